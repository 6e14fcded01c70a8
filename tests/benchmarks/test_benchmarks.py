"""The benchmarks compare like with like: the plain models are deltafl's, and the loops average."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import compare, fleet, memory, report
from benchmarks.environments import ROOT
from benchmarks.faults import load
from benchmarks.federation import tiny
from benchmarks.items import cluster
from benchmarks.session import FailedError, Session, System
from benchmarks.systems.nets import NETS
from deltafl import models

SHAPES = {"cnn": (1, 28, 28), "softmax": (1, 8, 8), "mlp": (1, 8, 8), "resnet18": (3, 32, 32)}


@pytest.mark.parametrize("name", NETS)
def test_plain_models_compute_what_deltafls_do(name):
    ours = models.build(name, shape=SHAPES[name], classes=10, seed=0).eval()
    plain = NETS[name]().eval()
    plain.load_state_dict(ours.state_dict())
    inputs = torch.randn(4, *SHAPES[name], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(plain(inputs), ours(inputs), rtol=1e-4, atol=1e-5)


def test_all_systems_do_the_same_work():
    """One step on all samples and no dropout: only rounding is left to differ."""
    fields = tiny("softmax")
    systems = [fleet.deltafl(fields), fleet.loop(fields, 1), fleet.loop_processes(fields)]
    accuracies = []
    for system in systems:
        with Session(system) as session:
            assert len(session.run(4)) == 4
            session.run(8)
            accuracies.append(session.accuracy())
    assert accuracies == pytest.approx([accuracies[0]] * 3, abs=0.003)
    assert accuracies[0] > 0.5


def test_a_system_that_dies_says_why():
    system = System("broken", "loop", {"folder": "nowhere", "threads": 1, "channels_last": False})
    with pytest.raises(FailedError, match="it ended: FileNotFoundError"):
        Session(system)


def test_ratio_is_of_medians_and_by_repeat():
    slow = compare.Series(blocks=[[2.0, 4.0, 3.0], [6.0]])
    fast = compare.Series(blocks=[[1.0], [2.0, 2.0]])
    result = compare.ratio(slow, fast)
    assert result.of_medians == 3.5 / 2
    assert result.repeats == [3.0, 3.0]
    assert slow.mad == 1.0


def test_a_failed_system_stays_in_the_table():
    results = {"a": compare.Series(blocks=[[1.0]]), "b": compare.Series(failure="not installed")}
    rows = compare.rows(results, "a")
    assert rows[1][:2] == ["b", "failed: not installed"]


def test_the_costs_of_a_round_are_found_again():
    shapes = [cluster.Shape(clients, size, 2) for clients in (10, 200) for size in (2_600, 90_000)]
    shapes += [cluster.Shape(10, 10**7, 2), cluster.Shape(10, 2_600, 8)]
    true = [0.002, 0.0005, 0.0001, 0.0]
    seconds = [sum(a * b for a, b in zip(true, shape.parts, strict=True)) for shape in shapes]
    assert cluster.fit(shapes, seconds) == pytest.approx(true, abs=1e-6)


def test_large_weights_leave_the_main_process_once():
    assert cluster.Shape(10, 90_000, 5).megabytes == pytest.approx(15 * 0.09)
    assert cluster.Shape(10, 10**6, 5).megabytes == pytest.approx(11)


def test_memory_counts_descendants():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        for _ in range(200):
            if len(memory.tree(process.pid)) == 2:
                break
            time.sleep(0.05)
        assert len(memory.tree(process.pid)) == 2
        assert all(memory.usage(pid) for pid in memory.tree(process.pid))
        process.communicate(b"\n")
    assert memory.usage(os.getpid()) is not None


def test_report_warns_of_a_busy_machine(tmp_path: Path):
    about = {
        "hardware": {"cpu": "x", "cores": 2, "memory_gib": 1, "system": "y"},
        "started": "now",
        "command": "c",
        "minutes": 1.0,
        "load_before": [3.0, 1.0, 1.0],
        "load_after": [0.0, 0.0, 0.0],
        "software": {"python": "3"},
    }
    order = ["i", "j"]
    one = {"i": report.Outcome("T", [report.Table("t", ["a"], [["1"]])], ["n"], about=about)}
    assert "do not quote" in report.write(tmp_path, "quick", one, order).read_text()
    idle = {**about, "load_before": [0.1, 1.0, 1.0]}
    other = {"j": report.Outcome("U", about=idle)}
    text = report.write(tmp_path, "quick", other, order).read_text()
    # What was not measured again stays, with what is said of it.
    assert text.count("do not quote") == 1
    assert (
        text.index("## T") < text.index("do not quote") < text.index("| 1 |") < text.index("## U")
    )
    again = {"i": report.Outcome("T", about=idle)}
    assert "do not quote" not in report.write(tmp_path, "quick", again, order).read_text()


def test_the_slope_of_a_line_is_found_with_its_error():
    times = list(range(20))
    rate, error = load.slope(times, [3.0 + 0.5 * time for time in times])
    assert rate == pytest.approx(0.5)
    assert error == pytest.approx(0, abs=1e-9)
    rate, error = load.slope(times, [time % 2 for time in times])
    assert abs(rate) < 2 * error


@pytest.mark.federation
@pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans, as only Linux lets it")
def test_a_few_kills_and_a_little_load_break_nothing(tmp_path):
    def measured(module: str, *words: str) -> str:
        command = [sys.executable, "-m", f"benchmarks.faults.{module}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = tmp_path / "kills"
    measured("kills", "--kills", "inline=3", "--scratch", str(tmp_path), "--out", str(out))
    assert "0 broken promises" in out.with_suffix(".md").read_text()
    words = ("--clients", "50", "--rounds", "8", "--workers", "1", "--out", str(tmp_path))
    assert "8 rounds of 50 clients" in measured("load", *words)
