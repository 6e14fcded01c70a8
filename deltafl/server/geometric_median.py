"""The geometric median: the point with the least sum of distances to all clients.

It is found by the smoothed Weiszfeld algorithm (Pillutla, Kakade and Harchaoui, "Robust aggregation
for federated learning", IEEE Transactions on Signal Processing 2022, called RFA there): an average
whose weights are the inverse distances to the last one, from the coordinate-wise median on. It
needs to know no number of attackers, and tolerates any number below half of the clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafl.server.aggregate import weighted_sum
from deltafl.server.median import median
from deltafl.server.stack import Stack

ITERATIONS = 100
# Shares that move by less are those of the median, for all that float32 can tell.
STILL = 1e-7
# Distances below this part of the usual one count as it: a client in the median itself, at
# distance zero, does not take everything.
SMOOTHING = 1e-6


def geometric_median(stack: Stack, attackers: int = 0) -> list[float]:
    """Return each client's share in the geometric median, which is an average of them."""
    distances = _distances(stack, None)
    # Where most clients agree to the bit, they are the median, and any small number will do.
    least = max(SMOOTHING * float(distances.median()), torch.finfo(torch.float64).tiny)
    shares = _shares(distances, least)
    for _ in range(ITERATIONS):
        last = shares
        shares = _shares(_distances(stack, last), least)
        if float((shares - last).abs().max()) < STILL:
            break
    return [float(share) for share in shares]


def _shares(distances: Tensor, least: float) -> Tensor:
    # The nearest has 1, so that nothing overflows, before all are divided by their sum.
    bounded = distances.clamp(min=least)
    inverse = bounded.min() / bounded
    return inverse / inverse.sum()


def _distances(stack: Stack, shares: Tensor | None) -> Tensor:
    """Return the clients' distances to their average with these shares, or to their median."""
    squares = torch.zeros(len(stack), dtype=torch.float64)
    for block in stack.numbers():
        centre = median(block) if shares is None else weighted_sum(block, shares.tolist())
        squares += (block - centre).square().sum(1)
    return squares.sqrt()
