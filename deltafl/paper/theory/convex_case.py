r"""The convex case, run: Lemma 4 and Theorem 5 (Appendix A.2).

Full gradients, one local step (K = 1), every client in every round (p = 1), gamma = delta = 1, and
step sizes that never restart; the steps are those of `DeltaSGD`. Lemma 4 (eq:lyapunov) compares,
with f_i measured from its value at x*,

    V_t = |x_t - x*|^2 + 1/2m sum |x_t^i - x_{t-1}^i|^2 + 2/m sum eta_t^i theta_t^i f_i(x_{t-1}^i)
    U_t = |x_{t+1} - x*|^2 + 1/2m sum |x_{t+1}^i - x_t^i|^2
          + 2/m sum eta_t^i (1 + theta_t^i) f_i(x_t^i)

and says U_t <= V_t; V_{t+1} <= U_t by the growth condition, where x* minimises every f_i. Theorem 5
(eq:convex-result) bounds the mean of f_i at weighted points by 2 D L^2 / (2 L t + 1), D = V_1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from deltafl.optim import DeltaSGD
from deltafl.paper.theory.rounding import six_digits
from deltafl.report.labels import require

Array = NDArray[np.float64]

Loss = Callable[[Tensor], Tensor]
"""Turns points [..., d] into losses [...]."""

_ROUNDING = 1e-9
"""Excess, relative, that may be the rounding of sums."""


@dataclass(frozen=True)
class Problem:
    """Convex losses of clients, a minimiser of their mean, and where to start."""

    losses: tuple[Loss, ...]
    star: Tensor
    start: Tensor
    smoothness: float
    """The largest Lipschitz constant of the gradients, over all clients and points."""


def logistic(seed: int, *, tilt: float, clients: int = 8, d: int = 5, samples: int = 12) -> Problem:
    """Return logistic regressions on inputs of very different scale.

    The labels are probabilities that x* predicts exactly, so that x* minimises every loss. `tilt`
    adds linear terms that cancel in the mean: x* still minimises that, but no client's loss.
    """
    ridge = 0.1  # or a tilted loss might have no minimum at all
    rng = np.random.default_rng(seed)
    star = torch.from_numpy(rng.normal(size=d))
    scales = 3.0 * np.exp(0.5 * rng.normal(size=(clients, 1, 1)))
    inputs = torch.from_numpy(scales * rng.normal(size=(clients, samples, d)))
    tilts = rng.normal(size=(clients, d))
    linear = torch.from_numpy(tilt * (tilts - tilts.mean(axis=0)))
    start = torch.from_numpy(2.0 * rng.normal(size=d))

    def loss_of(design: Tensor, slope: Tensor) -> Loss:
        labels = torch.sigmoid(design @ star)

        def loss(x: Tensor) -> Tensor:
            scores = x @ design.T
            fit = (F.softplus(scores) - labels * scores).mean(-1)
            return fit + ridge / 2 * (x - star).square().sum(-1) + x @ slope

        return loss

    # The second derivative of softplus is at most 1/4.
    curvatures = torch.linalg.matrix_norm(inputs, 2).square() / (4 * samples) + ridge
    losses = tuple(loss_of(design, slope) for design, slope in zip(inputs, linear, strict=True))
    return Problem(losses, star, start, float(curvatures.max()))


def _parabola(direction: Sequence[float], level: float) -> Loss:
    """Return (a'x - level)^2 / 2."""
    row = torch.tensor(direction, dtype=torch.float64)
    return lambda x: (x @ row - level).square() / 2


def one_parabola(curvature: float = 1.0) -> Problem:
    """Return curvature x^2 / 2 from x = 1."""
    star, start = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return Problem((_parabola((curvature**0.5,), 0),), star, start, curvature)


def two_flat_parabolas(seed: int = 0) -> Problem:
    """Return (3 x)^2 / 2 and (2 y - 3 x)^2 / 2, both least at the origin; the seed plays no role.

    Each loss is flat in one direction, and the average moves each client along the direction of the
    other. Found by a search over small whole numbers.
    """
    losses = (_parabola((3, 0), 0), _parabola((-3, 2), 0))
    origin = torch.zeros(2, dtype=torch.float64)
    return Problem(losses, origin, torch.tensor([1.0, 3.0], dtype=torch.float64), 13.0)


def two_parabolas_apart(seed: int = 0) -> Problem:
    """Return (x - 1)^2 / 2 and (x + 1)^2 / 2, least at different points; the seed plays no role.

    With eta_0 = 1 the average is x* = 0 after one round and stays. Step sizes can then only grow,
    and with them the moves of the clients, whose gradients do not vanish at x*.
    """
    losses = (_parabola((1,), 1), _parabola((1,), -1))
    star, start = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return Problem(losses, star, start, 1.0)


class ConvexCase(NamedTuple):
    """A family of problems by seed, and how clients step on them."""

    problem: Callable[[int], Problem]
    averaged: bool = True
    random: bool = True
    """Whether the problem depends on the seed."""


OWN = "own trajectories, common minimiser"
AVERAGED = "averaged, common minimiser"
FLAT = "one parabola of curvature 0.001"
APART = "averaged, no common minimiser"
FLAT_PAIR = "two flat parabolas, common minimiser"
APART_PAIR = "two parabolas, no common minimiser"


def _together(seed: int) -> Problem:
    return logistic(seed, tilt=0.0)


def _tilted(seed: int) -> Problem:
    return logistic(seed, tilt=0.2)


def _flat(seed: int) -> Problem:
    return one_parabola(1e-3)


CONVEX_CASES = {
    OWN: ConvexCase(_together, averaged=False),
    AVERAGED: ConvexCase(_together),
    APART: ConvexCase(_tilted),
    FLAT: ConvexCase(_flat, random=False),
    FLAT_PAIR: ConvexCase(two_flat_parabolas, random=False),
    APART_PAIR: ConvexCase(two_parabolas_apart, random=False),
}
"""What is run, by name. The proof of Lemma 4 takes the point where a client's step starts for the
point where its last step led to. They are the same for the first, and for a single client;
averaging makes them two."""


class _Trace(NamedTuple):
    """Where the steps of the clients started and led to [t, m, d], and their sizes [t, m]."""

    starts: Tensor
    ends: Tensor
    eta: Tensor
    theta: Tensor


def convex(seeds: int = 5, steps: int = 40) -> pd.DataFrame:
    """Run every convex case, and measure Lemma 4 and Theorem 5 after each step.

    Returns:
        One row a case, seed and step t = 1 ... steps:

        - `lyapunov`: V_t
        - `excess`: (U_t - V_t) / |V_t|, above 0 where the lemma fails
        - `gap` and `bound`: both sides of Theorem 5
        - `suboptimality`: f(x_t) - f(x*) at the average of the clients' points
        - `least_step`: the smallest 2 L eta_t^i, which the proof takes to be at least 1
    """
    tables = []
    for name, case in CONVEX_CASES.items():
        for seed in range(seeds if case.random else 1):
            problem = case.problem(seed)
            table = measure(problem, steps, averaged=case.averaged)
            table.insert(0, "seed", seed)
            table.insert(0, "case", name)
            tables.append(table)
    return six_digits(pd.concat(tables, ignore_index=True))


def measure(
    problem: Problem, steps: int, *, averaged: bool = True, eta_0: float = 1.0
) -> pd.DataFrame:
    """Run one problem; return the columns of `convex` from `t` on, with all their digits."""
    trace = _steps(problem, steps + 2, averaged=averaged, eta_0=eta_0)
    return pd.DataFrame({"t": range(1, steps + 1), **_columns(problem, trace)})


def _steps(problem: Problem, steps: int, *, averaged: bool, eta_0: float) -> _Trace:
    """Let every client take full-gradient steps, from the average of all or on its own."""
    points = [problem.start.clone().requires_grad_() for _ in problem.losses]
    # Same batch: with full gradients the same as reused, but it knows of the move to the average.
    optimizers = [
        DeltaSGD([x], lr=eta_0, gamma=1.0, delta=1.0, curvature="same-batch") for x in points
    ]
    starts, ends = [], []
    for optimizer in optimizers:
        optimizer.recording = True
    for _ in range(steps):
        starts.append(_stacked(points))
        for x, loss, optimizer in zip(points, problem.losses, optimizers, strict=True):
            optimizer.step(_closure(x, loss))
        ends.append(_stacked(points))
        if averaged:
            mean = ends[-1].mean(0)
            for x in points:
                x.data.copy_(mean)
    records = [optimizer.records for optimizer in optimizers]
    sizes = [[(step.eta, step.theta) for step in client] for client in records]
    eta, theta = torch.tensor(sizes, dtype=torch.float64).permute(2, 1, 0)
    return _Trace(torch.stack(starts), torch.stack(ends), eta, theta)


def _closure(x: Tensor, loss: Loss) -> Callable[[], float]:
    def closure() -> float:
        x.grad = None
        value = loss(x)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    return closure


def _stacked(points: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.detach().clone() for x in points])


def _columns(problem: Problem, trace: _Trace) -> dict[str, Array]:
    """Return the columns of `convex` for t = 1 up to the last step but one."""
    starts, ends, eta, theta = trace
    best = torch.stack([loss(problem.star) for loss in problem.losses])

    def above_best(points: Tensor) -> Tensor:
        """Return f_i(x^i) - f_i(x*) for points [t, m, d]."""
        values = [loss(points[:, i]) for i, loss in enumerate(problem.losses)]
        return torch.stack(values, dim=1) - best

    distance = (starts - problem.star).square().sum(-1).mean(1)
    moves = (ends - starts).square().sum(-1).mean(1) / 2
    heights = above_best(starts)
    before, after = eta * theta, eta * (1 + theta)
    v = distance[1:-1] + moves[:-2] + 2 * (before[1:-1] * heights[:-2]).mean(1)
    u = distance[2:] + moves[1:-1] + 2 * (after[1:-1] * heights[1:-1]).mean(1)

    # The weighted points of Theorem 5: alpha_k for the steps before, eta (1 + theta) for the last.
    alpha = after[1:-1] - before[2:]
    weighted = torch.cumsum(alpha[..., None] * starts[1:-1], 0)
    weighted = weighted + before[2:, :, None] * starts[1:-1]
    total = torch.cumsum(eta[1:-1], 0) + before[1]
    gap = above_best(weighted / total[..., None]).mean(1)

    smoothness = problem.smoothness
    t = torch.arange(1, len(v) + 1)
    centre = starts.mean(1, keepdim=True).expand_as(starts)
    columns = {
        "lyapunov": v,
        "excess": (u - v) / v.abs(),
        "gap": gap,
        "bound": 2 * v[0] * smoothness**2 / (2 * smoothness * t + 1),
        "suboptimality": above_best(centre).mean(1)[1:-1],
        "least_step": 2 * smoothness * eta[1:-1].min(1).values,
    }
    return {name: column.numpy() for name, column in columns.items()}


def convex_summary(frame: pd.DataFrame) -> list[str]:
    """Say of each case whether Lemma 4 and Theorem 5 held at every step."""
    require(frame, ["case", "seed", "t", "lyapunov", "excess", "gap", "bound"], "the convex theory")
    sentences = []
    for case, rows in frame.groupby("case", sort=False):
        problems = rows["seed"].nunique()
        broken = int((rows["excess"] > _ROUNDING).sum())
        growth = _growth(rows)
        ratio = rows["gap"] / rows["bound"]
        above = int((ratio > 1).sum())
        lemma = (
            f"Lemma 4 fails at {broken} of {len(rows)} steps (by up to {rows['excess'].max():.0%})"
            if broken
            else f"Lemma 4 holds at all {len(rows)} steps"
        )
        v = f"V grows by up to {growth:.0%} in a step" if growth > _ROUNDING else "V never grows"
        rate = (
            f"the bound of Theorem 5 fails at {above} steps (gap up to {ratio.max():.1f} times it)"
            if above
            else f"the gap is at most {ratio.max():.1%} of the bound of Theorem 5"
        )
        end = rows.loc[rows["t"] == rows["t"].max(), "suboptimality"].mean()
        count = f"{problems} problem{'s' if problems > 1 else ''}"
        sentences.append(
            f"{case} ({count}): {lemma}; {v}; {rate}; in the end f(x_t) - f(x*) is {end:.2g}."
        )
    return sentences


def _growth(rows: pd.DataFrame) -> float:
    """Return the largest growth of V in one step, relative to its value before."""
    v = rows.pivot_table(index="t", columns="seed", values="lyapunov")
    return float((v.diff() / v.shift()).max().max())
