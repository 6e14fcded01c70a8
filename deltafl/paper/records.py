"""What is kept of a run of the reproduction: a line of JSON, small enough to share.

`results/TASK-SCALE.jsonl` grows by a line a finished run. A line says what was computed (the
configuration, and its fingerprint), what came out (accuracies, the curve, the checksum of the
weights), and where (versions, hardware).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from deltafl.errors import UserError
from deltafl.experiment import Config, Result
from deltafl.experiment.config import Finite, RecordedConfig, Strict, validated
from deltafl.paper.scale import SCALES
from deltafl.report.runs import Fraction
from deltafl.tensorfile import write_atomically
from deltafl.untrusted import LARGEST_ROWS, read_plain

TAIL = 0.1
"""The share of the rounds, at the end, over which `tail` is the mean accuracy."""

STEP_DIGITS = 4


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]
"""A part of a file's name, so it leads nowhere else."""


class Steps(Strict):
    """The step sizes of one client a round, step after step (Figure 7)."""

    round: list[int]
    smoothness: list[Finite | None]
    growth: list[Finite | None]
    eta: list[Finite | None]


class Record(Strict):
    """One finished run."""

    fingerprint: str
    task: Name
    scale: Name
    config: dict[str, Any] = Field(description="what differs from the defaults")
    final: float = Field(ge=0, le=1, description="test accuracy of the last round")
    tail: float = Field(ge=0, le=1, description="mean test accuracy over the last tenth")
    best: float = Field(ge=0, le=1)
    refused: int
    seconds: Finite
    weights_sha256: str
    finished: str
    hardware: str
    native_kernels: bool
    data: str | None = Field(None, description="the part of the data set, where not all of it")
    versions: dict[str, str]
    curve: list[tuple[int, Fraction]]
    steps: Steps | None = None

    def configuration(self) -> Config:
        """Return the configuration that was run; its names are not looked up."""
        return validated(RecordedConfig, self.config, f"in the record {self.fingerprint}")


def record(result: Result, scale: str) -> Record:
    """Make the record of a finished run."""
    config, summary = result.config, result.summary
    curve = [
        (int(row["round"]), float(row["test_accuracy"]))
        for row in result.metrics
        if row["test_accuracy"] is not None
    ]
    tail = [accuracy for round_, accuracy in curve if round_ > (1 - TAIL) * config.run.rounds]
    tail = tail or [result.final_test_accuracy]  # of a run that diverged before
    return Record(
        fingerprint=config.fingerprint,
        task=config.task,
        scale=scale,
        config=config.changes,
        final=result.final_test_accuracy,
        tail=sum(tail) / len(tail),
        best=summary["best_test_accuracy"],
        refused=summary["refused_updates"],
        seconds=summary["seconds"],
        weights_sha256=summary["weights_sha256"],
        finished=summary["finished"],
        hardware=_hardware(),
        native_kernels=summary["native_kernels"],
        data=summary.get("data"),
        versions=summary["versions"],
        curve=curve,
        steps=_steps(result.metrics) if config.run.record_step_sizes else None,
    )


def _steps(metrics: Sequence[dict[str, Any]]) -> Steps | None:
    """Return the step sizes of the first client of every round."""
    columns: dict[str, list[Any]] = {"round": [], "smoothness": [], "growth": [], "eta": []}
    for row in metrics:
        steps = next(iter(row.get("steps", {}).values()), None)
        if steps is None:
            continue
        columns["round"] += [row["round"]] * len(steps["eta"])
        for name in ("smoothness", "growth", "eta"):
            columns[name] += [None if v is None else _significant(v) for v in steps[name]]
    return Steps.model_validate(columns) if columns["round"] else None


def _significant(value: float) -> float:
    return float(f"{value:.{STEP_DIGITS}g}")


class Records:
    """The records of a folder, by fingerprint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: dict[str, Record] = {}
        for scale in SCALES:
            for path in sorted(folder.glob(f"*-{scale}.jsonl")):
                for row in _read(path):
                    self._rows[row.fingerprint] = row

    def get(self, fingerprint: str) -> Record | None:
        """Return the record of a configuration, if it has been run."""
        return self._rows.get(fingerprint)

    def all(self) -> Iterable[Record]:
        """Return every record."""
        return self._rows.values()

    def add(self, row: Record) -> None:
        """Keep a record; one of the same fingerprint is replaced."""
        path = self.folder / f"{row.task}-{row.scale}.jsonl"
        rows = {old.fingerprint: old for old in _read(path)} | {row.fingerprint: row}
        lines = (json.dumps(kept.model_dump(exclude_none=True)) + "\n" for kept in rows.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(lines).encode())
        self._rows[row.fingerprint] = row


def _read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(read_plain(path, LARGEST_ROWS).splitlines(), start=1):
        where = f"in {path}, line {number},"
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}, line {number}, is not JSON: delete that line") from None
        rows.append(validated(Record, tree, where))
    return rows


def _hardware() -> str:
    """Name the processor, the number of cores, and the instructions, which decide on roundings."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
