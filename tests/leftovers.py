"""What a test must not leave behind: processes, shared memory, temporary files."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

PROC, SHARED = Path("/proc"), Path("/dev/shm")
KINDS = ("plasma", "torch_", "psm_", "sem.")
# Generous: what is waited for comes in seconds on an idle machine, and a minute after the kill of
# a process whose descendants only look now and then whether it is still there.
PATIENCE_SECONDS = 900.0

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], what: object = "what was awaited") -> Found:
    """Wait for something that will come, and return it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        text = what() if callable(what) else what
        assert time.monotonic() < end, f"not within {PATIENCE_SECONDS:g} s: {text}"
        time.sleep(0.1)
    return found


def processes(folder: Path) -> dict[int, str]:
    """Return the commands of all other processes that were told to put temporary files there."""
    found = {}
    for process in PROC.glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue
        # A process that has ended and is not waited for yet has no command.
        if f"TMPDIR={folder}".encode() in variables and words and process.name != str(os.getpid()):
            found[int(process.name)] = words.replace(b"\0", b" ").decode(errors="replace")
    return found


def segments() -> set[str]:
    """Return the shared memory that Ray, torch or multiprocessing has given a name."""
    return {path.name for kind in KINDS for path in SHARED.glob(f"{kind}*")}


def orphans(names: set[str]) -> set[str]:
    """Return those segments that no process has mapped: nobody will ever remove them."""
    used = set()
    for maps in PROC.glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue
        used |= {name for name in names if f"{SHARED}/{name}" in text}
    return (names & segments()) - used


def content(folder: Path) -> list[Path]:
    """Return what is in a temporary folder, but for what torch's compiler keeps for next time."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


@contextmanager
def nothing_left_behind() -> Iterator[Path]:
    """Yield the temporary folder of all that is started inside, and look what is left of it.

    Other tests and other users may work on the machine at the same time, so it is that folder
    which tells whose a process is.
    """
    folder = Path(tempfile.mkdtemp(prefix="df-", dir="/tmp"))  # Ray needs a short name
    variable, chosen = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    before = segments()
    try:
        yield folder
        _restore(variable, chosen)
        wait_until(lambda: not processes(folder), lambda: processes(folder))
        wait_until(lambda: not orphans(segments() - before), lambda: orphans(segments() - before))
        wait_until(lambda: not content(folder), lambda: content(folder))
    finally:
        _restore(variable, chosen)
        for pid in processes(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


def _restore(variable: str | None, chosen: str | None) -> None:
    tempfile.tempdir = chosen
    if variable is None:
        os.environ.pop("TMPDIR", None)
    else:
        os.environ["TMPDIR"] = variable
