"""Ray computes the bits of the other engines, whatever dies, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from leftovers import nothing_left_behind, wait_until

from deltafl import UserError, run
from deltafl.cli import main
from deltafl.data.partition import Partition
from deltafl.engine import ClientTask, InlineEngine, RayEngine, WorkersEngine, build, ray_cluster
from deltafl.engine.workbench import build_model
from deltafl.experiment.federation import build_setup

pytest.importorskip("ray")

SMALL = """--federation.clients 6 --federation.samples 30 --federation.participation 0.5
    --client.batch-size 8 --engine.kind ray""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Ray takes some seconds to start: the quick tests share it."""
    tmp_path_factory.getbasetemp()  # lies outside of what is looked at
    with nothing_left_behind(), RayEngine(2) as ray:
        yield ray


def prepared(engine, setup):
    engine.open(setup)
    return {name: value.clone() for name, value in build_model(setup).state_dict().items()}


def taken(updates):
    """Return (weights, samples, metrics) of every client of a bundle."""
    return [
        ({name: value[place].clone() for name, value in updates.weights.items()}, samples, metrics)
        for place, (samples, metrics) in enumerate(
            zip(updates.samples, updates.metrics, strict=True)
        )
    ]


def trained(engine, weights, tasks):
    """Return (weights, samples, metrics) of every client."""
    return [one for updates in engine.train(weights, tasks) for one in taken(updates)]


def assert_same(updates, expected):
    for (weights, samples, metrics), (want, n, wanted) in zip(updates, expected, strict=True):
        assert all(torch.equal(weights[key], want[key]) for key in want)
        assert (samples, metrics) == (n, wanted)


class Unequal(Partition):
    """Client 0 holds a lot, the others few samples."""

    def __init__(self, clients: int, few: int = 8) -> None:
        super().__init__(np.zeros(0, dtype=np.int64), 10, clients)
        self._few = few

    def indices(self, client: int):
        return np.arange(self.size(client)) % 1000

    def size(self, client: int) -> int:
        return self._few if client else 6_000


@pytest.fixture
def scratch(tmp_path):
    """The temporary folder of a test that starts processes of its own."""
    with nothing_left_behind() as folder:
        yield folder


# The first of all: a process is connected to one cluster at a time, and `engine` stays connected.
@pytest.mark.federation
def test_a_node_that_dies_in_the_middle_of_a_round_changes_no_bit(small, scratch, monkeypatch):
    from ray._private import services
    from ray.cluster_utils import Cluster

    folder = scratch / "cluster"
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    patient = ray_cluster.patiently(services.get_node)
    monkeypatch.setattr(services, "get_node", patient)
    setup = build_setup(small.override(**{"engine.fast": False, "task": "digits-mlp"}))
    setup = replace(setup, partition=Unequal(6, few=600))  # long enough to be killed in the middle
    tasks = [ClientTask(1 + client % 5, 1 + client // 5, 0.0) for client in range(24)]
    with InlineEngine() as inline:
        weights = prepared(inline, setup)
        expected, evaluation = trained(inline, weights, tasks), inline.evaluate(weights)
    quickly = {
        # A dead node refuses connections, which is noticed within seconds; one that is only slow,
        # because the machine is busy, has a minute to answer.
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 6,
        "health_check_timeout_ms": 60_000,
        "worker_niceness": 0,  # or anything else on this machine would keep the actors waiting
    }
    head = {"num_cpus": 1, "temp_dir": str(folder / "ray"), "_system_config": quickly}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        with build("ray", 0, cluster.address) as engine:
            weights = prepared(engine, setup)
            assert len(engine._actors) == 3
            assert_same(trained(engine, weights, tasks), expected)
            assert all_are_linked(engine)
            handles = [actor.handle for actor in engine._actors]
            updates = engine.train(weights, tasks)
            found = taken(next(updates))
            cluster.remove_node(nodes[0], allow_graceful=False)
            found += [one for rest in updates for one in taken(rest)]
            assert_same(found, expected)
            assert sum(actor.handle not in handles for actor in engine._actors) == 1
            # Two CPUs are left: the third actor waits for another node, and the others work.
            assert engine.evaluate(weights) == evaluation
            cluster.add_node(num_cpus=1)
            wait_until(lambda: all_are_open(engine, weights, tasks[:6]))
            assert_same(trained(engine, weights, tasks), expected)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder)


def all_are_open(engine, weights, tasks):
    """Work a little, and tell whether all actors could have done it."""
    trained(engine, weights, tasks)
    return all_are_linked(engine)


def all_are_linked(engine):
    return all(actor.link is not None for actor in engine._actors)


VARIATIONS = [
    ("delta-sgd", "cross-entropy", "digits-mlp", True),
    ("delta-sgd-reused", "fedprox", "digits-mlp", False),
    ("adam", "cross-entropy", "digits-softmax", True),
    ("sps", "moon", "digits-mlp", True),
]


@pytest.mark.parametrize(("optimizer", "objective", "task", "fast"), VARIATIONS)
def test_clients_on_ray_have_the_bits_of_this_process(
    engine, small, optimizer, objective, task, fast
):
    setup = build_setup(
        small.override(
            **{
                "task": task,
                "federation.samples": (5, 60),
                "client.optimizer": optimizer,
                "client.objective": objective,
                "run.record_step_sizes": True,
                "engine.fast": fast,
            }
        )
    )
    # More clients than places and than a bundle, in an order of their own.
    tasks = [ClientTask(client % 6, 1 + client // 6, 0.0) for client in range(80)]
    with InlineEngine() as inline:
        weights = prepared(inline, setup)
        expected, evaluation = trained(inline, weights, tasks), inline.evaluate(weights)
    weights = prepared(engine, setup)
    assert_same(trained(engine, weights, tasks), expected)
    assert engine.evaluate(weights) == evaluation


def test_large_weights_go_through_the_object_store(engine, small):
    setup = build_setup(small.override(**{"task": "digits-mlp", "model.width": 1000}))
    tasks = [ClientTask(client, 1, 0.0) for client in range(6)]
    with InlineEngine() as inline:
        weights = prepared(inline, setup)
        other = {name: value / 2 for name, value in weights.items()}
        expected = [
            (trained(inline, given, tasks), inline.evaluate(given)) for given in (weights, other)
        ]
    prepared(engine, setup)
    for given, (updates, evaluation) in zip((weights, other), expected, strict=True):
        assert isinstance(engine._run.broadcast(given), engine._ray.ObjectRef)
        assert_same(trained(engine, given, tasks), updates)
        assert engine.evaluate(given) == evaluation


def test_a_stream_that_was_interrupted_leaves_no_answers(engine, small, monkeypatch):
    setup = build_setup(small.override(**{"engine.fast": False}))
    tasks = [ClientTask(client % 6, 1 + client // 6, 0.0) for client in range(20)]
    with InlineEngine() as inline:
        expected = trained(inline, prepared(inline, setup), tasks)
    weights = prepared(engine, setup)
    trained(engine, weights, tasks)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained(engine, weights, tasks)
    assert any(actor.jobs for actor in engine._actors)
    assert_same(trained(engine, weights, tasks), expected)


def test_an_actor_that_dies_is_replaced_and_the_bits_stay(engine, small):
    setup = build_setup(small.override(**{"engine.fast": False}))
    tasks = [ClientTask(client % 6, 1 + client // 6, 0.0) for client in range(20)]
    with InlineEngine() as inline:
        expected = trained(inline, prepared(inline, setup), tasks)
    weights = prepared(engine, setup)
    for _ in range(2):
        dying = engine._actors[0].handle
        updates = engine.train(weights, tasks)
        found = taken(next(updates))
        engine._ray.kill(dying)
        found += [one for rest in updates for one in taken(rest)]
        assert_same(found, expected)
        # Its share may have been done when it died: then the next round finds it dead.
        assert_same(trained(engine, weights, tasks), expected)
        assert engine._actors[0].handle is not dying


@pytest.mark.federation
def test_a_client_that_kills_its_actor_is_named(engine, small):
    setup = replace(build_setup(small), partition=Deadly(small.federation.clients), fast=False)
    weights = prepared(engine, setup)
    with pytest.raises(UserError, match="actors died 3 times on client 5"):
        list(engine.train(weights, [ClientTask(client, 1, 0.0) for client in range(6)]))
    assert len(trained(engine, weights, [ClientTask(0, 1, 0.0)])) == 1


class Deadly(Partition):
    """Whoever asks what client 5 holds is killed."""

    def __init__(self, clients: int) -> None:
        super().__init__(np.zeros(0, dtype=np.int64), 10, clients)

    def indices(self, client: int):
        if client == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.arange(30)

    def size(self, client: int) -> int:
        return 30


def test_a_failing_client_is_named_and_the_engine_stays_usable(engine, small):
    weights = prepared(engine, build_setup(small.override(**{"engine.fast": False})))
    good = [ClientTask(client, 1, 0.0) for client in range(4)]
    with pytest.raises(UserError, match="client 99 failed in round 7"):
        list(engine.train(weights, [*good, ClientTask(99, 7, 0.0), *good]))
    abandoned = engine.train(weights, good * 5)
    next(abandoned)
    abandoned.close()
    assert len(trained(engine, weights, good)) == 4


def test_a_large_client_does_not_keep_the_small_ones_waiting(engine, small, monkeypatch):
    setup = build_setup(small.override(**{"engine.fast": False, "task": "digits-mlp"}))
    setup = replace(setup, partition=Unequal(small.federation.clients))
    weights = prepared(engine, setup)
    wait_until(lambda: all_are_open(engine, weights, [ClientTask(1, 1, 0.0)]))
    given = Counter()

    def give(actor, method, job, plain=ray_cluster.Actor.give):
        given[id(actor)] += 1
        plain(actor, method, job)

    monkeypatch.setattr(ray_cluster.Actor, "give", give)
    tasks = [ClientTask(min(client, 1), 1, 0.0) for client in range(40)]
    samples = [n for _, n, _ in trained(engine, weights, tasks)]
    assert samples == [6_000] + [8] * 39
    # Whoever has the large client was given one ahead, and a few more if it ended early.
    assert min(given.values()) <= 8, given


def test_memories_travel_as_files_and_a_missing_one_is_named(engine, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup = build_setup(small.override(**{"client.objective": "moon", "task": "digits-mlp"}))
    first = ClientTask(0, 1, 0.0, remember=Path("memory.safetensors"))
    second = ClientTask(0, 2, 0.0, recall=Path("memory.safetensors"))
    outcomes = []
    for where in (InlineEngine(), engine):
        weights = prepared(where, setup)
        outcomes.append(trained(where, weights, [first]) + trained(where, weights, [second]))
        memory = Path("memory.safetensors").read_bytes()
        Path("memory.safetensors").unlink()
        outcomes.append(memory)
    assert_same(outcomes[2], outcomes[0])
    assert outcomes[3] == outcomes[1]
    with pytest.raises(UserError, match=r"does not see .*memory\.safetensors.*--out"):
        trained(engine, weights, [second])


def test_a_node_with_other_tools_is_refused(engine, small, monkeypatch):
    monkeypatch.setattr(ray_cluster, "tools", lambda _: {"torch": "1.0"})
    weights = prepared(engine, build_setup(small))
    with pytest.raises(UserError, match=r"torch: 2.*, 1\.0 here"):
        trained(engine, weights, [ClientTask(0, 1, 0.0)])


def test_only_cpus(engine, small):
    with pytest.raises(UserError, match=r"--run\.device cpu"):
        engine.open(replace(build_setup(small), device="cuda"))


def refusal(capsys, *words: str) -> str:
    """Return the one line that a command answers bad input with."""
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_ray_a_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'deltafl[ray]'" in refusal(capsys, "run", *SMALL)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--engine.address", "nowhere"], "neither auto nor HOST:PORT"),
        (["--engine.address", "ray://here:10001"], "neither auto nor HOST:PORT"),
        (["--engine.address", "127.0.0.1:99999"], "no Ray cluster answers at 127.0.0.1:99999"),
    ],
)
def test_addresses_that_cannot_be(capsys, monkeypatch, words, expected):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert expected in refusal(capsys, "run", *SMALL, *words)


def test_an_address_is_for_ray_only(capsys):
    words = [*SMALL[:-2], "--engine.address", "auto"]
    assert "use kind ray" in refusal(capsys, "run", *words)


def test_a_connected_process_does_not_connect_elsewhere(engine):
    with pytest.raises(UserError, match=r"connected to Ray at .* already"), RayEngine(1, "a:1"):
        pass


def test_an_address_where_nobody_listens_is_refused_quickly(capsys, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    begun = time.monotonic()
    assert f"no Ray cluster answers at {address}" in refusal(
        capsys, "run", *SMALL, "--engine.address", address
    )
    assert time.monotonic() - begun < 20


@pytest.mark.federation
@pytest.mark.parametrize(
    "fields",
    [
        {"server.optimizer": "fedadam", "client.optimizer": "delta-sgd", "task": "digits-mlp"},
        {"server.optimizer": "weighted-average", "client.objective": "fedprox"},
        {"client.objective": "moon", "task": "digits-mlp", "federation.participation": 1.0},
    ],
    ids=["fedadam", "fedprox", "moon"],
)
def test_runs_have_the_same_bits_on_every_engine(engine, small, tmp_path, fields):
    config = small.override(**{"run.rounds": 4, "federation.samples": (10, 60), **fields})
    with WorkersEngine(2) as workers:
        results = [
            run(config, out=tmp_path / str(place), engine=where)
            for place, where in enumerate((InlineEngine(), workers, engine))
        ]
    assert len({result.summary["weights_sha256"] for result in results}) == 1
    rows = [[{**row, "seconds": 0} for row in result.metrics] for result in results]
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.federation
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
@pytest.mark.parametrize("how", ["end", "fault", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_behind(tmp_path, how):
    rounds = "3" if how in ("end", "fault") else "1000000"
    command = [sys.executable, "-m", "deltafl", "run", *SMALL, "--engine.workers", "2"]
    command += ["--run.rounds", rounds, "--out", str(tmp_path / "run")]
    if how == "fault":
        command += ["--client.optimizer", "torch.optim.SGD", "--client.options", "lr=-1"]
    with nothing_left_behind():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if how.startswith("SIG"):
            metrics = tmp_path / "run" / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
            if how == "SIGINT":  # as a terminal sends it, to everybody
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal(getattr(signal, how))
        _, said = process.communicate()
        codes = {"end": 0, "fault": 2, "SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}
        assert process.returncode == codes[how], said
        assert len(said.splitlines()) == (0 if how in ("end", "SIGKILL") else 1), said
