"""What an item is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.progress import Progress
from benchmarks.report import Outcome


@dataclass(frozen=True)
class Settings:
    """How much to measure; None leaves it to the item."""

    repeats: int | None = None
    rounds: int | None = None
    quick: bool = False
    """Compare with the hand-written loop only, in a minute or two."""

    def choose(self, repeats: int, rounds: int) -> tuple[int, int]:
        """Return the number of repeats and of rounds a block, given an item's own."""
        return self.repeats or repeats, self.rounds or rounds


@dataclass(frozen=True)
class Item:
    """Something to measure. `minutes` is what it takes, for the estimate of the time left."""

    name: str
    title: str
    minutes: float
    measure: Callable[[Settings, Progress], Outcome]
    quick: float = 0.0
    """The minutes of its quick form; 0 if it has none."""
