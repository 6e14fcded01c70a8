"""The decoded contents of a data set: four arrays of bytes, whichever way they came."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PARTS = ("train-images", "train-labels", "test-images", "test-labels")
"""The arrays every set decodes to: images N,C,H,W and labels N, all uint8."""

Parts = dict[str, Bytes]


def sha256(array: Bytes) -> str:
    """Return the SHA-256 of an array's values in C order, without its shape."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
