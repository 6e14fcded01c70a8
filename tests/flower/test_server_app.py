from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from deltafl import UserError, run
from deltafl.data import load
from deltafl.flower import server_app
from deltafl.flower.control import _events, bundle


def given(config, out, **changes):
    plain = {"deadline": 5.0, "join": 0.2, "data": "", "evaluate-nodes": False}
    return plain | {"experiment": config.to_toml(), "out": str(out)} | changes


def events(text):
    return list(_events(text.split("\n")))


def test_a_run_says_how_it_goes_and_leaves_a_run_folder(small, grid, tmp_path, capsys):
    context = SimpleNamespace(run_config=given(small, tmp_path / "run", **{"evaluate-nodes": True}))
    server_app.app(grid, context)
    heard = events(capsys.readouterr().out)
    assert [event["kind"] for event in heard] == ["started", *["round"] * 3, "finished"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert heard[-1]["summary"] == summary
    assert summary["weights_sha256"] == run(small).summary["weights_sha256"]
    text = (tmp_path / "run" / "nodes.jsonl").read_text()
    rows = [json.loads(row) for row in text.splitlines()]
    assert {row["round"] for row in rows} == {1, 2, 3}
    server_app.app(grid, context)  # a finished run is only told of
    assert [event["kind"] for event in events(capsys.readouterr().out)] == ["finished"]


def test_rounds_that_come_again_are_told_of_once(small, tmp_path, capsys):
    reporter = server_app.Reporter(tmp_path / "nodes.jsonl")
    for round_ in (1, 2, 3):
        reporter.record(round_, [{"client": 0}, {"client": 1}])
    with (tmp_path / "nodes.jsonl").open("a") as file:
        file.write('{"round": 4, "cli')  # killed in the middle
    reporter.started(small, 2)
    reporter.record(3, [{"client": 1}])
    rows = [json.loads(row) for row in (tmp_path / "nodes.jsonl").read_text().splitlines()]
    assert [(row["round"], row["client"]) for row in rows] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (3, 1),
    ]


def test_what_is_wrong_is_said_in_one_line(small, grid, tmp_path, capsys):
    grid.nodes.clear()
    context = SimpleNamespace(run_config=given(small, tmp_path / "run"))
    with pytest.raises(UserError):
        server_app.app(grid, context)
    *_, event = events(capsys.readouterr().out)
    assert event["kind"] == "error"
    assert "no node joined" in event["text"]


def test_a_task_without_a_data_set_of_ours(small, grid, tmp_path):
    config = small.override(**{"task": "own-mlp", "federation.participation": 1.0})
    digits = load("digits")
    images, labels = digits.train.inputs.numpy(), digits.train.labels.numpy()
    np.savez(tmp_path / "test.npz", inputs=images[:300], labels=labels[:300])
    for client in range(6):
        rows = slice(300 + 150 * client, 450 + 150 * client)
        np.savez(tmp_path / f"{client}.npz", inputs=images[rows], labels=labels[rows])
        grid.nodes[100 + client]["data"] = str(tmp_path / f"{client}.npz")
    data = str(tmp_path / "test.npz")
    summary = server_app.serve(grid, given(config, tmp_path / "run", data=data))
    assert summary["refused_updates"] == 0
    assert summary["final_test_accuracy"] > 0.5
    with pytest.raises(UserError, match="brings its own test set"):
        server_app.serve(grid, given(small, tmp_path / "other", data=data))
    del grid.nodes[100]["data"]
    summary = server_app.serve(grid, given(config, tmp_path / "third", data=data))
    assert summary["refused_updates"] == 3


def test_it_waits_for_a_server_that_is_about_to_end(tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    threading.Timer(0.3, os.close, [handle]).start()
    start = time.monotonic()
    server_app.wait_for(tmp_path)
    assert time.monotonic() - start >= 0.25
    server_app.wait_for(tmp_path / "nothing")


def test_other_lines_of_a_log_are_no_events():
    lines = [
        "INFO : deltafl",
        'deltafl-event {"kind": "round"}',
        "deltafl-event {",
        "deltafl-event 3",
    ]
    assert list(_events(lines)) == [{"kind": "round"}]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_bundle_has_a_key_for_everything_a_run_is_told(small, tmp_path):
    content = bundle(given(small, tmp_path))
    assert content[:2] == b"PK"
    assert content == bundle(given(small, tmp_path))
