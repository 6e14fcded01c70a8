"""Many clients a round for a long time: does memory stay flat, and do handles and segments leak?

    python -m benchmarks.faults.load --rounds 100
    python -m benchmarks.faults.load --minutes 60

After every round the memory, open file descriptors and shared memory of the main process and its
workers are counted. Memory is what could leak, anonymous and shared pages: those of mapped files,
such as libraries, cost less while others map them, too. The slope over the rounds after the
warm-up, with its standard error, says what a day would bring.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.environments import ROOT
from benchmarks.memory import tree
from deltafl import Config, run
from deltafl.experiment.rounds import RoundReport
from deltafl.tensorfile import write_atomically

WARM_UP = 0.2  # of the rounds: caches fill, allocators settle
DAY = 24 * 3600.0


@dataclass(frozen=True)
class Sample:
    """What the processes of a run hold after a round."""

    round: int
    seconds: float
    main_mb: float
    workers_mb: float
    handles: int
    segments: int


class Sampler:
    """A listener that counts after every round, and stops the run when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.samples: list[Sample] = []
        self._limit = seconds
        self._begun = time.monotonic()

    def started(self, config: Config, done: int) -> None:
        """Begin."""

    def finished_round(self, report: RoundReport) -> None:
        """Count."""
        main, *others = tree(os.getpid())
        spent = time.monotonic() - self._begun
        self.samples.append(
            Sample(
                report.round,
                round(spent, 3),
                _megabytes(main),
                sum(_megabytes(pid) for pid in others),
                sum(len(_handles(pid)) for pid in (main, *others)),
                sum("memfd:" in name or "/dev/shm" in name for name in _handles(main)),
            )
        )
        print(self.samples[-1], flush=True)
        if spent > self._limit:
            raise KeyboardInterrupt

    def finished(self, summary: dict[str, Any]) -> None:
        """End."""


def _megabytes(pid: int) -> float:
    """Return what a process holds beside mapped files; pages that processes share count once."""
    kilobytes = 0
    with contextlib.suppress(OSError):  # it may be gone
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                kilobytes += int(line.split()[1])
    return round(kilobytes * 1024 / 1e6, 3)


def _handles(pid: int) -> list[str]:
    """Return where the open file descriptors of a process lead."""
    names = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                names.append(str(Path(entry.path).readlink()))
    return names


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope and its standard error."""
    x, y = np.asarray(times), np.asarray(values)
    x = x - x.mean()
    spread = float(x @ x)
    rate = float(x @ y) / spread
    rest = y - y.mean() - rate * x
    return rate, float(np.sqrt(rest @ rest / (len(x) - 2) / spread))


def written(samples: Sequence[Sample], clients: int, command: str) -> str:
    """Return the outcome as Markdown."""
    kept = samples[int(WARM_UP * len(samples)) :]
    times = [one.seconds for one in kept]
    about = machine.hardware()
    lines = [
        f"`{command}`, on {about['cpu']}, {about['cores']} cores, load average at the end "
        f"{machine.load()[0]:.1f}: {len(samples)} rounds of {clients:,} clients in "
        f"{samples[-1].seconds / 60:.0f} minutes; slopes over the last {len(kept)} rounds "
        f"({(times[-1] - times[0]) / 60:.0f} minutes), ± one standard error.",
        "",
        "| what | first of these | last | largest | slope an hour | in 24 hours |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    columns = {
        "memory of the main process, MB": "main_mb",
        "memory of the workers, MB": "workers_mb",
        "open handles of all processes": "handles",
        "shared memory segments": "segments",
    }
    for title, name in columns.items():
        values = [getattr(one, name) for one in kept]
        rate, error = slope(times, values)
        lines.append(
            f"| {title} | {values[0]:g} | {values[-1]:g} | {max(values):g} | "
            f"{_rate(rate * 3600, error * 3600)} | {_rate(rate * DAY, error * DAY)} |"
        )
    return "\n".join(lines) + "\n"


def _rate(value: float, error: float) -> str:
    return f"{round(value, 1) + 0.0:.1f} ± {round(error, 1):.1f}"  # the zero has no sign


def measure(clients: int, rounds: int, minutes: float, workers: int, out: Path) -> None:
    """Run, and write what came out."""
    config = Config.model_validate(
        {
            "task": "digits-softmax",
            "federation": {
                "clients": 10 * clients,
                "participation": 0.1,
                "samples": 20,
                "replacement": True,
            },
            "client": {"batch_size": 10},
            "run": {"rounds": rounds},
            "engine": {"kind": "workers", "workers": workers},
        }
    )
    sampler = Sampler(minutes * 60)
    with (
        tempfile.TemporaryDirectory(prefix="deltafl-load-") as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        run(config, out=Path(folder) / "run", listeners=[sampler])
    out.mkdir(parents=True, exist_ok=True)
    given = " ".join(["python -m benchmarks.faults.load", *sys.argv[1:]])
    niceness = os.nice(0)
    command = f"nice -n {niceness} {given}" if niceness else given
    text = written(sampler.samples, clients, command)
    write_atomically(out / "load.md", text.encode())
    samples = json.dumps([asdict(one) for one in sampler.samples], indent=1) + "\n"
    write_atomically(out / "load.json", samples.encode())
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000, help="a round")
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "faults")
    given = parser.parse_args()
    if given.rounds == 10**9 and given.minutes == 10**6:
        parser.error("say how long: --rounds, --minutes, or both")
    measure(given.clients, given.rounds, given.minutes, given.workers, given.out)
