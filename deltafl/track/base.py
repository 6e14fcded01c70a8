"""What trackers share: the numbers of a round, and a beginning and an end."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

from deltafl.errors import UserError
from deltafl.experiment.config import Config
from deltafl.experiment.rounds import RoundReport


class Tracker(ABC):
    """A listener that must be closed, or its last rounds may be lost; a `with` block does."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def started(self, config: Config, done: int) -> None:
        """Begin a run, or go on with it after `done` rounds."""

    @abstractmethod
    def finished_round(self, report: RoundReport) -> None:
        """Tell of a round."""

    @abstractmethod
    def finished(self, summary: dict[str, Any]) -> None:
        """End the run with its summary."""

    @abstractmethod
    def close(self) -> None:
        """Write down what is left, also of a run that was stopped."""


def numbers(report: RoundReport) -> dict[str, float]:
    """Return the numbers of a round as trackers name them; what is unknown is left out."""
    row = report.row()
    named = {
        "accuracy": row["test_accuracy"],
        "loss": row["test_loss"],
        "train_loss": row["train_loss"],
        "step_size": row["step_size"],
        "seconds": row["seconds"],
        "refused": len(report.refused),
    }
    return {name: float(value) for name, value in named.items() if value is not None}


def step_sizes(report: RoundReport) -> list[float]:
    """Return every step size of a round, of all its clients, where they were recorded."""
    return [step.eta for metrics in report.steps.values() for step in metrics.steps]


def load(module: str) -> Any:
    """Import a tracker's own package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = error.name or module
        raise UserError(
            f"{name.partition('.')[0]} is not installed: `pip install deltafl[track]`"
        ) from None
