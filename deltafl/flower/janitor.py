"""Ends what a federation started and deletes its folder, once whoever started it is gone.

`python janitor.py FOLDER` reads process ids, one a line, until its standard input closes: because
its parent is done, or because it was killed. It needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

# Flower's processes end by themselves within five seconds of a signal, as a rule.
PATIENCE_SECONDS = 8.0
PROC = Path("/proc")


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
    roots: dict[int, str] = {}
    for line in sys.stdin:
        pid = int(line)
        when = started(pid)
        if when is not None:
            roots[pid] = when
    end(roots)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
