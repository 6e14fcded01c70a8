"""Reading files that somebody else may have made: plain files only, and never more than expected.

A folder that came as an archive may hold a pipe that never ends or a link to somewhere else where a
small text file belongs.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from deltafl.errors import UserError

LARGEST_TEXT = 1 << 20
"""Bytes of a configuration or a summary; both are a few kilobytes."""
LARGEST_ROWS = 1 << 30
"""Bytes of a file of rows that is only looked at."""


def read_plain(path: Path, largest: int | None = None) -> bytes:
    """Return the bytes of a plain file, at most `largest`; other kinds are not even waited for."""
    # To open a pipe would wait for whoever writes into it.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a plain file: delete it, or put the file itself there")
        if largest is not None and status.st_size > largest:
            raise UserError(
                f"{path} has {status.st_size} bytes, and at most {largest} are read: "
                "it is not what its name says"
            )
        return file.read() if largest is None else file.read(largest)


def inside(path: Path, folder: Path) -> bool:
    """Say whether a path that somebody else chose stays below a folder, links followed."""
    if "\0" in str(path) or path.is_absolute() or ".." in path.parts or path.parts[:1] == ("~",):
        return False
    try:
        return (folder / path).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # too long a name, or links in a circle
        return False


def brief(value: object, length: int = 80) -> str:
    """Return the start of what a value looks like, on one line: it may be as long as a file."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
