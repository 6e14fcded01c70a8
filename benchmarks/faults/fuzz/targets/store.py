"""The decoded store of data sets: a manifest and four .npy files."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.faults.fuzz.target import Target, files, together
from deltafl.data import cache
from deltafl.data.entry import Entry
from deltafl.data.parts import PARTS

ENTRY = Entry(
    name="tiny",
    classes=("a", "b"),
    shape=(1, 2, 2),
    train=2,
    test=2,
    mean=(0.5,),
    std=(0.25,),
    scale=255.0,
    augment="none",
    licence="none",
    citation="nobody",
    digests=dict.fromkeys(PARTS, "0" * 64),
)
MANIFEST = {"format": cache.FORMAT, "sha256": dict(ENTRY.digests)}


def _run(content: bytes, folder: Path) -> None:
    manifest, array = files(content, 2)
    place = folder / ENTRY.name
    place.mkdir()
    (place / cache.MANIFEST).write_bytes(manifest)
    for part in PARTS:
        (place / f"{part}.npy").write_bytes(array)
    cache.read(folder, ENTRY, hashed=True)


def npy(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    """Return an array as the bytes of an .npy file; of objects, as a pickle inside it."""
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


def _seeds() -> Sequence[bytes]:
    manifest = json.dumps(MANIFEST)
    whole = npy(np.zeros((2, 1, 2, 2), np.uint8))
    return [
        together(manifest, whole),
        together(manifest, whole.replace(b"(2, 1, 2, 2)", b"(2, 1, 2,9**9)")),
        together(manifest, npy(np.array([{}], dtype=object))),
        together("{}", whole),
    ]


TARGET = Target(
    "store",
    "the decoded store: manifest and .npy",
    _run,
    _seeds,
    words=(b"'|u1'", b"'descr'", b"'fortran_order'", b"'shape'", b"'|O'", b"\x93NUMPY\x01\x00"),
)
