"""A step of ResNet-18: deltafl's, and the best that plain torch does with the same numerics."""

from __future__ import annotations

from benchmarks import compare, fleet
from benchmarks.federation import W
from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table

TITLE = "ResNet-18: width 64, batch norm, batch 64, 32x32x3, one thread"
STEPS = 7
BATCH = 64


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure a client of seven steps, as many as the paper's, and as many bare ones in torch."""
    fields = W | {
        "task": "cifar10-resnet18",
        "federation.clients": 1,
        "federation.samples": STEPS * BATCH,
        "federation.partition": "iid",
        "federation.participation": 1.0,
        "client.lr": 0.01,
        "client.batch_size": BATCH,
        "client.augment": "none",
        "engine.workers": 1,
    }
    inline = fields | {"engine.kind": "inline"}
    systems = [
        fleet.deltafl(inline, "deltafl, inline", noise=STEPS * BATCH),
        fleet.deltafl(fields, "deltafl, 1 worker", noise=STEPS * BATCH),
        *(
            fleet.resnet_steps(channels_last=last, compiled=compiled, steps=STEPS, batch=BATCH)
            for compiled in (False, True)
            for last in (False, True)
        ),
    ]
    repeats, rounds = settings.choose(3, 1)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds, warm_up=1)
    title = f"seconds for {STEPS} steps; ratio to deltafl"
    table = Table(title, compare.COLUMNS, compare.rows(results, systems[0].name))
    return Outcome(TITLE, [table], _notes(results), compare.raw(results))


def _notes(results: dict[str, compare.Series]) -> list[str]:
    notes = [
        f"deltafl: a whole round of one client of {STEPS} steps through its engine, with loading "
        "the weights, the aggregate and the checkpoints; the others: bare steps.",
    ]
    bare = {n: s for n, s in results.items() if not n.startswith("deltafl") and s.blocks}
    for name, series in results.items():
        if name.startswith("deltafl") and series.blocks and bare:
            best = min(bare, key=lambda other: bare[other].median)
            times = compare.ratio(series, bare[best]).of_medians
            text = f"{name}: {times:.3f} times the best plain steps ({best})"
            if "NCHW eager" in bare:
                times = compare.ratio(series, bare["NCHW eager"]).of_medians
                text += f", {times:.3f} times those in NCHW eager"
            notes.append(text + ".")
    return notes


ITEM = Item("resnet", TITLE, 9, measure)
