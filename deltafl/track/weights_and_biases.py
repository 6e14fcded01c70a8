"""A run as Weights & Biases shows it; its own files lie in `wandb` in the run folder.

Where the run goes, to a server or only to those files, is what WANDB_MODE and the user's other
settings of wandb say.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltafl.errors import UserError
from deltafl.experiment.config import Config
from deltafl.experiment.rounds import RoundReport
from deltafl.tensorfile import write_atomically
from deltafl.track.base import Tracker, load, numbers, step_sizes

IDENTITY = "wandb-run-id"
"""The file in the run folder that names the run for wandb, so that it can be gone on with."""


class WeightsAndBiases(Tracker):
    """Logs scalars, the configuration, the summary and histograms of recorded step sizes."""

    def __init__(self, folder_of: Callable[[Config], Path]) -> None:
        self._wandb = load("wandb")
        self._folder_of = folder_of
        self._run: Any = None

    def started(self, config: Config, done: int) -> None:
        """Begin the run, or go on with the one that the folder names."""
        self.close()
        folder = self._folder_of(config)
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "deltafl"),
                id=_identity(folder),
                name=config.run_name,
                # Whole, because wandb's own process may have started in another folder.
                dir=str(folder.resolve()),
                config=config.model_dump(mode="json"),
                resume="allow",
                # The terminal belongs to our progress bar.
                settings=self._wandb.Settings(console="off"),
            )
        except self._wandb.Error as error:
            reason = str(error).rstrip(".")
            raise UserError(
                f"wandb cannot start: {reason}; WANDB_MODE=offline keeps the run on this machine"
            ) from None

    def finished_round(self, report: RoundReport) -> None:
        """Log the numbers of a round; wandb drops rounds that it already has."""
        values: dict[str, Any] = dict(numbers(report))
        if sizes := step_sizes(report):
            values["step_sizes"] = self._wandb.Histogram(sizes)
        self._run.log(values, step=report.round)

    def finished(self, summary: dict[str, Any]) -> None:
        """Log the summary, and end the run."""
        self._run.summary.update(summary)
        self._end(0)

    def close(self) -> None:
        """End a run that was stopped."""
        self._end(1)

    def _end(self, code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=code)
            self._run = None


def _identity(folder: Path) -> str:
    place = folder / IDENTITY
    if not place.exists():
        write_atomically(place, secrets.token_hex(4).encode())
    return place.read_text(encoding="utf-8").strip()
