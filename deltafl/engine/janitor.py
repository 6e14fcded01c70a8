"""Ends what somebody started and deletes their folder, once they are gone.

`python janitor.py FOLDER` reads process ids, one a line, until its standard input closes: because
its parent is done, or because it was killed. Processes whose environment says `DELTAFL_FOLDER` is
FOLDER are among those it ends. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# Flower's processes end by themselves within five seconds of a signal, as a rule.
PATIENCE_SECONDS = 8.0
PROC = Path("/proc")
MARK = "DELTAFL_FOLDER"
"""The variable by which processes are known that nobody has named."""


def hire(folder: Path) -> subprocess.Popen[str]:
    """Start a janitor for a folder; it waits until its standard input closes."""
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder)],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then lets it work
    )


def started(pid: int) -> str | None:
    """Return when a process started, which tells it from a later one with its number."""
    fields = _fields(pid)
    if fields is not None:
        return None if fields[0] == "Z" else fields[19]
    if PROC.joinpath("self").exists():
        return None
    try:  # no /proc on this system
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


def _fields(pid: int) -> list[str] | None:
    try:
        # The name, in parentheses, may hold anything: split after it.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def marked(folder: str) -> set[int]:
    """Return the processes that were started with the folder's name in their environment."""
    mark = f"{MARK}={folder}".encode()
    found = set()
    for entry in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def family(roots: set[int]) -> set[int]:
    """Return the processes and all their descendants."""
    parents = {}
    for entry in PROC.glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if fields is not None:
            parents[int(entry.name)] = int(fields[1])
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def end(roots: dict[int, str]) -> None:
    """Ask processes to end, wait a while, and kill what is left of them and their children."""
    known = dict(roots)

    def living() -> list[int]:
        alive = {pid for pid, when in known.items() if started(pid) == when}
        for pid in family(alive) - known.keys():
            when = started(pid)
            if when is not None:
                known[pid] = when
        return [pid for pid, when in known.items() if started(pid) == when]

    living()  # whom they have started, before they end and it cannot be seen any more
    for pid, when in roots.items():
        if started(pid) == when:
            _signal(pid, signal.SIGTERM)
    last = time.monotonic() + PATIENCE_SECONDS
    while living() and time.monotonic() < last:
        time.sleep(0.05)
    while left := living():
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.05)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def main() -> None:
    """Wait for the end, and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it goes last, when its parent is done
    folder = sys.argv[1]
    roots: dict[int, str] = {}

    def known(pid: int) -> None:
        when = started(pid)
        if when is not None:
            roots[pid] = when

    for line in sys.stdin:
        known(int(line))
    for pid in marked(folder):
        known(pid)
    end(roots)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
