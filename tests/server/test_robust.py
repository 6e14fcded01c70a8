"""Robust aggregation: exact numbers on toy problems, properties, and composition with servers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafl.errors import UserError
from deltafl.server import Rule, Server, aggregates
from deltafl.server.geometric_median import geometric_median
from deltafl.server.median import median
from deltafl.server.multi_krum import multi_krum
from deltafl.server.nearest_neighbours import nearest_neighbours
from deltafl.server.robust import Robust
from deltafl.server.stack import Stack
from deltafl.server.trimmed_mean import trimmed_mean

RULES = [name for name in aggregates() if name != "mean"]
BOTH = [(name, mixing) for name in RULES for mixing in (False, True)]


def stack_of(rows) -> Stack:
    return Stack({torch.float64: torch.tensor(rows, dtype=torch.float64)})


def aggregate(rows, name, dtype=torch.float64, **options):
    """The aggregate of rows, as a collector takes them: one by one."""
    values = torch.tensor(rows, dtype=dtype)
    collector = Robust({"x": torch.zeros_like(values[0])}, Rule.read(name, options))
    for row in values:
        collector.add({"x": row})
    return collector.result()["x"]


def options_for(name, mixing, attackers=0.2):
    counted = mixing or name in ("trimmed-mean", "multi-krum")
    return ({"mixing": True} if mixing else {}) | ({"attackers": attackers} if counted else {})


class TestByHand:
    def test_median(self):
        odd = torch.tensor([[1.0, -5.0], [2.0, 7.0], [1e9, 0.0]], dtype=torch.float64)
        assert median(odd).tolist() == [2.0, 0.0]
        even = torch.tensor([[1.0], [2.0], [4.0], [1e9]], dtype=torch.float64)
        assert median(even).tolist() == [3.0]

    def test_trimmed_mean(self):
        values = torch.tensor([[5.0], [1.0], [-1e9], [3.0], [1e9]], dtype=torch.float64)
        assert trimmed_mean(values, 1).tolist() == [3.0]
        assert trimmed_mean(values, 0).item() == pytest.approx(9 / 5)
        assert trimmed_mean(values, 2).tolist() == [3.0]

    def test_multi_krum(self):
        # n = 5, f = 1: two nearest others each. Scores: 0: 1+4, 1: 1+1, 2: 1+4, 3: 25+36, ...
        stack = stack_of([[0.0], [1.0], [2.0], [7.0], [100.0]])
        assert multi_krum(stack, 1) == [1.0, 1.0, 1.0, 1.0, 0.0]
        assert multi_krum(stack, 2) == [1.0, 1.0, 1.0, 0.0, 0.0]
        assert multi_krum(stack, 0) == [1.0] * 5

    def test_multi_krum_takes_the_lower_number_of_equals(self):
        assert multi_krum(stack_of([[0.0], [2.0], [1.0]]), 1) == [1.0, 1.0, 0.0]

    def test_geometric_median_of_a_triangle(self):
        # The Fermat point: all sides are seen under 120 degrees.
        corners = np.array([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]])
        shares = geometric_median(stack_of(corners))
        point = np.array(shares) @ corners
        directions = [(c - point) / np.linalg.norm(c - point) for c in corners]
        for one, other in ((0, 1), (1, 2), (0, 2)):
            assert directions[one] @ directions[other] == pytest.approx(-0.5, abs=1e-5)

    def test_geometric_median_where_most_agree_is_that_point(self):
        result = aggregate([[1.0, 2.0]] * 3 + [[50.0, 1e12], [-1e15, 0.0]], "geometric-median")
        torch.testing.assert_close(result, torch.tensor([1.0, 2.0], dtype=torch.float64))

    def test_nearest_neighbours(self):
        mixing = nearest_neighbours(stack_of([[0.0], [1.0], [10.0]]), 1)
        assert mixing.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0.5, 0.5]]

    def test_equally_near_neighbours_are_taken_in_order(self):
        mixing = nearest_neighbours(stack_of([[0.0], [0.0], [0.0], [0.0]]), 2)
        assert mixing.tolist() == [
            [0.5, 0.5, 0, 0],
            [0.5, 0.5, 0, 0],
            [0.5, 0, 0.5, 0],
            [0.5, 0, 0, 0.5],
        ]

    def test_mixing_before_a_median(self):
        # As above: the mixed clients are at 0.5, 0.5 and 5.5.
        assert aggregate([[0.0], [1.0], [10.0]], "median", mixing=True, attackers=0.3).item() == 0.5


@pytest.mark.parametrize(
    ("share", "clients", "count"),
    [(0.2, 10, 2), (0.21, 10, 3), (0.2, 1, 0), (0.49, 4, 1), (0.4, 5, 2), (0.0, 9, 0), (0.1, 3, 1)],
)
def test_a_share_is_rounded_up_and_stays_below_half(share, clients, count):
    assert Rule("trimmed-mean", share).count(clients) == count


sizes = st.floats(-(2.0**30), 2.0**30, width=32)


@st.composite
def federations(draw):
    """Honest rows, f < n/2 attackers of any size, and the order they come in."""
    width = draw(st.integers(1, 3))
    row = st.lists(sizes, min_size=width, max_size=width)
    honest = draw(st.lists(row, min_size=2, max_size=6))
    far = st.lists(st.floats(-1e18, 1e18), min_size=width, max_size=width)
    bad = draw(st.lists(far, max_size=len(honest) - 1))
    order = draw(st.permutations(range(len(honest) + len(bad))))
    return honest, bad, order


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
@settings(max_examples=40)
@given(federations())
def test_every_coordinate_stays_within_the_honest(name, federation):
    honest, bad, order = federation
    rows = [(honest + bad)[place] for place in order]
    share = min(len(bad) / len(rows), 0.499)
    result = aggregate(rows, name, **options_for(name, mixing=False, attackers=share))
    low, high = torch.tensor(honest, dtype=torch.float64).aminmax(dim=0)
    slack = 1e-12 * max(low.abs().max(), high.abs().max())
    assert (result >= low - slack).all()
    assert (result <= high + slack).all()


@settings(max_examples=40)
@given(federations())
def test_the_geometric_median_stays_as_near_as_its_bound_says(federation):
    honest, bad, order = federation
    rows = [(honest + bad)[place] for place in order]
    result = aggregate(rows, "geometric-median")
    points = torch.tensor(honest, dtype=torch.float64)
    centre = points.mean(0)
    radius = (points - centre).norm(dim=1).max()
    # Pillutla et al. 2022, and Minsker 2015: 2 (n - f) / (n - 2 f) times the honest radius.
    factor = 2 * len(honest) / (len(honest) - len(bad))
    assert (result - centre).norm() <= factor * radius * (1 + 1e-3) + 1e-9 * centre.norm() + 1e-9


@pytest.mark.parametrize(("name", "mixing"), BOTH)
@settings(max_examples=10)
@given(order=st.permutations(range(9)))
def test_the_order_of_clients_does_not_matter_but_for_ties(name, mixing, order):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 4, dtype=torch.float64, generator=generator)
    options = options_for(name, mixing)
    first = aggregate(rows.tolist(), name, **options)
    second = aggregate(rows[list(order)].tolist(), name, **options)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "mixing"), BOTH)
@settings(max_examples=15)
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(1, 9))
def test_without_spread_the_aggregate_is_the_mean_to_the_bit(name, mixing, row, clients):
    result = aggregate([row] * clients, name, torch.float32, **options_for(name, mixing))
    assert torch.equal(result, torch.tensor(row))


@pytest.mark.parametrize(("name", "mixing"), BOTH)
def test_no_rule_follows_two_of_ten_that_are_far_away(name, mixing):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 50, generator=generator)
    honest = rows[:8].mean(0)
    for far in (1e3, 1e9, 1e16):
        rows[8:] = far
        result = aggregate(rows.tolist(), name, torch.float32, **options_for(name, mixing))
        assert (result - honest).norm() < 5  # an honest client is 6.6 away


@pytest.mark.parametrize("name", ["trimmed-mean", "multi-krum"])
def test_guarding_against_nobody_is_the_mean(name):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 9, dtype=torch.float64, generator=generator)
    result = aggregate(rows.tolist(), name, attackers=0.0)
    torch.testing.assert_close(result, rows.mean(0), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("name", "mixing"), BOTH)
def test_integers_and_blocks(name, mixing, monkeypatch):
    """Counts are rounded and tell no distance; columns are read in blocks with the same result."""
    generator = torch.Generator().manual_seed(0)
    reference = {"w": torch.zeros(40), "n": torch.tensor(0), "v": torch.zeros(3, 5)}
    updates = [
        {
            "w": torch.randn(40, generator=generator),
            "n": torch.tensor(count),
            "v": torch.randn(3, 5, generator=generator),
        }
        for count in (3, 3, 4, 4, 10**6)
    ]
    rule = Rule.read(name, options_for(name, mixing))

    def result():
        collector = Robust(reference, rule)
        for update in updates:
            collector.add(update)
        return collector.result()

    whole = result()
    assert whole["n"].dtype == torch.int64
    assert list(whole) == ["w", "n", "v"]
    monkeypatch.setattr("deltafl.server.stack._BLOCK", 35)  # seven columns
    parts = result()
    for entry in whole:
        torch.testing.assert_close(whole[entry], parts[entry], rtol=1e-6, atol=1e-7)


def test_the_updates_are_copied_and_may_be_overwritten():
    reference = {"x": torch.zeros(2)}
    collector = Robust(reference, Rule("median"))
    slot = {"x": torch.zeros(3, 2)}
    for value in (1.0, 2.0, 3.0):
        slot["x"].fill_(value)
        assert collector.add_all(slot, [1.0] * 3) == {}
        slot["x"].fill_(torch.nan)
    assert collector.result()["x"].tolist() == [2.0, 2.0]
    assert len(collector) == 9


def test_what_cannot_be_used_is_refused_here_too():
    collector = Robust({"x": torch.zeros(2)}, Rule("median"))
    stack = {"x": torch.tensor([[1.0, 1.0], [math.nan, 0.0], [1e30, 0.0], [3.0, 3.0]])}
    assert collector.add_all(stack, [1.0, 1.0, 1.0, 1.0]) == {
        1: "non-finite values in 'x'",
        2: "values up to 1.0e+30, whose squares overflow",
    }
    assert collector.add_all({"x": torch.ones(1, 2)}, [0.0]) == {
        0: "its weight is 0, not finite and above 0"
    }
    assert collector.result()["x"].tolist() == [2.0, 2.0]


def test_the_bits_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 30_011, generator=generator)
    before = torch.get_num_threads()
    try:
        for name, mixing in BOTH:
            results = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                collector = Robust({"x": torch.zeros(30_011)}, Rule(name, 0.2, mixing))
                collector.add_all({"x": rows}, [1.0] * 9)
                results.append(collector.result()["x"])
            assert torch.equal(*results), (name, mixing)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", ["average", "fedadam", "fedavgm"])
def test_a_rule_composes_with_every_server(optimizer):
    start = {"w": torch.zeros(3)}
    server = Server(optimizer, start, ["w"], aggregate="median")
    collector = server.start_round()
    for value in (1.0, 2.0, 1e9):
        collector.add({"w": torch.full((3,), value)}, server.client_weight(5))
    server.finish_round(collector.result())
    plain = Server(optimizer, start, ["w"])
    plain.finish_round({"w": torch.full((3,), 2.0)})
    assert torch.equal(server.weights["w"], plain.weights["w"])


def test_a_server_whose_state_is_not_finite_says_so():
    server = Server("fedadam", {"w": torch.zeros(2)}, ["w"])
    assert server.fault() is None
    server.finish_round({"w": torch.tensor([1.0, 1e25])})
    assert server.fault() == "non-finite values in 'exp_avg_sq/w'"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("medain", {}, "unknown aggregate 'medain': did you mean 'median'"),
        ("mean", {"attackers": 0.2}, "'mean' has no options"),
        ("median", {"attackers": 0.2}, "needs no number of attackers"),
        ("median", {"mixing": 2}, "neither true nor false"),
        ("multi-krum", {"attackers": 0.5}, "at least 0 and below 0.5"),
        ("multi-krum", {"attackers": -0.1}, "at least 0 and below 0.5"),
        ("multi-krum", {"atackers": 0.1}, "did you mean 'attackers'"),
    ],
)
def test_options_are_checked(small, name, options, message):
    with pytest.raises(UserError, match=message):
        Rule.read(name, options)
    with pytest.raises(UserError, match=message):
        small.override(**{"server.aggregate": name, "server.aggregate_options": options})


@pytest.mark.parametrize(
    ("name", "weighting"), [("weighted-average", None), ("fedadam", "samples")]
)
def test_robust_rules_do_not_believe_numbers_of_samples(name, weighting):
    with pytest.raises(UserError, match="every client count the same"):
        Server(name, {"w": torch.zeros(1)}, ["w"], weighting=weighting, aggregate="median")
