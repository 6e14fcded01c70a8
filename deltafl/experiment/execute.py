"""Run one experiment from start, or from where it stopped, to its end."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from deltafl import engine as engines
from deltafl.data.dataset import AnyDataset
from deltafl.engine import Engine
from deltafl.errors import UserError, explained
from deltafl.experiment.config import Config
from deltafl.experiment.federation import build_setup
from deltafl.experiment.memory import ClientMemory
from deltafl.experiment.rounds import RoundReport, Rounds
from deltafl.experiment.run_folder import CHECKPOINT, MEMORY, METRICS, RunFolder, read_metrics
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


class DivergedError(UserError):
    """The global weights are no longer a model. The result is that of the rounds until then."""

    def __init__(self, result: Result) -> None:
        self.result = result
        super().__init__(divergence(result))


def divergence(result: Result) -> str:
    """Say in one line when and why a run diverged, and what is left of it."""
    how = result.summary["diverged"]
    text = f"the global weights diverged in round {result.summary['rounds']}: {how['reason']}; "
    if "client" in how:
        text += (
            f"client {how['client']} went farthest, {how['length']:.3g} in round {how['round']}, "
            f"with a mean step size of {how['step_size']:.3g}; "
        )
    if result.folder is not None:
        text += f"{result.folder / CHECKPOINT} has the last good weights, "
        text += f"of round {how['good_round']}; "
    return (
        text + "use a smaller --client.lr, or --server.aggregate geometric-median for bad clients"
    )


def run(
    config: Config,
    *,
    out: Path | str | None = None,
    dataset: AnyDataset | None = None,
    engine: Engine | None = None,
    listeners: Sequence[Listener] = (),
) -> Result:
    """Run an experiment; with `out`, in a folder where it can be resumed.

    A run that is finished there is not run again. `dataset` is data of your own, for a task such
    as own-mlp, and `engine` one that is already open (several runs can share it). A run whose
    global weights diverge ends with a `DivergedError`, which has its result.
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
                folder.tidy()  # the run may have been killed just after it had written it
                rows = read_metrics(folder.path / METRICS)
                return _sound(Result(config, summary, rows, folder.path))
        stack.enter_context(_refusals_explained(folder))
        if engine is None:
            chosen = config.engine
            built = engines.build(chosen.kind, chosen.workers, chosen.address)
            engine = stack.enter_context(built)
        rounds = Rounds(config, build_setup(config, dataset), engine)
        memory = None
        if folder is not None:
            folder.resume(rounds)
        if rounds.remembers:
            place = folder.path / MEMORY if folder is not None else None
            if place is None:
                temporary = tempfile.TemporaryDirectory(prefix="deltafl-")
                place = Path(stack.enter_context(temporary))
            memory = ClientMemory(place, rounds.done)
        return _go(rounds, folder, memory, listeners)


@contextlib.contextmanager
def _refusals_explained(folder: RunFolder | None) -> Iterator[None]:
    """Say what to do when the system has no room, handles or memory left."""
    try:
        yield
    except OSError as error:
        again = "; after that the same command goes on from the last checkpoint" if folder else ""
        raise UserError(explained(error, folder and folder.path) + again) from None


def _go(
    rounds: Rounds,
    folder: RunFolder | None,
    memory: ClientMemory | None,
    listeners: Sequence[Listener],
) -> Result:
    config = rounds.config
    rows = read_metrics(folder.path / METRICS) if folder else []
    for listener in listeners:
        listener.started(config, rounds.done)
    for report in rounds.run(memory):
        rows.append(report.row())
        if folder is not None:
            folder.record(report)
        if report.divergence is not None:
            rounds.back_to_good()
        saved = folder is None or report.divergence is not None or folder.checkpoint_due(report)
        if saved:
            _save(rounds, folder, memory)
        try:
            for listener in listeners:
                listener.finished_round(report)
        except KeyboardInterrupt:  # whoever stops a run between two rounds loses nothing
            if not saved:
                _save(rounds, folder, memory)
            raise
    summary = _summary(rounds, rows)
    if folder is not None:
        folder.finish(summary)
    for listener in listeners:
        listener.finished(summary)
    return _sound(Result(config, summary, rows, folder.path if folder else None))


def _sound(result: Result) -> Result:
    if "diverged" in result.summary:
        raise DivergedError(result)
    return result


def _save(rounds: Rounds, folder: RunFolder | None, memory: ClientMemory | None) -> None:
    """Write a checkpoint, and forget what no checkpoint needs any more."""
    if folder is not None:
        needed = memory.newest() if memory is not None and rounds.ended is None else []
        folder.checkpoint(rounds, needed)
    if memory is not None:
        memory.forget(rounds.done)


def _summary(rounds: Rounds, rows: list[dict[str, Any]]) -> dict[str, Any]:
    evaluated = [row for row in rows if row["test_accuracy"] is not None]
    last = evaluated[-1]
    summary = {
        "final_test_accuracy": last["test_accuracy"],
        "final_test_loss": last["test_loss"],
        "best_test_accuracy": max(row["test_accuracy"] for row in evaluated),
        "rounds": rows[-1]["round"],
        "refused_updates": sum(len(row.get("refused", ())) for row in rows),
        "unchanged_rounds": sum(row.get("unchanged", False) for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 3),
        "weights_sha256": rounds.weights_sha256(),
        "run": rounds.config.hash,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "native_kernels": rounds.native,
        **({"data": rounds.data_part} if rounds.data_part else {}),
        "versions": {"deltafl": __version__, "torch": torch.__version__},
    }
    return summary | ({"diverged": rows[-1]["diverged"]} if "diverged" in rows[-1] else {})
