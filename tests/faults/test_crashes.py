"""Whatever happens to the process of a run, the same command goes on and ends in the same bits."""

from __future__ import annotations

import json
import os
import signal

import pytest

from .conftest import RUN, STOPPED, outcome
from .forge import STAGES

WORKERS = [*RUN[:-1], "workers", "--engine.workers", "2"]


def refused(done) -> str:
    """Return the one line of a command that could not go on."""
    assert done.code == 2, done.err
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    return done.err


# Without checkpoints between rounds there is none to be killed in.
PLACES = [(stage, "0") for stage in STAGES] + [
    (stage, "3600")
    for stage in STAGES
    if "checkpoint" not in stage and stage != "after memories are forgotten"
]


@pytest.mark.parametrize(("stage", "every"), PLACES)
def test_a_kill_at_any_stage_of_a_round_loses_nothing(forge, undisturbed, tmp_path, stage, every):
    words = [*RUN, "--out", str(tmp_path / "run"), "--run.checkpoint-seconds", every]
    killed = forge(words, "stage", stage)
    assert (killed.code, killed.err, killed.left) == (-signal.SIGKILL, "", [])
    again = forge(words)
    assert (again.code, again.err, again.left) == (0, "", [])
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_round_end_and_saves_it(forge, undisturbed, tmp_path, number):
    words = [*RUN, "--out", str(tmp_path / "run"), "--run.checkpoint-seconds", "3600"]
    stopped = forge(words, "signals", [number], 2)
    assert (stopped.code, stopped.err, stopped.left) == (128 + number, STOPPED, [])
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    seconds = json.loads(rows[0])["seconds"]
    assert forge(words).code == 0
    assert outcome(tmp_path / "run") == undisturbed
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["seconds"] == seconds  # it was not run again


def test_a_second_signal_stops_at_once(forge, undisturbed, tmp_path):
    words = [*RUN, "--out", str(tmp_path / "run"), "--run.checkpoint-seconds", "0"]
    stopped = forge(words, "signals", [signal.SIGINT, signal.SIGTERM], 2)
    assert (stopped.code, stopped.err, stopped.left) == (143, STOPPED, [])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert forge(words).code == 0
    assert outcome(tmp_path / "run") == undisturbed


def test_a_signal_in_the_last_round_finishes_the_run(forge, undisturbed, tmp_path):
    stopped = forge([*RUN, "--out", str(tmp_path / "run")], "signals", [signal.SIGTERM], 4)
    assert (stopped.code, stopped.err) == (143, STOPPED)
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_round_stops_at_once(forge, tmp_path, number):
    stopped = forge([*RUN, "--out", str(tmp_path / "run")], "signal_at_start", number)
    assert (stopped.code, stopped.err, stopped.left) == (128 + number, STOPPED, [])


def test_an_ignored_signal_stays_ignored(forge, undisturbed, tmp_path):
    done = forge([*RUN, "--out", str(tmp_path / "run")], "ignored_and_sent", signal.SIGINT)
    assert (done.code, done.err) == (0, "")
    assert outcome(tmp_path / "run") == undisturbed


def test_a_comparison_that_is_stopped_goes_on(forge, tmp_path):
    words = ["compare", *RUN[1:], "--optimizers", "sgd", "--seeds", "0", "1"]
    words += ["--out", str(tmp_path / "c")]
    stopped = forge(words, "signals", [signal.SIGTERM], 6)  # in the second run
    assert (stopped.code, stopped.err, stopped.left) == (143, STOPPED, [])
    assert len(list((tmp_path / "c").glob("*/summary.json"))) == 1
    assert forge(words).code == 0
    assert len(list((tmp_path / "c").glob("*/summary.json"))) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_named_and_the_same_command_goes_on_when_there_is_room(
    forge, undisturbed, tmp_path
):
    words = [*RUN, "--out", str(tmp_path / "run"), "--run.checkpoint-seconds", "0"]
    # The disk is seen by one process only: it runs the command twice.
    done = forge(words, "full_then_freed", str(tmp_path), 100, words)
    assert done.err.count("\n") == 1, done.err
    assert "No space left on device" in done.err
    assert "goes on from the last checkpoint" in done.err
    first = json.loads(done.out.splitlines()[0])
    assert first["first"] == 2
    assert not [name for name in first["names"] if name.endswith(".tmp")]
    assert done.code == 0
    assert undisturbed[0] in done.out


def test_a_limit_of_file_sizes_is_named(forge, undisturbed, tmp_path):
    words = [*RUN, "--out", str(tmp_path / "run")]
    line = refused(forge(words, "limit", "RLIMIT_FSIZE", 10_000))
    assert "File too large" in line
    assert "ulimit -f" in line
    assert forge(words).code == 0
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("left", [1, 2, 4, 7, 10])
def test_too_few_file_handles_are_named(forge, undisturbed, tmp_path, left):
    words = [*WORKERS, "--out", str(tmp_path / "run")]
    done = forge(words, "handles_left", left)
    assert done.left == []
    if done.code != 0:
        assert "Too many open files" in refused(done)
        assert forge([*RUN, "--out", str(tmp_path / "run")]).code == 0
    assert outcome(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("owner", ["client", "server"])
def test_no_memory_is_one_line(forge, undisturbed, tmp_path, owner):
    words = [*RUN, "--out", str(tmp_path / "run")]
    line = refused(forge(words, "no_memory_for", owner))
    assert "memory" in line
    assert forge(words).code == 0
    assert outcome(tmp_path / "run") == undisturbed


def test_shared_memory_that_the_system_refuses_is_named(forge, tmp_path):
    words = [*WORKERS, "--out", str(tmp_path / "run"), "--model.width", "4096"]
    line = refused(forge(words, "limit", "RLIMIT_FSIZE", 2_000_000))
    assert "cannot share" in line
    assert "--engine.workers" in line
