"""A run as TensorBoard shows it; its event files lie in `tensorboard` in the run folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deltafl.experiment.config import Config
from deltafl.experiment.rounds import RoundReport
from deltafl.track.base import Tracker, load, numbers, step_sizes

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writes scalars, the configuration, the summary and histograms of recorded step sizes."""

    def __init__(self, folder_of: Callable[[Config], Path]) -> None:
        load("tensorboard")
        self._make: Any = load("torch.utils.tensorboard").SummaryWriter
        self._folder_of = folder_of
        self._writer: Any = None
        self._done = 0

    def started(self, config: Config, done: int) -> None:
        """Open a new event file; rounds after `done` that an old one holds are withdrawn."""
        self.close()
        self._done = done
        self._writer = self._make(
            str(self._folder_of(config) / FOLDER), purge_step=done + 1 if done else 0
        )
        if not done:
            self._writer.add_text("config", _code(config.to_toml()), 0)

    def finished_round(self, report: RoundReport) -> None:
        """Write the numbers of a round."""
        self._done = report.round
        for name, value in numbers(report).items():
            self._writer.add_scalar(name, value, report.round)
        if sizes := step_sizes(report):
            self._writer.add_histogram("step_sizes", np.asarray(sizes), report.round)

    def finished(self, summary: dict[str, Any]) -> None:
        """Write the summary, and close the file."""
        self._writer.add_text("summary", _code(json.dumps(summary, indent=2)), self._done)
        self.close()

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _code(text: str) -> str:
    """Return Markdown that shows the text as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
