"""What an engine is: a place where client work runs.

An engine is opened with a `Setup`, then trains the sampled clients of a round and evaluates the
global weights. It never decides anything: which clients, which weights and which seeds come from
above, so every engine computes the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deltafl.client import LocalWork, Updates
from deltafl.data.dataset import AnyDataset
from deltafl.data.partition import Partition

# Evaluation goes in chunks of fixed size, summed in order: the same bits however many
# processes share them.
EVALUATION_CHUNK = 250


@dataclass(frozen=True)
class Setup:
    """Everything a process needs to do the work of any client of a run."""

    dataset: AnyDataset
    partition: Partition
    model: str
    width: int | None
    norm: str | None
    work: LocalWork
    seed: int
    fast: bool = True
    device: str = "cpu"
    weights: str | None = None
    held_out: npt.NDArray[np.int64] | None = None  # training rows to evaluate on, not the test set
    test_rows: npt.NDArray[np.int64] | None = None  # where not the whole test set is evaluated on

    @property
    def evaluated(self) -> int:
        """How many samples an evaluation uses."""
        rows = self.test_rows if self.held_out is None else self.held_out
        return len(self.dataset.test) if rows is None else len(rows)

    @property
    def one_shape(self) -> bool:
        """Whether all batches have the same shape; those of texts differ in length."""
        return self.dataset.shape is not None


class ClientTask(NamedTuple):
    """One client's work in one round. Memories are files, so that they outlive a process."""

    client: int
    round: int
    progress: float
    recall: Path | None = None
    remember: Path | None = None


class Missing(NamedTuple):
    """In place of a client's update: it did not come, or cannot be used, and why."""

    reason: str


@dataclass(frozen=True)
class Evaluation:
    """How the global weights do on the test set."""

    accuracy: float
    loss: float


class Engine(Protocol):
    """Where client work runs. Use it as a context manager, so that it leaves nothing behind."""

    def __enter__(self) -> Engine:
        """Return the engine itself."""

    def __exit__(self, *exc: object) -> None:
        """Release everything the engine holds."""

    def open(self, setup: Setup) -> None:
        """Prepare for the clients of a run; an engine may be opened again for the next run."""

    def train(
        self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]
    ) -> Iterator[Updates | Missing]:
        """Yield the clients' updates in the order of `tasks`, one or several at a time.

        The weights are valid until the next updates are asked for. `Missing` stands for one client.
        """

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate the global weights on all samples held for that."""


def bundles(tasks: Sequence[ClientTask], size: int) -> list[Sequence[ClientTask]]:
    """Cut a round's tasks into pieces of about the same size, at most `size`, to work on together.

    They follow from the run alone, never from the number of processes: clients that share a bundle
    may share bits.
    """
    count = -(-len(tasks) // size)
    cuts = [place * len(tasks) // count for place in range(count + 1)]
    return [tasks[start:stop] for start, stop in pairwise(cuts)]


def chunks(samples: int) -> list[tuple[int, int]]:
    """Return the chunks of an evaluation as (start, stop)."""
    return [
        (start, min(start + EVALUATION_CHUNK, samples))
        for start in range(0, samples, EVALUATION_CHUNK)
    ]


def total(parts: Sequence[tuple[int, float]], samples: int) -> Evaluation:
    """Add up (correct, summed loss) of the chunks, in order."""
    correct = sum(part[0] for part in parts)
    loss = sum(part[1] for part in parts)
    return Evaluation(correct / samples, loss / samples)
