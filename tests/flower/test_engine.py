from __future__ import annotations

import io
import json
import pickle
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord

from deltafl import UserError, run
from deltafl.flower import client_app
from deltafl.flower.engine import AwayError


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"task": "digits-mlp", "federation.participation": 1.0, "federation.samples": (5, 60)},
        {"client.optimizer": "sgdm-decay", "client.objective": "fedprox"},
        {"server.optimizer": "fedadam", "federation.samples": (5, 60)},
        {"server.optimizer": "weighted-average", "federation.samples": (5, 60)},
        {"client.optimizer": "sps", "client.objective": "moon", "task": "digits-mlp"},
        {"run.evaluate_on": "validation", "engine.fast": False},
        {
            "server.aggregate": "geometric-median",
            "server.aggregate_options": {"mixing": True},
            "server.optimizer": "fedadam",
            "federation.attack": "sign-flip",
            "federation.attackers": 0.2,
        },
        {"run.record_step_sizes": True, "client.optimizer": "delta-sgd-reused"},
    ],
)
def test_the_bits_are_those_of_a_simulation(small, grid, federated, changes):
    config = small.override(**changes)
    ours, theirs = federated(config, grid), run(config)
    assert ours.summary["weights_sha256"] == theirs.summary["weights_sha256"]
    for row, wanted in zip(ours.metrics, theirs.metrics, strict=True):
        assert row | {"seconds": 0} == wanted | {"seconds": 0}


def test_a_run_that_was_cut_short_goes_on_with_its_memories(small, grid, federated, tmp_path):
    config = small.override(**{"client.objective": "moon", "task": "digits-mlp", "run.rounds": 5})
    wanted = run(config).summary["weights_sha256"]
    whole = grid.pull_messages

    def dies(message_ids):
        if grid.sent[-1].metadata.group_id == "4":
            raise ConnectionError("the SuperLink was killed")
        return whole(message_ids)

    grid.pull_messages = dies
    with pytest.raises(AwayError, match="the SuperLink was killed"):
        federated(config, grid, tmp_path / "run")
    grid.pull_messages = whole
    result = federated(config, grid, tmp_path / "run")
    assert result.summary["weights_sha256"] == wanted
    assert [row["round"] for row in result.metrics] == [1, 2, 3, 4, 5]


def test_a_node_that_lost_its_memory_starts_afresh(small, grid, federated, tmp_path):
    config = small.override(
        **{"client.objective": "moon", "task": "digits-mlp", "federation.participation": 1.0}
    )

    def forgetful(message, context):
        for path in (tmp_path / "memory").rglob("0-*.safetensors"):
            path.unlink()
        return client_app.app(message, context)

    grid.handlers[100] = forgetful
    result = federated(config, grid, tmp_path / "run")
    assert result.summary["refused_updates"] == 0
    assert result.summary["weights_sha256"] != run(config).summary["weights_sha256"]


def test_nodes_keep_no_more_memories_than_a_round_needs(small, grid, federated, tmp_path):
    config = small.override(
        **{"client.objective": "moon", "task": "digits-mlp", "federation.participation": 1.0}
    )
    federated(config, grid, tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "memory").rglob("*-*.safetensors"))
    assert names == sorted(f"{c}-{r}.safetensors" for c in range(6) for r in (2, 3))


def with_arrays(change):
    """A node that trains, and then changes its arrays."""

    def handler(message, context):
        reply = client_app.app(message, context)
        if message.metadata.message_type == "train":
            arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
            change(arrays)
            reply.content["arrays"] = ArrayRecord(
                {n: a if isinstance(a, Array) else Array(a) for n, a in arrays.items()}
            )
        return reply

    return handler


def put(value):
    def change(arrays):
        next(iter(arrays.values())).flat[0] = value

    return change


def renamed(arrays):
    name = next(iter(arrays))
    arrays["other"] = arrays.pop(name)


def reshaped(arrays):
    name = next(iter(arrays))
    arrays[name] = arrays[name][:-1]


def retyped(arrays):
    name = next(iter(arrays))
    arrays[name] = arrays[name].astype(np.float64)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def pickled(arrays):
    name = next(iter(arrays))
    buffer = io.BytesIO()
    values = np.empty(arrays[name].shape, dtype=object)
    values.flat[0] = Bomb()
    np.save(buffer, values, allow_pickle=True)
    arrays[name] = Array("float32", arrays[name].shape, "numpy.ndarray", buffer.getvalue())


def plain_pickle(arrays):
    name = next(iter(arrays))
    data = pickle.dumps(Bomb())
    arrays[name] = Array("float32", arrays[name].shape, "numpy.ndarray", data)


def lying(arrays):
    name = next(iter(arrays))
    shape = arrays[name].shape
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3, np.float32))
    arrays[name] = Array("float32", shape, "numpy.ndarray", buffer.getvalue())


def swollen(arrays):
    name = next(iter(arrays))
    shape = arrays[name].shape
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((1000, *shape), np.float32))
    arrays[name] = Array("float32", shape, "numpy.ndarray", buffer.getvalue())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(np.nan), "non-finite values"),
        (put(np.inf), "non-finite values"),
        (put(1e30), "values up to 1.0e\\+30, whose squares overflow"),
        (renamed, "missing"),
        (reshaped, "has shape"),
        (retyped, "has dtype float64, not float32"),
        (pickled, "cannot be decoded|more bytes"),
        (plain_pickle, "cannot be decoded"),
        (lying, "has shape"),
        (swollen, "more bytes than its shape needs"),
    ],
)
def test_a_broken_update_is_refused_and_the_round_goes_on(small, grid, federated, change, reason):
    config = small.override(**{"federation.participation": 1.0})
    grid.handlers[103] = with_arrays(change)
    result = federated(config, grid)
    assert result.summary["refused_updates"] == 3
    for row in result.metrics:
        assert list(row["refused"]) == ["3"]
        assert row["clients"] == 6
    assert re.search(reason, result.metrics[0]["refused"]["3"])
    assert np.isfinite(result.summary["final_test_loss"])


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"num-examples": 10**7, "loss": 1.0, "step-size": 0.1}, "claims 10000000 samples"),
        ({"num-examples": 0, "loss": 1.0, "step-size": 0.1}, "num-examples is 0"),
        ({"num-examples": 30, "loss": [1.0], "step-size": 0.1}, "not a number"),
        ({"num-examples": 30, "loss": 1.0, "step-size": 0.1, "eta": [1.0]}, "not a list"),
    ],
)
def test_false_claims_are_refused(small, grid, federated, metrics, reason):
    def handler(message, context):
        reply = client_app.app(message, context)
        if message.metadata.message_type == "train":
            reply.content["metrics"] = MetricRecord(metrics)
        return reply

    grid.handlers[102] = handler
    config = small.override(**{"federation.participation": 1.0, "run.rounds": 1})
    assert reason in federated(config, grid).metrics[0]["refused"]["2"]


def test_silent_and_failing_nodes_cost_their_own_updates_only(small, grid, federated):
    def silent(message, context):
        query = message.metadata.message_type == "query"
        return client_app.app(message, context) if query else None

    grid.handlers[100] = silent
    grid.nodes[101]["data"] = "/nowhere.npz"
    del grid.nodes[105]
    config = small.override(**{"federation.participation": 1.0, "run.rounds": 1})
    refused = federated(config, grid).metrics[0]["refused"]
    assert refused["0"] == "no reply within 0.2 s"
    assert "cannot read the data" in refused["1"]
    assert refused["5"] == "no node holds client 5"
    assert set(refused) == {"0", "1", "5"}


def test_a_late_node_takes_part_as_soon_as_it_is_there(small, grid, federated):
    config = small.override(**{"federation.participation": 1.0, "run.rounds": 4})
    late = grid.nodes.pop(104)
    push = grid.push_messages

    def joins(messages):
        if messages[0].metadata.group_id == "2":
            grid.nodes[104] = late
        return push(messages)

    grid.push_messages = joins
    rows = federated(config, grid).metrics
    assert [("4" in row.get("refused", {})) for row in rows] == [True, True, False, False]


def test_a_node_that_comes_back_under_another_number_takes_its_client_over(small, grid, federated):
    config = small.override(**{"federation.participation": 1.0})
    push = grid.push_messages

    def moves(messages):
        if messages[0].metadata.group_id == "1":
            grid.nodes[204] = grid.nodes[104]  # both are online for a while
        if messages[0].metadata.group_id == "2":
            grid.nodes.pop(104, None)
        return push(messages)

    grid.push_messages = moves
    rows = federated(config, grid).metrics
    assert [row.get("refused", {}).get("4") for row in rows] == [
        None,
        "its node has left the federation",
        None,
    ]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"version": "0.0", "client": 1, "own-data": False}, "it runs deltafl 0.0"),
        ({"client": 1, "own-data": False}, "'version' is not of type str"),
        ({"version": "same", "client": 99, "own-data": False}, "its partition-id is 99"),
        ({"version": "same", "client": True, "own-data": False}, "'client' is not of type int"),
    ],
)
def test_a_node_that_does_not_fit_is_turned_away(small, grid, federated, answer, reason):
    from deltafl import __version__

    def handler(message, context):
        reply = client_app.app(message, context)
        fixed = {k: __version__ if v == "same" else v for k, v in answer.items()}
        reply.content["config"] = ConfigRecord(fixed)
        return reply

    grid.handlers[101] = handler
    config = small.override(**{"federation.participation": 1.0, "run.rounds": 1})
    assert reason in federated(config, grid).metrics[0]["refused"]["1"]


def test_without_nodes_there_is_no_run(small, grid, federated):
    grid.nodes.clear()
    with pytest.raises(UserError, match=r"no node joined within 0\.2 s: start SuperNodes"):
        federated(small, grid)
    grid.nodes[1] = {}
    with pytest.raises(UserError, match="this node has no number"):
        federated(small, grid)


def test_a_federation_that_falls_silent_stops_and_goes_on_later(small, grid, federated, tmp_path):
    config = small.override(**{"run.rounds": 8})
    push = grid.push_messages

    def dies(messages):
        if messages[0].metadata.group_id == "2":
            grid.handlers = {node: lambda m, c: None for node in grid.nodes}
        return push(messages)

    grid.push_messages = dies
    with pytest.raises(UserError, match="no node sent a usable update in 3 rounds"):
        federated(config, grid, tmp_path / "run")
    grid.push_messages, grid.handlers = push, {}
    result = federated(config, grid, tmp_path / "run")
    assert result.summary["rounds"] == 8


def test_nodes_evaluate_on_their_own_data(small, grid, federated):
    heard = {}
    federated(small, grid, on_nodes=lambda round_, rows: heard.update({round_: rows}))
    assert list(heard) == [1, 2, 3]
    assert all(row["samples"] == 30 and 0 <= row["accuracy"] <= 1 for row in heard[3])
    assert len(heard[3]) >= 3
    assert json.dumps(heard[3])


def test_orders_reach_every_node_with_the_same_arrays(small, grid, federated):
    federated(small.override(**{"run.rounds": 1}), grid)
    trained = [message for message in grid.sent if message.metadata.message_type == "train"]
    assert len(trained) == 3
    arrays = {id(message.content["arrays"]) for message in trained}
    assert len(arrays) == 1  # sent once, however many nodes there are
    assert isinstance(trained[0], Message)
    first = next(iter(trained[0].content["arrays"].values()))
    assert torch.from_numpy(first.numpy().copy()).dtype == torch.float32
