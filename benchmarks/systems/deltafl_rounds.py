"""deltafl as its users run it: `deltafl.run` in a run folder, with a listener that stops the clock.

The listener sees the end of every round, so a round's seconds include its row of metrics and the
checkpoints on the way. There is no evaluation: `run.eval_every` is never reached.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import deltafl
from benchmarks.systems.gate import Gate, arguments

ENDLESS = 10**6


class Clock:
    """A listener of deltafl that waits at the gate between two blocks of rounds."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def started(self, _config: deltafl.Config, _done: int) -> None:
        """Wait for the first block."""
        self._gate.open()

    def finished_round(self, _report: object) -> None:
        """Note the end of a round."""
        self._gate.tick()

    def finished(self, _summary: dict[str, Any]) -> None:
        """Never happens: the gate ends the run."""


def main() -> None:
    """Run rounds of a configuration given as {dotted field: value}."""
    measure(arguments())


def measure(spec: dict[str, Any]) -> None:
    """Run rounds of what is asked for until the gate closes."""
    config = deltafl.Config().override(**spec["config"])
    dataset = noise(spec["noise"]) if "noise" in spec else None

    def accuracy(done: int) -> float:
        short = config.override(**{"run.rounds": done, "run.eval_every": done})
        return deltafl.run(short, dataset=dataset).final_test_accuracy

    timer = time.process_time if spec.get("clock") == "processor" else time.perf_counter
    clock = Clock(Gate(accuracy, timer))
    endless = config.override(**{"run.rounds": ENDLESS, "run.eval_every": ENDLESS})
    with tempfile.TemporaryDirectory(prefix="deltafl-benchmark-") as folder:
        deltafl.run(endless, out=Path(folder) / "run", dataset=dataset, listeners=[clock])


def noise(images: int) -> deltafl.Dataset:
    """Return random 32x32 colour images: what they show does not matter to the clock."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(images) % 10
    return deltafl.Dataset.from_tensors("cifar10", (pixels, labels), (pixels[:10], labels[:10]))


if __name__ == "__main__":
    main()
