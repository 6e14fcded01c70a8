"""Aggregation that a minority of bad clients cannot take over, in place of the average.

These rules look at all updates of a round together, so they keep them until its end: as many copies
of the weights as there are clients in a round. Every client counts the same, whatever number of
samples it claims. They are in the order of clients and on one thread, so that the bits are the
same wherever clients ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafl.errors import UserError, unknown
from deltafl.server.collect import Joined, Rows
from deltafl.server.geometric_median import geometric_median
from deltafl.server.median import median
from deltafl.server.multi_krum import multi_krum
from deltafl.server.nearest_neighbours import nearest_neighbours
from deltafl.server.stack import Stack
from deltafl.server.trimmed_mean import trimmed_mean

MEAN = "mean"
ATTACKERS = 0.2
"""The share of the clients that are guarded against, unless it is given."""

_BY_COORDINATE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "median": median,
    "trimmed-mean": trimmed_mean,
}
_BY_DISTANCE: dict[str, Callable[[Stack, int], list[float]]] = {
    "multi-krum": multi_krum,
    "geometric-median": geometric_median,
}
# Rules that need no number of attackers, unless they mix.
_UNCOUNTED = ("median", "geometric-median")


def aggregates() -> tuple[str, ...]:
    """Return the names of the ways to aggregate."""
    return (MEAN, *_BY_COORDINATE, *_BY_DISTANCE)


@dataclass(frozen=True)
class Rule:
    """A robust rule with its options."""

    name: str
    attackers: float = ATTACKERS
    """The share of a round's clients that may be bad, below one half."""
    mixing: bool = False
    """Whether clients are first mixed with their nearest neighbours."""

    @classmethod
    def read(cls, name: str, options: Mapping[str, float] | None = None) -> Rule | None:
        """Check a name and options; None stands for the mean."""
        given = dict(options or {})
        if name not in aggregates():
            raise unknown("aggregate", name, aggregates())
        if name == MEAN:
            if given:
                raise UserError(f"aggregate {MEAN!r} has no options: remove them")
            return None
        for option in given:
            if option not in ("attackers", "mixing"):
                raise unknown(f"option of aggregate {name!r}", option, ("attackers", "mixing"))
        mixing = given.get("mixing", False)
        if mixing not in (False, True):
            raise UserError(f"mixing {mixing} of aggregate {name!r} is neither true nor false")
        attackers = float(given.get("attackers", ATTACKERS))
        if not 0 <= attackers < 0.5:
            raise UserError(
                f"attackers {attackers:g} of aggregate {name!r} is wrong: use a share of at least "
                "0 and below 0.5"
            )
        if name in _UNCOUNTED and not mixing and "attackers" in given:
            raise UserError(
                f"aggregate {name!r} needs no number of attackers: remove it, or add mixing=true"
            )
        return cls(name, attackers, bool(mixing))

    def count(self, clients: int) -> int:
        """Return f, how many of a round's clients may be bad: the share rounded up, below half."""
        return min(math.ceil(self.attackers * clients - 1e-9), (clients - 1) // 2)

    def __call__(self, stack: Stack) -> dict[torch.dtype, Tensor]:
        """Return the aggregate of all clients."""
        count = self.count(len(stack))
        if self.mixing:
            stack = stack.mixed(nearest_neighbours(stack, count))
        if (by_coordinate := _BY_COORDINATE.get(self.name)) is not None:
            return {
                dtype: torch.cat([by_coordinate(block, count) for block in stack.blocks(dtype)])
                for dtype in stack.dtypes
            }
        return stack.combined(_BY_DISTANCE[self.name](stack, count))


class Robust(Joined):
    """Keeps all updates of a round, and aggregates them by a rule."""

    def __init__(self, reference: Mapping[str, Tensor], rule: Rule) -> None:
        """Start with no update; `reference` are the global weights."""
        super().__init__(reference)
        self._rule = rule
        self._kept: list[Rows] = []

    def _take(self, rows: Rows, weights: Sequence[float]) -> None:
        self._kept.append(rows)

    def _aggregate(self) -> dict[torch.dtype, Tensor]:
        rows = {dtype: torch.cat([kept[dtype] for kept in self._kept]) for dtype in self._names}
        return self._rule(Stack(rows))
