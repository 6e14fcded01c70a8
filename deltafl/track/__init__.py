"""Who else is told how a run goes: TensorBoard and Weights & Biases, as listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deltafl.errors import unknown
from deltafl.experiment.config import Config
from deltafl.track.base import Tracker
from deltafl.track.tensorboard import TensorBoard
from deltafl.track.weights_and_biases import WeightsAndBiases

__all__ = ["TensorBoard", "Tracker", "WeightsAndBiases", "build", "names"]

_TRACKERS: dict[str, Callable[[Callable[[Config], Path]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def names() -> tuple[str, ...]:
    """Return the names `build` knows."""
    return tuple(_TRACKERS)


def build(chosen: Sequence[str], folder_of: Callable[[Config], Path]) -> list[Tracker]:
    """Return the trackers of some names, each once; `folder_of` gives the folder of a run."""
    for name in chosen:
        if name not in _TRACKERS:
            raise unknown("tracker", name, _TRACKERS)
    return [_TRACKERS[name](folder_of) for name in dict.fromkeys(chosen)]
