"""A fuzz target: what is done with the bytes, and inputs to begin with."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from benchmarks.faults.fuzz.guard import Guard
from deltafl.errors import UserError

SEPARATOR = b"\n=====\n"
"""Between the files of a target that reads several."""


@dataclass(frozen=True)
class Target:
    """One kind of input.

    `run` gets the bytes and an empty folder. `seeds` returns inputs that are intact, or nearly.
    `allowed` is what it may raise: bad input, said in a line.
    """

    name: str
    reads: str
    run: Callable[[bytes, Path], None]
    seeds: Callable[[], Sequence[bytes]]
    allowed: tuple[type[Exception], ...] = (UserError,)
    words: tuple[bytes, ...] = ()
    """Words of the format, which a fuzzer would not guess."""

    def __call__(self, content: bytes) -> None:
        """Hand the bytes over; whatever is not allowed comes out."""
        folder = scratch()
        try:
            with contextlib.suppress(*self.allowed), _guard().active(folder):
                self.run(content, folder)
        finally:
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    Path(entry.path).unlink()

    @cached_property
    def intact(self) -> Sequence[bytes]:
        """The seeds, made once."""
        return tuple(self.seeds())

    def warm_up(self) -> None:
        """Import and build, unwatched, all that is needed once."""
        for seed in self.intact:
            with tempfile.TemporaryDirectory() as folder, contextlib.suppress(*self.allowed):
                self.run(seed, Path(folder))


@cache
def scratch() -> Path:
    """Return this process's folder for what targets read and write; in memory where possible."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="deltafl-fuzz-", dir=place)).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _guard() -> Guard:
    return Guard()


def files(content: bytes, count: int) -> list[bytes]:
    """Split an input into the contents of several files; missing ones are empty."""
    parts = content.split(SEPARATOR, count - 1)
    return parts + [b""] * (count - len(parts))


def together(*parts: bytes | str) -> bytes:
    """Return one input that `files` splits again."""
    return SEPARATOR.join(part.encode() if isinstance(part, str) else part for part in parts)


def switch(content: bytes) -> tuple[int, bytes]:
    """Split off the first byte, which chooses between ways to read the rest."""
    return (content[0], content[1:]) if content else (0, b"")
