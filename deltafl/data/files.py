"""Reading files that others wrote: never more than expected, never anything that can run code."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np

from deltafl.data.parts import Bytes
from deltafl.errors import UserError


def damaged(path: Path | str, what: str) -> UserError:
    """Return the error for a raw file that does not hold what its name promises."""
    return UserError(f"{path}: {what}: delete it, or replace it with an intact copy")


def exists(path: Path) -> bool:
    """Say whether a file is there; one in a folder that may not be looked into is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def plain_or_gz(path: Path) -> Path | None:
    """Return the file, or the same name with .gz, whichever is there."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if exists(candidate):
            return candidate
    return None


def read_exactly(path: Path, size: int) -> Bytes:
    """Return the bytes of a file, gunzipped if its name ends in .gz, that must be `size` long."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return take_exactly(cast(IO[bytes], stream), size, path)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"cannot be read ({error})") from error


class Bounded(io.RawIOBase):
    """A stream of which no more than so many bytes come: what unpacks to more is not unpacked."""

    def __init__(self, stream: IO[bytes], largest: int) -> None:
        self._stream = stream
        self._largest = largest

    def read(self, size: int = -1) -> bytes:
        """Read on, or raise OSError where the stream should have ended by now."""
        left = self._largest - self._stream.tell()
        if size < 0 or size > left:
            # A header may announce any size: no more is asked for than there may be.
            content = self._stream.read(max(left, 0) + 1)
            if len(content) > left:
                raise OSError(f"it unpacks to more than {self._largest} bytes")
            return content
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, but not beyond the bound."""
        if whence != 0 or offset > self._largest:
            raise OSError(f"it unpacks to more than {self._largest} bytes")
        return self._stream.seek(offset)

    def tell(self) -> int:
        """Say how many bytes lie before here."""
        return self._stream.tell()


@contextmanager
def open_tar(path: Path, largest: int) -> Iterator[tarfile.TarFile]:
    """Open a gzipped tar archive that unpacks, headers and all, to at most so many bytes."""
    with gzip.open(path) as stream:
        bounded = cast(IO[bytes], Bounded(cast(IO[bytes], stream), largest))
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            yield tar


def plain_member(tar: tarfile.TarFile, archive: Path, member: str) -> IO[bytes]:
    """Open a file in an archive without unpacking it; links are not followed."""
    stream = None
    if member in tar.getnames() and tar.getmember(member).isreg():
        stream = tar.extractfile(member)
    if stream is None:
        raise damaged(archive, f"has no file {member}")
    return stream


def take_exactly(stream: IO[bytes], size: int, name: Path | str) -> Bytes:
    """Return all bytes of a stream, which must be `size`; one more is read to know it ended."""
    content = stream.read(size + 1)
    if len(content) != size:
        found = f"{len(content)}" if len(content) < size else f"more than {size}"
        raise damaged(name, f"holds {found} bytes where {size} belong")
    return np.frombuffer(content, dtype=np.uint8)
