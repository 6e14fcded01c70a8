"""Live progress in a terminal: the round, how it goes, and the time left. Quiet in a pipe.

Whoever shows the rounds also stops between them when a signal has asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from deltafl.cli.stopping import AfterRound
from deltafl.experiment import Config, Result
from deltafl.experiment.rounds import RoundReport


class RunProgress:
    """Shows a run, or the runs of a comparison, while they go on."""

    def __init__(self, console: Console, *, finish_rounds: bool = True) -> None:
        """Prepare to show on a console; a signal lets the round end, or is left to others."""
        self._finish_rounds = finish_rounds
        self._runs: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[details]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._rounds = self._progress.add_task("round", details="", visible=False)
        self._evaluation = ""
        self._went_on = False
        self._stopping = AfterRound()
        self._last_round = 0

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.__exit__()
        self._progress.stop()

    def planned(self, configs: Sequence[Config]) -> None:
        """Show how many runs there are; their time left counts rounds, not runs."""
        total = sum(config.run.rounds for config in configs)
        self._runs = self._progress.add_task(f"all {len(configs)} runs", total=total, details="")

    def started(self, config: Config, done: int) -> None:
        """Begin a new bar for a run."""
        if self._finish_rounds:
            self._stopping = AfterRound().__enter__()
        self._last_round = config.run.rounds
        self._evaluation = ""
        self._went_on = True
        name = f"{config.task} α={config.federation.alpha:g} {config.client.optimizer}"
        self._progress.reset(
            self._rounds,
            description=name if self._runs is not None else "round",
            total=config.run.rounds,
            completed=done,
            visible=True,
        )
        if self._runs is not None:
            self._progress.advance(self._runs, done)

    def finished_round(self, report: RoundReport) -> None:
        """Advance, tell how the round went, and stop if that was asked for meanwhile."""
        if report.evaluation is not None:
            accuracy, loss = report.evaluation.accuracy, report.evaluation.loss
            self._evaluation = f"accuracy {accuracy:.1%}  loss {loss:.3f}  "
        step = "" if report.step_size is None else f"step size {report.step_size:.3g}  "
        speed = report.clients / max(report.seconds, 1e-9)
        details = f"{self._evaluation}{step}{speed:.0f} clients/s"
        if report.refused:
            details += f"  [red]{len(report.refused)} refused[/]"
        if report.unchanged:
            details += "  [red]no update left: old weights kept[/]"
        self._progress.update(self._rounds, completed=report.round, details=details)
        if self._runs is not None:
            self._progress.advance(self._runs, 1)
        if report.round < self._last_round:  # after the last one there is a summary to write
            self._stopping.check()

    def finished(self, summary: dict[str, Any]) -> None:
        """Show nothing: whoever started the run prints its result. Stop if that was asked for."""
        self._stopping.__exit__()
        self._stopping.check()

    def finished_run(self, result: Result) -> None:
        """Count a run that was found finished; the others have counted their rounds."""
        if self._runs is not None and not self._went_on:
            self._progress.advance(self._runs, result.config.run.rounds)
        self._went_on = False
