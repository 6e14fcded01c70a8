"""The memory of a process and all its descendants, sampled from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path

INTERVAL = 0.05
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Peak:
    """The largest sums seen, in MB; PSS counts a page that processes share once, RSS each time."""

    pss: float = 0.0
    rss: float = 0.0
    processes: int = 0


class Monitor:
    """Watches a process tree while the block lasts."""

    def __init__(self) -> None:
        self.peak = Peak()
        self._pid: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def watch(self, pid: int) -> None:
        """Say which process."""
        self._pid = pid

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL):
            if self._pid is None:
                continue
            found = [now for pid in tree(self._pid) if (now := usage(pid)) is not None]
            self.peak.pss = max(self.peak.pss, sum(pss for pss, _ in found) / 1e6)
            self.peak.rss = max(self.peak.rss, sum(rss for _, rss in found) / 1e6)
            self.peak.processes = max(self.peak.processes, len(found))


def tree(root: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may hold spaces; the parent is the second word after it.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found, ahead = [], [root]
    while ahead:
        pid = ahead.pop()
        found.append(pid)
        ahead += children.get(pid, [])
    return found


def usage(pid: int) -> tuple[int, int] | None:
    """Return the bytes of PSS and RSS of a process, or None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        pss = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, StopIteration):
        return None
    return pss, rss
