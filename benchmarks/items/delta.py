"""What Delta-SGD costs: both ways to take the gradient difference, against deltafl's own SGD."""

from __future__ import annotations

from benchmarks import compare, fleet
from benchmarks.federation import W
from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table

TITLE = "Delta-SGD on W"


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure the three optimizers in turns."""
    systems = [
        fleet.deltafl(W | {"client.optimizer": name, "client.lr": None}, name)
        for name in ("sgd", "delta-sgd-reused", "delta-sgd")
    ]
    repeats, rounds = settings.choose(9, 15)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds)
    title = "seconds a round of deltafl; ratio to its SGD"
    table = Table(title, compare.COLUMNS, compare.rows(results, "sgd"))
    notes = ["delta-sgd takes two gradients a step (same batch), delta-sgd-reused one."]
    return Outcome(TITLE, [table], notes, compare.raw(results))


ITEM = Item("delta", TITLE, 4, measure)
