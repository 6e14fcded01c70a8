"""Real federations in which something dies, is slow, comes late or lies."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from federations import CONFIG, PATIENT, Run, rows
from leftovers import nothing_left_behind, processes, wait_until

from deltafl import run
from deltafl.flower import certificates
from deltafl.flower.control import Job
from deltafl.flower.engine import Patience
from deltafl.flower.launch import Federation, run_here

pytestmark = [
    pytest.mark.federation,
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def scratch(tmp_path):
    with nothing_left_behind() as folder:
        yield folder


def test_nodes_that_come_late_or_are_slow_or_die_in_a_round_cost_their_updates_only(
    tmp_path, scratch
):
    config = CONFIG.override(**{"run.rounds": 1000, "federation.clients": 3})
    with Federation(["", ""]) as federation:
        key, public = certificates.write_node_key(federation.folder, "late")
        federation.control.register(public, "late")
        # How long honest nodes take on this machine says how long to wait for the others.
        usual = Run(federation, tmp_path / "usual", CONFIG.override(**{"run.rounds": 2}))
        assert usual.summary()["refused_updates"] == 0
        seconds = max(15.0, 3 * usual.rounds()[1]["seconds"])
        running = Run(federation, tmp_path / "run", config, Patience(seconds, seconds))
        wait_until(running.rounds)
        assert running.refused(2)[0] == "no node holds client 2"
        federation.start_node(2, key)
        wait_until(lambda: running.refused(2)[-1] is None)
        slow, dying = federation.nodes
        # In the middle of its work of a round, as if the power had failed.
        wait_until(lambda: works(dying, scratch))
        os.killpg(dying.pid, signal.SIGKILL)
        os.killpg(slow.pid, signal.SIGSTOP)  # too slow for any deadline
        wait_until(lambda: running.refused(0)[-1] and running.refused(1)[-1])
        os.killpg(slow.pid, signal.SIGCONT)
        wait_until(lambda: running.refused(0)[-1] is None)
        assert running.refused(1)[-1] is not None
    assert None in running.refused(2)
    *_, last = rows(tmp_path / "run" / "metrics.jsonl")
    assert set(last.get("refused", {})) >= {"1"}


def works(node, scratch):
    """Whether a node's ClientApp is at work."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        return any(
            "flwr-clientapp" in command and os.getpgid(pid) == node.pid
            for pid, command in processes(scratch).items()
        )
    return False


# The owner of a node runs what he likes: these send what no honest client would.
DISHONEST = """
import torch
from deltafl.data import load
from deltafl.flower import client_app

honest = client_app.to_arrays

def sending(change):
    def loader():
        client_app.to_arrays = lambda weights: honest(change(dict(weights)))
        split = load("digits").train
        return split.inputs[:40], split.labels[:40]
    return loader

def first(weights, value):
    name = next(iter(weights))
    return weights | {name: value(weights[name])}

none = sending(lambda weights: weights)
nan = sending(lambda weights: first(weights, lambda tensor: tensor * torch.nan))
shape = sending(lambda weights: first(weights, lambda tensor: tensor[:-1]))
names = sending(lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()})
"""


def test_broken_updates_are_refused_and_counted(tmp_path, monkeypatch):
    (tmp_path / "dishonest.py").write_text(DISHONEST)
    monkeypatch.syspath_prepend(tmp_path)
    config = CONFIG.override(**{"run.rounds": 1, "federation.clients": 4})
    told = [f'loader="dishonest:{what}"' for what in ("none", "nan", "shape", "names")]
    with Federation(told) as federation:
        running = Run(federation, tmp_path / "run", config)
        summary = running.summary()
    (row,) = running.rounds()
    assert set(row["refused"]) == {"1", "2", "3"}
    assert "non-finite values" in row["refused"]["1"]
    assert "has shape" in row["refused"]["2"]
    assert "missing" in row["refused"]["3"]
    assert summary["refused_updates"] == 3
    assert summary["final_test_loss"] is not None


@pytest.mark.parametrize("program", ["flower-superlink", "flwr-serverapp"])
def test_a_run_goes_on_when_its_server_is_killed(tmp_path, scratch, program):
    wanted = run(CONFIG).summary["weights_sha256"]
    events, killed = [], []

    def hear(event):
        events.append(event)
        if event["kind"] == "round" and not killed:
            for pid, command in processes(scratch).items():
                if program in command:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

    job = Job(CONFIG, tmp_path / "run", PATIENT, evaluate_nodes=True)
    run_here(job, ["", ""], hear)
    assert killed
    assert [event["kind"] for event in events].count("again") >= 1
    # It went on, and did not begin anew.
    assert [event["done"] for event in events if event["kind"] == "started"][-1] >= 1
    assert events[-1]["summary"]["weights_sha256"] == wanted
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["round"] for row in found] == [1, 2, 3]
    # What nodes say of the weights is there once for each round, too.
    nodes = rows(tmp_path / "run" / "nodes.jsonl")
    assert [(row["round"], row["client"]) for row in nodes] == [
        (round_, client) for round_ in (1, 2, 3) for client in (0, 1)
    ]
