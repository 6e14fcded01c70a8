from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import ConfigRecord, RecordDict

from deltafl import UserError, run
from deltafl.data import load
from deltafl.experiment.federation import build_setup
from deltafl.flower.node import Node, read_arrays
from deltafl.flower.wire import MalformedError, Order, facts_of, read_order


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "this node has no number"),
        ({"partition-id": "0"}, "this node has no number"),
        ({"partition-id": True}, "this node has no number"),
        ({"partition-id": 0, "data": 3}, "data in the node's configuration is not a str"),
        ({"partition-id": 0, "data": "a", "loader": "b:c"}, "both data and loader"),
    ],
)
def test_what_an_owner_gets_wrong_is_said(given, message):
    with pytest.raises(UserError, match=message):
        Node.read(given)


def order_for(config, **changes):
    fields = {"client": 0, "round": 1, "progress": 0.0} | changes
    return Order(config.to_toml(), "{}", **fields)


def test_a_node_imports_nothing_for_a_server(small, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')\nclass Trap: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = small.to_toml().replace('optimizer = "delta-sgd"', 'optimizer = "trap.Trap"')
    assert "trap" in text
    order = Order(text, "{}", 0, 1, 0.0)
    with pytest.raises(MalformedError, match="imports nothing for a server"):
        Node(0).config(order)
    text = small.to_toml().replace('optimizer = "delta-sgd"', 'optimizer = "torch.optim.RAdam"')
    order = Order(text, "{}", 0, 1, 0.0)
    with pytest.raises(MalformedError, match="imports nothing"):
        Node(0).config(order)
    assert Node(0, allow_import=True).config(order).client.optimizer == "torch.optim.RAdam"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = 'nonsense'", "task 'nonsense' is not DATASET-MODEL"),
        ("taks = 'digits-mlp'", "unknown key 'taks' from the server"),
        ("= = =", "the configuration is not TOML"),
        ("client = 3", "not of the catalog"),
        ("[run]\nrounds = -1", "run.rounds from the server"),
    ],
)
def test_a_servers_configuration_is_checked(text, message):
    with pytest.raises((UserError, MalformedError), match=message):
        Node(0).config(Order(text, "{}", 0, 1, 0.0))


def test_an_order_for_somebody_else_is_refused(small):
    with pytest.raises(MalformedError, match="holds client 0, not 1"):
        Node(0).config(order_for(small, client=1))
    with pytest.raises(MalformedError, match="round 99 is not of this run"):
        Node(0).config(order_for(small, round=99))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("version", "0.0", r"the server runs deltafl 0\.0"),
        ("round", 0, "impossible"),
        ("round", 1.0, "'round' is not of type int"),
        ("recall", 1, "impossible"),
        ("progress", 2.0, "impossible"),
        ("progress", float("nan"), "impossible"),
        ("experiment", b"bytes", "'experiment' is not of type str"),
    ],
)
def test_every_field_of_an_order_is_checked(small, name, value, message):
    record = dict(order_for(small).record()) | {name: value}

    class FakeMessage:
        content = RecordDict({"config": ConfigRecord(record)})

    with pytest.raises(MalformedError, match=message):
        read_order(FakeMessage())


def own(config, client):
    """The arrays of a client, as its owner would store them."""
    setup = build_setup(config)
    rows = setup.partition.indices(client)
    train = setup.dataset.train
    return train.inputs[rows].numpy(), train.labels[rows].numpy()


def digits_of_client_two():
    return own(digits_of_client_two.config, 2)


def test_data_of_a_nodes_own_gives_the_bits_of_a_simulation(small, grid, federated, tmp_path):
    config = small.override(**{"federation.participation": 1.0, "federation.samples": (5, 60)})
    config = config.override(**{"server.optimizer": "weighted-average"})
    images, labels = own(config, 0)
    np.savez(tmp_path / "zero.npz", inputs=images, labels=labels)
    grid.nodes[100]["data"] = str(tmp_path / "zero.npz")
    images, labels = own(config, 1)
    grey = np.ascontiguousarray(images[:, 0])  # without their channel
    safetensors.numpy.save_file(
        {"inputs": grey, "labels": labels.astype(np.int32)}, tmp_path / "one.safetensors"
    )
    grid.nodes[101]["data"] = str(tmp_path / "one.safetensors")
    digits_of_client_two.config = config
    grid.nodes[102]["loader"] = f"{__name__}:digits_of_client_two"
    folder = tmp_path / "three"
    folder.mkdir()
    for name, array in zip(("inputs", "labels"), own(config, 3), strict=True):
        np.save(folder / f"{name}.npy", array)
    grid.nodes[103]["data"] = str(folder)
    result = federated(config, grid)
    assert result.summary["refused_updates"] == 0
    assert result.summary["weights_sha256"] == run(config).summary["weights_sha256"]


def test_a_node_may_hold_what_no_simulation_has(small, grid, federated, tmp_path):
    config = small.override(
        **{"federation.participation": 1.0, "server.optimizer": "weighted-average"}
    )
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        inputs=rng.integers(0, 17, (123, 8, 8)).astype(np.uint8),
        labels=rng.integers(0, 10, 123),
    )
    grid.nodes[105]["data"] = str(tmp_path / "own.npz")
    heard = []
    result = federated(config, grid, on_nodes=lambda round_, rows: heard.append(rows))
    assert result.summary["refused_updates"] == 0
    assert heard[-1][5]["samples"] == 123


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"inputs": np.zeros((3, 8, 8))}, "has no array 'labels"),
        ({"inputs": np.zeros((3, 9, 9)), "labels": np.zeros(3)}, "but the model takes"),
        ({"inputs": np.zeros((0, 8, 8)), "labels": np.zeros(0)}, "has no samples"),
        ({"inputs": np.zeros((3, 8, 8)), "labels": np.full(3, 10)}, "labels run from 10 to 10"),
        ({"inputs": np.array([object()]), "labels": np.zeros(1)}, "cannot read the data"),
    ],
)
def test_unfit_data_is_said_to_the_server(small, grid, federated, tmp_path, arrays, reason):
    np.savez(tmp_path / "own.npz", **arrays)
    grid.nodes[100]["data"] = str(tmp_path / "own.npz")
    config = small.override(**{"federation.participation": 1.0, "run.rounds": 1})
    assert reason in federated(config, grid).metrics[0]["refused"]["0"]


def test_arrays_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot read the data"):
        read_arrays(tmp_path / "nothing.npz")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot read the data"):
        read_arrays(tmp_path / "bad.safetensors")


def test_facts_say_how_to_feed_a_model():
    dataset = load("digits")
    assert '"shape": [1, 8, 8]' in facts_of(dataset)
