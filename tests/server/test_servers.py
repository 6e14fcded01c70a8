"""Whole rounds of each server."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from deltafl.errors import UserError
from deltafl.server import Server, names

OPTIMIZERS = ("fedadam", "fedyogi", "fedadagrad", "fedavgm")
TRAINABLE = ("w", "b")


def start():
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(3, 2, generator=generator),
        "b": torch.randn(3, generator=generator),
        "running_mean": torch.zeros(3),
        "num_batches_tracked": torch.tensor(0),
    }


def averages(rounds, seed=1):
    """What the clients' averages might be: a drift of the start, and buffers."""
    generator = torch.Generator().manual_seed(seed)
    for count in range(1, rounds + 1):
        weights = start()
        for name in ("w", "b", "running_mean"):
            weights[name] += 0.1 * torch.randn(weights[name].shape, generator=generator)
        weights["num_batches_tracked"] = torch.tensor(7 * count)
        yield weights


def same_bits(first, second):
    """Say whether these are the same entries, in the same order."""
    return list(first) == list(second) and all(torch.equal(first[n], second[n]) for n in first)


def in_order(weights):
    return dict(sorted(weights.items()))


def test_names():
    assert names() == ("average", "weighted-average", *OPTIMIZERS)


@pytest.mark.parametrize("name", ["average", "weighted-average"])
def test_an_average_is_taken_exactly(name):
    server = Server(name, start(), TRAINABLE)
    (average,) = averages(1)
    server.finish_round(average)
    assert same_bits(server.weights, in_order(average))
    assert server.state_tensors() == {}


def test_a_round_of_the_weighted_average_from_the_clients_up():
    server = Server("weighted-average", {"w": torch.zeros(2)}, ["w"])
    collector = server.start_round()
    collector.add({"w": torch.tensor([1.0, 0.0])}, server.client_weight(300))
    collector.add({"w": torch.tensor([5.0, 4.0])}, server.client_weight(100))
    server.finish_round(collector.result())
    assert server.weights["w"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_buffers_and_frozen_parameters_take_their_average(name):
    server = Server(name, start(), ["w"], lr=0.5)
    (average,) = averages(1)
    server.finish_round(average)
    for entry in ("b", "running_mean", "num_batches_tracked"):
        assert torch.equal(server.weights[entry], average[entry])
    assert not torch.equal(server.weights["w"], average["w"])
    assert not torch.equal(server.weights["w"], start()["w"])


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=2), min_size=1, max_size=5
    )
)
def test_sgd_with_step_one_is_the_average_to_rounding(rounds):
    sgd = Server("fedavgm", {"x": torch.zeros(2)}, ["x"], options={"momentum": 0.0})
    plain = Server("average", {"x": torch.zeros(2)}, ["x"])
    for row in rounds:
        largest = float(sgd.weights["x"].abs().max())
        for server in (sgd, plain):
            server.finish_round({"x": torch.tensor(row)})
        bound = 2e-7 * max(largest, *(abs(value) for value in row))
        torch.testing.assert_close(sgd.weights["x"], plain.weights["x"], rtol=0, atol=bound + 1e-37)


def run_by_hand(rule, rounds):
    """Run a rule in float64 with (x, pseudo-gradient, round, state) -> x for each entry."""
    weights = {name: start()[name].double() for name in TRAINABLE}
    states = {name: {} for name in TRAINABLE}
    for count, average in enumerate(averages(rounds), start=1):
        for name in TRAINABLE:
            gradient = weights[name] - average[name].double()
            weights[name] = rule(weights[name], gradient, count, states[name])
    return weights


def by_hand_adam(x, g, count, state, *, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    m = state["m"] / (1 - beta1**count)
    v = state["v"] / (1 - beta2**count)
    return x - lr * m / (v.sqrt() + eps)


def by_hand_yogi(x, g, count, state, *, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-3):
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    v = state.get("v", torch.full_like(x, eps**2))
    state["v"] = v - (1 - beta2) * torch.sign(v - g**2) * g**2
    return x - lr * state["m"] / (state["v"].sqrt() + eps)


def by_hand_adagrad(x, g, count, state, *, lr=1e-2, eps=1e-10, initial=0.0):
    state["v"] = state.get("v", initial) + g**2
    return x - lr * g / (state["v"].sqrt() + eps)


def by_hand_momentum(x, g, count, state, *, lr=1.0, momentum=0.9):
    state["m"] = momentum * state.get("m", 0) + g
    return x - lr * state["m"]


RULES = {
    "fedadam": (by_hand_adam, {"beta1": 0.8, "beta2": 0.9, "eps": 0.01}),
    "fedyogi": (by_hand_yogi, {"beta1": 0.8, "beta2": 0.9, "eps": 0.01}),
    "fedadagrad": (by_hand_adagrad, {"eps": 0.01}),
    "fedavgm": (by_hand_momentum, {"momentum": 0.5}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_defaults_against_the_equations(name):
    server = Server(name, start(), TRAINABLE)
    for average in averages(6):
        server.finish_round(average)
    expected = run_by_hand(RULES[name][0], 6)
    for entry in TRAINABLE:
        torch.testing.assert_close(
            server.weights[entry].double(), expected[entry], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_against_the_equations(name):
    rule, options = RULES[name]
    server = Server(name, start(), TRAINABLE, lr=0.05, options=options)
    for average in averages(6):
        server.finish_round(average)
    expected = run_by_hand(lambda *args: rule(*args, lr=0.05, **options), 6)
    for entry in TRAINABLE:
        torch.testing.assert_close(
            server.weights[entry].double(), expected[entry], rtol=1e-5, atol=1e-6
        )


def test_the_initial_accumulator_of_fedadagrad():
    server = Server("fedadagrad", start(), TRAINABLE, options={"initial_accumulator": 0.1})
    for average in averages(2):
        server.finish_round(average)
    expected = run_by_hand(lambda *args: by_hand_adagrad(*args, initial=0.1), 2)
    torch.testing.assert_close(server.weights["w"].double(), expected["w"], rtol=1e-5, atol=1e-6)


def test_the_first_step_of_fedadam_is_one_learning_rate_towards_the_average():
    server = Server("fedadam", {"x": torch.tensor([1.0, 1.0])}, ["x"])
    server.finish_round({"x": torch.tensor([3.0, 0.5])})
    torch.testing.assert_close(server.weights["x"], torch.tensor([1.001, 0.999]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", names())
def test_weights_once_handed_out_never_change(name):
    given_weights = start()
    server = Server(name, given_weights, TRAINABLE)
    seen = []
    for average in averages(3):
        handed = server.weights
        seen.append((handed, {entry: tensor.clone() for entry, tensor in handed.items()}))
        server.finish_round(average)
        for tensor in average.values():
            tensor.zero_()  # the caller's own, to reuse as it likes
    assert all(same_bits(handed, copied) for handed, copied in seen)
    assert same_bits(given_weights, start())
    assert server.weights["w"].any()
    server.weights["w"] = torch.zeros(3, 2)
    assert server.weights["w"].any()


@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("name", names())
def test_a_server_resumed_from_a_file_goes_on_bit_for_bit(name, stop):
    whole = Server(name, start(), TRAINABLE)
    half = Server(name, start(), TRAINABLE)
    rounds = list(averages(6))
    for average in rounds:
        whole.finish_round(average)
    for average in rounds[:stop]:
        half.finish_round(average)
    weights, state = load(save(half.weights)), load(save(half.state_tensors()))
    half.finish_round(rounds[0])  # what happens after a checkpoint is not in it

    resumed = Server(name, weights, TRAINABLE)
    resumed.load_state_tensors(state)
    for average in rounds[stop:]:
        resumed.finish_round(average)
    assert same_bits(resumed.weights, whole.weights)
    assert same_bits(resumed.state_tensors(), whole.state_tensors())


def test_the_order_of_entries_is_that_of_their_names_however_a_file_was_read():
    entries = list(start().items())
    first, second = (Server("fedadam", dict(e), TRAINABLE) for e in (entries, entries[::-1]))
    assert list(first.weights) == list(second.weights) == sorted(start())
    assert list(first.state_tensors()) == list(second.state_tensors())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_has_the_same_entries_from_the_start(name):
    server = Server(name, start(), TRAINABLE)
    before = {entry: (t.shape, t.dtype) for entry, t in server.state_tensors().items()}
    assert {entry.split("/", 1)[1] for entry in before} == set(TRAINABLE)
    (average,) = averages(1)
    server.finish_round(average)
    state = server.state_tensors()
    assert {entry: (t.shape, t.dtype) for entry, t in state.items()} == before
    server.finish_round(next(averages(1, seed=2)))
    later = server.state_tensors()
    assert any(not torch.equal(state[entry], later[entry]) for entry in state)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("fedadam", torch.optim.Adam),
        ("fedadagrad", torch.optim.Adagrad),
        ("fedavgm", lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9)),
    ],
)
def test_the_first_step_is_that_of_an_optimizer_torch_set_up_itself(name, make):
    """The state made in advance is the one torch would have made in its first step."""
    server = Server(name, start(), ["w"])
    parameter = start()["w"]
    optimizer = make([parameter])
    for average in averages(3):
        server.finish_round(average)
        parameter.grad = parameter - average["w"]
        optimizer.step()
        assert torch.equal(server.weights["w"], parameter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg/w": None}, "missing 'exp_avg/w'"),
        ({"sum/w": torch.zeros(3, 2)}, "unexpected 'sum/w'"),
        ({"exp_avg/w": torch.zeros(2, 2)}, r"'exp_avg/w' has shape \(2, 2\), not \(3, 2\)"),
        ({"step/w": torch.tensor(3)}, "'step/w' has dtype int64, not float32"),
        ({"exp_avg_sq/b": torch.full((3,), math.nan)}, "non-finite values in 'exp_avg_sq/b'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(change, message):
    server = Server("fedadam", start(), TRAINABLE)
    before = server.state_tensors()
    state = {name: tensor + 1 for name, tensor in before.items()} | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    with pytest.raises(UserError, match=f"server 'fedadam' for this model: {message}; resume with"):
        server.load_state_tensors(state)
    assert same_bits(server.state_tensors(), before)


def test_the_state_of_another_server_is_refused():
    adam = Server("fedadam", start(), TRAINABLE).state_tensors()
    with pytest.raises(UserError, match="not one of server 'average'"):
        Server("average", start(), TRAINABLE).load_state_tensors(adam)
    with pytest.raises(UserError, match="not one of server 'fedavgm'"):
        Server("fedavgm", start(), TRAINABLE).load_state_tensors({})


@pytest.mark.parametrize(
    ("name", "weighting", "expected"),
    [
        ("average", None, 1.0),
        ("average", "equal", 1.0),
        ("weighted-average", None, 500.0),
        ("weighted-average", "samples", 500.0),
        ("fedadam", None, 1.0),
        ("fedadam", "equal", 1.0),
        ("fedadam", "samples", 500.0),
        ("fedavgm", "samples", 500.0),
    ],
)
def test_what_a_client_weighs(name, weighting, expected):
    assert Server(name, start(), TRAINABLE, weighting=weighting).client_weight(500) == expected


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedadm", {}, r"unknown server 'fedadm': did you mean 'fedadam'\?"),
        ("fedadam", {"options": {"betta1": 0.9}}, r"option of server 'fedadam'.*'beta1'\?"),
        ("fedavgm", {"options": {"beta1": 0.9}}, "option of server 'fedavgm' 'beta1'"),
        ("fedadam", {"options": {"eps": math.nan}}, "eps nan of server 'fedadam'"),
        ("fedadam", {"options": {"beta1": 1.5}}, "server 'fedadam': .*1.5"),
        ("fedyogi", {"options": {"beta2": 1.5}}, "server 'fedyogi': .*1.5"),
        ("fedadagrad", {"options": {"initial_accumulator": -1.0}}, "server 'fedadagrad': .*-1.0"),
        ("fedavgm", {"options": {"momentum": 1.0}}, "server 'fedavgm': .*momentum value: 1.0"),
        ("fedadam", {"lr": 0.0}, "lr 0.0 of server 'fedadam' is wrong: use more than 0"),
        ("fedadam", {"lr": math.inf}, "lr inf of server 'fedadam'"),
        ("average", {"lr": 1.0}, "server 'average' has no learning rate and no options"),
        ("average", {"options": {"eps": 1.0}}, "server 'average' has no learning rate"),
        ("average", {"weighting": "samples"}, "'average' cannot .*: use 'weighted-average'"),
        ("weighted-average", {"weighting": "equal"}, "'weighted-average' cannot .*: use 'average'"),
        ("fedadam", {"weighting": "size"}, "unknown weighting 'size': .*equal, samples"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_line(name, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        Server(name, start(), TRAINABLE, **settings)
    assert "\n" not in str(caught.value)


def test_trainable_names_must_be_weights():
    with pytest.raises(ValueError, match="not among the weights: \\['c'\\]"):
        Server("average", start(), ["w", "c"])


def test_an_average_that_does_not_fit_is_refused_and_changes_nothing():
    server = Server("fedadam", start(), TRAINABLE)
    (average,) = averages(1)
    average["w"][0, 0] = math.nan
    with pytest.raises(ValueError, match="does not fit the global weights: non-finite values in"):
        server.finish_round(average)
    assert same_bits(server.weights, in_order(start()))
    assert not server.state_tensors()["step/w"].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_do_not_depend_on_the_number_of_threads(name):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(100_003, generator=generator) for _ in range(4)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            server = Server(name, {"x": values[0]}, ["x"], lr=0.3)
            for value in values[1:]:
                server.finish_round({"x": value})
            results.append(server.weights)
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
