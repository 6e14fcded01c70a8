"""Run folders as what a page shows of them, whether they are finished, half done or broken."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deltafl.errors import UserError
from deltafl.experiment.config import Config, Finite, RecordedConfig, read_toml, validated
from deltafl.experiment.run_folder import CONFIG, METRICS, SUMMARY, read_metrics
from deltafl.untrusted import LARGEST_ROWS, LARGEST_TEXT, read_plain


class StepTrace(NamedTuple):
    """The local steps of one client in a round; `start` counts the steps of earlier rounds."""

    round: int
    start: int
    smoothness: Sequence[float | None]
    growth: Sequence[float | None]
    eta: Sequence[float | None]


@dataclass(frozen=True)
class RunView:
    """What a page shows of a run; a configuration and a curve are enough to show one."""

    config: Config
    curve: Sequence[Sequence[float]]
    """[round, accuracy] of every evaluated round; accuracies lie between 0 and 1."""
    summary: Mapping[str, Any] | None = None
    """summary.json, or None of a run that is not finished."""
    losses: Sequence[float | None] = ()
    """The test loss of every point of the curve, or nothing."""
    steps: Sequence[StepTrace] = ()
    """The first client of each round, where step sizes were recorded."""
    rounds_done: int | None = None
    seconds: float | None = None
    refused: int = 0
    name: str = ""
    """The folder, or whatever tells this run from the others."""
    scale: str | None = None
    """How the run's size relates to the paper's, where that is known."""

    @property
    def done(self) -> int:
        """How many rounds are over."""
        if self.rounds_done is not None:
            return self.rounds_done
        return int(self.curve[-1][0]) if self.curve else 0

    @property
    def final(self) -> float | None:
        """The final accuracy of a finished run."""
        return None if self.summary is None else float(self.summary["final_test_accuracy"])


def read_runs(path: Path | str) -> tuple[list[RunView], list[str]]:
    """Return the runs in and below a folder, and a line about each that cannot be read."""
    reader = RunReader(Path(path))
    reader.refresh()
    return reader.runs, reader.warnings


class RunReader:
    """The runs in and below a folder; a file that has not changed is not read again."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder: give one with run folders in or below it")
        self._root = root
        self._known: dict[Path, tuple[_Stamps, RunView | str]] = {}

    def refresh(self) -> bool:
        """Look again, and say whether anything has changed."""
        found = {}
        changed = False
        for folder in _run_folders(self._root):
            # Taken before reading: what changes meanwhile is seen next time.
            stamps = tuple(_stamp(folder / name) for name in (CONFIG, METRICS, SUMMARY))
            known = self._known.get(folder)
            if known is None or known[0] != stamps:
                known = stamps, self._view(folder)
                changed = True
            found[folder] = known
        changed = changed or found.keys() != self._known.keys()
        self._known = found
        return changed

    @property
    def runs(self) -> list[RunView]:
        """The runs that could be read."""
        return [view for _, view in self._known.values() if isinstance(view, RunView)]

    @property
    def warnings(self) -> list[str]:
        """A line about each of the others: which, and why."""
        return [f"skipped {view}" for _, view in self._known.values() if isinstance(view, str)]

    def _view(self, folder: Path) -> RunView | str:
        name = str(folder.relative_to(self._root))
        try:
            return _read(folder, folder.resolve().name if name == "." else name)
        except (UserError, OSError) as error:
            return f"{folder}: {' '.join(str(error).split())}"


_Stamps = tuple[tuple[int, int] | None, ...]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _run_folders(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        if CONFIG in files and METRICS in files:
            below.clear()  # what lies inside a run belongs to it
            yield Path(folder)
        below.sort()


Fraction = Annotated[float, Field(ge=0, le=1)]


class _Steps(BaseModel):
    """Step sizes of a client; None is what JSON cannot write."""

    smoothness: list[Finite | None]
    growth: list[Finite | None]
    eta: list[Finite | None]

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        if not len(self.smoothness) == len(self.growth) == len(self.eta):
            raise ValueError("has lists of different lengths")
        return self


class _Row(BaseModel):
    """What is needed of a line of metrics.jsonl."""

    round: int
    test_accuracy: Fraction | None
    test_loss: Finite | None = None
    seconds: Finite = 0.0
    refused: dict[str, str] = {}
    steps: dict[str, _Steps] = {}


class _Divergence(BaseModel):
    """Why a run stopped before its last round."""

    reason: str


class _Summary(BaseModel):
    """What is needed of summary.json."""

    model_config = ConfigDict(extra="ignore")

    final_test_accuracy: Fraction
    final_test_loss: Finite | None = None
    best_test_accuracy: Fraction | None = None
    rounds: int
    refused_updates: int = 0
    diverged: _Divergence | None = None
    seconds: Finite | None = None
    weights_sha256: str | None = None
    finished: str | None = None
    native_kernels: bool | None = None
    versions: dict[str, str] = {}


def _read(folder: Path, name: str) -> RunView:
    place = folder / CONFIG
    config = validated(RecordedConfig, read_toml(place), f"in {place}")
    rows = [
        validated(_Row, row, f"in {folder / METRICS}, line {line},")
        for line, row in enumerate(read_metrics(folder / METRICS, LARGEST_ROWS), start=1)
    ]
    numbers = [row.round for row in rows]
    if numbers != sorted(set(numbers)):
        raise UserError(f"{folder / METRICS} does not have its rounds in order")
    evaluated = [row for row in rows if row.test_accuracy is not None]
    summary = _summary(folder / SUMMARY)
    return RunView(
        config,
        curve=[
            (row.round, row.test_accuracy) for row in evaluated if row.test_accuracy is not None
        ],
        summary=summary,
        losses=[row.test_loss for row in evaluated],
        steps=_traces(rows),
        rounds_done=max(numbers, default=0) if summary is None else summary["rounds"],
        seconds=sum(row.seconds for row in rows),
        refused=sum(len(row.refused) for row in rows),
        name=name,
    )


def _summary(place: Path) -> dict[str, Any] | None:
    if not place.exists():
        return None
    try:
        tree = json.loads(read_plain(place, LARGEST_TEXT))
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"{place} is damaged")
    return validated(_Summary, tree, f"in {place}").model_dump()


def _traces(rows: Sequence[_Row]) -> list[StepTrace]:
    """Follow the first client of each round, as the paper's figure follows one client."""
    traces = []
    start = 0
    for row in rows:
        kept = next(iter(row.steps.values()), None)
        if kept is not None:
            traces.append(StepTrace(row.round, start, kept.smoothness, kept.growth, kept.eta))
            start += len(kept.eta)
    return traces
