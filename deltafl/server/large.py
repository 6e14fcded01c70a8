"""The average of large models: the bits of `Average`, an entry and a piece of it at a time.

Small models are joined into one row, since operations cost more than numbers there. The rows of a
large one, and what they are widened to, would be several copies of all its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

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
        super().__init__({})  # nothing to join
        self._reference = dict(reference)
        self._forms = check.forms(reference)
        self._sums: Weights = {}
        self._first = 0.0
        self._total = 0.0

    def add_all(self, stack: Mapping[str, Tensor], weights: Sequence[float]) -> dict[int, str]:
        """Add clients whose weights lie side by side; return why clients were refused."""
        clients = len(weights)
        if (fault := check.misfit(check.forms(stack, leading=1), self._forms)) is not None:
            return dict.fromkeys(range(clients), fault)
        lengths = self._distances(stack, clients)
        refused = self._refused(stack, weights, lengths)
        good = [place for place in range(clients) if place not in refused]
        if good:
            rows = {n: v if len(good) == clients else v[good] for n, v in stack.items()}
            self._add(rows, [weights[place] for place in good])
            self.lengths += [lengths[place] for place in good]
        return refused

    def _distances(self, stack: Mapping[str, Tensor], clients: int) -> list[float]:
        parts: list[list[float]] = [[0.0] * clients]
        for name, start in self._reference.items():
            if start.is_floating_point():
                pieces = zip(_pieces(stack[name], clients), _pieces(start, 1), strict=True)
                parts += [check.distances(rows, from_[0]).tolist() for rows, from_ in pieces]
        return [math.hypot(*own) for own in zip(*parts, strict=True)]

    def _add(self, stack: Mapping[str, Tensor], weights: Sequence[float]) -> None:
        self._first = self._first or weights[0]
        shares = [weight / self._first for weight in weights]
        for name, start in self._reference.items():
            if name not in self._sums:
                # Not 0 + x: that would turn -0 into 0.
                self._sums[name] = torch.full(start.shape, -0.0, dtype=torch.float64)
            rows = _pieces(stack[name], len(shares))
            for sums, piece in zip(_pieces(self._sums[name], 1), rows, strict=True):
                sums[0].add_(weighted_sum(piece.to(torch.float64), shares))
        self._total += sum(shares)

    def result(self) -> Weights:
        """Return the aggregate, each entry in its own dtype. `ValueError` if there is nothing."""
        if not len(self):
            raise ValueError("there is no update to aggregate: add one first")
        whole = {
            name: torch.empty(start.shape, dtype=start.dtype)
            for name, start in self._reference.items()
        }
        for name, entry in whole.items():
            pairs = zip(_pieces(entry, 1), _pieces(self._sums[name], 1), strict=True)
            for piece, sums in pairs:
                mean = sums / self._total
                piece.copy_(mean if entry.is_floating_point() else mean.round())
        return whole

    def _take(self, rows: Rows, weights: Sequence[float]) -> None:
        raise NotImplementedError  # rows are never joined

    def _aggregate(self) -> dict[torch.dtype, Tensor]:
        raise NotImplementedError


def _pieces(tensor: Tensor, clients: int) -> Iterator[Tensor]:
    """Return the columns of a tensor as [client, entry], a piece at a time, to look into."""
    rows = tensor.reshape(clients, tensor.numel() // clients)
    return iter(torch.split(rows, _PIECE, dim=1))


def is_large(weights: Mapping[str, Tensor]) -> bool:
    """Say whether weights are too many to be joined."""
    return sum(value.numel() for value in weights.values()) > LARGE
