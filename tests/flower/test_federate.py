"""Real federations on this machine: a SuperLink, SuperNodes, TLS and keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from deltafl import Config, UserError, run
from deltafl.cli import main
from deltafl.engine import janitor
from deltafl.flower import certificates
from deltafl.flower.control import Job, LostError
from deltafl.flower.engine import Patience
from deltafl.flower.launch import Federation, environment, run_here

pytestmark = [
    pytest.mark.federation,
    # Flower builds its bundles by a pattern that a library it uses would like renamed.
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
]

CONFIG = Config.model_validate(
    {
        "task": "digits-mlp",
        "federation": {"clients": 2, "participation": 1.0, "samples": 60},
        "run": {"rounds": 3, "checkpoint_seconds": 0},
        "engine": {"kind": "inline"},
    }
)


def job(out, config=CONFIG, **more):
    patience = Patience(deadline=more.pop("deadline", 90.0), join=90.0)
    return Job(config, out, patience, **more)


def folders():
    return set(Path(tempfile.gettempdir()).glob("deltafl-federation-*"))


def processes(text):
    """The processes whose command line has a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in words and "pytest" not in words:
            found.append(int(entry.name))
    return found


def wait_until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)
    return found


class Run(threading.Thread):
    """A run on a federation, in the background."""

    def __init__(self, federation, job):
        super().__init__()
        self.federation, self.job = federation, job
        self.events = []
        self.start()

    def run(self):
        control = self.federation.control
        with contextlib.suppress(LostError, RuntimeError):  # a test may end before its run
            for event in control.follow(control.submit(self.job), self.federation.running):
                self.events.append(event)

    def rounds(self):
        return [event["row"] for event in self.events if event["kind"] == "round"]

    def summary(self):
        self.join()
        return self.events[-1]["summary"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = folders()
    yield
    wait_until(lambda: folders() <= before, 20.0)
    assert processes("deltafl-federation-") == []


def test_the_command_gives_the_bits_of_a_simulation(tmp_path, capsys):
    words = ["--task", "digits-mlp", "--run.rounds", "3"]
    assert main(["federate", "--nodes", "3", *words, "--out", str(tmp_path / "real")]) == 0
    said = capsys.readouterr().out
    assert "3 SuperNodes, TLS and keys" in said
    simulated = ["--federation.clients", "3", "--federation.participation", "1"]
    assert main(["run", *words, *simulated, "--out", str(tmp_path / "simulated")]) == 0
    real, other = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("real", "simulated")
    )
    assert real["weights_sha256"] == other["weights_sha256"]
    assert real["weights_sha256"] in said
    assert real["refused_updates"] == 0
    # A finished run is not run again, and another configuration does not go into its folder.
    assert main(["federate", "--nodes", "3", *words, "--out", str(tmp_path / "real")]) == 0
    assert "SuperLink" not in capsys.readouterr().out
    assert main(["federate", "--nodes", "2", *words, "--out", str(tmp_path / "real")]) == 2


def test_a_node_killed_in_a_round_costs_its_update_only(tmp_path):
    config = CONFIG.override(**{"run.rounds": 4})
    with Federation(["", ""]) as federation:
        running = Run(federation, job(tmp_path / "run", config, deadline=20.0))
        wait_until(running.rounds)
        federation.nodes[1].kill()
        summary = running.summary()
    rows = running.rounds()
    assert summary["rounds"] == 4
    assert "refused" not in rows[0]
    assert list(rows[3]["refused"]) == ["1"]
    assert summary["refused_updates"] >= 2


def test_a_slow_node_and_a_late_one(tmp_path):
    config = CONFIG.override(**{"run.rounds": 50, "federation.clients": 3})
    with Federation(["", ""]) as federation:
        key, public = certificates.write_node_key(federation.folder, "late")
        federation.control.register(public, "late")
        running = Run(federation, Job(config, tmp_path / "run", Patience(40.0, 25.0)))

        def refused(client):
            return [row.get("refused", {}).get(str(client)) for row in running.rounds()]

        wait_until(running.rounds)
        assert refused(2) == ["no node holds client 2"]
        federation.start_node(2, key)
        wait_until(lambda: refused(2)[-1] is None, 180.0)
        os.killpg(federation.nodes[0].pid, signal.SIGSTOP)  # too slow for any deadline
        wait_until(lambda: refused(0)[-1], 120.0)
        os.killpg(federation.nodes[0].pid, signal.SIGCONT)
        wait_until(lambda: refused(0)[-1] is None, 180.0)
    assert [why for why in refused(0) if why] != []
    assert all("no reply within 40 s" in why or "could not" in why for why in refused(0) if why)


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

nan = sending(lambda weights: first(weights, lambda tensor: tensor * torch.nan))
shape = sending(lambda weights: first(weights, lambda tensor: tensor[:-1]))
names = sending(lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()})
"""


def test_broken_updates_are_refused_and_counted(tmp_path, monkeypatch):
    (tmp_path / "dishonest.py").write_text(DISHONEST)
    monkeypatch.syspath_prepend(tmp_path)
    config = CONFIG.override(**{"run.rounds": 1, "federation.clients": 4})
    told = ["", *(f'loader="dishonest:{what}"' for what in ("nan", "shape", "names"))]
    with Federation(told) as federation:
        running = Run(federation, job(tmp_path / "run", config))
        summary = running.summary()
    (row,) = running.rounds()
    assert "non-finite values" in row["refused"]["1"]
    assert "has shape" in row["refused"]["2"]
    assert "missing" in row["refused"]["3"]
    assert summary["refused_updates"] == 3
    assert summary["final_test_loss"] is not None


def test_strangers_are_refused(tmp_path):
    with Federation([""]) as federation:
        key, _ = certificates.write_node_key(federation.folder, "stranger")  # not registered
        stranger = federation.start_node(1, key)
        words = ["--superlink", federation.address.superlink, "--insecure", "--max-retries", "2"]
        port = ["--host", "127.0.0.1", "--port", "39871"]
        plain = federation.spawn(
            "flower-supernode", "plain", *words, *port, "--node-config", "partition-id=1"
        )
        assert stranger.wait(60) != 0
        assert plain.wait(60) != 0
        assert "Failed to activate SuperNode" in federation.last_words("node-1")
        config = CONFIG.override(**{"federation.clients": 2, "run.rounds": 1})
        running = Run(federation, Job(config, tmp_path / "run", Patience(60.0, 20.0)))
        assert running.summary()["refused_updates"] == 1
        assert running.rounds()[0]["refused"] == {"1": "no node holds client 1"}


@pytest.mark.parametrize("victim", ["SuperLink", "ServerApp"])
def test_a_run_goes_on_when_its_server_is_killed(tmp_path, victim):
    config = CONFIG.override(**{"run.rounds": 4})
    wanted = run(config).summary["weights_sha256"]
    events = []

    def hear(event):
        events.append(event)
        if event["kind"] == "round" and event["row"]["round"] == 2 and not killed:
            name = "flower-superlink" if victim == "SuperLink" else "flwr-serverapp"
            # Only those of this federation: its address is on their command lines.
            port = events[0]["superlink"].rpartition(":")[2]
            for pid in processes(name):
                if pid in processes(port):
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

    killed = []
    run_here(job(tmp_path / "run", config), ["", ""], hear)
    assert killed
    assert [event["kind"] for event in events].count("again") >= 1
    assert events[-1]["summary"]["weights_sha256"] == wanted
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_is_ended_and_it_goes_on(tmp_path, how):
    words = ["federate", "--nodes", "2", "--run.rounds", "3", "--out", str(tmp_path / "run")]
    before = folders()
    with subprocess.Popen(
        [sys.executable, "-m", "deltafl", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[1])
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text())
        (folder,) = folders() - before
        process.send_signal(how)
        process.wait(30)
    wait_until(lambda: not folder.exists(), 20.0)
    wait_until(lambda: not processes(str(folder)), 5.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    assert not (tmp_path / "run" / "summary.json").exists()
    assert [janitor.started(pid) for pid in processes(f"127.0.0.1:{port}")] == []
    if how == signal.SIGKILL:
        assert main(words) == 0
        text = (tmp_path / "run" / "summary.json").read_text()
        config = {"federation": {"clients": 2, "participation": 1.0}, "run": {"rounds": 3}}
        wanted = run(Config.model_validate(config)).summary["weights_sha256"]
        assert json.loads(text)["weights_sha256"] == wanted


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


def test_a_run_handed_to_a_federation_that_is_up(tmp_path, capsys):
    with Federation(["", ""]) as federation:
        words = ["--federation.clients", "2", "--run.rounds", "1", "--evaluate-nodes"]
        where = ["--superlink", federation.address.superlink]
        ca = ["--root-certificates", str(federation.files.ca)]
        out = ["--out", str(tmp_path / "run")]
        assert main(["federate", *where, *ca, *words, *out]) == 0
        assert "weights_sha256" in capsys.readouterr().out
        text = (tmp_path / "run" / "nodes.jsonl").read_text()
        nodes = [json.loads(row) for row in text.splitlines()]
        assert [row["client"] for row in nodes] == [0, 1]
        assert main(["federate", *where, *words, *out]) == 2  # it does not know whom to trust
        assert "no SuperLink answers" in capsys.readouterr().err
        bad = ["--client.options", "nonsense=1"]
        assert main(["federate", *where, *ca, *words, *bad, "--out", str(tmp_path / "bad")]) == 2
        assert "has no option 'nonsense'" in capsys.readouterr().err


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("flower-own-app", 'privacy="none" rounds=2'),
        ("flower-own-app", 'privacy="central" rounds=2'),
        ("flower-secagg", "rounds=1"),
    ],
)
def test_the_examples_of_apps_of_ones_own(tmp_path, example, options):
    out = tmp_path / "out.json"
    with Federation([""] * 3) as federation:
        home = federation.folder / "home-flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            "[superlink.here]\n"
            f'address = "{federation.address.superlink}"\n'
            f'root-certificates = "{federation.files.ca}"\n'
        )
        subprocess.run(
            ["flwr", "run", EXAMPLES / example, "here", "--run-config", f'out="{out}" {options}'],
            check=True,
            env=environment(home),
        )
        wait_until(lambda: out.exists() and out.read_text(), 180.0)
        report = json.loads(out.read_text())
    assert report.get("refused", {}) == {}
    assert report["accuracies"][-1] > report["accuracies"][0] + 0.3


def test_errors_are_said_and_not_tried_again(tmp_path):
    config = CONFIG.override(**{"client.options": {"gamma": -1.0}})
    with pytest.raises(UserError):
        run_here(job(tmp_path / "run", config), ["", ""], lambda event: None)
