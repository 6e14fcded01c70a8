"""Text sets: files of rows, plain, gzipped or in an archive, and the store of their tokens."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.faults.fuzz.target import Target, files, switch, together
from benchmarks.faults.fuzz.targets.store import npy
from deltafl.data.text import store
from deltafl.data.text.entry import SPLITS, Edition, RawFile, TextEntry

_MEMBERS = ("toy/train.csv", "toy/test.csv")


def _edition(name: str, members: tuple[str, ...] = ()) -> Edition:
    return Edition((RawFile(name, "md5:0"),), 2, 2, columns=2, text=(1,), members=members)


EDITIONS = (_edition("rows.csv"), _edition("rows.csv.gz"), _edition("rows.tgz", _MEMBERS))
ENTRY = TextEntry("toy", ("a", "b"), "none", "nobody", EDITIONS, ("toy",))


def _read_rows(content: bytes, folder: Path) -> None:
    way, rest = switch(content)
    edition = EDITIONS[way % len(EDITIONS)]
    (folder / edition.files[0].name).write_bytes(rest)
    for split in SPLITS:
        edition.rows(folder, split, len(ENTRY.classes))


def _row_seeds() -> Sequence[bytes]:
    rows = b'1,"one, two"\n2,three\n'
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in _MEMBERS:
            about = tarfile.TarInfo(name)
            about.size = len(rows)
            tar.addfile(about, io.BytesIO(rows))
    return [b"\0" + rows, b"\1" + gzip.compress(rows), b"\2" + archive.getvalue()]


def _read_tokens(content: bytes, folder: Path) -> None:
    manifest, *arrays = files(content, 4)
    (folder / store.MANIFEST).write_bytes(manifest)
    for split in SPLITS:
        for name, array in zip(store.ARRAYS, arrays, strict=True):
            (folder / f"{split}-{name}.npy").write_bytes(array)
    # What another process has checked is not checked again: anybody could make checksums right.
    found = store.read(folder, ENTRY, EDITIONS[0], pad=0, hashed=False)
    for _ in found.samples(found.train).all_batches():
        pass


def _token_seeds() -> Sequence[bytes]:
    manifest = json.dumps({"format": store.FORMAT, "sha256": {}})
    tokens, labels = npy(np.arange(5, dtype=np.int32)), npy(np.array([0, 1]))
    return [
        together(manifest, tokens, npy(np.array([2, 5])), labels),
        together(manifest, tokens, npy(np.array([9, 5])), labels),
        together(manifest, tokens, npy(np.array([-3, 5])), labels),
        together(manifest, tokens, npy(np.array([2, 5])), npy(np.array([0, 7]))),
        together("{}", tokens, npy(np.array([{}, {}], dtype=object)), labels),
    ]


ROWS = Target("text-rows", "rows of texts: CSV, gzip, tar", _read_rows, _row_seeds, words=(b'"',))
TOKENS = Target(
    "text-tokens",
    "the store of tokens: manifest and .npy",
    _read_tokens,
    _token_seeds,
    words=(b"'<i8'", b"'<i4'", b"'descr'", b"'shape'", b"\x93NUMPY\x01\x00"),
)
