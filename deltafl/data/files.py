"""Reading files that others wrote: never more than expected, never anything that can run code."""

from __future__ import annotations

import gzip
import zlib
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


def take_exactly(stream: IO[bytes], size: int, name: Path | str) -> Bytes:
    """Return all bytes of a stream, which must be `size`; one more is read to know it ended."""
    content = stream.read(size + 1)
    if len(content) != size:
        found = f"{len(content)}" if len(content) < size else f"more than {size}"
        raise damaged(name, f"holds {found} bytes where {size} belong")
    return np.frombuffer(content, dtype=np.uint8)
