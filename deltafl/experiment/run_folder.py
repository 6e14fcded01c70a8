"""A run folder: config.toml, metrics.jsonl, summary.json and a checkpoint.

Every file appears whole or not at all, except metrics.jsonl, which grows by a row a round; rows
past the checkpoint are dropped when a run is resumed, so it holds every round exactly once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltafl import tensorfile
from deltafl.errors import UserError
from deltafl.experiment.config import Config, RecordedConfig, read_toml, validated
from deltafl.experiment.memory import is_version
from deltafl.experiment.rounds import RoundReport, Rounds
from deltafl.untrusted import LARGEST_TEXT, brief, read_plain

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
CHECKPOINT, MEMORY = "checkpoint.safetensors", "memory"


class RunFolder:
    """The files of one run, locked while the run goes on."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.config = config
        self._saved = time.monotonic()

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder for this configuration alone; refuse one that holds another run."""
        self.path.mkdir(parents=True, exist_ok=True)
        with _locked(self.path):
            place = self.path / CONFIG
            if place.exists():
                self._check_same(place)
            elif any(not _is_temporary(entry) for entry in self.path.iterdir()):
                raise UserError(
                    f"{self.path} is neither empty nor a run folder: choose another --out"
                )
            else:
                tensorfile.write_atomically(place, self.config.to_toml().encode())
            for stray in filter(_is_temporary, self.path.iterdir()):
                stray.unlink()
            yield

    def _check_same(self, place: Path) -> None:
        there = validated(RecordedConfig, read_toml(place), f"in {place}").identity
        here = self.config.identity
        if there != here:
            name, old, new = next(_differences(there, here))
            raise UserError(
                f"{self.path} holds another run ({name} is {brief(old)} there, {brief(new)} here): "
                "choose another --out, or delete it"
            )

    def summary(self) -> dict[str, Any] | None:
        """Return the summary of a finished run, or None."""
        place = self.path / SUMMARY
        if not place.exists():
            return None
        try:
            summary = json.loads(read_plain(place, LARGEST_TEXT))
            if not isinstance(summary["weights_sha256"], str):
                raise TypeError("no checksum")
            same = summary["run"] == self.config.hash
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{place} is damaged: delete it, and the run finishes again") from None
        if not same:
            raise UserError(
                f"{self.path} was finished by another version of deltafl, whose numbers may "
                "differ: choose another --out, or delete it"
            )
        return dict(summary)

    def resume(self, rounds: Rounds) -> None:
        """Put the rounds where the checkpoint is, and drop metrics of later rounds."""
        place = self.path / CHECKPOINT
        if place.exists():
            tensors, about = tensorfile.load(place)
            rounds.load_state(tensors, about)
            names = about.get("memories", [])
            if not isinstance(names, list) or not all(map(is_version, names)):
                raise UserError(f"{place} names what is no memory: delete {self.path}")
            for name in names:
                memory = self.path / MEMORY / name
                if not memory.is_file():
                    raise UserError(
                        f"{memory}, which the checkpoint needs, is missing: "
                        f"delete {self.path} and start the run again"
                    )
        metrics = self.path / METRICS
        last = rounds.done if rounds.ended is None else rounds.ended
        kept = [row for row in read_metrics(metrics) if row["round"] <= last]
        if [row["round"] for row in kept] != list(range(1, last + 1)):
            raise UserError(
                f"{metrics} does not have every round up to the checkpoint's ({last}): "
                f"delete {self.path} and start the run again"
            )
        if rounds.ended is not None and not (last and kept[-1].get("diverged")):
            raise UserError(
                f"{metrics} does not say how the run ended in round {last}: "
                f"delete {self.path} and start the run again"
            )
        write_rows(metrics, kept)

    def record(self, report: RoundReport) -> None:
        """Append a round to metrics.jsonl."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.row(), allow_nan=False) + "\n")

    def checkpoint_due(self, report: RoundReport) -> bool:
        """Whether so much work has been done that it should be saved."""
        run = self.config.run
        elapsed = time.monotonic() - self._saved
        return report.round == run.rounds or elapsed >= run.checkpoint_seconds

    def checkpoint(self, rounds: Rounds, memories: list[str]) -> None:
        """Save everything the next round depends on; `memories` name what clients remember."""
        # A checkpoint of a round whose row a power cut took away could not be used.
        with (self.path / METRICS).open("ab") as metrics:
            os.fsync(metrics.fileno())
        tensors, about = rounds.state()
        tensorfile.save(self.path / CHECKPOINT, tensors, about | {"memories": memories})
        self._saved = time.monotonic()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary; its presence says that the run is done."""
        text = json.dumps(summary, indent=2) + "\n"
        tensorfile.write_atomically(self.path / SUMMARY, text.encode())
        self.tidy()

    def tidy(self) -> None:
        """Delete what a finished run does not need."""
        shutil.rmtree(self.path / MEMORY, ignore_errors=True)


def read_metrics(path: Path, largest: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl; a last row that was cut short is left out."""
    if not path.exists():
        return []
    lines = read_plain(path, largest).split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is partial
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                raise ValueError("not a row")
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}, line {number}, is damaged: delete {path.parent} and start the run again"
            ) from None
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file of rows, all at once."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    tensorfile.write_atomically(path, text.encode())


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, value there, value here) of what differs."""
    old, new = dict(_leaves(there)), dict(_leaves(here))
    for name in dict.fromkeys([*new, *old]):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder against a second run; the lock dies with the process and leaves no file."""
    try:
        import fcntl  # noqa: PLC0415  (not on every platform)
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is running in {folder}: wait for it, or choose another --out"
            ) from None
        yield
    finally:
        os.close(handle)
