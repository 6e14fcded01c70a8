"""Algorithm 1 of the paper, line by line, in float64 and plain numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def delta_sgd(
    gradient: Callable[[Vector, int], Vector],
    x_0: Vector,
    steps: int,
    *,
    same_batch: bool,
    eta_0: float = 0.2,
    theta_0: float = 1.0,
    gamma: float = 2.0,
    delta: float = 0.1,
) -> tuple[list[Vector], list[float], list[float]]:
    """Return the iterates x_0 .. x_K, step sizes eta_0 .. eta_{K-1} and ratios theta.

    ``gradient(x, k)`` is the gradient at x on the batch of step k.
    """
    x, eta, theta = [x_0], [eta_0], [theta_0]
    for k in range(1, steps + 1):
        last = gradient(x[k - 1], k - 1)
        x.append(x[k - 1] - eta[k - 1] * last)  # line 8
        if k == steps:
            break
        moved = np.linalg.norm(x[k] - x[k - 1])
        before = gradient(x[k - 1], k) if same_batch else last
        turned = np.linalg.norm(gradient(x[k], k) - before)
        smoothness = gamma * moved / (2 * turned)
        growth = np.sqrt(1 + delta * theta[k - 1]) * eta[k - 1]
        eta.append(float(min(smoothness, growth)))  # line 9
        theta.append(eta[k] / eta[k - 1])  # line 10
    return x, eta, theta
