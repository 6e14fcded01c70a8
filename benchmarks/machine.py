"""What was measured on: hardware, versions and load."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from benchmarks.environments import HERE, ROOT, versions


def hardware() -> dict[str, str | int | float]:
    """Return the processor, the cores this process may use, and the memory."""
    model = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def software() -> dict[str, str]:
    """Return the versions of Python, of deltafl and its torch, and of the peers."""
    found = {
        "python": platform.python_version(),
        "deltafl": f"{version('deltafl')} at {_commit()}",
        "torch": version("torch"),
        "numpy": version("numpy"),
        "compiler": _first_line("cc", "--version"),
    }
    for folder in sorted((HERE / "requirements").iterdir()):
        peer = folder.stem
        text = ", ".join(f"{name} {number}" for name, number in sorted(versions(peer).items()))
        found[f"environment of {peer}"] = text or "not installed"
    return found


def load() -> list[float]:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _commit() -> str:
    commit = _first_line("git", "rev-parse", "--short=12", "HEAD")
    changed = _first_line("git", "status", "--porcelain", "--", "deltafl", "benchmarks")
    return f"{commit} with changes" if changed else commit


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return (done.stdout.splitlines() or [""])[0]
