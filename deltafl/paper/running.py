"""Run what is missing of a recipe, and keep a record of every finished run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltafl.errors import UserError
from deltafl.experiment import Config, Result
from deltafl.experiment.comparison import Watcher, run_all
from deltafl.experiment.rounds import RoundReport
from deltafl.paper.only import Only
from deltafl.paper.recipes import Item
from deltafl.paper.records import Records, record
from deltafl.paper.scale import Scale


def missing(
    items: Iterable[Item], scale: Scale, only: Only, rates: Mapping[str, float], records: Records
) -> tuple[list[Config], int]:
    """Return the runs without a record, each once, and how many there are with those that have."""
    wanted = {
        config.fingerprint: config
        for item in items
        for _, config in item.runs(scale, rates)
        if only.wants(config)
    }
    todo = [config for print_, config in wanted.items() if records.get(print_) is None]
    return todo, len(wanted)


def run_missing(
    configs: Sequence[Config], scale: Scale, records: Records, runs: Path, watcher: Watcher
) -> None:
    """Run configurations in folders below `runs`; each is recorded as soon as it is finished."""
    if not configs:
        raise UserError("nothing is left to run: see deltafl paper show")
    run_all(configs, runs, _Recording(records, scale.name, watcher))


class _Recording:
    """A watcher that records finished runs, and hands on everything it hears."""

    def __init__(self, records: Records, scale: str, watcher: Watcher) -> None:
        self._records = records
        self._scale = scale
        self._watcher = watcher

    def planned(self, configs: Sequence[Config]) -> None:
        self._watcher.planned(configs)

    def started(self, config: Config, done: int) -> None:
        self._watcher.started(config, done)

    def finished_round(self, report: RoundReport) -> None:
        self._watcher.finished_round(report)

    def finished(self, summary: dict[str, Any]) -> None:
        self._watcher.finished(summary)

    def finished_run(self, result: Result) -> None:
        self._records.add(record(result, self._scale))
        self._watcher.finished_run(result)
