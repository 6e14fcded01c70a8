"""Progress in the terminal and trackers, told of the same runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console

from deltafl import track as trackers
from deltafl.cli.progress import RunProgress
from deltafl.experiment import Config, Listener, Result
from deltafl.experiment.rounds import RoundReport

TRACK: list[str] = Field(
    [], description=f"who is told of every round: {', '.join(trackers.names())}"
)
"""The option of commands that run something."""


class Watching:
    """Shows runs as they go on, and tells the trackers that were asked for."""

    def __init__(
        self, console: Console, track: Sequence[str], folder_of: Callable[[Config], Path]
    ) -> None:
        self._progress = RunProgress(console)
        self._trackers = trackers.build(track, folder_of)
        # Progress comes last: it may stop the run, and by then everybody knows of the round.
        self._listeners: list[Listener] = [*self._trackers, self._progress]
        self._stack = ExitStack()

    def __enter__(self) -> Watching:
        for tracker in self._trackers:
            self._stack.enter_context(tracker)
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def planned(self, configs: Sequence[Config]) -> None:
        """So many runs are ahead."""
        self._progress.planned(configs)

    def started(self, config: Config, done: int) -> None:
        """A run begins, or goes on after `done` rounds."""
        for listener in self._listeners:
            listener.started(config, done)

    def finished_round(self, report: RoundReport) -> None:
        """A round is over and recorded."""
        for listener in self._listeners:
            listener.finished_round(report)

    def finished(self, summary: dict[str, Any]) -> None:
        """A run is over."""
        for listener in self._listeners:
            listener.finished(summary)

    def finished_run(self, result: Result) -> None:
        """A run is over, or was found finished."""
        self._progress.finished_run(result)
