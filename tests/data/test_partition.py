from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafl.data.partition import (
    DealtPartition,
    Mixtures,
    Partition,
    Sizes,
    deal,
    draw_labels,
    make_partition,
)
from deltafl.errors import UserError

BALANCED = np.repeat(np.arange(10), 500)


def proportions(mixtures: Mixtures, client: int) -> np.ndarray:
    weights = mixtures.log_weights(client)
    return np.exp(weights - np.logaddexp.reduce(weights))


def partitions(**overrides: object) -> Partition:
    settings = {"classes": 10, "clients": 20, "samples": 100, "alpha": 0.1, "seed": 3}
    return make_partition(BALANCED, **(settings | overrides))  # type: ignore[arg-type]


alphas = st.one_of(st.none(), st.floats(1e-6, 1e6))


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    clients=st.integers(1, 8),
    alpha=alphas,
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_without_replacement_sizes_are_exact_and_no_row_is_held_twice(
    labels: list[int], clients: int, alpha: float | None, seed: int, data: st.DataObject
) -> None:
    share = len(labels) // clients
    if share == 0:
        clients, share = 1, len(labels)
    high = data.draw(st.integers(1, share))
    low = data.draw(st.integers(1, high))
    partition = make_partition(
        labels, classes=7, clients=clients, samples=(low, high), alpha=alpha, seed=seed
    )
    held = [partition.indices(client) for client in range(clients)]
    assert [len(rows) for rows in held] == [partition.size(client) for client in range(clients)]
    assert all(low <= len(rows) <= high for rows in held)
    everything = np.concatenate(held)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(labels)


@settings(max_examples=40, deadline=None)
@given(alpha=alphas, replacement=st.booleans(), seed=st.integers(0, 2**40))
def test_a_partition_is_a_function_of_its_seed(
    alpha: float | None, replacement: bool, seed: int
) -> None:
    def make(seed: int) -> Partition:
        return partitions(alpha=alpha, replacement=replacement, seed=seed, samples=(50, 90))

    first, again, other = make(seed), make(seed), make(seed + 1)
    # Asked in another order, and more than once, with numpy's own generator moved on.
    backwards = {client: again.indices(client) for client in reversed(range(20))}
    np.random.random(5)
    for client in range(20):
        np.testing.assert_array_equal(first.indices(client), backwards[client])
        assert first.indices(client).dtype == np.int64
    assert any(
        not np.array_equal(first.indices(client), other.indices(client)) for client in range(20)
    )


@pytest.mark.parametrize("alpha", [None, 0.01, 1.0])
def test_dealing_everything_runs_every_class_out(alpha: float | None) -> None:
    partition = partitions(alpha=alpha, clients=50, samples=100)
    everything = np.concatenate([partition.indices(client) for client in range(50)])
    np.testing.assert_array_equal(np.sort(everything), np.arange(len(BALANCED)))
    np.testing.assert_array_equal(partition.counts().sum(0), np.full(10, 500))


def test_a_client_of_a_class_that_ran_out_gets_the_others() -> None:
    labels = np.array([0] * 5 + [1] * 95)
    partition = make_partition(labels, classes=2, clients=10, samples=10, alpha=1e-6, seed=0)
    counts = partition.counts()
    assert counts[:, 0].sum() == 5
    np.testing.assert_array_equal(counts.sum(1), np.full(10, 10))


class FixedMixture(Mixtures):
    """Every client wants the same proportions."""

    def __init__(self, *wanted: float) -> None:
        self._wanted = np.log(wanted)

    def log_weights(self, client: int) -> np.ndarray:
        return self._wanted


def test_running_out_has_the_law_of_drawing_one_label_after_another() -> None:
    generator = np.random.default_rng(0)
    trials = 4000
    both = 0
    for _ in range(trials):
        rows = deal(
            [np.arange(2), np.arange(2, 7)], np.array([4]), FixedMixture(0.7, 0.3), generator
        )
        both += np.count_nonzero(rows < 2) == 2
    # Both rows of class 0 go unless fewer than two of four draws hit it.
    expected = 1 - 0.3**4 - 4 * 0.7 * 0.3**3
    assert abs(both / trials - expected) < 5 * np.sqrt(expected * (1 - expected) / trials)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_class_proportions_follow_the_clients_mixture(alpha: float, replacement: bool) -> None:
    labels = np.tile(np.arange(4), 50_000)
    mixtures = Mixtures(alpha, np.ones(4), 11)
    partition = make_partition(
        labels,
        classes=4,
        clients=3,
        samples=10_000,
        alpha=alpha,
        replacement=replacement,
        seed=11,
    )
    for client, counts in enumerate(partition.counts()):
        wanted = proportions(mixtures, client)
        deviation = np.sqrt(wanted * (1 - wanted) * 10_000)
        assert (np.abs(counts - 10_000 * wanted) <= 5 * deviation + 1).all()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 50.0])
def test_mixtures_have_the_mean_and_variance_of_a_dirichlet(alpha: float) -> None:
    prior = np.array([0.5, 0.3, 0.15, 0.05])
    mixtures = Mixtures(alpha, prior, 5)
    drawn = np.array([proportions(mixtures, client) for client in range(4000)])
    assert np.isfinite(drawn).all()
    np.testing.assert_allclose(drawn.sum(1), 1)
    variance = prior * (1 - prior) / (alpha + 1)
    assert (np.abs(drawn.mean(0) - prior) < 5 * np.sqrt(variance / 4000)).all()
    np.testing.assert_allclose(drawn.var(0), variance, rtol=0.15)


def test_mixtures_over_a_hundred_classes_at_the_papers_smallest_alpha_are_sound() -> None:
    prior = np.full(100, 0.01)
    mixtures = Mixtures(0.01, prior, 2)
    logs = np.array([mixtures.log_weights(client) for client in range(500)])
    assert np.isfinite(logs).all()
    # Far below zero, P(log Gamma(a) <= t) is exp(a t) / Gamma(a + 1); here a = 1e-4.
    share = np.mean(logs <= -1e4)
    assert abs(share - np.exp(-1)) < 5 * np.sqrt(np.exp(-1) * (1 - np.exp(-1)) / logs.size)
    largest = np.array([proportions(mixtures, client).max() for client in range(500)])
    assert np.median(largest) > 0.999
    # No class is favoured: the winner is uniform over the hundred.
    winners = np.bincount(logs.argmax(1), minlength=100)
    assert winners.max() <= 20


@pytest.mark.parametrize("alpha", [1e-100, 1e-12, 1e12, 1e300])
@pytest.mark.parametrize("replacement", [True, False])
def test_extreme_alphas_still_deal_exact_sizes(alpha: float, replacement: bool) -> None:
    counts = partitions(alpha=alpha, replacement=replacement).counts()
    np.testing.assert_array_equal(counts.sum(1), np.full(20, 100))


def test_smaller_alpha_means_fewer_classes_a_client() -> None:
    held = [
        (partitions(alpha=alpha, replacement=True, clients=200).counts() > 0).sum(1).mean()
        for alpha in (0.01, 1.0, 100.0)
    ]
    assert held[0] < 2
    assert 6 < held[1] < 9.5 < held[2]


def test_the_share_of_a_class_varies_as_a_dirichlet_with_alpha_for_every_class() -> None:
    partition = partitions(alpha=0.5, replacement=True, clients=3000, samples=400)
    shares = partition.counts() / 400
    # Dir(a, ..., a) over ten classes; drawing 400 labels adds the multinomial's own variance.
    mixture = 0.1 * 0.9 / (10 * 0.5 + 1)
    wanted = mixture + (0.1 * 0.9 - mixture) / 400
    np.testing.assert_allclose(shares.var(0), wanted, rtol=0.15)


def test_classes_without_samples_are_never_drawn() -> None:
    labels = np.repeat([2, 5], 50)
    for replacement in (True, False):
        partition = make_partition(
            labels, classes=9, clients=10, samples=10, alpha=0.5, replacement=replacement, seed=1
        )
        assert set(np.flatnonzero(partition.counts().sum(0))) <= {2, 5}


def test_labels_are_drawn_by_weight_and_never_at_weight_zero() -> None:
    weights = np.array([-np.inf, np.log(3.0), -np.inf, np.log(1.0), -np.inf])
    drawn = draw_labels(weights, 8000, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert abs(counts[1] - 6000) < 5 * np.sqrt(8000 * 0.75 * 0.25)


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_a_million_clients_cost_nothing_until_they_are_asked(alpha: float | None) -> None:
    partition = partitions(clients=1_000_000, samples=(100, 500), alpha=alpha, replacement=True)
    # What it carries is the labels, sorted, and a few numbers: nothing per client.
    assert len(pickle.dumps(partition)) < 4 * BALANCED.size * 8
    assert 100 <= partition.size(999_999) <= 500
    assert len(partition.indices(999_999)) == partition.size(999_999)
    assert partition.counts([999_999, 0]).shape == (2, 10)


def test_with_replacement_a_client_is_independent_of_the_federation() -> None:
    few, many = partitions(clients=5, replacement=True), partitions(clients=50, replacement=True)
    np.testing.assert_array_equal(few.indices(4), many.indices(4))


def test_sizes_are_uniform_over_the_range_and_the_same_both_ways() -> None:
    sizes = np.array([Sizes(100, 104, 0)[client] for client in range(5000)])
    np.testing.assert_array_equal(np.unique(sizes), np.arange(100, 105))
    assert (np.abs(np.bincount(sizes - 100) - 1000) < 5 * np.sqrt(800)).all()
    drawn = partitions(samples=(50, 90), replacement=True)
    dealt = partitions(samples=(50, 90), replacement=False)
    assert [drawn.size(i) for i in range(20)] == [dealt.size(i) for i in range(20)]


def test_iid_without_replacement_looks_like_the_whole() -> None:
    counts = partitions(alpha=None, clients=10, samples=500).counts()
    assert (np.abs(counts - 50) < 5 * np.sqrt(45)).all()


def test_the_default_size_is_500_or_an_equal_share() -> None:
    assert partitions(clients=5, samples=None).size(0) == 500
    assert partitions(clients=20, samples=None).size(0) == 250
    assert partitions(clients=10_000, samples=None, replacement=True).size(0) == 1


def test_indices_are_the_callers_to_change() -> None:
    partition = partitions()
    before = partition.indices(0)
    partition.indices(0)[:] = 0
    np.testing.assert_array_equal(partition.indices(0), before)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("client", [-1, 20])
def test_a_client_outside_the_federation_is_refused(client: int, replacement: bool) -> None:
    partition = partitions(replacement=replacement)
    with pytest.raises(IndexError, match="federation of 20"):
        partition.indices(client)
    with pytest.raises(IndexError, match="federation of 20"):
        partition.size(client)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"alpha": -1.0}, "alpha = -1.0"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"alpha": float("inf")}, "identically distributed"),
        ({"clients": 0}, "at least 1"),
        ({"samples": 0}, "at least 1"),
        ({"samples": (5, 4)}, "a range"),
        ({"classes": 9}, "from 0 to 9 but there are 9 classes"),
        ({"clients": 100}, "ask for at least 10000 samples but the training set has 5000"),
        ({"clients": 10**12, "samples": 1}, "or draw with replacement"),
        ({"clients": 26, "samples": (1, 1000)}, "fewer samples or clients"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_one_line(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        partitions(**overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.0]])
def test_labels_that_are_not_class_numbers_are_refused(labels: list[object]) -> None:
    with pytest.raises(UserError, match="one class number per training sample"):
        make_partition(labels, classes=2, clients=1)


def test_the_papers_federation_uses_every_image_once() -> None:
    labels = np.repeat(np.arange(100), 500)
    partition = make_partition(labels, classes=100, clients=100, samples=500, alpha=0.01, seed=0)
    assert isinstance(partition, DealtPartition)
    np.testing.assert_array_equal(partition.counts().sum(0), np.full(100, 500))
