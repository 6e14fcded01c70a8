"""Repeat the beginning of recorded runs: do this code and this machine still compute the same?

A record holds what its run found, but other code, another torch or another processor may round
differently, and some runs then end elsewhere. The accuracy of the first evaluated round tells.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltafl import engine as engines
from deltafl.engine import Engine
from deltafl.experiment import Config
from deltafl.experiment.federation import build_setup
from deltafl.experiment.memory import ClientMemory
from deltafl.experiment.rounds import Rounds
from deltafl.paper.records import Record


@dataclass(frozen=True)
class Repeat:
    """The test accuracy of a round, as recorded and as found now (None: it ended before)."""

    config: Config
    round: int
    recorded: float
    found: float | None

    @property
    def same(self) -> bool:
        """Whether not a single test sample is judged differently."""
        return self.found == self.recorded


def repeat_all(recorded: Iterable[tuple[Config, Record]]) -> Iterator[Repeat]:
    """Run each configuration up to the first round that its record evaluated."""
    for config, record in recorded:
        chosen = config.engine
        with (
            engines.build(chosen.kind, chosen.workers, chosen.address) as engine,
            tempfile.TemporaryDirectory(prefix="deltafl-") as folder,
        ):
            yield _repeat(config, record, engine, Path(folder))


def _repeat(config: Config, record: Record, engine: Engine, folder: Path) -> Repeat:
    number, accuracy = record.curve[0]
    rounds = Rounds(config, build_setup(config), engine)
    memory = ClientMemory(folder, 0) if rounds.remembers else None
    reports = rounds.run(memory)
    evaluation = next((report.evaluation for report in reports if report.round == number), None)
    return Repeat(config, number, accuracy, None if evaluation is None else evaluation.accuracy)
