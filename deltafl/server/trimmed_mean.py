"""The coordinate-wise trimmed mean (Yin, Chen, Ramchandran and Bartlett, ICML 2018).

Of every coordinate, the f largest and the f smallest values are left out and the others averaged.
As long as at most f clients are bad, every coordinate stays within those of the good ones.
"""

from __future__ import annotations

from torch import Tensor


def trimmed_mean(values: Tensor, attackers: int) -> Tensor:
    """Return the mean over clients, [client, entry], without `attackers` at either end."""
    ordered = values.sort(0).values
    return ordered[attackers : len(values) - attackers].mean(0)
