"""Interleaved measurement of several systems, A B C A B C ..., and the statistics of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.progress import Progress
from benchmarks.session import FailedError, Session, System, sessions

WARM_UP = 3
BUDGET = 60.0
"""Seconds after which a block should end: a system that is too slow runs fewer rounds."""


@dataclass
class Series:
    """The seconds of a system's rounds, a list a block, or why there are none."""

    blocks: list[list[float]] = field(default_factory=list)
    failure: str | None = None
    start_seconds: float | None = None
    accuracy: float | None = None
    rounds_run: int = 0
    pace: float = 1e-9
    """The seconds of the last round before the first that counts."""

    @property
    def seconds(self) -> list[float]:
        """All rounds."""
        return [value for block in self.blocks for value in block]

    @property
    def median(self) -> float:
        """The median over all rounds."""
        return statistics.median(self.seconds)

    @property
    def mad(self) -> float:
        """The median absolute deviation from the median."""
        middle = self.median
        return statistics.median(abs(value - middle) for value in self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile."""
        values = self.seconds
        if len(values) < 2:
            return values[0], values[0]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class Ratio:
    """How many times as long one system takes as another."""

    of_medians: float
    repeats: list[float]
    """The ratio of the blocks' medians in each repeat."""

    @property
    def text(self) -> str:
        """The repeats' median and range."""
        middle = statistics.median(self.repeats)
        return f"{middle:.2f} [{min(self.repeats):.2f}, {max(self.repeats):.2f}]"


def ratio(series: Series, reference: Series) -> Ratio:
    """Compare two series that were measured side by side."""
    pairs = zip(series.blocks, reference.blocks, strict=False)
    repeats = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]
    return Ratio(series.median / reference.median, repeats)


def interleave(
    systems: Sequence[System],
    progress: Progress,
    *,
    repeats: int,
    rounds: int | Mapping[str, int],
    warm_up: int = WARM_UP,
    accuracy: bool = False,
    budget: float = BUDGET,
) -> dict[str, Series]:
    """Measure blocks of rounds of each system in turn; a system that fails drops out."""
    results = {system.name: Series() for system in systems}
    count = rounds if isinstance(rounds, Mapping) else {s.name: rounds for s in systems}
    progress.plan(repeats * len(systems))
    with sessions([system for system in systems if system.lasting]) as running:
        for name, session in running.items():
            if isinstance(session, str):
                results[name].failure = session
            else:
                results[name].start_seconds = session.start_seconds
        for repeat in range(repeats):
            for system in systems:
                series = results[system.name]
                if series.failure is None:
                    _measure(
                        system,
                        running.get(system.name),
                        series,
                        count[system.name],
                        warm_up if repeat == 0 or not system.lasting else 0,
                        accuracy=accuracy and repeat == repeats - 1,
                        budget=budget,
                    )
                spent = f"{series.median:.4g} s" if series.blocks else "failed"
                progress.step(f"repeat {repeat + 1}/{repeats}, {system.name}: {spent}")
    return results


def _measure(
    system: System,
    session: Session | str | None,
    series: Series,
    rounds: int,
    warm_up: int,
    *,
    accuracy: bool,
    budget: float,
) -> None:
    try:
        if session is None:
            with Session(system) as own:
                series.start_seconds, series.rounds_run = own.start_seconds, 0
                _block(own, series, rounds, warm_up, accuracy=accuracy, budget=budget)
        elif isinstance(session, Session):
            _block(session, series, rounds, warm_up, accuracy=accuracy, budget=budget)
    except FailedError as error:
        series.failure, series.blocks = str(error), []


def _block(
    session: Session, series: Series, rounds: int, warm_up: int, *, accuracy: bool, budget: float
) -> None:
    if warm_up:
        series.pace = session.run(warm_up)[-1]
    rounds = max(1, min(rounds, int(budget / series.pace)))
    series.blocks.append(session.run(rounds))
    series.rounds_run += warm_up + rounds
    if accuracy:
        series.accuracy = session.accuracy()


COLUMNS = ("system", "median s", "MAD", "IQR", "n", "ratio", "ratio by repeat: median [range]")


def rows(results: Mapping[str, Series], reference: str) -> list[list[str]]:
    """Return the table of a comparison; the ratio is a system's time over the reference's."""
    lines = []
    base = results[reference]
    for name, series in results.items():
        if not series.blocks:
            lines.append([name, f"failed: {series.failure}", *[""] * 5])
            continue
        low, high = series.quartiles
        compared = ratio(series, base) if base.blocks else None
        lines.append(
            [
                name,
                f"{series.median:.4g}",
                f"{series.mad:.2g}",
                f"{low:.4g} to {high:.4g}",
                str(len(series.seconds)),
                "" if compared is None else f"{compared.of_medians:.2f}",
                "" if compared is None else compared.text,
            ]
        )
    return lines


def raw(results: Mapping[str, Series]) -> dict[str, Any]:
    """Return every number of a comparison."""
    return {
        name: {
            "blocks": series.blocks,
            "failure": series.failure,
            "start_seconds": series.start_seconds,
            "accuracy": series.accuracy,
            "rounds_run": series.rounds_run,
        }
        | (
            {"median": series.median, "mad": series.mad, "quartiles": series.quartiles}
            if series.blocks
            else {}
        )
        for name, series in results.items()
    }
