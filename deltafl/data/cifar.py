"""The forms CIFAR-10 and CIFAR-100 come in: official binary, strips of PNG, compressed residuals.

The official Python version is a pickle, which could run code, so it is not read.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from deltafl.data.files import (
    damaged,
    exists,
    open_tar,
    plain_member,
    read_exactly,
    take_exactly,
)
from deltafl.data.parts import Bytes, Parts
from deltafl.errors import UserError

SIDE = 32
PIXELS = 3 * SIDE * SIDE
# What an archive holds beside the images: headers, names of classes, a page about the set.
LARGEST_REST = 1 << 20


@dataclass(frozen=True)
class Binary:
    """The authors' binary version: records of the label bytes (the class last) and an image.

    The files lie in the folder, in the folder their archive unpacks to, or in the archive.
    """

    archive: str
    unpacked: str
    train: tuple[tuple[str, int], ...]
    test: tuple[tuple[str, int], ...]
    label_bytes: int

    def here(self, folder: Path) -> bool:
        """Say whether the files or their archive are there."""
        return self._files(folder) is not None or exists(folder / self.archive)

    def read(self, folder: Path) -> Parts:
        """Decode the files, out of the archive if need be without unpacking it."""
        files = self._files(folder)
        if files is not None:
            return self._decode(lambda name, size: read_exactly(files / name, size))
        archive = folder / self.archive
        try:
            with open_tar(archive, self._bytes + LARGEST_REST) as tar:
                return self._decode(lambda name, size: self._member(tar, archive, name, size))
        except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
            raise damaged(archive, f"cannot be unpacked ({error})") from error

    @property
    def _bytes(self) -> int:
        records = sum(count for _, count in self.train + self.test)
        return records * (self.label_bytes + PIXELS)

    def _files(self, folder: Path) -> Path | None:
        names = [name for name, _ in self.train + self.test]
        for candidate in (folder, folder / self.unpacked):
            if all(exists(candidate / name) for name in names):
                return candidate
        return None

    def _member(self, tar: tarfile.TarFile, archive: Path, name: str, size: int) -> Bytes:
        member = f"{self.unpacked}/{name}"
        stream = plain_member(tar, archive, member)
        return take_exactly(stream, size, f"{archive}: {member}")

    def _decode(self, content: Callable[[str, int], Bytes]) -> Parts:
        parts: Parts = {}
        width = self.label_bytes + PIXELS
        for split, files in (("train", self.train), ("test", self.test)):
            records = [content(name, count * width).reshape(count, width) for name, count in files]
            images = [part[:, self.label_bytes :] for part in records]
            labels = [part[:, self.label_bytes - 1] for part in records]
            parts[f"{split}-images"] = np.concatenate(images).reshape(-1, 3, SIDE, SIDE)
            parts[f"{split}-labels"] = np.concatenate(labels)
        return parts


@dataclass(frozen=True)
class PngStrips:
    """CIFAR-10 as six lossless PNGs, one image a row of pixels, and labels as JSON."""

    per_file: int = 10_000

    TRAIN = tuple(f"data_batch_{number}.png" for number in range(1, 6))
    TEST = ("test_batch.png",)
    # Spelt so in the package.
    LABELS = ("train_lables.json", "test_lables.json")

    def here(self, folder: Path) -> bool:
        """Say whether the six pictures and both lists of labels are there."""
        return all(exists(folder / name) for name in self.TRAIN + self.TEST + self.LABELS)

    def read(self, folder: Path) -> Parts:
        """Decode the pictures and the labels."""
        parts: Parts = {}
        for split, files, labels in zip(
            ("train", "test"), (self.TRAIN, self.TEST), self.LABELS, strict=True
        ):
            images = [self.strip(folder / name) for name in files]
            parts[f"{split}-images"] = np.concatenate(images)
            parts[f"{split}-labels"] = read_labels(folder / labels, len(files) * self.per_file)
        return parts

    def strip(self, path: Path) -> Bytes:
        """Decode one picture, a row of pixels an image."""
        size = (SIDE * SIDE, self.per_file)
        try:
            with Image.open(path, formats=["PNG"]) as picture:
                # Known from the header, before the pixels are allocated.
                if picture.size != size or picture.mode != "RGB":
                    raise damaged(path, f"is not an RGB picture of {size[0]} x {size[1]} pixels")
                pixels = np.asarray(picture)
        except UserError:
            raise
        except Exception as error:  # bytes of somebody else's may fail in any way
            raise damaged(path, f"cannot be read as PNG ({error})") from error
        images = pixels.reshape(self.per_file, SIDE, SIDE, 3).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(images)


def read_labels(path: Path, count: int) -> Bytes:
    """Return the class numbers in a JSON list, which must be `count` long."""
    # Ten characters a label are ample: a digit, a comma, and white space.
    largest = 10 * count + 10
    try:
        with path.open("rb") as stream:
            content = stream.read(largest + 1)
        if len(content) > largest:
            raise damaged(path, f"is too large for {count} labels")
        labels = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(labels, list) or len(labels) != count:
        raise damaged(path, f"is not a list of {count} labels")
    if not all(type(label) is int and 0 <= label <= 255 for label in labels):
        raise damaged(path, "holds something that is not a class number")
    return np.array(labels, dtype=np.uint8)


@dataclass(frozen=True)
class Residuals:
    """CIFAR-100 as gzipped differences between neighbours, which compress far better.

    N coarse and fine label bytes, then N images of R-G, G, B-G, each the difference from the
    pixel above and to the left; all modulo 256, so decoding is exact.
    """

    train: int = 50_000
    test: int = 10_000

    TRAIN = "train.delta.gz"
    TEST = "test.delta.gz"

    def here(self, folder: Path) -> bool:
        """Say whether both files are there."""
        return exists(folder / self.TRAIN) and exists(folder / self.TEST)

    def read(self, folder: Path) -> Parts:
        """Decode both files."""
        parts: Parts = {}
        for split, name, count in (
            ("train", self.TRAIN, self.train),
            ("test", self.TEST, self.test),
        ):
            content = read_exactly(folder / name, count * (2 + PIXELS))
            parts[f"{split}-labels"] = content[1 : 2 * count : 2].copy()
            images = content[2 * count :].reshape(count, 3, SIDE, SIDE)
            for axis in (2, 3):
                images = images.cumsum(axis, dtype=np.uint8)
            images[:, 0] += images[:, 1]
            images[:, 2] += images[:, 1]
            parts[f"{split}-images"] = images
        return parts
