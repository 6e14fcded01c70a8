"""An item's cells, ours beside theirs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltafl import data
from deltafl.paper.numbers import Number
from deltafl.paper.only import Only
from deltafl.paper.recipes import Case, Item
from deltafl.paper.records import Record, Records
from deltafl.paper.scale import Scale
from deltafl.report.tables import BEST_WITHIN


@dataclass(frozen=True, eq=False)
class Result:
    """One cell: what was found in the records, and what the paper reports."""

    case: Case
    scale: str
    records: tuple[Record, ...]
    wanted: int
    theirs: Number | None

    @property
    def n(self) -> int:
        """How many seeds were run."""
        return len(self.records)

    @property
    def ours(self) -> float | None:
        """The mean final accuracy in percent."""
        return _mean([100 * row.final for row in self.records])

    @property
    def tail(self) -> float | None:
        """The mean accuracy in percent over the last tenth of the rounds."""
        return _mean([100 * row.tail for row in self.records])

    @property
    def std(self) -> float | None:
        """The sample deviation over seeds, in points; one seed has none."""
        if self.n < 2:
            return None
        return round(statistics.stdev(100 * row.final for row in self.records), 9)

    @property
    def difference(self) -> float | None:
        """Ours less theirs, in points."""
        if self.ours is None or self.theirs is None:
            return None
        return round(self.ours - self.theirs.accuracy, 9)

    def as_json(self) -> dict[str, Any]:
        """Return what programs read."""
        return {
            "task": self.case.task,
            "alpha": self.case.alpha,
            "optimizer": self.case.optimizer,
            "variant": self.case.variant or None,
            "ours": self.ours,
            "std": self.std,
            "n": self.n,
            "paper": self.theirs and self.theirs.accuracy,
            "scale": self.scale,
            "tail": self.tail,
        }


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 9) if values else None


def results(
    item: Item,
    scale: Scale,
    records: Records,
    rates: Mapping[str, float],
    only: Only = Only(),  # noqa: B008  (frozen)
) -> list[Result]:
    """Return the cells of an item at a scale; those never run have no records."""
    cells = []
    for case in item.cases:
        found: list[Record] = []
        wanted = len(case.seeds)
        if case.task.partition("-")[0] in data.names():
            configs = [case.config(scale, seed, rates) for seed in case.seeds]
            configs = [config for config in configs if only.wants(config)]
            wanted = len(configs)
            if not configs:
                continue
            rows = [records.get(config.fingerprint) for config in configs]
            found = [row for row in rows if row is not None]
        cells.append(Result(case, scale.name, tuple(found), wanted, item.theirs(case)))
    return cells


def best_of(cells: Iterable[Result]) -> tuple[set[Result], set[Result]]:
    """Return the cells whose accuracy is within 0.5 of the best of their setting: ours, theirs."""
    ours: set[Result] = set()
    theirs: set[Result] = set()
    settings: dict[tuple[str, float], list[Result]] = {}
    for cell in cells:
        settings.setdefault((cell.case.task, cell.case.alpha), []).append(cell)
    for group in settings.values():
        mine = {cell: cell.ours for cell in group if cell.ours is not None}
        published = {cell: cell.theirs.accuracy for cell in group if cell.theirs is not None}
        ours |= _within(mine)
        theirs |= _within(published)
    return ours, theirs


def verdict(cells: Iterable[Result], name: str = "delta-sgd") -> str | None:
    """Say how an optimizer fares beside the others and beside the paper; None if it was not run."""
    cells = list(cells)
    ours, theirs = best_of(cells)
    mine = [cell for cell in cells if cell.case.optimizer == name and cell.ours is not None]
    rivals = {(c.case.task, c.case.alpha) for c in cells if c.ours is not None and c not in mine}
    compared = [cell for cell in mine if (cell.case.task, cell.case.alpha) in rivals]
    known = [cell.difference for cell in mine if cell.difference is not None]
    if not mine:
        return None
    clauses = []
    if compared:
        best = sum(cell in ours for cell in compared)
        published = sum(cell in theirs for cell in compared if cell.theirs is not None)
        clauses.append(
            f"best or within {BEST_WITHIN} points of the best in {best} of {len(compared)} "
            f"settings (the paper: {published})"
        )
    if known:
        reached = sum(difference >= -BEST_WITHIN for difference in known)
        clauses.append(
            f"at least the paper's accuracy less {BEST_WITHIN} in {reached} of {len(known)} "
            f"(differences from {min(known):+.1f} to {max(known):+.1f} points)"
        )
    return f"{mine[0].case.label}: {'; '.join(clauses)}." if clauses else None


def _within(values: Mapping[Result, float]) -> set[Result]:
    best = max(values.values(), default=0.0)
    return {cell for cell, value in values.items() if round(best - value, 9) <= BEST_WITHIN}
