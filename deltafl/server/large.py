"""The average of large models: the bits of `Average`, an entry and a piece of it at a time.

Small models are joined into one row, since operations cost more than numbers there. The rows of a
large one, and what they are widened to, would be several copies of all its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltafl.server import check
from deltafl.server.aggregate import weighted_sum
from deltafl.server.collect import Collector, Rows
from deltafl.server.weights import Weights

LARGE = 4_000_000
"""Numbers in a model from which its weights are not joined."""

# Elements of a piece of every client: in float64 it stays in the cache.
_PIECE = 1 << 16


class LargeAverage(Collector):
    """A weighted average that takes one update after the other, and keeps none of them."""

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        """Start with no update; `reference` are the global weights."""
        super().__init__(reference)
        self._sums: Weights = {}
        self._first = 0.0
        self._total = 0.0

    def _rows(self, stack: Mapping[str, Tensor], clients: int) -> Rows:
        return {
            name: value.reshape(clients, value.numel() // clients) for name, value in stack.items()
        }

    def _distances(self, rows: Rows) -> list[Tensor]:
        return [
            check.distances(piece, from_[0])
            for name, start in self._reference.items()
            if start.is_floating_point()
            for piece, from_ in zip(_pieces(rows[name]), _pieces(_row(start)), strict=True)
        ]

    def _take(self, rows: Rows, weights: Sequence[float]) -> None:
        self._first = self._first or weights[0]
        shares = [weight / self._first for weight in weights]
        for name, start in self._reference.items():
            if name not in self._sums:
                # Not 0 + x: that would turn -0 into 0.
                self._sums[name] = torch.full(start.shape, -0.0, dtype=torch.float64)
            pairs = zip(_pieces(_row(self._sums[name])), _pieces(rows[name]), strict=True)
            for sums, piece in pairs:
                sums[0].add_(weighted_sum(piece.to(torch.float64), shares))
        self._total += sum(shares)

    def _result(self) -> Weights:
        whole = {
            name: torch.empty(start.shape, dtype=start.dtype)
            for name, start in self._reference.items()
        }
        for name, entry in whole.items():
            pairs = zip(_pieces(_row(entry)), _pieces(_row(self._sums[name])), strict=True)
            for piece, sums in pairs:
                mean = sums / self._total
                piece.copy_(mean if entry.is_floating_point() else mean.round())
        return whole


def _row(entry: Tensor) -> Tensor:
    return entry.reshape(1, entry.numel())


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    """Return the columns of a table, a piece at a time, to look into and to write to."""
    return torch.split(rows, _PIECE, dim=1)


def is_large(weights: Mapping[str, Tensor]) -> bool:
    """Say whether weights are too many to be joined."""
    return sum(value.numel() for value in weights.values()) > LARGE
