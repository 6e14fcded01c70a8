"""Workload W with SGD: deltafl, the hand-written loop, pfl and Flower."""

from __future__ import annotations

from benchmarks import compare, fleet
from benchmarks.federation import W
from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table

TITLE = "Workload W: Fashion-MNIST, the paper's CNN"
QUICK = 5.0
PLAIN = "deltafl, plain torch"
WHAT = (
    "100 clients of 500 samples, Dirichlet 0.1, 10 clients a round, one epoch of batch 64 "
    "(7 steps), dropout, SGD, plain average, float32; every system may use two cores."
)


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure all systems in turns."""
    systems = [
        fleet.deltafl(W),
        fleet.loop(W, 2),
        fleet.loop(W, 2, channels_last=True),
        fleet.loop_processes(W, channels_last=True),
    ]
    if not settings.quick:
        systems += [
            fleet.loop_processes(W),
            fleet.deltafl(W | {"engine.fast": False}, PLAIN),
            fleet.pfl(W),
            fleet.flower(W),
        ]
    repeats, rounds = settings.choose(3 if settings.quick else 9, 5 if settings.quick else 15)
    results = compare.interleave(
        systems,
        progress,
        repeats=repeats,
        rounds=rounds,
        warm_up=2 if settings.quick else compare.WARM_UP,
        accuracy=not settings.quick,
        budget=QUICK if settings.quick else compare.BUDGET,
    )
    outcome = Outcome(TITLE, notes=[WHAT], raw=compare.raw(results))
    title = "seconds a round; ratio to deltafl (2 workers, fast)"
    outcome.tables.append(Table(title, compare.COLUMNS, compare.rows(results, "deltafl")))
    outcome.notes.append(
        "*channels_last* is the loop with its model in that memory format, which "
        "plain torch computes faster on the CPU: the fastest loop is the fair reference."
    )
    loops = {n: s for n, s in results.items() if n.startswith("loop") and s.blocks}
    if loops and results["deltafl"].blocks:
        best = min(loops, key=lambda name: loops[name].median)
        times = compare.ratio(loops[best], results["deltafl"])
        outcome.notes.append(
            f"The fastest loop ({best}) takes {times.of_medians:.2f} times as long as deltafl; "
            f"by repeat {times.text}."
        )
    learned = [
        f"{name} {series.accuracy:.1%} ({series.rounds_run})"
        for name, series in results.items()
        if series.accuracy is not None
    ]
    if learned:
        outcome.notes.append(
            "A rough check that all learn, test accuracy after (rounds): " + ", ".join(learned)
        )
    if not settings.quick:
        outcome.notes.append(
            "Flower is started anew for every block (Ray is not idle while it waits), and samples "
            "its own clients; its first rounds are dropped. The others keep running. The models "
            "of pfl and Flower are channels_last."
        )
        outcome.notes.append(
            f"*{PLAIN}* is deltafl with engine.fast = false: the compiled kernels are the rest."
        )
    return outcome


ITEM = Item("workload", TITLE, 10, measure, quick=0.8)
