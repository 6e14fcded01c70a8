"""The nonconvex case, run: Theorem 1 (Section 3.1).

Algorithm 1 on a problem whose constants in Assumption 1 are known, for a series of horizons T, with
gamma = c / (K sqrt(T)) and eta_0 in proportion. The theorem: the mean of |grad f(x_t)|^2 over the
rounds is O(1 / sqrt(T)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from deltafl.paper.theory.rounding import six_digits
from deltafl.report.labels import require

Array = NDArray[np.float64]

_FLAT = -0.45
"""Slopes above are not called 1 / sqrt(T): the theorem's is -0.5 or steeper."""


@dataclass(frozen=True)
class Federation:
    """Clients who estimate a vector from measurements with noise, by a robust loss.

    Client i minimises f_i(x) = sum_j c_ij E psi(x_j - o_ij - z_j) with psi(v) = log(1 + v^2) / 2
    (the loss of Cauchy noise) and z_j = ± noise, each with probability 1/2. For noise > 1 every
    coordinate has two minima and a maximum between them, so f has 2^d minima, and saddle points.

    Where all o_i are equal, each gradient is grad f scaled by c_ij / mean_i c_ij in coordinate j:
    (1c) holds everywhere, with the rho of `rho`, though the gradients point into different
    directions.
    """

    weights: Array
    """c_ij, [m, d]."""
    offsets: Array
    """o_ij, [m, d]."""
    noise: float

    def sides(self, x: Array) -> tuple[Array, Array]:
        """Return psi' where the noise is positive, and where it is negative."""
        return _slope(x - self.noise), _slope(x + self.noise)

    def gradients(self, x: Array) -> Array:
        """Return grad f_i(x) of all clients, [..., m, d], at points [..., d]."""
        high, low = self.sides(x[..., None, :] - self.offsets)
        return self.weights * (high + low) / 2

    def variances(self, x: Array) -> Array:
        """Return E |grad F_i(x, z) - grad f_i(x)|^2 of all clients, [..., m]."""
        high, low = self.sides(x[..., None, :] - self.offsets)
        spread: Array = np.square(self.weights * (high - low) / 2).sum(-1)
        return spread

    # Each of these sums takes its largest value where every coordinate does.

    @property
    def sigma2(self) -> float:
        """sigma^2 of (1a), the largest variance of a sample's gradient."""
        high, low = self.sides(_LINE)
        return float(np.square(self.weights).sum(1).max() * np.square((high - low) / 2).max())

    @property
    def largest_gradient(self) -> float:
        """G of (1b)."""
        high, low = self.sides(_LINE)
        return float(np.sqrt(np.square(self.weights).sum(1).max()) * np.abs(high + low).max() / 2)

    @property
    def rho(self) -> float:
        """rho of (1c); infinite if clients disagree about the stationary points."""
        if np.ptp(self.offsets, axis=0).any():
            return float("inf")
        return float(np.square(self.weights / self.weights.mean(0) - 1).max())

    @property
    def smoothness(self) -> float:
        """The Lipschitz constant of any sample's gradient: psi'' is at most 1."""
        return float(self.weights.max())


_LINE = np.linspace(-20.0, 20.0, 40001)


def _slope(v: Array) -> Array:
    """Return psi'(v)."""
    return v / (1 + v * v)


def federation(*, disagreement: float, clients: int = 10, d: int = 10) -> Federation:
    """Return the federation of `nonconvex`: rho = 1/4, the largest the proof of Theorem 1 takes.

    With `disagreement` the clients of larger weights, who take smaller steps, also aim higher.
    """
    rng = np.random.default_rng(0)
    tilt = 0.8 * rng.uniform(-1, 1, (clients, 1)) + 0.2 * rng.uniform(-1, 1, (clients, d))
    tilt -= tilt.mean(axis=0)
    tilt /= np.abs(tilt).max()
    return Federation(10.0 * (1 + tilt / 2), disagreement * tilt, noise=1.5)


class Arm(NamedTuple):
    """A way to choose gamma, a federation, and the batches that the step size sees."""

    theory: bool = True
    """gamma = c / (K sqrt(T)) and delta = 1, as in Theorem 1; otherwise the defaults."""
    independent: bool = True
    """Line 9 of Algorithm 1 uses a batch of its own; otherwise that of the next step, as
    `DeltaSGD` does."""
    disagreement: float = 0.0

    def gamma(self, horizon: int, local_steps: int) -> float:
        """Return the amplifier for T = horizon."""
        return SCALE / (local_steps * np.sqrt(horizon)) if self.theory else 2.0

    @property
    def delta(self) -> float:
        """The damping of the growth."""
        return 1.0 if self.theory else 0.1


SCALE = 20.0
"""c in gamma = c / (K sqrt(T)): with K = 10 this is the default gamma over sqrt(T)."""

PROVED = "γ = c/(K√T), batch of its own for η"
SAME_BATCH = "γ = c/(K√T), same batch for η and step"
DEFAULTS = "γ = 2 (default), same batch"
DISAGREEING = "γ = c/(K√T), without (1c)"

ARMS = {
    PROVED: Arm(),
    SAME_BATCH: Arm(independent=False),
    DEFAULTS: Arm(theory=False, independent=False),
    DISAGREEING: Arm(disagreement=2.5),
}
"""What is run, by name; the first is what the proof of Theorem 1 supposes."""

HORIZONS = tuple(2**power for power in range(4, 14))
LARGE = 512
"""Horizons from here on enter the fitted slopes: T has to be "sufficiently large"."""


class Draws(NamedTuple):
    """The randomness of one round, for all seeds [S, ...]."""

    clients: NDArray[np.intp]
    """Who takes part, [S, P]."""
    high: Array
    """The share of positive noise in each batch and coordinate, [S, K, P, d], for the steps."""
    aside: Array
    """The same in the batches that only step sizes see."""


_CHUNK = 64


def draws(
    rngs: Sequence[np.random.Generator],
    *,
    clients: int,
    participants: int,
    local_steps: int,
    d: int,
    batch_size: int,
) -> Iterator[Draws]:
    """Yield rounds for ever. A seed's draws depend on nothing but its generator."""
    shape = (_CHUNK, 2, local_steps, participants, d)
    while True:
        # Many rounds at a time: the generators' calls would cost more than the numbers.
        orders = [rng.random((_CHUNK, clients)).argsort(1)[:, :participants] for rng in rngs]
        shares = [rng.binomial(batch_size, 0.5, shape) / batch_size for rng in rngs]
        chosen, high = np.stack(orders, axis=1), np.stack(shares, axis=1)
        for t in range(_CHUNK):
            yield Draws(chosen[t], high[t, :, 0], high[t, :, 1])


class Rates(NamedTuple):
    """Settings of runs that go side by side, each [R, 1, 1] to spread over seeds and clients."""

    gamma: Array
    eta_0: Array
    delta: Array
    independent: NDArray[np.bool_]


def train_round(
    x: Array, weights: Array, offsets: Array, noise: float, drawn: Draws, rates: Rates
) -> tuple[Array, Array]:
    """Return x_{t+1} [R, S, d] and the step sizes [K, R, S, P] of one round from x_t.

    Lines 4 to 13 of Algorithm 1 for R settings and S seeds at once; weights [m, d] and offsets
    [R, m, d] are those of all clients.
    """
    heavy, centres = weights[drawn.clients], offsets[:, drawn.clients]

    def gradient(points: Array, high: Array) -> Array:
        shifted = points - centres
        mixed = high * _slope(shifted - noise) + (1 - high) * _slope(shifted + noise)
        return heavy * mixed

    points = np.repeat(x[:, :, None], drawn.clients.shape[1], axis=2)
    eta = np.broadcast_to(rates.eta_0, points.shape[:3])
    theta = np.ones(points.shape[:3])
    previous = points
    sizes = []
    for k in range(drawn.high.shape[1]):
        batch = drawn.high[:, k]
        if k:
            seen = np.where(rates.independent[..., None], drawn.aside[:, k], batch)
            turned = _norm(gradient(points, seen) - gradient(previous, seen))
            moved = _norm(points - previous)
            with np.errstate(divide="ignore", invalid="ignore"):
                smooth = rates.gamma * moved / (2 * turned)
            smooth = np.where((moved > 0) & (turned > 0), smooth, np.inf)
            chosen = np.minimum(smooth, np.sqrt(1 + rates.delta * theta) * eta)
            eta, theta = chosen, chosen / eta
        previous, points = points, points - eta[..., None] * gradient(points, batch)
        sizes.append(eta)
    return points.mean(axis=2), np.stack(sizes)


def _norm(vectors: Array) -> Array:
    lengths: Array = np.sqrt(np.einsum("...d,...d->...", vectors, vectors))
    return lengths


def nonconvex(
    seeds: int = 8,
    horizons: Sequence[int] = HORIZONS,
    *,
    participants: int = 5,
    local_steps: int = 10,
    batch_size: int = 1,
) -> pd.DataFrame:
    """Run Algorithm 1 for every arm, horizon and seed, each to its own T with its own gamma.

    A seed is a start and a stream of batches, the same for all arms and horizons.

    Returns:
        One row a run:

        - `mean_square`: the mean of |grad f(x_t)|^2 over t = 0 ... T - 1
        - `sigma2`, `gradient`, `rho`: the constants of Assumption 1 as the largest values met at
          the points x_t, and with `_bound` those that hold everywhere
        - `step`: the mean step size over gamma
        - `coefficient`: the least factor of |grad f(x_t)|^2 in (eq:nonconvex-18), which the
          theorem needs to be positive, with the step sizes of the run; `limit`: the same without
          the term that vanishes with gamma
    """
    rows = [(name, arm, horizon) for name, arm in ARMS.items() for horizon in sorted(horizons)]
    places = {arm.disagreement: federation(disagreement=arm.disagreement) for arm in ARMS.values()}
    where = [places[arm.disagreement] for _, arm, _ in rows]
    clients, d = where[0].weights.shape
    rngs = [np.random.default_rng(seed) for seed in range(seeds)]
    starts = np.stack([2.0 * rng.normal(size=d) for rng in rngs])
    stream = draws(
        rngs,
        clients=clients,
        participants=participants,
        local_steps=local_steps,
        d=d,
        batch_size=batch_size,
    )
    gamma = np.array([arm.gamma(horizon, local_steps) for _, arm, horizon in rows])
    ends = np.array([horizon for _, _, horizon in rows])
    runs = _Runs(
        where,
        Rates(
            gamma=gamma[:, None, None],
            # In the proportion of the defaults, 0.2 to 2.
            eta_0=0.1 * gamma[:, None, None],
            delta=np.array([arm.delta for _, arm, _ in rows])[:, None, None],
            independent=np.array([arm.independent for _, arm, _ in rows])[:, None, None],
        ),
        np.broadcast_to(starts, (len(rows), seeds, d)).copy(),
    )
    for t, drawn in zip(range(max(horizons)), stream, strict=False):
        runs.advance(np.flatnonzero(ends > t), drawn)

    tables = []
    for row, (name, _, horizon) in enumerate(rows):
        place = where[row]
        columns: dict[str, Any] = {
            "arm": name,
            "horizon": horizon,
            "seed": range(seeds),
            "gamma": gamma[row],
            "mean_square": runs.squares[row] / horizon,
            "step": runs.steps[row] / horizon / gamma[row],
            "coefficient": runs.coefficient[row],
            "limit": runs.limit[row],
            "sigma2": runs.sigma2[row],
            "sigma2_bound": place.sigma2,
            "gradient": runs.gradient[row],
            "gradient_bound": place.largest_gradient,
            "rho": runs.rho[row],
            "rho_bound": place.rho,
        }
        tables.append(pd.DataFrame(columns))
    return six_digits(pd.concat(tables, ignore_index=True))


class _Runs:
    """Runs side by side [R, S], and what is measured of each on the way."""

    def __init__(self, where: Sequence[Federation], rates: Rates, x: Array) -> None:
        self.where = where
        self.rates = rates
        self.x = x
        self.offsets = np.stack([place.offsets for place in where])
        shape = x.shape[:2]
        self.squares, self.steps = np.zeros(shape), np.zeros(shape)
        self.sigma2, self.gradient, self.rho = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.coefficient, self.limit = np.full(shape, np.inf), np.full(shape, np.inf)

    def advance(self, active: NDArray[np.intp], drawn: Draws) -> None:
        """Take the active runs one round further."""
        first = self.where[0]
        here = Federation(first.weights, self.offsets[active][:, None], first.noise)
        x = self.x[active]
        gradients = here.gradients(x)
        mean = gradients.mean(axis=2)
        square = np.square(mean).sum(-1)
        self.squares[active] += square
        apart = np.square(gradients - mean[:, :, None]).sum(-1).max(-1)
        _raise_to(self.rho, active, apart / square)
        _raise_to(self.gradient, active, _norm(gradients).max(-1))
        _raise_to(self.sigma2, active, here.variances(x).max(-1))

        rates = Rates._make(values[active] for values in self.rates)
        self.x[active], sizes = train_round(
            x, here.weights, self.offsets[active], here.noise, drawn, rates
        )
        self.steps[active] += sizes.mean(axis=(0, 3))
        rho = np.array([self.where[row].rho for row in active])[:, None]
        coefficient, limit = _coefficients(sizes, rho, first.smoothness)
        self.coefficient[active] = np.minimum(self.coefficient[active], coefficient)
        self.limit[active] = np.minimum(self.limit[active], limit)


def _raise_to(largest: Array, rows: NDArray[np.intp], values: Array) -> None:
    largest[rows] = np.maximum(largest[rows], values)


def _coefficients(sizes: Array, rho: Array, smoothness: float) -> tuple[Array, Array]:
    """Return the factor of |grad f(x_t)|^2 in (eq:nonconvex-18), and its part without gamma.

    Means over clients are those over the ones who took part.
    """
    steps = len(sizes)
    total = sizes.sum(axis=0).mean(-1)
    squares = np.square(sizes).sum(axis=0).mean(-1)
    limit = 1 - 2 * steps * rho * squares / total**2
    return limit - 4 * steps * smoothness * (1 + rho) * squares / total, limit


def slopes(frame: pd.DataFrame, smallest: int = LARGE) -> pd.DataFrame:
    """Return the slope of log mean_square over log T by arm: mean, deviation and n over seeds.

    Args:
        frame: What `nonconvex` returns.
        smallest: Horizons below are left out.
    """
    large = frame[frame["horizon"] >= smallest]
    fits = [
        (arm, float(np.polyfit(np.log(run["horizon"]), np.log(run["mean_square"]), 1)[0]))
        for (arm, _), run in large.groupby(["arm", "seed"], sort=False)
    ]
    by_seed = pd.DataFrame(fits, columns=["arm", "slope"])
    found = by_seed.groupby("arm", sort=False)["slope"].agg(["mean", "std", "count"])
    return found.rename(columns={"count": "n"}).reset_index()


def fit_from(frame: pd.DataFrame) -> int:
    """Return where fits start: at `LARGE`, or at the first horizon if too few are as large."""
    horizons = frame["horizon"].unique()
    return LARGE if (horizons >= LARGE).sum() >= 2 else int(horizons.min())


def nonconvex_summary(frame: pd.DataFrame) -> list[str]:
    """Say whether the assumptions held, and how fast each arm's gradients vanish."""
    columns = ["arm", "horizon", "seed", "mean_square", "coefficient", "limit"]
    require(frame, columns, "the nonconvex theory")
    sentences = [_assumptions(rows) for _, rows in frame.groupby("rho_bound", sort=False)]
    largest = frame["horizon"].max()
    smallest = fit_from(frame)
    last = frame[frame["horizon"] == largest].groupby("arm")["mean_square"].agg(["mean", "std"])
    for arm, slope, deviation, n in slopes(frame, smallest).itertuples(index=False):
        mean, spread = last.loc[arm]
        verdict = "falls like 1/√T" if slope <= _FLAT else "falls slower than 1/√T"
        sentences.append(
            f"{arm}: the mean of |∇f(x_t)|² is {mean:.3g} ± {spread:.1g} at T = {largest}, its "
            f"slope over T ≥ {smallest} is {slope:.2f} ± {deviation:.2f} (n = {n}): it {verdict}."
        )
    proved = frame[frame["arm"] == PROVED]
    positive, n = int((proved["coefficient"] > 0).sum()), len(proved)
    sentences.append(
        "The factor of |∇f(x_t)|² in the proof's last inequality is positive in all rounds of "
        f"{positive} of {n} runs of the first (largest: {proved['coefficient'].max():.2g}); "
        f"without the term that vanishes with γ it is at least {proved['limit'].min():.2g}."
    )
    return sentences


def _assumptions(rows: pd.DataFrame) -> str:
    """Compare the constants met on the way with those that hold everywhere."""
    parts = []
    for name, column in {"σ²": "sigma2", "G": "gradient", "ρ": "rho"}.items():
        met, bound = rows[column].max(), rows[f"{column}_bound"].iloc[0]
        parts.append(f"{name} = {bound:.3g} (met: {met:.3g})")
    holds = np.isfinite(rows["rho_bound"].iloc[0]) and all(
        (rows[column] <= rows[f"{column}_bound"]).all() for column in ("sigma2", "gradient", "rho")
    )
    arms = f"{rows['arm'].nunique()} arm{'s' if rows['arm'].nunique() > 1 else ''}"
    verdict = "holds" if holds else "does not hold"
    return f"Assumption 1 {verdict} in {len(rows)} runs of {arms}: {', '.join(parts)}."
