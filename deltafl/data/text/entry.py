"""What the catalog says about a text set: its classes, and the editions its rows come in."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from deltafl.data.files import damaged, exists, plain_member
from deltafl.errors import UserError

Rows = tuple[list[str], list[int]]
"""The texts of a split and their class numbers, which count from zero."""

SPLITS = ("train", "test")


@dataclass(frozen=True)
class RawFile:
    """A file by name, with a published checksum, as in md5:0123, of the bytes it lies there as."""

    name: str
    checksum: str
    url: str | None = None

    def verify(self, folder: Path) -> None:
        """Raise UserError unless the file in the folder is this one, byte for byte."""
        kind, _, known = self.checksum.partition(":")
        path = folder / self.name
        try:
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, kind).hexdigest()
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror})") from error
        if found != known:
            raise damaged(path, "is not the file of that name (checksum mismatch)")


@dataclass(frozen=True)
class Edition:
    """One form of a set: all of it, or a part that is at hand where the whole is not.

    `files` has the training and the test file, or one archive whose `members` they are. The
    first of the `columns` is the class, counted from one; those in `text` make the text.
    """

    files: tuple[RawFile, ...]
    train: int
    test: int
    columns: int
    text: tuple[int, ...]
    members: tuple[str, ...] = ()
    part: str | None = None
    """What is missing, in words for results; None for the whole set."""

    def here(self, folder: Path) -> bool:
        """Say whether all files are in the folder; reads none of them."""
        return all(exists(folder / file.name) for file in self.files)

    def verify(self, folder: Path) -> None:
        """Raise UserError unless every file is the known one, byte for byte."""
        for file in self.files:
            file.verify(folder)

    @property
    def checksums(self) -> str:
        """What names these contents."""
        return " ".join(file.checksum for file in self.files)

    def rows(self, folder: Path, split: str, classes: int) -> Rows:
        """Read a split, or raise UserError naming the file and the row that is wrong."""
        place = SPLITS.index(split)
        path = folder / self.files[place if len(self.files) > 1 else 0].name
        texts, labels = [], []
        try:
            with self._open(path, place) as stream:
                for number, row in enumerate(csv.reader(stream), start=1):
                    label = row[0] if row else ""
                    known = label.isdecimal() and 1 <= int(label[:9]) <= classes
                    if len(row) != self.columns or not known:
                        raise damaged(path, f"row {number} of the {split} set is not a sample")
                    labels.append(int(label) - 1)
                    texts.append(" ".join(row[column] for column in self.text))
        except (OSError, EOFError, ValueError, csv.Error, zlib.error, tarfile.TarError) as error:
            raise damaged(path, f"cannot be read as CSV ({error})") from error
        if len(labels) != (wanted := (self.train, self.test)[place]):
            raise damaged(path, f"has {len(labels)} rows in the {split} set where {wanted} belong")
        return texts, labels

    @contextmanager
    def _open(self, path: Path, place: int) -> Iterator[io.TextIOBase]:
        if not self.members:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                yield _text(cast(IO[bytes], stream))
            return
        with tarfile.open(path, "r:gz") as tar:
            yield _text(plain_member(tar, path, self.members[place]))


def _text(stream: IO[bytes]) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8", newline="")


@dataclass(frozen=True)
class TextEntry:
    """One text set of the catalog; its editions best first.

    `folders` are where files may lie below a data folder, in the layouts people have them in.
    """

    name: str
    classes: tuple[str, ...]
    licence: str
    citation: str
    editions: tuple[Edition, ...]
    folders: tuple[str, ...]

    @property
    def whole(self) -> Edition:
        """The whole set."""
        return self.editions[0]

    def find(self, places: tuple[Path, ...]) -> tuple[Edition, Path] | None:
        """Return the best edition below some data folders, and where; checks no contents."""
        for edition in self.editions:
            for place in places:
                for folder in self.folders:
                    if edition.here(place / folder):
                        return edition, place / folder
        return None

    def missing(self) -> UserError:
        """Return the error for a set that is not on this machine."""
        return UserError(f"data set {self.name} is not here: run `deltafl data get {self.name}`")
