"""Scale: many clients a round, a million clients, and what a round costs beside local work."""

from __future__ import annotations

import statistics

from benchmarks import compare, fleet
from benchmarks.federation import CORES, Fields, W
from benchmarks.items.base import Item, Settings
from benchmarks.items.memory import peak
from benchmarks.memory import Monitor
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table
from benchmarks.session import FailedError, Session

TITLE = "Scale"
CLIENTS = 1000
SAMPLES = 64
MILLION = 1_000_000
SAMPLED = {10: 30, 100: 10, 1000: 2}
"""How many clients a round, and how many rounds a block."""


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure the three questions one after the other."""
    outcome = Outcome(TITLE)
    for task in ("digits-softmax", "fmnist-cnn"):
        _sampled(task, settings, progress, outcome)
    _million(settings, progress, outcome)
    _overhead(settings, progress, outcome)
    return outcome


def _federation(task: str, clients: int, sampled: int) -> Fields:
    return W | {
        "task": task,
        "federation.clients": clients,
        "federation.samples": SAMPLES,
        "federation.replacement": True,
        "federation.participation": sampled / clients,
    }


def _sampled(task: str, settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Time rounds of 10, 100 and 1000 clients, and watch the memory of each."""
    systems = {
        sampled: fleet.deltafl(_federation(task, CLIENTS, sampled), f"{sampled} clients a round")
        for sampled in SAMPLED
    }
    repeats, _ = settings.choose(5, 1)
    results = compare.interleave(
        list(systems.values()),
        progress,
        repeats=repeats,
        rounds={
            system.name: settings.rounds or SAMPLED[sampled] for sampled, system in systems.items()
        },
        warm_up=1,
    )
    columns = ("clients a round", "median s", "MAD", "n", "ms a client", "peak PSS, MB", "RSS, MB")
    lines = []
    progress.plan(len(systems))
    for sampled, system in systems.items():
        series = results[system.name]
        if not series.blocks:
            lines.append([str(sampled), f"failed: {series.failure}", *[""] * 5])
            continue
        memory = peak(system, 3)
        progress.step(f"{task}, {system.name}: {memory.pss:.0f} MB")
        lines.append(
            [
                str(sampled),
                f"{series.median:.4g}",
                f"{series.mad:.2g}",
                str(len(series.seconds)),
                f"{series.median / sampled * 1e3:.3g}",
                f"{memory.pss:.0f}",
                f"{memory.rss:.0f}",
            ]
        )
        outcome.raw[f"{task}, {sampled}"] = compare.raw({system.name: series}) | {
            "peak": vars(memory)
        }
    title = f"{task}, {CLIENTS} clients of {SAMPLES} samples, one step, {CORES} workers"
    outcome.tables.append(Table(title, columns, lines))


def _million(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Time the way from nothing to the end of the first round of a million clients."""
    columns = ("clients", "s to the end of round 1", "range", "n", "peak PSS, MB", "RSS, MB")
    lines = []
    repeats, _ = settings.choose(5, 1)
    sizes = (CLIENTS, MILLION)
    systems = {
        clients: fleet.deltafl(_federation("digits-softmax", clients, 100)) for clients in sizes
    }
    seconds: dict[int, list[float]] = {clients: [] for clients in sizes}
    progress.plan((repeats + 1) * len(sizes))
    try:
        for _ in range(repeats):
            for clients in sizes:
                with Session(systems[clients]) as session:
                    seconds[clients].append(session.start_seconds + session.run(1)[0])
                progress.step(f"{clients} clients: {seconds[clients][-1]:.2f} s to start")
        for clients in sizes:
            with Monitor() as monitor, Session(systems[clients], monitor.watch) as session:
                session.run(1)
            progress.step(f"{clients} clients: {monitor.peak.pss:.0f} MB")
            spent = seconds[clients]
            lines.append(
                [
                    f"{clients:,}",
                    f"{statistics.median(spent):.2f}",
                    f"{min(spent):.2f} to {max(spent):.2f}",
                    str(len(spent)),
                    f"{monitor.peak.pss:.0f}",
                    f"{monitor.peak.rss:.0f}",
                ]
            )
            outcome.raw[f"{clients} clients"] = {"seconds": spent, "peak": vars(monitor.peak)}
    except FailedError as error:
        outcome.notes.append(f"A million clients: failed: {error}")
    title = "from starting Python to the end of round 1: digits-softmax, 100 clients a round"
    outcome.tables.append(Table(title, columns, lines))


def _overhead(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Compare a round of W with its local work alone."""
    systems = [fleet.deltafl(W), fleet.local_work(W)]
    # Many turns: a few percent are less than what a shared machine's speed changes between two.
    repeats, rounds = settings.choose(16, 15)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds)
    title = "a round of W beside the local work of its clients alone, on two processes"
    outcome.tables.append(Table(title, compare.COLUMNS, compare.rows(results, "deltafl")))
    outcome.raw["overhead"] = compare.raw(results)
    whole, local = (results[system.name] for system in systems)
    if whole.blocks and local.blocks:
        shares = [1 - value for value in compare.ratio(local, whole).repeats]
        outcome.raw["overhead share"] = shares
        outcome.notes.append(
            "Share of a round of W outside the local steps (messages, sampling, aggregation, "
            f"metrics): {1 - local.median / whole.median:.1%} of the medians; by repeat "
            f"{statistics.median(shares):.1%} [{min(shares):.1%}, {max(shares):.1%}]."
        )


ITEM = Item("scale", TITLE, 8, measure)
