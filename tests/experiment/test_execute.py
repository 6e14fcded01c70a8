from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deltafl import Dataset, UserError, run, tensorfile
from deltafl.experiment.federation import build_setup, hold_out, sample_clients

VARIATIONS = {
    "plain": {},
    "reused": {"client.optimizer": "delta-sgd-reused"},
    "decay": {"client.optimizer": "sgdm-decay"},
    "fedprox": {"client.objective": "fedprox"},
    "moon": {"client.objective": "moon", "task": "digits-mlp"},
    "fedadam": {"server.optimizer": "fedadam"},
    "fedyogi": {"server.optimizer": "fedyogi"},
    "fedadagrad": {"server.optimizer": "fedadagrad"},
    "fedavgm": {"server.optimizer": "fedavgm"},
    "weighted": {"server.optimizer": "weighted-average", "federation.samples": (10, 40)},
    "iid": {"federation.partition": "iid", "federation.replacement": True},
}


class Crash(Exception):
    """Stands for whatever ends a process."""


class CrashAfter:
    def __init__(self, round_: int) -> None:
        self._round = round_

    def started(self, config, done):
        self.began_after = done

    def finished_round(self, report):
        if report.round == self._round:
            raise Crash

    def finished(self, summary):
        pass


def test_a_run_folder_is_as_documented(small, tmp_path: Path):
    result = run(small.override(**{"run.record_step_sizes": True}), out=tmp_path / "run")
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "summary.json", "checkpoint.safetensors"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 <= row["test_accuracy"] <= 1
        assert row["test_loss"] > 0
        assert row["seconds"] > 0
        assert len(row["steps"]) == 3
        for steps in row["steps"].values():
            assert len(steps["eta"]) == 30 // 8
            assert steps["eta"][0] == pytest.approx(0.2)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == result.summary
    assert summary["final_test_accuracy"] == rows[-1]["test_accuracy"]
    tensors, about = tensorfile.load(folder / "checkpoint.safetensors")
    assert about["round"] == 3
    weights = {
        k.removeprefix("weights/"): v for k, v in tensors.items() if k.startswith("weights/")
    }
    assert tensorfile.digest(weights) == summary["weights_sha256"]


def test_it_learns(small):
    config = small.override(**{"run.rounds": 40, "federation.alpha": 10.0, "run.eval_every": 40})
    result = run(config)
    assert result.final_test_accuracy > 0.85
    assert [row["test_accuracy"] is not None for row in result.metrics] == [False] * 39 + [True]


@pytest.mark.parametrize("variation", VARIATIONS)
def test_resumed_after_a_crash_the_bits_are_the_same(small, tmp_path: Path, variation):
    config = small.override(**VARIATIONS[variation], **{"run.rounds": 5})
    undisturbed = run(config)
    for round_ in (2, 4):
        with pytest.raises(Crash):
            run(config, out=tmp_path, listeners=[CrashAfter(round_)])
    last = CrashAfter(99)
    resumed = run(config, out=tmp_path, listeners=[last])
    assert last.began_after == 4
    assert resumed.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert [row["round"] for row in resumed.metrics] == [1, 2, 3, 4, 5]
    for row, want in zip(resumed.metrics, undisturbed.metrics, strict=True):
        assert row | {"seconds": 0} == want | {"seconds": 0}


def test_rounds_after_the_checkpoint_are_run_again(small, tmp_path: Path):
    config = small.override(
        **{"task": "digits-mlp", "client.objective": "moon", "federation.participation": 1.0}
    )
    with pytest.raises(Crash):
        run(config, out=tmp_path, listeners=[CrashAfter(1)])
    # The next round is recorded and remembered, but the process ends before its checkpoint.
    rarely = config.override(**{"run.checkpoint_seconds": 3600.0})
    with pytest.raises(Crash):
        run(rarely, out=tmp_path, listeners=[CrashAfter(2)])
    assert (tmp_path / "memory" / "0-2.safetensors").exists()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "test_acc')  # a write that was cut short
    result = run(config, out=tmp_path)
    assert [row["round"] for row in result.metrics] == [1, 2, 3]
    assert result.summary["weights_sha256"] == run(config).summary["weights_sha256"]


ENGINES = {
    "sums over names": {
        "task": "digits-mlp",
        "client.optimizer": "sps",
        "client.objective": "fedprox",
        "federation.samples": (20, 70),
    },
    "channels last": {
        "task": "digits-resnet18",
        "model.width": 16,
        "model.norm": "group",
        "client.optimizer": "sgd",
        "client.objective": "moon",
        "federation.samples": 8,
    },
}


@pytest.mark.parametrize("variation", ENGINES)
def test_a_run_has_the_same_bits_on_every_engine_and_resumed(small, tmp_path: Path, variation):
    config = small.override(**ENGINES[variation])
    inline = run(config)
    workers = run(config.override(**{"engine.kind": "workers", "engine.workers": 2}))
    assert workers.summary["weights_sha256"] == inline.summary["weights_sha256"]
    with pytest.raises(Crash):
        run(config, out=tmp_path, listeners=[CrashAfter(1)])
    resumed = run(config, out=tmp_path)
    assert resumed.summary["weights_sha256"] == inline.summary["weights_sha256"]
    losses = [[row["test_loss"] for row in r.metrics] for r in (inline, workers, resumed)]
    assert losses[0] == losses[1] == losses[2]


def test_a_process_killed_in_the_middle_goes_on_and_ends_in_the_same_bits(small, tmp_path: Path):
    config = small.override(
        **{"run.rounds": 60, "engine.kind": "workers", "engine.workers": 2, "task": "digits-mlp"}
    )
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    out = tmp_path / "run"
    command = [sys.executable, "-m", "deltafl", "run", str(file), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "checkpoint.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "summary.json").exists()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    undisturbed = run(config.override(**{"engine.kind": "inline"}))
    assert undisturbed.summary["weights_sha256"] in done.stdout


def test_a_finished_run_is_not_run_again(small, tmp_path: Path):
    first = run(small, out=tmp_path)
    second = run(small, out=tmp_path, listeners=[CrashAfter(1)])
    assert second == first


def test_moon_differs_from_cross_entropy_once_clients_come_back(small):
    shared = {"task": "digits-mlp", "federation.participation": 1.0, "run.rounds": 3}
    plain = small.override(**shared)
    moon = plain.override(**{"client.objective": "moon"})
    assert run(moon).summary["weights_sha256"] != run(plain).summary["weights_sha256"]


def test_weights_that_are_huge_but_finite_are_a_result(small):
    config = small.override(**{"client.optimizer": "sgd", "client.lr": 1e6, "run.rounds": 8})
    result = run(config.override(**{"client.options": {"momentum": 0.99}}))
    assert result.summary["rounds"] == 8
    assert result.summary["final_test_loss"] > 1e5
    assert "diverged" not in result.summary


def test_a_refused_client_does_not_remember_what_broke_it(small, tmp_path: Path):
    config = small.override(
        **{
            "task": "digits-mlp",
            "client.objective": "moon",
            "client.optimizer": "torch.optim.SGD",
            "client.options": {"lr": 1e30},
            "federation.participation": 1.0,
        }
    )
    with pytest.raises(Crash):
        run(config, out=tmp_path, listeners=[CrashAfter(1)])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows[0]["refused"]) == 6
    assert list((tmp_path / "memory").iterdir()) == []


def test_memories_that_are_gone_are_missed_and_those_of_a_finished_run_deleted(
    small, tmp_path: Path
):
    config = small.override(**{"task": "digits-mlp", "client.objective": "moon"})
    with pytest.raises(Crash):
        run(config, out=tmp_path, listeners=[CrashAfter(2)])
    memory = next((tmp_path / "memory").iterdir())
    content = memory.read_bytes()
    memory.unlink()
    with pytest.raises(UserError, match="which the checkpoint needs"):
        run(config, out=tmp_path)
    memory.write_bytes(content)
    run(config, out=tmp_path)
    assert not (tmp_path / "memory").exists()


def test_another_configuration_in_the_folder_is_refused(small, tmp_path: Path):
    prox = small.override(
        **{"client.objective": "fedprox", "client.objective_options": {"mu": 0.1}}
    )
    run(prox, out=tmp_path / "prox")
    with pytest.raises(UserError, match=r"objective_options\.mu is 0\.1 there, None here"):
        run(prox.override(**{"client.objective_options": {}}), out=tmp_path / "prox")
    run(small, out=tmp_path / "x")
    tmp_path = tmp_path / "x"
    with pytest.raises(UserError, match=r"run\.seed is 0 there, 1 here"):
        run(small.override(**{"run.seed": 1}), out=tmp_path)
    run(small.override(**{"engine.workers": 5}), out=tmp_path)  # where it runs is no difference


def test_a_folder_with_something_else_in_it_is_refused(small, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="neither empty nor a run folder"):
        run(small, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_runs_in_one_folder_at_once_are_refused(small, tmp_path: Path):
    class Second(CrashAfter):
        def finished_round(self, report):
            with pytest.raises(UserError, match="another process is running"):
                run(small, out=tmp_path)

    run(small, out=tmp_path, listeners=[Second(0)])


def break_checkpoint(folder: Path) -> None:
    path = folder / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap_checkpoint(folder: Path) -> None:
    tensors, about = tensorfile.load(folder / "checkpoint.safetensors")
    tensorfile.save(folder / "checkpoint.safetensors", tensors, about | {"run": "another"})


def reshape_checkpoint(folder: Path) -> None:
    tensors, about = tensorfile.load(folder / "checkpoint.safetensors")
    tensors = {name: value.flatten() for name, value in tensors.items()}
    tensorfile.save(folder / "checkpoint.safetensors", tensors, about)


def lie_about_the_round(folder: Path) -> None:
    tensors, about = tensorfile.load(folder / "checkpoint.safetensors")
    tensorfile.save(folder / "checkpoint.safetensors", tensors, about | {"round": 10**9})


def break_metrics(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("{}\n" + path.read_text())


def lose_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_checkpoint, "checkpoint.safetensors is damaged: delete it"),
        (swap_checkpoint, "belongs to another run"),
        (reshape_checkpoint, "does not fit this run"),
        (lie_about_the_round, "round 1000000000"),
        (break_metrics, "metrics.jsonl, line 1, is damaged"),
        (lose_metrics, "does not have every round"),
    ],
)
def test_damaged_files_are_named_and_left_alone(small, tmp_path: Path, damage, words):
    with pytest.raises(Crash):
        run(small, out=tmp_path, listeners=[CrashAfter(2)])
    damage(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as caught:
        run(small, out=tmp_path)
    assert words in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_loses_nothing(small, tmp_path: Path, monkeypatch):
    real = tensorfile.write_atomically
    state = {"full": False}

    def write(path, content):
        if state["full"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, content)

    class Fill(CrashAfter):
        def finished_round(self, report):
            state["full"] = report.round == 2

    monkeypatch.setattr(tensorfile, "write_atomically", write)
    with pytest.raises(UserError, match=r"No space left on device.*goes on"):
        run(small, out=tmp_path, listeners=[Fill(0)])
    monkeypatch.setattr(tensorfile, "write_atomically", real)
    resumed = CrashAfter(0)
    result = run(small, out=tmp_path, listeners=[resumed])
    assert resumed.began_after == 2
    assert result.summary["weights_sha256"] == run(small).summary["weights_sha256"]


def test_a_place_that_cannot_be_written(small, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot use"):
        run(small, out=blocked / "run")


def test_own_data(small):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 1, 3, 3, generator=generator)
    labels = (images.flatten(1).mean(1) > 0.5).long()
    dataset = Dataset.from_tensors(
        "mine", (images[:150], labels[:150]), (images[150:], labels[150:])
    )
    config = small.override(**{"task": "own-softmax", "federation.samples": 20, "run.rounds": 20})
    inline = run(config, dataset=dataset)
    assert inline.final_test_accuracy > 0.7
    workers = run(
        config.override(**{"engine.kind": "workers", "engine.workers": 2}), dataset=dataset
    )
    assert workers.summary["weights_sha256"] == inline.summary["weights_sha256"]


def test_own_data_is_part_of_the_run(small, tmp_path: Path):
    def dataset(scale):
        images = torch.arange(60.0).view(60, 1, 1, 1) * scale
        pair = (images, torch.arange(60) % 2)
        return Dataset.from_tensors("mine", pair, pair, scale=1.0, mean=(0.0,), std=(1.0,))

    config = small.override(**{"task": "own-softmax", "federation.samples": 5, "run.rounds": 1})
    first = run(config, dataset=dataset(1.0), out=tmp_path)
    assert run(config, dataset=dataset(1.0), out=tmp_path) == first
    with pytest.raises(UserError, match="data_sha256"):
        run(config, dataset=dataset(2.0), out=tmp_path)
    with pytest.raises(UserError, match=r"dataset=\.\.\."):
        run(config)


def test_a_run_of_another_version_is_not_taken_for_this_ones(small, tmp_path: Path, monkeypatch):
    run(small, out=tmp_path)
    monkeypatch.setattr("deltafl.experiment.config.__version__", "9.9.9")
    with pytest.raises(UserError, match="another version"):
        run(small, out=tmp_path)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(UserError, match="another run or version"):
        run(small, out=tmp_path)


def test_validation_holds_training_rows_out_of_the_federation(small):
    config = small.override(**{"run.evaluate_on": "validation"})
    setup = build_setup(config)
    rest, held_out = hold_out(config, setup.dataset)
    assert len(held_out) == len(setup.dataset.train) // 10
    assert sorted([*rest, *held_out]) == list(range(len(setup.dataset.train)))
    used = {int(row) for client in range(6) for row in setup.partition.indices(client)}
    assert not used & set(held_out.tolist())
    assert setup.evaluated == len(held_out)
    assert run(config).final_test_accuracy != run(small).final_test_accuracy


def test_clients_are_sampled_without_repetition_and_anew_each_round(small):
    config = small.override(**{"federation.clients": 100, "federation.samples": 5})
    rounds = [sample_clients(config, number) for number in range(1, 40)]
    for clients in rounds:
        assert clients == sorted(set(clients))
        assert len(clients) == 50
        assert set(clients) <= set(range(100))
    assert len({tuple(clients) for clients in rounds}) == 39
    assert sample_clients(config, 1) == rounds[0]
    assert sample_clients(config.override(**{"run.seed": 1}), 1) != rounds[0]
