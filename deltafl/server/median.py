"""The coordinate-wise median (Yin, Chen, Ramchandran and Bartlett, ICML 2018).

Of an even number it is the mean of the two in the middle. It needs to know no number of attackers:
every coordinate stays within those of the good clients while these are more than half. Where
clients differ a lot, it follows the majority of them and forgets the others.
"""

from __future__ import annotations

from torch import Tensor

from deltafl.server.trimmed_mean import trimmed_mean


def median(values: Tensor, attackers: int = 0) -> Tensor:
    """Return the median over clients, [client, entry]: all but the middle is trimmed."""
    return trimmed_mean(values, (len(values) - 1) // 2)
