"""The theorems hold where they are proved, and fail where the page says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from deltafl.errors import UserError
from deltafl.optim import DeltaSGD
from deltafl.optim.delta_sgd import next_step_size
from deltafl.paper import theory
from deltafl.paper.theory import STUDIES, convex_case, nonconvex_case
from deltafl.paper.theory.convex_case import (
    APART,
    APART_PAIR,
    AVERAGED,
    FLAT,
    FLAT_PAIR,
    OWN,
    Problem,
)
from deltafl.paper.theory.nonconvex_case import (
    DEFAULTS,
    DISAGREEING,
    PROVED,
    SAME_BATCH,
    Draws,
    Federation,
    Rates,
)
from deltafl.report import save
from deltafl.server.aggregate import Average

ROUNDING = 1e-9


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def convex() -> pd.DataFrame:
    return theory.convex(seeds=2, steps=25)


@pytest.fixture(scope="module")
def nonconvex() -> pd.DataFrame:
    return theory.nonconvex(seeds=3, horizons=(64, 256, 1024))


def rows_of(frame: pd.DataFrame, case: str) -> pd.DataFrame:
    rows = frame[frame["case"] == case]
    assert not rows.empty
    return rows


@pytest.mark.parametrize("case", [OWN, AVERAGED])
def test_lemma_and_rate_hold_with_a_common_minimiser(convex: pd.DataFrame, case: str) -> None:
    for _, run in rows_of(convex, case).groupby("seed"):
        assert (run["excess"] <= ROUNDING).all()
        assert run["lyapunov"].is_monotonic_decreasing
        assert (run["lyapunov"] > 0).all()
        assert (run["gap"] <= run["bound"]).all()
        assert (run["gap"] >= 0).all()
        assert (run["least_step"] >= 1 - ROUNDING).all()


def test_the_bound_is_that_of_the_theorem(convex: pd.DataFrame) -> None:
    """With L = 0.001 and D = V_1 it is 2 D L^2 / (2 L t + 1)."""
    run = rows_of(convex, FLAT)
    expected = 2e-6 * run["lyapunov"].iloc[0] / (0.002 * run["t"] + 1)
    assert run["bound"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5)


def test_one_parabola_by_hand() -> None:
    """eta_0 = 1/2 from x = 1: every eta is 1/2 and every theta 1, so x halves at each step."""
    run = convex_case.measure(convex_case.one_parabola(), 2, eta_0=0.5)
    # V_1 = 1/4 + 1/2 * 1/4 + 2 * 1/2 * 1/2; the second halves every point.
    assert run["lyapunov"].tolist() == pytest.approx([0.875, 0.875 / 4])
    # U_1 = 1/16 + 1/2 * 1/16 + 2 * 1 * 1/8
    assert run["excess"].iloc[0] == pytest.approx((0.34375 - 0.875) / 0.875)
    # The points are 1/2, and (1/2 * 1/2 + 1 * 1/4) / (3/2) = 1/3.
    assert run["gap"].tolist() == pytest.approx([1 / 8, 1 / 18])
    assert run["bound"].tolist() == pytest.approx([1.75 / 3, 1.75 / 5])
    assert run["least_step"].tolist() == pytest.approx([1.0, 1.0])
    assert run["suboptimality"].tolist() == pytest.approx([1 / 8, 1 / 32])


def test_a_common_minimiser_is_not_enough_for_the_lemma(convex: pd.DataFrame) -> None:
    """Numbers of an independent transcription; the rate holds all the same."""
    run = rows_of(convex, FLAT_PAIR)
    assert run["lyapunov"].iloc[:4].tolist() == pytest.approx(
        [59.5216346, 73.0436902, 27.6105795, 8.82462544], rel=1e-5
    )
    assert run["excess"].iloc[0] == pytest.approx(29.0766218 / 59.5216346, rel=1e-5)
    assert (run["excess"].iloc[1:] <= ROUNDING).all()
    assert (run["gap"] <= run["bound"]).all()


def test_without_a_common_minimiser_the_lemma_fails(convex: pd.DataFrame) -> None:
    pair = rows_of(convex, APART_PAIR)
    growth = (pair["lyapunov"] / pair["lyapunov"].shift()).to_numpy()[2:]
    assert (growth > 1).all()
    # theta tends to the golden ratio, the squares of the moves grow by its square.
    assert growth[-1] == pytest.approx((3 + 5**0.5) / 2, rel=1e-3)
    for _, run in rows_of(convex, APART).groupby("seed"):
        assert run["excess"].max() > 0.1
        # What the steps approach minimises a mean weighted by step sizes, not f.
        assert run["suboptimality"].iloc[-5:].min() > 1e-4


def test_a_flat_loss_breaks_the_rate_but_not_the_lemma(convex: pd.DataFrame) -> None:
    run = rows_of(convex, FLAT)
    assert (run["excess"] <= ROUNDING).all()
    assert run["least_step"].min() < 0.01
    assert (run["gap"] / run["bound"]).max() > 100


def flat_pair(rng: np.random.Generator) -> Problem:
    """Two parabolas in the plane, each flat in one direction, both least at the origin."""
    directions = torch.from_numpy(rng.normal(size=(2, 2)) * np.exp(1.5 * rng.normal(size=(2, 1))))

    def loss_of(row: Tensor) -> convex_case.Loss:
        return lambda x: (x @ row).square() / 2

    smoothness = max(1 / 2, directions.square().sum(1).max().item())
    start = torch.from_numpy(rng.normal(size=2))
    losses = tuple(loss_of(row) for row in directions)
    return Problem(losses, torch.zeros(2, dtype=torch.float64), start, smoothness)


def test_random_flat_pairs_break_the_lemma_now_and_then_and_the_rate_never() -> None:
    rng = np.random.default_rng(0)
    runs = [convex_case.measure(flat_pair(rng), 20) for _ in range(40)]
    broken = sum((run["excess"] > 1e-6).any() for run in runs)
    assert 1 <= broken <= 20
    assert all((run["gap"] <= run["bound"]).all() for run in runs)


@pytest.mark.parametrize("disagreement", [0.0, 2.5])
def test_the_constants_hold_everywhere_and_are_met(disagreement: float) -> None:
    place = nonconvex_case.federation(disagreement=disagreement)
    points = 4 * np.random.default_rng(0).normal(size=(2000, 10))
    gradients, mean = place.gradients(points), place.gradients(points).mean(1)
    assert place.variances(points).max() <= place.sigma2
    assert np.linalg.norm(gradients, axis=-1).max() <= place.largest_gradient
    ratio = np.square(gradients - mean[:, None]).sum(-1) / np.square(mean).sum(-1)[:, None]
    assert ratio.max() <= place.rho
    if not disagreement:
        assert place.rho == pytest.approx(0.25)
        # One coordinate away from its minimum, and the bounds are reached.
        worst = np.unravel_index(
            np.argmax(np.abs(place.weights / place.weights.mean(0) - 1)), (10, 10)
        )
        lonely = np.full(10, np.sqrt(place.noise**2 - 1))
        lonely[worst[1]] = 3.0
        one, all_ = place.gradients(lonely)[worst[0]], place.gradients(lonely).mean(0)
        assert np.square(one - all_).sum() == pytest.approx(place.rho * np.square(all_).sum())


def losses_of(place: Federation, client: int, high: np.ndarray, x: Tensor) -> Tensor:
    """Return the loss of a batch with these shares of positive noise, for autograd."""
    weights, offsets = (torch.from_numpy(part[client]) for part in (place.weights, place.offsets))
    share = torch.from_numpy(high)

    def cauchy(v: Tensor) -> Tensor:
        return torch.log1p(v.square()) / 2

    shifted = x - offsets
    mixed = share * cauchy(shifted - place.noise) + (1 - share) * cauchy(shifted + place.noise)
    return (weights * mixed).sum()


def test_gradients_and_minima_are_those_of_the_loss() -> None:
    place = nonconvex_case.federation(disagreement=2.5)
    x = torch.linspace(-3, 3, 10, dtype=torch.float64, requires_grad=True)
    losses_of(place, 3, np.full(10, 0.5), x).backward()
    assert x.grad is not None
    assert place.gradients(x.detach().numpy())[3] == pytest.approx(x.grad.numpy())
    # Not convex: a maximum lies between two minima of every coordinate.
    shared = nonconvex_case.federation(disagreement=0.0)
    for point in (0.0, 1.25**0.5, -(1.25**0.5)):
        assert shared.gradients(np.full(10, point)) == pytest.approx(np.zeros((10, 10)))
    assert (shared.gradients(np.full(10, 0.1)) < 0).all()


def drawn_rounds(seeds: int, rounds: int) -> list[Draws]:
    rngs = [np.random.default_rng(seed) for seed in range(seeds)]
    stream = nonconvex_case.draws(
        rngs, clients=10, participants=4, local_steps=6, d=10, batch_size=3
    )
    return [next(stream) for _ in range(rounds)]


def rates_of(*, independent: bool) -> Rates:
    """Two settings: those of the theory at T = 16, and the defaults."""
    gamma = np.array([0.8, 2.0])[:, None, None]
    delta = np.array([1.0, 0.1])[:, None, None]
    return Rates(gamma, 0.1 * gamma, delta, np.full((2, 1, 1), independent))


@pytest.mark.parametrize("disagreement", [0.0, 2.5])
def test_rounds_are_those_of_the_optimizer_and_the_server(disagreement: float) -> None:
    """Same batch: `DeltaSGD` on every client and `Average`, on the same batches."""
    place, rates = nonconvex_case.federation(disagreement=disagreement), rates_of(independent=False)
    seeds, rounds = 2, 4
    x = np.broadcast_to(np.random.default_rng(9).normal(size=(seeds, 10)), (2, seeds, 10)).copy()
    expected = x.copy()
    for drawn in drawn_rounds(seeds, rounds):
        offsets = np.stack([place.offsets] * 2)
        x, sizes = nonconvex_case.train_round(x, place.weights, offsets, place.noise, drawn, rates)
        for setting, seed in np.ndindex(2, seeds):
            average = Average({"x": torch.from_numpy(expected[setting, seed])})
            for p, client in enumerate(drawn.clients[seed]):
                point = torch.from_numpy(expected[setting, seed].copy()).requires_grad_()
                optimizer = DeltaSGD(
                    [point],
                    lr=rates.eta_0[setting].item(),
                    gamma=rates.gamma[setting].item(),
                    delta=rates.delta[setting].item(),
                    curvature="same-batch",
                )
                optimizer.recording = True
                for high in drawn.high[seed, :, p]:

                    def closure(
                        point: Tensor = point, client: int = client, high: np.ndarray = high
                    ) -> float:
                        point.grad = None
                        loss = losses_of(place, client, high, point)
                        loss.backward()
                        return loss.item()

                    optimizer.step(closure)
                etas = [record.eta for record in optimizer.records]
                assert sizes[:, setting, seed, p] == pytest.approx(etas, rel=1e-10)
                average.add({"x": point.detach()})
            expected[setting, seed] = average.result()["x"].numpy()
        assert x == pytest.approx(expected, rel=1e-10)


def test_a_batch_of_its_own_sets_the_step_size() -> None:
    """The rule of the optimizer, on gradients of the batch that no step uses."""
    place, rates = nonconvex_case.federation(disagreement=0.0), rates_of(independent=True)
    (drawn,) = drawn_rounds(1, 1)
    x = np.random.default_rng(9).normal(size=10)
    offsets = np.stack([place.offsets] * 2)
    found, sizes = nonconvex_case.train_round(
        np.tile(x, (2, 1, 1)), place.weights, offsets, place.noise, drawn, rates
    )

    def gradient(client: int, high: np.ndarray, point: Tensor) -> Tensor:
        point = point.clone().requires_grad_()
        return torch.autograd.grad(losses_of(place, client, high, point), point)[0]

    ends = []
    for p, client in enumerate(drawn.clients[0]):
        point = before = torch.from_numpy(x)
        eta, theta = torch.tensor(rates.eta_0[0].item()).double(), torch.tensor(1.0).double()
        for k in range(6):
            if k:
                aside = drawn.aside[0, k, p]
                moved = (point - before).norm()
                turned = (gradient(client, aside, point) - gradient(client, aside, before)).norm()
                choice = next_step_size(
                    moved, turned, eta, theta, gamma=0.8, delta=1.0, cap=float("inf")
                )
                eta, theta = choice.eta, choice.theta
            assert sizes[k, 0, 0, p] == pytest.approx(eta.item(), rel=1e-6)
            before, point = point, point - eta * gradient(client, drawn.high[0, k, p], point)
        ends.append(point.numpy())
    assert found[0, 0] == pytest.approx(np.mean(ends, axis=0), rel=1e-6)


def test_the_assumptions_hold_on_the_way(nonconvex: pd.DataFrame) -> None:
    together = nonconvex[nonconvex["arm"] != DISAGREEING]
    for column in ("sigma2", "gradient", "rho"):
        assert (together[column] <= together[f"{column}_bound"]).all()
        assert together[column].max() > 0.4 * together[f"{column}_bound"].max()
    assert (nonconvex.loc[nonconvex["arm"] == DISAGREEING, "rho"] > 10).all()


def test_slopes(nonconvex: pd.DataFrame) -> None:
    """Theorem 1 says -1/2 or steeper, for the first arm alone."""
    slope = nonconvex_case.slopes(nonconvex, 64).set_index("arm")["mean"]
    assert -0.65 < slope[PROVED] < -0.48
    assert slope[SAME_BATCH] > slope[PROVED] + 0.05
    assert slope[DEFAULTS] > -0.2
    assert slope[DISAGREEING] > -0.4


def test_steps_are_of_the_order_of_gamma(nonconvex: pd.DataFrame) -> None:
    """What the proof uses: eta over gamma stays within constants as gamma falls."""
    steps = nonconvex.loc[nonconvex["arm"] == PROVED].groupby("horizon")["step"].mean()
    assert steps.between(0.05, 0.3).all()
    assert steps.iloc[-1] > 0.7 * steps.iloc[0]


def test_the_fitted_slope_is_that_of_a_power() -> None:
    horizons = np.array([128, 512, 2048, 8192])
    rows = [
        {"arm": "a", "horizon": horizon, "seed": seed, "mean_square": horizon**power}
        for seed, power in enumerate((-0.4, -0.6))
        for horizon in horizons.astype(float)
    ]
    found = nonconvex_case.slopes(pd.DataFrame(rows)).iloc[0]
    assert found["mean"] == pytest.approx(-0.5)
    assert found["std"] == pytest.approx(0.2 / 2**0.5)
    assert found["n"] == 2


def test_runs_depend_on_their_seed_and_horizon_alone() -> None:
    few = theory.nonconvex(seeds=1, horizons=(16,))
    more = theory.nonconvex(seeds=2, horizons=(8, 16))
    same = more[(more["seed"] == 0) & (more["horizon"] == 16)].reset_index(drop=True)
    pd.testing.assert_frame_equal(few, same)
    assert not few["mean_square"].equals(
        more[(more["seed"] == 1) & (more["horizon"] == 16)]["mean_square"].reset_index(drop=True)
    )


def test_convex_is_deterministic(convex: pd.DataFrame) -> None:
    again = theory.convex(seeds=1, steps=5)
    merged = again.merge(convex, on=["case", "seed", "t"], suffixes=("", "_before"))
    assert len(merged) == len(again)
    # The bound and the steps do not depend on how many follow.
    for column in ("lyapunov", "excess", "gap", "bound", "suboptimality", "least_step"):
        assert merged[column].tolist() == merged[f"{column}_before"].tolist()


def test_summaries_say_what_the_numbers_say(convex: pd.DataFrame, nonconvex: pd.DataFrame) -> None:
    said = dict(zip(convex_case.CONVEX_CASES, theory.convex_summary(convex), strict=True))
    assert "Lemma 4 holds at all 50 steps" in said[AVERAGED]
    assert "V never grows" in said[AVERAGED]
    assert "Lemma 4 fails at 1 of 25 steps (by up to 49%)" in said[FLAT_PAIR]
    assert "the bound of Theorem 5 fails at 25 steps (gap up to 250.0 times it)" in said[FLAT]
    doctored = convex.assign(excess=0.5, gap=2 * convex["bound"])
    assert "Lemma 4 fails at 50 of 50" in theory.convex_summary(doctored)[0]
    assert "gap up to 2.0 times" in theory.convex_summary(doctored)[0]

    holds, fails, *arms, factor = theory.nonconvex_summary(nonconvex)
    assert holds.startswith("Assumption 1 holds in 27 runs of 3 arms")
    assert fails.startswith("Assumption 1 does not hold in 9 runs of 1 arm")
    assert "it falls like 1/√T" in arms[0]
    assert "it falls slower than 1/√T" in arms[2]
    assert "positive in all rounds of 0 of 9 runs" in factor
    flat = theory.nonconvex_summary(nonconvex.assign(mean_square=1.0, rho=0.3))
    assert flat[0].startswith("Assumption 1 does not hold")
    assert "slower" in flat[2]


@pytest.mark.parametrize("name", STUDIES)
def test_studies_are_drawn_from_their_files(
    name: str, convex: pd.DataFrame, nonconvex: pd.DataFrame, tmp_path: Path
) -> None:
    study = STUDIES[name]
    frame = convex if study.compute is theory.convex else nonconvex
    path = tmp_path / f"{name}.csv"
    with pytest.raises(UserError, match=f"deltafl paper run {name}"):
        study.draw(path)
    frame.to_csv(path, index=False)
    pd.testing.assert_frame_equal(pd.read_csv(path), frame)
    image = save(study.draw(path), tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    for label in frame["case" if "case" in frame else "arm"].unique():
        assert label in image


def test_a_frame_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UserError, match="needs the column"):
        theory.convex_chart(pd.DataFrame({"t": [1]}))
    with pytest.raises(UserError, match="needs the column"):
        theory.nonconvex_chart(pd.DataFrame({"seed": [1]}))
