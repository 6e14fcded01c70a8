"""The IDX files of MNIST and the sets made in its image, gzipped or not."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from deltafl.data.files import damaged, plain_or_gz, read_exactly
from deltafl.data.parts import Bytes, Parts

FILES = {
    "train-images": "train-images-idx3-ubyte",
    "train-labels": "train-labels-idx1-ubyte",
    "test-images": "t10k-images-idx3-ubyte",
    "test-labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Idx:
    """Four IDX files of grey images."""

    train: int = 60_000
    test: int = 10_000
    size: tuple[int, int] = (28, 28)

    def here(self, folder: Path) -> bool:
        """Say whether the four files are there."""
        return all(plain_or_gz(folder / name) for name in FILES.values())

    def read(self, folder: Path) -> Parts:
        """Decode the four files."""
        parts: Parts = {}
        for part, name in FILES.items():
            count = self.train if part.startswith("train") else self.test
            shape = (count, *self.size) if part.endswith("images") else (count,)
            array = read_idx(plain_or_gz(folder / name) or folder / name, shape)
            parts[part] = array[:, None] if part.endswith("images") else array
        return parts


def read_idx(path: Path, shape: tuple[int, ...]) -> Bytes:
    """Return the array of bytes in an IDX file, which must have this shape."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    content = read_exactly(path, len(header) + prod(shape))
    if content[: len(header)].tobytes() != header:
        raise damaged(path, f"is not an IDX file of {' x '.join(map(str, shape))} bytes")
    return content[len(header) :].reshape(shape)
