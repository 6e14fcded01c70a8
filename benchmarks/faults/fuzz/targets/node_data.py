"""A node's own data: .npz, .safetensors, or a folder of .npy files."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from benchmarks.faults.fuzz.target import Target, switch
from benchmarks.faults.fuzz.targets.store import npy
from deltafl.data import Dataset
from deltafl.flower.node import read_arrays

NPZ, SAFETENSORS, FOLDER = range(3)
ARRAYS = {"inputs": np.zeros((2, 3, 3), np.uint8), "labels": np.array([0, 1])}


def _run(content: bytes, folder: Path) -> None:
    way, rest = switch(content)
    if way % 3 == FOLDER:
        place = folder
        for name in ARRAYS:
            (folder / f"{name}.npy").write_bytes(rest)
    else:
        place = folder / ("x.safetensors" if way % 3 == SAFETENSORS else "x.npz")
        place.write_bytes(rest)
    arrays = read_arrays(place)
    Dataset.from_tensors("own", arrays, arrays)


def _npz(compression: int) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, array in ARRAYS.items():
            archive.writestr(f"{name}.npy", npy(array))
    return content.getvalue()


def _seeds() -> Sequence[bytes]:
    stored, plain = _npz(zipfile.ZIP_STORED), npy(ARRAYS["labels"])
    return [
        bytes([NPZ]) + stored,
        *(bytes([NPZ]) + _npz(c) for c in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)),
        bytes([NPZ]) + stored.replace(b"(2, 3, 3)", b"(9**9**9)"),
        bytes([NPZ]) + stored[:-30],
        bytes([SAFETENSORS]) + safetensors.numpy.save(ARRAYS),
        bytes([FOLDER]) + plain,
        bytes([FOLDER]) + plain.replace(b"(2,)", b"(9**12,)"),
        bytes([FOLDER]) + npy(np.array([{}], dtype=object)),
        bytes([FOLDER]) + npy(np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])),
    ]


TARGET = Target(
    "node-data",
    "a node's own data: .npz, .npy, .safetensors",
    _run,
    _seeds,
    words=(b"PK\x01\x02", b"PK\x05\x06", b"'<f4'", b"'|O'", b"'<M8[s]'", b"'<c8'", b'"BF16"'),
)
