"""The ServerApp: runs an experiment on the nodes, in a run folder like any other.

What it is to do comes with the run: the configuration as TOML, the folder, and how long to wait.
It says how it goes on lines of its own, which whoever started the run reads from Flower's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from deltafl.data import Dataset
from deltafl.errors import UserError
from deltafl.experiment import Config, run
from deltafl.experiment.config import OWN_DATA, validated
from deltafl.experiment.rounds import RoundReport
from deltafl.experiment.run_folder import read_metrics, write_rows
from deltafl.flower.engine import FlowerEngine, Patience
from deltafl.flower.node import read_arrays
from deltafl.flower.wire import MalformedError, read_experiment

EVENT = "deltafl-event "
NODES = "nodes.jsonl"
# A server that was killed lets go of its run folder a moment later.
LOCK_SECONDS = 30.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment of this run's configuration, from start or from where it stopped."""
    try:
        summary = serve(grid, context.run_config)
    except (UserError, MalformedError) as error:
        say("error", text=" ".join(str(error).split()))
        raise
    say("finished", summary=summary)


def serve(grid: Grid, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run to the end and return the summary."""
    experiment = str(given["experiment"])
    config = validated(Config, read_experiment(experiment), "of the run")
    folder = Path(str(given["out"])).expanduser()
    patience = Patience(float(given["deadline"]), float(given["join"]))
    dataset = read_test_set(config, str(given["data"])) if given["data"] else None

    reporter = Reporter(folder / NODES)
    wait_for(folder)
    on_nodes = reporter.record if given["evaluate-nodes"] else None
    with FlowerEngine(grid, experiment, patience, on_nodes) as engine:
        result = run(config, out=folder, dataset=dataset, engine=engine, listeners=[reporter])
    return result.summary


def read_test_set(config: Config, path: str) -> Dataset:
    """Return the server's own test set; images are normalised by its mean and deviation.

    The server trains nobody, so the training part of the data set is never looked at.
    """
    if config.dataset_name != OWN_DATA:
        raise UserError(
            f"{config.task} brings its own test set: leave --data out, or use own-MODEL"
        )
    arrays = read_arrays(Path(path).expanduser())
    return Dataset.from_tensors(OWN_DATA, arrays, arrays)


class Reporter:
    """Says on standard output how the run goes; Flower carries it to whoever follows the log.

    What nodes say of the weights on their own samples goes to a file.
    """

    def __init__(self, nodes: Path) -> None:
        self._nodes = nodes

    def record(self, round_: int, rows: list[dict[str, Any]]) -> None:
        """Append the nodes' evaluations after a round."""
        with self._nodes.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"round": round_} | row) + "\n" for row in rows)

    def started(self, config: Config, done: int) -> None:
        """Say that the rounds begin, and forget what nodes said of rounds that come again."""
        if self._nodes.exists():
            kept = [row for row in read_metrics(self._nodes) if row["round"] <= done]
            write_rows(self._nodes, kept)
        say("started", done=done)

    def finished_round(self, report: RoundReport) -> None:
        """Say how a round went."""
        say("round", row=report.row())

    def finished(self, summary: dict[str, Any]) -> None:
        """Say nothing: a run that is found finished has to be told of, too, and is by `main`."""


def say(kind: str, **content: object) -> None:
    """Print one event on a line of its own, in one piece: Flower's log keeps pieces apart."""
    sys.stdout.write(f"{EVENT}{json.dumps({'kind': kind} | content)}\n")
    sys.stdout.flush()


def wait_for(folder: Path) -> None:
    """Wait a while until no other process holds the run folder."""
    try:
        import fcntl  # noqa: PLC0415  (not on every platform)
    except ImportError:
        return
    end = time.monotonic() + LOCK_SECONDS
    while folder.is_dir() and time.monotonic() < end:
        handle = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        finally:
            os.close(handle)
        time.sleep(0.5)
