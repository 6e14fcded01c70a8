from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

STOPPED = "deltafl: stopped; the same command goes on where it stopped\n"
RUN = """run --task digits-mlp --client.objective moon --federation.clients 6
    --federation.samples 30 --federation.participation 0.5 --client.batch-size 8
    --run.rounds 4 --engine.kind inline""".split()  # noqa: SIM905


class Forge:
    """Starts commands, attacked or not."""

    def __init__(self, process: subprocess.Popen[str], scratch: Path) -> None:
        self._process = process
        self._scratch = scratch

    def __call__(self, words: list[str], *attack: object) -> SimpleNamespace:
        request = {"words": words, "attack": attack or ["nothing"], "scratch": str(self._scratch)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return SimpleNamespace(**json.loads(self._process.stdout.readline()))


@pytest.fixture(scope="session")
def forge(tmp_path_factory):
    """A process that has imported torch, and forks a command for every call."""
    if sys.platform != "linux":
        pytest.skip("it looks into /proc and limits resources as Linux does")
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forge.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Forge(process, tmp_path_factory.mktemp("scratch"))
        process.stdin.close()


def outcome(folder: Path) -> tuple[str, list[dict[str, object]], set[str]]:
    """Return the checksum of a finished run, its rows without the clock, and its files."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {path.name for path in folder.iterdir()}
    return summary["weights_sha256"], [{**row, "seconds": 0} for row in rows], names


@pytest.fixture(scope="session")
def undisturbed(forge, tmp_path_factory):
    """What the run of these tests ends in when nobody attacks it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = forge([*RUN, "--out", str(folder)])
    assert (done.code, done.err, done.left) == (0, "", [])
    return outcome(folder)
