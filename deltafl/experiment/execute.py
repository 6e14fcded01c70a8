"""Run one experiment from start, or from where it stopped, to its end."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from deltafl import engine as engines
from deltafl.data.dataset import Dataset
from deltafl.engine import Engine
from deltafl.errors import UserError
from deltafl.experiment.config import Config
from deltafl.experiment.federation import build_setup
from deltafl.experiment.memory import ClientMemory
from deltafl.experiment.rounds import RoundReport, Rounds
from deltafl.experiment.run_folder import MEMORY, METRICS, RunFolder, read_metrics
from deltafl.version import __version__


class Listener(Protocol):
    """Somebody who watches a run: progress, a tracker, a live page."""

    def started(self, config: Config, done: int) -> None:
        """A run begins, or goes on after `done` rounds."""

    def finished_round(self, report: RoundReport) -> None:
        """A round is over and recorded."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is over."""


@dataclass(frozen=True)
class Result:
    """A finished run: its summary, a row a round, and its folder if it has one."""

    config: Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]] = field(repr=False)
    folder: Path | None = None

    @property
    def final_test_accuracy(self) -> float:
        """The accuracy of the last round's global weights on the test set."""
        return float(self.summary["final_test_accuracy"])


def run(
    config: Config,
    *,
    out: Path | str | None = None,
    dataset: Dataset | None = None,
    engine: Engine | None = None,
    listeners: Sequence[Listener] = (),
) -> Result:
    """Run an experiment; with `out`, in a folder where it can be resumed.

    A run that is finished there is not run again. `dataset` is data of your own, for a task such
    as own-mlp, and `engine` one that is already open (several runs can share it).
    """
    if dataset is not None:
        # What is computed depends on it, so the run's identity does, too.
        config = config.override(data_sha256=dataset.fingerprint())
    with contextlib.ExitStack() as stack:
        folder = None
        if out is not None:
            folder = RunFolder(Path(out), config)
            try:
                stack.enter_context(folder.claimed())
            except OSError as error:
                raise UserError(
                    f"cannot use {out} as a run folder: {error.strerror}; choose another --out"
                ) from None
            summary = folder.summary()
            if summary is not None:
                return Result(config, summary, read_metrics(folder.path / METRICS), folder.path)
        if engine is None:
            chosen = config.engine
            built = engines.build(chosen.kind, chosen.workers, chosen.address)
            engine = stack.enter_context(built)
        rounds = Rounds(config, build_setup(config, dataset), engine)
        if folder is None:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="deltafl-"))
            memory_folder = Path(temporary)
        else:
            folder.resume(rounds)
            memory_folder = folder.path / MEMORY
        return _go(rounds, folder, memory_folder, listeners)


def _go(
    rounds: Rounds, folder: RunFolder | None, memory_folder: Path, listeners: Iterable[Listener]
) -> Result:
    config = rounds.config
    memory = ClientMemory(memory_folder, rounds.done) if rounds.remembers else None
    rows = read_metrics(folder.path / METRICS) if folder else []
    for listener in listeners:
        listener.started(config, rounds.done)
    try:
        for report in rounds.run(memory):
            rows.append(report.row())
            if folder is not None:
                folder.record(report)
                if folder.checkpoint_due(report):
                    folder.checkpoint(rounds, [] if memory is None else memory.newest())
                    if memory is not None:
                        memory.forget(report.round)
            elif memory is not None:
                memory.forget(report.round)
            for listener in listeners:
                listener.finished_round(report)
        summary = _summary(rounds, rows)
        if folder is not None:
            folder.finish(summary)
    except OSError as error:
        where = error.filename or (folder.path if folder else "a temporary folder")
        raise UserError(
            f"cannot write {where}: {error.strerror}; once that is mended, the same command "
            "goes on from the last checkpoint"
        ) from None
    for listener in listeners:
        listener.finished(summary)
    return Result(config, summary, rows, folder.path if folder else None)


def _summary(rounds: Rounds, rows: list[dict[str, Any]]) -> dict[str, Any]:
    evaluated = [row for row in rows if row["test_accuracy"] is not None]
    last = evaluated[-1]
    return {
        "final_test_accuracy": last["test_accuracy"],
        "final_test_loss": last["test_loss"],
        "best_test_accuracy": max(row["test_accuracy"] for row in evaluated),
        "rounds": rounds.done,
        "refused_updates": sum(len(row.get("refused", ())) for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        "weights_sha256": rounds.weights_sha256(),
        "run": rounds.config.hash,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "native_kernels": rounds.native,
        "versions": {"deltafl": __version__, "torch": torch.__version__},
    }
