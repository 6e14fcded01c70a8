from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from deltafl import Config, UserError
from deltafl.engine import ClientTask, InlineEngine, WorkersEngine
from deltafl.engine.shared import SharedMemory
from deltafl.engine.workbench import build_model
from deltafl.engine.workers import Worker
from deltafl.errors import told
from deltafl.experiment.federation import build_setup


@pytest.fixture(scope="module")
def engines():
    """Workers take a second or two to start: all tests share them."""
    with InlineEngine() as inline, WorkersEngine(1) as one, WorkersEngine(3) as three:
        yield {"inline": inline, "one": one, "three": three}


def opened(engine, config: Config):
    setup = build_setup(config)
    engine.open(setup)
    return {name: value.clone() for name, value in build_model(setup).state_dict().items()}


def outcome(engine, config: Config, tasks):
    weights = opened(engine, config)
    return trained(engine, weights, tasks), engine.evaluate(weights)


def trained(engine, weights, tasks):
    """Return (weights, samples, metrics) of every client."""
    return [
        ({name: value[place].clone() for name, value in updates.weights.items()}, samples, metrics)
        for updates in engine.train(weights, tasks)
        for place, (samples, metrics) in enumerate(
            zip(updates.samples, updates.metrics, strict=True)
        )
    ]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "objective", "task"),
    [
        ("delta-sgd", "cross-entropy", "digits-mlp"),
        ("delta-sgd-reused", "fedprox", "digits-mlp"),
        ("adam", "cross-entropy", "digits-softmax"),
        ("sps", "moon", "digits-mlp"),
    ],
)
def test_every_engine_gives_the_same_bits_in_the_same_order(
    engines, small, optimizer, objective, task, fast
):
    config = small.override(
        **{
            "task": task,
            "federation.samples": (5, 60),
            "client.optimizer": optimizer,
            "client.objective": objective,
            "run.record_step_sizes": True,
            "engine.fast": fast,
        }
    )
    # More clients than slots and than a bundle, in an order of their own.
    tasks = [ClientTask(client % 6, 1 + client // 6, 0.0) for client in range(80)]
    expected, evaluation = outcome(engines["inline"], config, tasks)
    for name in ("one", "three"):
        updates, other = outcome(engines[name], config, tasks)
        assert other == evaluation
        for (weights, samples, metrics), (want, n, wanted) in zip(updates, expected, strict=True):
            assert all(torch.equal(weights[key], want[key]) for key in want)
            assert (samples, metrics) == (n, wanted)


def test_memories_travel_as_files(engines, small, tmp_path: Path):
    config = small.override(**{"client.objective": "moon", "task": "digits-mlp"})
    paths = {}
    for name, engine in engines.items():
        paths[name] = tmp_path / f"{name}.safetensors"
        (update,) = outcome(engine, config, [ClientTask(0, 1, 0.0, remember=paths[name])])[0]
        again = ClientTask(0, 2, 0.0, recall=paths[name])
        (second,) = outcome(engine, config, [again])[0]
        first_time = outcome(engine, config, [ClientTask(0, 2, 0.0)])[0][0]
        assert any(not torch.equal(second[0][key], first_time[0][key]) for key in second[0])
        assert update[1] == 30
    contents = {path.read_bytes() for path in paths.values()}
    assert len(contents) == 1


def test_a_killed_worker_is_replaced_and_the_bits_stay(small):
    small = small.override(**{"engine.fast": False})  # a bundle each, so that both have work
    tasks = [ClientTask(client, 1, 0.0) for client in range(6)]
    with InlineEngine() as inline:
        expected, _ = outcome(inline, small, tasks)
    with WorkersEngine(2) as engine:
        weights = opened(engine, small)
        for round_ in range(3):
            first = engine._workers[round_ % 2].process.pid
            os.kill(first, signal.SIGKILL)
            updates = trained(engine, weights, tasks)
            for (got, _, _), (want, _, _) in zip(updates, expected, strict=True):
                assert all(torch.equal(got[key], want[key]) for key in want)
            assert engine._workers[round_ % 2].process.pid != first


def test_all_workers_killed_in_the_middle_of_a_round(small):
    small = small.override(**{"engine.fast": False})
    tasks = [ClientTask(client % 6, 1, 0.0) for client in range(12)]
    with InlineEngine() as inline:
        expected, _ = outcome(inline, small, tasks)
    with WorkersEngine(2) as engine:
        weights = opened(engine, small)
        updates = engine.train(weights, tasks)
        got = [{name: value[0].clone() for name, value in next(updates).weights.items()}]
        for worker in engine._workers:
            worker.process.kill()
        got += [{name: value[0].clone() for name, value in u.weights.items()} for u in updates]
    for one, (want, _, _) in zip(got, expected, strict=True):
        assert all(torch.equal(one[key], want[key]) for key in want)


def test_the_main_process_is_a_worker_of_stacked_clients(small):
    """A helper that dies amid its bundles is replaced; the next run may need one more of them."""
    tasks = [ClientTask(client % 6, 1 + client // 6, 0.0) for client in range(400)]
    with InlineEngine() as inline:
        expected, evaluation = outcome(inline, small, tasks)
    with WorkersEngine(2) as engine:
        weights = opened(engine, small)
        (helper,) = engine._workers
        helper.process.kill()
        updates = trained(engine, weights, tasks)
        for (got, *_), (want, *_) in zip(updates, expected, strict=True):
            assert all(torch.equal(got[key], want[key]) for key in want)
        assert engine._workers[0] is not helper
        assert engine.evaluate(weights) == evaluation
        assert len(trained(engine, opened(engine, small.override(**{"engine.fast": False})), tasks))
        assert len(engine._workers) == 2


def test_workers_that_cannot_all_start_leave_none_behind(monkeypatch):
    hired = []

    def hire():
        if hired:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        hired.append(Worker())
        return hired[0]

    monkeypatch.setattr("deltafl.engine.workers.Worker", hire)
    with pytest.raises(OSError, match="Too many open files"), WorkersEngine(2):
        pass
    assert hired[0].process.poll() is not None


def test_workers_that_died_between_runs_are_replaced(small):
    with WorkersEngine(2) as engine:
        opened(engine, small)
        for worker in engine._workers:
            worker.process.kill()
            worker.process.wait()
        weights = opened(engine, small)
        assert len(trained(engine, weights, [ClientTask(0, 1, 0.0)])) == 1


def test_a_failing_client_is_named_and_the_engine_stays_usable(engines, small):
    engine = engines["three"]
    weights = opened(engine, small.override(**{"engine.fast": False}))
    good = [ClientTask(client, 1, 0.0) for client in range(4)]
    with pytest.raises(UserError, match="client 99 failed in round 7"):
        list(engine.train(weights, [*good, ClientTask(99, 7, 0.0), *good]))
    assert len(trained(engine, weights, good)) == 4


def test_an_abandoned_round_leaves_the_engine_usable(engines, small):
    engine = engines["three"]
    weights = opened(engine, small.override(**{"engine.fast": False}))
    tasks = [ClientTask(client % 6, 1, 0.0) for client in range(20)]
    updates = engine.train(weights, tasks)
    next(updates)
    updates.close()
    assert len(trained(engine, weights, tasks)) == 20


def test_an_interrupted_round_leaves_the_engine_usable(engines, small):
    small = small.override(**{"engine.fast": False})
    tasks = [ClientTask(client % 6, 1, 0.0) for client in range(20)]
    expected, _ = outcome(engines["inline"], small, tasks)
    engine = engines["three"]
    weights = opened(engine, small)
    updates = engine.train(weights, tasks)
    next(updates)
    with pytest.raises(KeyboardInterrupt):
        updates.throw(KeyboardInterrupt)
    again = trained(engine, weights, list(reversed(tasks)))
    for (got, _, _), (want, _, _) in zip(reversed(again), expected, strict=True):
        assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_a_worker_amid_a_clients_work_ends_with_its_main_process(small):
    """A client of hours would keep an orphan busy for hours."""
    task = ClientTask(0, 1, 0.0)
    with WorkersEngine(1) as engine:
        trained(engine, opened(engine, small), [task])  # it is up
        opened(engine, small.override(**{"client.epochs": 10**5, "engine.fast": False}))
        worker = engine._workers[0]
        worker.send("train", [task], 0)
        begun = spent(worker.process.pid)
        while spent(worker.process.pid) < begun + 0.2 * os.sysconf("SC_CLK_TCK"):
            time.sleep(0.01)
        worker.connection.close()  # as the kernel does
        assert worker.process.wait(timeout=30) == 0


def spent(pid: int) -> int:
    """Return the processor time of a process, in ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_no_process_is_left_behind(small):
    with WorkersEngine(2) as engine:
        opened(engine, small)
        pids = [worker.process.pid for worker in engine._workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("fast", [True, False])
def test_a_client_that_fails_is_named_also_among_stacked_ones(small, fast):
    broken = {"client.optimizer": "adam", "client.options": {"capturable": True}}
    config = small.override(**{**broken, "engine.fast": fast})
    with InlineEngine() as engine:
        weights = opened(engine, config)
        with pytest.raises(UserError, match=r"clients? 0.* failed in round 7: .*capturable"):
            trained(engine, weights, [ClientTask(client, 7, 0.0) for client in (0, 3)])


class OddError(Exception):
    """Cannot be unpickled: its constructor wants more than it hands on."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_travel_is_told_nevertheless():
    with pytest.raises(UserError, match="the work failed: this and that"), told("the work failed"):
        raise OddError("this", "that")


def test_memory_that_is_refused_to_a_second_run_is_said(small, monkeypatch):
    def refuse(size):
        raise UserError(f"cannot share {size} bytes")

    with WorkersEngine(1) as engine:
        opened(engine, small)
        monkeypatch.setattr(SharedMemory, "create", refuse)
        with pytest.raises(UserError, match="cannot share"):
            opened(engine, small)
