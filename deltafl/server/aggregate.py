"""The average of the clients' weights: x_{t+1} = 1/|S_t| sum_i x_i (Algorithm 1, line 13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltafl.server.collect import Joined, Rows


class Average(Joined):
    """A weighted average that takes one update after the other, and keeps none of them.

    The sums are in float64 and in the order of the calls, so the caller who adds in the order of
    clients gets the same bits wherever the clients ran. Integer entries (BatchNorm counts its
    batches) are averaged and rounded to the nearest, halves to the even; so a boolean one is
    true if more than half of the weight says so.
    """

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        """Start with no update; `reference` are the global weights."""
        super().__init__(reference)
        self._sums: dict[torch.dtype, Tensor] = {}
        self._first = 0.0
        self._total = 0.0

    def _take(self, rows: Rows, weights: Sequence[float]) -> None:
        # Relative to the first: equal weights are exactly 1 each, so they give the bits of the
        # plain average, and the unit of the weights cancels exactly.
        self._first = self._first or weights[0]
        shares = [weight / self._first for weight in weights]
        for dtype, row in rows.items():
            total = weighted_sum(row.to(torch.float64), shares)
            if dtype in self._sums:
                self._sums[dtype].add_(total)
            else:
                self._sums[dtype] = total
        self._total += sum(shares)

    def _aggregate(self) -> dict[torch.dtype, Tensor]:
        return {dtype: total / self._total for dtype, total in self._sums.items()}


def weighted_sum(values: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the sum over clients, in a tensor of its own or that of a single client."""
    if shares.count(1.0) != len(shares):
        # A product and a sum, each rounded: a fused one may round vector and tail apart.
        values = values * torch.tensor(shares, dtype=torch.float64).unsqueeze(1)
    return values[0] if len(shares) == 1 else values.sum(0)
