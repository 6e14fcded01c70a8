"""The decoded contents of a data set: four arrays of bytes, whichever way they came."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PARTS = ("train-images", "train-labels", "test-images", "test-labels")
"""The arrays every set decodes to: images N,C,H,W and labels N, all uint8."""

Parts = dict[str, Bytes]


def sha256(array: Bytes) -> str:
    """Return the SHA-256 of an array's values in C order, without its shape."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def mapped(path: Path) -> np.memmap[Any, Any]:
    """Map an .npy file into memory; ValueError, whatever is wrong with it."""
    try:
        # Copy on write: shared with every other reader, yet torch may wrap it.
        array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="c")
    except Exception as error:  # numpy's own parser of headers may fail in any way
        raise ValueError(f"cannot be read ({error})") from error
    if path.stat().st_size != array.offset + array.nbytes:
        raise ValueError("has not the length that its header says")
    return array
