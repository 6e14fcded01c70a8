from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import nn

from deltafl import DeltaSGD
from deltafl.flower import Guarded, train_with_delta_sgd


def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(5)
    ]


def test_it_trains_as_the_optimizer_does():
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    metrics = train_with_delta_sgd(model, batches(), epochs=2)
    optimizer = DeltaSGD(twin.parameters(), curvature="same-batch")
    for inputs, labels in batches() * 2:

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(twin(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert torch.equal(model.weight, twin.weight)
    assert metrics["num-examples"] == 40
    assert metrics["step-size"] > 0
    assert np.isfinite(metrics["loss"])
    MetricRecord(metrics)


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(ValueError, match="no batch"):
        train_with_delta_sgd(nn.Linear(4, 3), [])


INITIAL = {"weight": np.zeros((2, 2), np.float32), "seen": np.array(3)}


def reply(node, arrays, metrics=None):
    order = Message(RecordDict(), node, "train")
    content = RecordDict(
        {
            "arrays": ArrayRecord({name: Array(value) for name, value in arrays.items()}),
            "metrics": MetricRecord(metrics or {"num-examples": 10, "loss": 1.0}),
        }
    )
    return Message(content, reply_to=order)


def good(value):
    return {"weight": np.full((2, 2), value, np.float32), "seen": np.array(5)}


@pytest.fixture
def guarded(grid):
    """A guard whose first round is configured; `grid` gives messages an identity."""

    def build(strategy):
        guard = Guarded(strategy)
        arrays = ArrayRecord({name: Array(value) for name, value in INITIAL.items()})
        from flwr.app import ConfigRecord

        list(guard.configure_train(1, arrays, ConfigRecord(), grid))
        return guard

    return build


BROKEN = [
    {"weight": np.full((2, 2), np.nan, np.float32), "seen": np.array(5)},
    {"weight": np.full((2, 2), np.inf, np.float32), "seen": np.array(5)},
    {"weight": np.zeros((3, 2), np.float32), "seen": np.array(5)},
    {"weight": np.zeros((2, 2), np.float64), "seen": np.array(5)},
    {"other": np.zeros((2, 2), np.float32), "seen": np.array(5)},
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_update_is_left_out_of_the_average(guarded, broken):
    guard = guarded(FedAvg(fraction_evaluate=0.0))
    arrays, metrics = guard.aggregate_train(
        1, [reply(1, good(1.0)), reply(2, broken), reply(3, good(3.0))]
    )
    assert np.array_equal(arrays["weight"].numpy(), np.full((2, 2), 2.0))
    assert arrays["weight"].numpy().dtype == np.float32
    assert arrays["seen"].numpy().dtype == np.int64
    assert metrics["loss"] == 1.0
    assert list(guard.refused[1]) == [2]


@pytest.mark.parametrize(
    "metrics",
    [
        {"num-examples": 10},
        {"num-examples": -5, "loss": 1.0},
        {"num-examples": float("nan"), "loss": 1.0},
        {"num-examples": 10, "loss": 1.0, "odd": 1.0},
    ],
)
def test_odd_metrics_do_not_end_the_round(guarded, metrics):
    guard = guarded(FedAvg(fraction_evaluate=0.0))
    arrays, _ = guard.aggregate_train(
        1, [reply(2, good(9.0), metrics), reply(1, good(1.0)), reply(3, good(1.0))]
    )
    assert np.array_equal(arrays["weight"].numpy(), np.ones((2, 2)))
    assert list(guard.refused[1]) == [2]


def test_errors_of_nodes_pass_through(guarded):
    guard = guarded(FedAvg(fraction_evaluate=0.0))
    failed = Message(Error(2, "boom"), reply_to=Message(RecordDict(), 4, "train"))
    arrays, _ = guard.aggregate_train(1, [failed, reply(1, good(1.0))])
    assert np.array_equal(arrays["weight"].numpy(), np.ones((2, 2)))
    assert guard.refused == {}


def test_differential_privacy_inside_the_guard_leaves_a_broken_round_out(guarded):
    def private():
        return DifferentialPrivacyServerSideFixedClipping(
            FedAvg(fraction_evaluate=0.0),
            noise_multiplier=0.0,
            clipping_norm=1.0,
            num_sampled_clients=2,
        )

    guard = guarded(private())
    arrays, _ = guard.aggregate_train(1, [reply(1, good(1.0)), reply(2, good(1.0))])
    clipped = float(np.linalg.norm(arrays["weight"].numpy()))
    assert 0 < clipped <= 1.0 + 1e-6
    guard = guarded(private())
    assert guard.aggregate_train(1, [reply(1, good(1.0)), reply(2, BROKEN[2])]) == (None, None)
    assert list(guard.refused[1]) == [2]


def test_the_guard_inside_differential_privacy_refuses_nan(grid):
    from flwr.app import ConfigRecord

    guard = Guarded(FedAvg(fraction_evaluate=0.0))
    private = DifferentialPrivacyServerSideFixedClipping(guard, 0.0, 1.0, 2)
    initial = ArrayRecord({name: Array(value) for name, value in INITIAL.items()})
    list(private.configure_train(1, initial, ConfigRecord(), grid))
    arrays, _ = private.aggregate_train(1, [reply(1, good(0.1)), reply(2, BROKEN[0])])
    assert np.isfinite(arrays["weight"].numpy()).all()
    assert list(guard.refused[1]) == [2]
