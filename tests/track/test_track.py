from __future__ import annotations

import importlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltafl import track
from deltafl.cli import main
from deltafl.experiment import Config, run
from deltafl.experiment.rounds import RoundReport

SMALL = """--task digits-softmax --federation.clients 6 --federation.samples 30
    --federation.participation 0.5 --client.batch-size 8 --run.rounds 4
    --engine.kind inline""".split()  # noqa: SIM905

NAMES = {"accuracy", "loss", "train_loss", "step_size", "seconds", "refused"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No account, no network, and nothing outside of the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Stop(Exception):
    """A crash."""


class Crash:
    """A listener that fails after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def started(self, config: Config, done: int) -> None:
        pass

    def finished_round(self, report: RoundReport) -> None:
        if report.round == self.rounds:
            raise Stop

    def finished(self, summary: dict[str, Any]) -> None:
        pass


def crash_then_resume(name: str, folder: Path) -> Config:
    """Stop after round 3 with a checkpoint of round 2 only, then go on to the end."""
    config = Config.model_validate(
        {
            "task": "digits-softmax",
            "federation": {"clients": 6, "samples": 30},
            "run": {"rounds": 5, "checkpoint_seconds": 0},
            "engine": {"kind": "inline"},
        }
    )
    for rounds in (2, 3):
        (tracker,) = track.build([name], lambda _: folder)
        # The second attempt loses its last round, as a power cut would.
        kept = config if rounds == 2 else config.override(**{"run.checkpoint_seconds": 1000})
        with tracker, pytest.raises(Stop):
            run(kept, out=folder, listeners=[tracker, Crash(rounds)])
    (tracker,) = track.build([name], lambda _: folder)
    with tracker:
        run(config, out=folder, listeners=[tracker])
    return config


# --- TensorBoard -----------------------------------------------------------------------------


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "histograms", "tensors"), 0)
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    return found


def test_tensorboard_has_every_number_of_a_run() -> None:
    words = ["run", *SMALL, "--run.record-step-sizes", "--track", "tensorboard", "--out", "x"]
    assert main(words) == 0
    found = events(Path("x"))
    assert set(found.Tags()["scalars"]) == NAMES
    recorded = rows(Path("x"))
    for name, key in (("accuracy", "test_accuracy"), ("step_size", "step_size")):
        points = [(event.step, event.value) for event in found.Scalars(name)]
        assert points == [(row["round"], pytest.approx(row[key])) for row in recorded]
    histograms = found.Histograms("step_sizes")
    assert [event.step for event in histograms] == [1, 2, 3, 4]
    taken = [eta for client in recorded[0]["steps"].values() for eta in client["eta"]]
    assert histograms[0].histogram_value.num == len(taken)
    assert histograms[0].histogram_value.max == pytest.approx(max(taken))
    texts = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in found.Tags()["tensors"]
    }
    assert "digits-softmax" in texts["config/text_summary"]
    summary = json.loads(Path("x/summary.json").read_text())
    assert summary["weights_sha256"] in texts["summary/text_summary"]


def test_tensorboard_has_each_round_once_after_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    crash_then_resume("tensorboard", folder)
    found = events(folder)
    assert [event.step for event in found.Scalars("accuracy")] == [1, 2, 3, 4, 5]
    expected = [row["test_accuracy"] for row in rows(folder)]
    assert [event.value for event in found.Scalars("accuracy")] == pytest.approx(expected)
    assert len(found.Tensors("config/text_summary")) == 1


# --- Weights & Biases ------------------------------------------------------------------------


def wandb_records(folder: Path) -> list[Any]:
    """Everything that the offline runs of a folder hold, the oldest first."""
    deadline = time.monotonic() + 30
    while True:
        files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
        logs = [[parsed(entry) for entry in log_entries(file.read_bytes())] for file in files]
        # wandb's own process writes a little later than it says that it has.
        if all(any(record.HasField("exit") for record in log) for log in logs):
            return [record for log in logs for record in log]
        assert time.monotonic() < deadline, "wandb never wrote the end of a run"
        time.sleep(0.1)


def parsed(entry: bytes) -> Any:
    from wandb.proto.wandb_internal_pb2 import Record

    record = Record()
    record.ParseFromString(entry)
    return record


def log_entries(raw: bytes) -> Iterator[bytes]:
    """Read LevelDB's log format: fragments in blocks of 32 KiB, after a header of wandb's own."""
    assert raw[:4] == b":W&B"
    place, whole = 7, b""
    while place + 7 <= len(raw):
        left = 32768 - place % 32768
        if left < 7:  # too short for a fragment: the rest of the block is empty
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + 7])
        if place + 7 + length > len(raw):
            return  # still being written
        whole += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole entry, or the last fragment of one
            yield whole
            whole = b""


def items(changes: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in changes}


def test_wandb_has_every_number_of_a_run() -> None:
    assert main(["run", *SMALL, "--run.record-step-sizes", "--track", "wandb", "--out", "x"]) == 0
    records = wandb_records(Path("x"))
    (begun,) = (record.run for record in records if record.HasField("run"))
    assert begun.project == "deltafl"
    assert begun.display_name.startswith("digits-softmax")
    assert begun.run_id == Path("x/wandb-run-id").read_text()
    config = items(begun.config.update)
    assert config["task"] == "digits-softmax"
    history = [items(record.history.item) for record in records if record.HasField("history")]
    recorded = rows(Path("x"))
    assert [row["_step"] for row in history] == [1, 2, 3, 4]
    for name, key in (("accuracy", "test_accuracy"), ("step_size", "step_size")):
        assert [row[name] for row in history] == [row[key] for row in recorded]
    assert set(history[0]) >= NAMES
    taken = [eta for client in recorded[0]["steps"].values() for eta in client["eta"]]
    histogram = history[0].get("step_sizes") or {
        key.partition(".")[2]: value
        for key, value in history[0].items()
        if key.startswith("step_sizes.")
    }
    assert sum(histogram["values"]) == len(taken)
    ended: dict[str, Any] = {}
    for record in records:
        if record.HasField("summary"):
            ended |= items(record.summary.update)
    summary = json.loads(Path("x/summary.json").read_text())
    assert ended["weights_sha256"] == summary["weights_sha256"]
    assert not Path("wandb").exists()


def test_wandb_goes_on_with_the_same_run_after_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    crash_then_resume("wandb", folder)
    records = wandb_records(folder)
    ids = {record.run.run_id for record in records if record.HasField("run")}
    assert ids == {(folder / "wandb-run-id").read_text()}
    steps = [
        items(record.history.item)["_step"] for record in records if record.HasField("history")
    ]
    # The round that the crash lost is the only one told twice.
    assert steps == [1, 2, 3, 3, 4, 5]


# --- both ------------------------------------------------------------------------------------


def test_a_comparison_gives_each_run_a_tracker_of_its_own() -> None:
    words = ["compare", *SMALL, "--optimizers", "sgd", "delta-sgd", "--out", "c"]
    assert main([*words, "--track", "tensorboard", "wandb"]) == 0
    folders = [path.parent for path in Path("c").glob("*/summary.json")]
    assert len(folders) == 2
    for folder in folders:
        assert [event.step for event in events(folder).Scalars("accuracy")] == [1, 2, 3, 4]
        begun = [record.run for record in wandb_records(folder) if record.HasField("run")]
        assert [each.display_name for each in begun] == [folder.name]
    assert len({(folder / "wandb-run-id").read_text() for folder in folders}) == 2


def test_wandb_without_an_account(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wandb:
        Error = ValueError
        Settings = dict

        @staticmethod
        def init(**_: Any) -> None:
            raise ValueError("No API key configured.")

    monkeypatch.setattr("deltafl.track.weights_and_biases.load", lambda _: Wandb)
    assert main(["run", *SMALL, "--track", "wandb", "--out", "x"]) == 2
    error = capsys.readouterr().err
    assert "cannot start: No API key configured; WANDB_MODE=offline" in error
    assert error.count("\n") == 1


def test_an_unknown_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--track", "tensorbord", "--out", "x"]) == 2
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err
    assert not Path("x").exists()


@pytest.mark.parametrize("name", track.names())
def test_a_tracker_that_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(module: str, *_: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module)

    real = importlib.import_module
    monkeypatch.setattr("deltafl.track.base.importlib.import_module", absent)
    assert main(["run", *SMALL, "--track", name, "--out", "x"]) == 2
    error = capsys.readouterr().err
    assert "pip install deltafl[track]" in error
    assert error.count("\n") == 1
    assert not Path("x").exists()


def test_nobody_who_does_not_track_waits_for_the_trackers() -> None:
    code = "import sys, deltafl.cli; print({'wandb', 'tensorboard'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
