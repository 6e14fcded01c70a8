from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deltafl.server import Average, Server, Weights, problem, trainable_names, weights_of
from deltafl.server.large import LARGE, LargeAverage


def average(updates: list[Weights], weights: list[float] | None = None) -> Weights:
    mean = Average(updates[0])
    for update, weight in zip(updates, weights or [1.0] * len(updates), strict=True):
        mean.add(update, weight)
    return mean.result()


def of(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return average([{"x": torch.tensor([value], dtype=dtype)} for value in values])["x"]


# Beyond these, squares overflow and an update is refused.
finite = st.floats(-(2.0**60), 2.0**60, width=32)


def rows_of(values):
    """One row for each client: all rows of one length."""
    return st.integers(1, 4).flatmap(
        lambda size: st.lists(
            st.lists(values, min_size=size, max_size=size), min_size=1, max_size=6
        )
    )


rows = rows_of(finite)
# As precise as the sums themselves: every rounding shows.
double_rows = rows_of(st.floats(-1e100, 1e100))
samples = st.integers(1, 10_000)


def updates_of(values: list[list[float]], dtype: torch.dtype = torch.float32) -> list[Weights]:
    return [{"x": torch.tensor(row, dtype=dtype)} for row in values]


def same_bits(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype
        for name in first
    )


def test_plain_and_weighted_by_hand():
    updates = [{"x": torch.tensor([1.0, 10.0])}, {"x": torch.tensor([2.0, 50.0])}]
    assert average(updates)["x"].tolist() == [1.5, 30.0]
    assert average(updates, [3.0, 1.0])["x"].tolist() == [1.25, 20.0]


def test_the_sum_is_in_float64():
    # In float32 the small ones would be lost beside 2^25, one after the other.
    assert of([2.0**25, 1.0, 1.0, 2.0]).item() == 2.0**23 + 1


def test_no_overflow_within_float32():
    large = torch.finfo(torch.float32).max
    assert of([large, large, large]).item() == large


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_entry_keeps_its_dtype(dtype):
    mean = of([1.0, 2.0], dtype)
    assert mean.dtype == dtype
    assert mean.item() == 1.5


@pytest.mark.parametrize(
    ("values", "mean"), [([3, 4, 4], 4), ([3, 3, 4], 3), ([3, 4], 4), ([4, 5], 4), ([-3, -4], -4)]
)
def test_integers_are_rounded_to_the_nearest(values, mean):
    got = of(values, torch.int64)
    assert got.dtype == torch.int64
    assert got.item() == mean


@pytest.mark.parametrize(
    ("values", "mean"), [([True, True, False], True), ([False, True, False], False)]
)
def test_booleans_follow_the_majority(values, mean):
    got = of(values, torch.bool)
    assert got.dtype == torch.bool
    assert got.item() is mean
    assert of([True, False], torch.bool).item() is False


@given(double_rows, samples)
def test_equal_weights_are_the_plain_average_bit_for_bit(values, count):
    updates = updates_of(values, torch.float64)
    assert same_bits(average(updates, [float(count)] * len(updates)), average(updates))


@given(double_rows, st.data())
def test_the_unit_of_the_weights_does_not_matter(values, data):
    updates = updates_of(values, torch.float64)
    counts = data.draw(st.lists(samples, min_size=len(updates), max_size=len(updates)))
    scale = data.draw(st.integers(1, 1000))
    assert same_bits(
        average(updates, [float(count) for count in counts]),
        average(updates, [float(scale * count) for count in counts]),
    )


@given(st.lists(finite, min_size=1, max_size=4), st.lists(samples, min_size=1, max_size=8))
def test_the_average_of_one_and_the_same_is_that(row, counts):
    updates = updates_of([row] * len(counts))
    assert same_bits(average(updates, [float(count) for count in counts]), updates[0])


@given(rows, st.data())
def test_the_average_is_within_the_hull(values, data):
    updates = updates_of(values)
    counts = data.draw(st.lists(samples, min_size=len(updates), max_size=len(updates)))
    mean = average(updates, [float(count) for count in counts])["x"]
    stacked = torch.stack([update["x"] for update in updates])
    assert (stacked.min(0).values <= mean).all()
    assert (mean <= stacked.max(0).values).all()


@given(rows, st.data())
def test_the_order_matters_at_most_in_the_rounding(values, data):
    counts = data.draw(st.lists(samples, min_size=len(values), max_size=len(values)))
    order = data.draw(st.permutations(range(len(values))))
    updates = updates_of(values)
    first = average(updates, [float(count) for count in counts])["x"]
    second = average([updates[i] for i in order], [float(counts[i]) for i in order])["x"]
    # Sums in float64 differ by parts in 1e16 of their largest term, not of their result.
    scale = max(abs(value) for row in values for value in row)
    torch.testing.assert_close(first, second, rtol=2e-7, atol=1e-14 * scale + 1e-44)


def test_the_clients_tensors_are_left_alone_and_not_kept():
    update = {"x": torch.ones(2, dtype=torch.float64)}
    mean = Average(update)
    mean.add({"x": torch.zeros(2, dtype=torch.float64)}, 2.0)
    mean.add(update, 3.0)
    assert update["x"].tolist() == [1.0, 1.0]
    update["x"].fill_(100.0)
    assert mean.result()["x"].tolist() == [0.6, 0.6]


def test_results_on_the_way():
    mean = Average({"x": torch.zeros(())})
    assert len(mean) == 0
    with pytest.raises(ValueError, match="no update to aggregate"):
        mean.result()
    mean.add({"x": torch.tensor(1.0)})
    assert (len(mean), mean.result()["x"].item()) == (1, 1.0)
    mean.add({"x": torch.tensor(3.0)})
    assert (len(mean), mean.result()["x"].item()) == (2, 2.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_must_be_finite_and_positive(weight):
    mean = Average({"x": torch.zeros(())})
    with pytest.raises(ValueError, match="finite and above 0"):
        mean.add({"x": torch.zeros(())}, weight)


REFERENCE = {"a": torch.zeros(2), "b": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "missing 'b'"),
        ({"c": torch.zeros(1)}, "unexpected 'c'"),
        ({"a": torch.zeros(3)}, r"'a' has shape \(3,\), not \(2,\)"),
        ({"n": torch.zeros(())}, "'n' has dtype float32, not int64"),
        ({"a": torch.tensor([1.0, math.nan])}, "non-finite values in 'a'"),
        ({"b": torch.tensor([1.0, math.inf, 0])}, "non-finite values in 'b'"),
    ],
)
def test_an_update_that_cannot_be_used_is_refused_and_leaves_no_trace(change, message):
    update = {name: tensor for name, tensor in (REFERENCE | change).items() if tensor is not None}
    assert problem(update, REFERENCE) is not None
    mean = Average(REFERENCE)
    mean.add({name: tensor + 1 for name, tensor in REFERENCE.items()})
    with pytest.raises(ValueError, match=message):
        mean.add(update)
    assert len(mean) == 1
    assert mean.result()["a"].tolist() == [1.0, 1.0]


def test_a_good_update_has_no_problem():
    assert problem({name: tensor + 1 for name, tensor in REFERENCE.items()}, REFERENCE) is None


def test_large_numbers_are_finite_even_if_their_sum_is_not():
    update = {"x": torch.full([3], 3e38)}
    assert problem(update, update) is None
    assert problem({"x": torch.tensor([math.inf, -math.inf, 0])}, update) is not None


def test_many_names_are_shortened():
    reference = {f"layer{i}": torch.zeros(1) for i in range(10)}
    assert problem({}, reference) == "missing 'layer0', 'layer1', 'layer2' and 7 more"


def test_the_bits_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    updates = [{"x": torch.randn(100_003, generator=generator)} for _ in range(3)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(average(updates, [3.0, 7.0, 11.0]))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_weights_of_a_model_are_a_copy_with_the_buffers():
    model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model.append(nn.BatchNorm2d(3))
    model[0].bias.requires_grad_(False)
    weights = weights_of(model)
    assert list(weights) == list(model.state_dict())
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in weights.values())
    before = weights["0.weight"].clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(weights["0.weight"], before)
    assert trainable_names(model) == ("0.weight", "1.weight", "1.bias")


def test_clients_side_by_side_are_averaged_as_one_by_one():
    reference = {"w": torch.zeros(3), "n": torch.tensor(0)}
    generator = torch.Generator().manual_seed(0)
    stack = {"w": torch.randn(5, 3, generator=generator), "n": torch.arange(5) * 2}
    weights = [3.0, 1.0, 2.0, 5.0, 1.0]
    together, apart = Average(reference), Average(reference)
    assert together.add_all(stack, weights) == {}
    for place, weight in enumerate(weights):
        apart.add({name: value[place] for name, value in stack.items()}, weight)
    assert len(together) == 5
    torch.testing.assert_close(together.result(), apart.result(), rtol=1e-7, atol=0)
    alone, single = Average(reference), Average(reference)
    for place, weight in enumerate(weights):
        one = {name: value[place : place + 1] for name, value in stack.items()}
        assert alone.add_all(one, [weight]) == {}
        single.add({name: value[0] for name, value in one.items()}, weight)
    for name, value in alone.result().items():
        assert torch.equal(value, single.result()[name])


def test_a_broken_client_among_others_is_refused_alone():
    reference = {"a": torch.zeros(2), "b": torch.zeros(())}
    stack = {"a": torch.ones(3, 2), "b": torch.tensor([1.0, torch.nan, 4.0])}
    stack["a"][1, 0] = torch.inf
    average = Average(reference)
    assert average.add_all(stack, [1.0, 1.0, 2.0]) == {1: "non-finite values in 'a', 'b'"}
    assert average.result()["b"] == 3.0
    assert torch.equal(average.result()["a"], torch.ones(2))
    assert set(average.add_all({"a": torch.ones(2, 2)}, [1.0, 1.0])) == {0, 1}
    nothing = Average(reference)
    assert set(nothing.add_all({name: v * torch.nan for name, v in stack.items()}, [1.0] * 3)) == {
        0,
        1,
        2,
    }
    assert len(nothing) == 0


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 1.0, 2.0]])
def test_large_models_are_averaged_in_pieces_to_the_same_bits(weights):
    generator = torch.Generator().manual_seed(0)
    reference = {"w": torch.zeros(300, 401), "n": torch.tensor(0), "h": torch.zeros(7).bfloat16()}

    def clients(count: int) -> Weights:
        return {
            "w": torch.randn(count, 401, 300, generator=generator).mT,  # not contiguous
            "n": torch.arange(count) * 5,
            "h": torch.randn(count, 7, generator=generator).bfloat16(),
        }

    small, large = Average(reference), LargeAverage(reference)
    for stack in (clients(3), clients(3)):
        stack["w"][1, 299, 400] = torch.nan
        stack["h"][0, 3] = -0.0
        refused = {1: "non-finite values in 'w'"}
        assert small.add_all(stack, weights) == large.add_all(stack, weights) == refused
        assert same_bits(large.result(), small.result())
    assert len(large) == 4
    assert large.lengths == pytest.approx(small.lengths, rel=1e-5)
    assert large.add_all({"w": torch.zeros(1, 2)}, [1.0])[0].startswith("missing")
    with pytest.raises(ValueError, match="no update"):
        LargeAverage(reference).result()


def test_a_server_chooses_by_the_size_of_the_model():
    for numbers, kind in ((LARGE, Average), (LARGE + 1, LargeAverage)):
        server = Server("average", {"w": torch.zeros(1).expand(numbers)}, ["w"])
        assert type(server.start_round()) is kind
