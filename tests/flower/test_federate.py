"""`deltafl federate` on this machine: a SuperLink, SuperNodes, TLS and keys, and nothing left."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from federations import CONFIG, rows
from leftovers import nothing_left_behind, processes, wait_until

from deltafl import Config, UserError, run
from deltafl.cli import main
from deltafl.data import load
from deltafl.experiment.config import read_toml
from deltafl.experiment.run_folder import SUMMARY
from deltafl.flower import launch, server_app
from deltafl.flower.control import Job
from deltafl.flower.engine import Patience

# Flower builds its bundles by a pattern that a library it uses would like renamed.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


@pytest.fixture
def scratch(tmp_path):
    with nothing_left_behind() as folder:
        yield folder


# The defaults are for people who wait; a busy machine may take longer to start a few nodes.
PATIENT = ["--join", "600", "--deadline", "600"]


def summary(folder):
    return json.loads((folder / SUMMARY).read_text())


@pytest.mark.federation
def test_the_command_gives_the_bits_of_a_simulation(tmp_path, capsys, scratch):
    words = ["--task", "digits-mlp", "--run.rounds", "3"]
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    assert main(["federate", "--nodes", "3", *words, *PATIENT, "--out", str(real)]) == 0
    said = capsys.readouterr().out
    assert "3 SuperNodes, TLS and keys" in said
    alike = ["--federation.clients", "3", "--federation.participation", "1"]
    assert main(["run", *words, *alike, "--out", str(simulated)]) == 0
    assert summary(real)["weights_sha256"] == summary(simulated)["weights_sha256"]
    assert summary(real)["weights_sha256"] in said
    assert summary(real)["refused_updates"] == 0
    both = [rows(folder / "metrics.jsonl") for folder in (real, simulated)]
    assert [{**row, "seconds": 0} for row in both[0]] == [{**row, "seconds": 0} for row in both[1]]
    # A finished run is not run again, and another configuration does not go into its folder.
    assert main(["federate", "--nodes", "3", *words, "--out", str(real)]) == 0
    assert "SuperLink" not in capsys.readouterr().out
    assert main(["federate", "--nodes", "2", *words, "--out", str(real)]) == 2
    # It is a run folder like any other.
    page = tmp_path / "report.html"
    assert main(["report", str(real), "--out", str(page)]) == 0
    assert page.stat().st_size > 0


@pytest.mark.federation
def test_nodes_bring_data_of_their_own_and_are_weighed(tmp_path, grid, scratch):
    """One has 30 samples in a file and one 120 in a folder; the server has the test set."""
    digits = load("digits").train
    inputs, labels = digits.inputs.numpy(), digits.labels.numpy()
    np.savez(tmp_path / "test.npz", inputs=inputs[:300], labels=labels[:300])
    np.savez(tmp_path / "few.npz", inputs=inputs[300:330], labels=labels[300:330])
    many = tmp_path / "many"
    many.mkdir()
    np.save(many / "inputs.npy", inputs[400:520])
    np.save(many / "labels.npy", labels[400:520])
    words = ["--node-data", str(tmp_path / "few.npz"), str(many), "--data"]
    words += [str(tmp_path / "test.npz"), "--task", "own-mlp", "--run.rounds", "2"]
    words += ["--server.optimizer", "weighted-average", "--evaluate-nodes", *PATIENT]
    assert main(["federate", *words, "--out", str(tmp_path / "real")]) == 0
    found = summary(tmp_path / "real")
    assert found["refused_updates"] == 0
    held = [(row["client"], row["samples"]) for row in rows(tmp_path / "real" / "nodes.jsonl")]
    assert held == [(0, 30), (1, 120)] * 2
    # The same apps without processes: the same bits, and others when nodes count alike.
    grid.nodes = {
        7: {"partition-id": 0, "data": str(tmp_path / "few.npz")},
        8: {"partition-id": 1, "data": str(many)},
    }
    weighted = Config.model_validate(read_toml(tmp_path / "real" / "config.toml"))
    plain = weighted.override(**{"server.optimizer": "average"})
    digests = []
    for config in (weighted, plain):
        given = {"experiment": config.to_toml(), "out": str(tmp_path / config.server.optimizer)}
        given |= {"deadline": 60.0, "join": 60.0, "data": str(tmp_path / "test.npz")}
        outcome = server_app.serve(grid, given | {"evaluate-nodes": False})
        digests.append(outcome["weights_sha256"])
    assert digests[0] == found["weights_sha256"] != digests[1]


@pytest.mark.federation
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_is_ended_and_it_goes_on(tmp_path, scratch, how):
    out = tmp_path / "run"
    words = ["federate", "--nodes", "1", "--run.rounds", "3", "--out", str(out), *PATIENT]
    with subprocess.Popen(
        [sys.executable, "-m", "deltafl", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[1])
        metrics = out / "metrics.jsonl"
        try:
            wait_until(lambda: metrics.exists() and metrics.read_text())
        except BaseException:
            process.terminate()  # or this test would wait for the end of the run
            raise
        process.send_signal(how)
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert process.returncode == codes[how]
    wait_until(lambda: not processes(scratch), lambda: processes(scratch))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    assert not (out / SUMMARY).exists()
    if how == signal.SIGKILL:
        assert main(words) == 0
        config = {"federation": {"clients": 1, "participation": 1.0}, "run": {"rounds": 3}}
        wanted = run(Config.model_validate(config)).summary["weights_sha256"]
        assert summary(out)["weights_sha256"] == wanted


def test_bad_input_is_one_line(tmp_path, capsys):
    for words, message in (
        (["--nodes", "3", "--federation.clients", "4"], "a node is a client"),
        (["--superlink", "127.0.0.1:1"], "say how many nodes there are"),
        (["--superlink", "127.0.0.1:1", "--nodes", "2"], "leave them out with --superlink"),
        (["--superlink", "127.0.0.1:1", "--federation.clients", "2"], "no SuperLink answers"),
        (["--task", "own-mlp"], "needs --data"),
        (["--node-data", str(tmp_path / "no.npz")], "is not there"),
        (["--client.optimizer", "nothing"], "unknown optimizer"),
    ):
        assert main(["federate", *words, "--out", str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err


class Scripted:
    """A federation that only says what it is told to; a dead one after its last word."""

    def __init__(self, *runs):
        self.runs = list(runs)
        self.started = 0
        self.control = self
        self.address = SimpleNamespace(superlink="127.0.0.1:0")

    def __call__(self, nodes):
        self.started += 1
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def running(self):
        return True

    def submit(self, job):
        return 1

    def follow(self, run, alive):
        yield from self.runs.pop(0)


JOB = Job(CONFIG, None, Patience())
ROUND, ERROR = {"kind": "round"}, {"kind": "error", "text": "gamma is negative"}
END = {"kind": "finished"}


@pytest.mark.parametrize(
    ("told", "again", "error"),
    [
        ([[ERROR]], 0, "gamma is negative"),
        ([[ROUND], [ROUND], [ROUND], [END]], 3, None),
        ([[], [], []], 2, "3 times without a finished round"),
        ([[], [], [ROUND], [], [END]], 4, None),
    ],
)
def test_errors_are_said_and_a_lost_run_is_handed_over_again(monkeypatch, told, again, error):
    monkeypatch.setattr(launch, "Federation", Scripted(*told))
    heard = []
    if error:
        with pytest.raises(UserError, match=error):
            launch.run_here(JOB, ["", ""], heard.append)
    else:
        launch.run_here(JOB, ["", ""], heard.append)
        assert heard[-1] == END
    assert [event["kind"] for event in heard].count("again") == again
