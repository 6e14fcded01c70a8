"""Tiny models, where everything but arithmetic counts: 100 clients a round on digits."""

from __future__ import annotations

from benchmarks import compare, fleet
from benchmarks.federation import tiny
from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table

TITLE = "Tiny models: digits, 100 clients a round"
SIZES = {None: "14 samples a client, 1 step", 500: "500 samples a client, 7 steps"}


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure softmax regression and the perceptron, with few samples a client and with many."""
    outcome = Outcome(TITLE)
    repeats, rounds = settings.choose(3 if settings.quick else 9, 20 if settings.quick else 60)
    for samples, label in SIZES.items():
        if settings.quick and samples is not None:
            continue
        for model in ("softmax", "mlp"):
            fields = tiny(model, samples)
            systems = [fleet.deltafl(fields), fleet.loop(fields, 2), fleet.loop(fields, 1)]
            results = compare.interleave(
                systems,
                progress,
                repeats=repeats,
                rounds=rounds,
                budget=3.0 if settings.quick else compare.BUDGET,
            )
            title = f"{model}, {label}: seconds a round; ratio to deltafl"
            table = Table(title, compare.COLUMNS, compare.rows(results, "deltafl"))
            outcome.tables.append(table)
            outcome.raw[f"{model}, {label}"] = compare.raw(results)
            outcome.notes += _fairest(model, label, results)
    return outcome


def _fairest(model: str, label: str, results: dict[str, compare.Series]) -> list[str]:
    """Name the faster of the two loops: the fair reference."""
    ours = results["deltafl"]
    loops = {n: s for n, s in results.items() if n != "deltafl" and s.blocks}
    if not loops or not ours.blocks:
        return []
    name = min(loops, key=lambda loop: loops[loop].median)
    times = compare.ratio(loops[name], ours).of_medians
    return [f"{model}, {label}: the faster loop ({name}) takes {times:.2f} times as long."]


ITEM = Item("tiny", TITLE, 4, measure, quick=0.6)
