"""deltafl on Ray: what it costs beside workers, and as clients, the model or nodes become more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks import compare, fleet
from benchmarks.federation import CORES, Fields, W
from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table
from benchmarks.session import System

TITLE = "On a Ray cluster"
CLIENTS = {10: 30, 100: 15, 1000: 3}
"""How many clients a round, and how many rounds a block."""
WIDTHS = {100: 30, 3_000: 20, 60_000: 5}
"""How many hidden units, and how many rounds a block."""
BYTES_A_UNIT = 4 * (64 + 1 + 10)
NODES = {1: CORES, 2: 1, 4: 1}
"""How many nodes, and how many CPUs each has."""


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure the four questions one after the other."""
    outcome = Outcome(TITLE)
    _overhead(settings, progress, outcome)
    _clients(settings, progress, outcome)
    _model(settings, progress, outcome)
    _nodes(settings, progress, outcome)
    outcome.notes.append(
        "All are started anew for every block: Ray's own processes do not rest while they wait, "
        "and would slow down whoever is measured next."
    )
    return outcome


def _overhead(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Compare a round of W on Ray with the same on workers."""
    systems = _both(W)
    repeats, rounds = settings.choose(7, 30)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds)
    title = f"a round of W, {CORES} workers and {CORES} actors; ratio to deltafl on workers"
    outcome.tables.append(Table(title, compare.COLUMNS, compare.rows(results, "deltafl")))
    outcome.raw["overhead"] = compare.raw(results)


def _both(fields: Fields) -> list[System]:
    """Return workers and Ray; both are started for every block, so that caches are as full."""
    return [replace(fleet.deltafl(fields), lasting=False), fleet.deltafl_on_ray(fields)]


def _clients(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Time rounds of many clients that do next to nothing."""
    fields = {
        sampled: _almost_nothing("digits-softmax")
        | {"federation.clients": 1000, "federation.participation": sampled / 1000}
        for sampled in CLIENTS
    }
    rounds = {sampled: settings.rounds or count for sampled, count in CLIENTS.items()}
    title = "one step of softmax regression a client, one client after the other"
    _growth("clients a round", fields, rounds, title, settings, progress, outcome)


def _model(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Time rounds of ten clients whose model grows."""
    fields = {
        f"{width * BYTES_A_UNIT / 1e6:.3g}": _almost_nothing("digits-mlp")
        | {"federation.participation": 0.1, "model.width": width}
        for width in WIDTHS
    }
    counts = [settings.rounds or count for count in WIDTHS.values()]
    rounds = dict(zip(fields, counts, strict=True))
    title = "10 clients a round, one step of a perceptron of so many MB"
    _growth("MB", fields, rounds, title, settings, progress, outcome)


def _almost_nothing(task: str) -> Fields:
    return W | {
        "task": task,
        "federation.samples": 14,
        "federation.replacement": True,
        "client.batch_size": 14,
        "engine.fast": False,
    }


def _growth(
    what: str,
    fields: Mapping[object, Fields],
    rounds: Mapping[object, int],
    title: str,
    settings: Settings,
    progress: Progress,
    outcome: Outcome,
) -> None:
    """Time rounds on workers and on Ray as one thing grows."""
    lines = []
    repeats, _ = settings.choose(3, 1)
    for size, chosen in fields.items():
        results = compare.interleave(_both(chosen), progress, repeats=repeats, rounds=rounds[size])
        outcome.raw[f"{what}: {size}"] = compare.raw(results)
        for line in compare.rows(results, "deltafl"):
            lines.append([str(size), *line])
    outcome.tables.append(Table(title, (what, *compare.COLUMNS), lines))


def _nodes(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Time rounds of W on one node and on several, all on this machine."""
    systems: list[System] = [fleet.deltafl_on_nodes(W, *shape) for shape in NODES.items()]
    repeats, rounds = settings.choose(3, 15)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds)
    title = f"a round of W on nodes that share this machine's {CORES} cores; ratio to one node"
    rows = compare.rows(results, systems[0].name)
    outcome.tables.append(Table(title, compare.COLUMNS, rows))
    outcome.raw["nodes"] = compare.raw(results)


ITEM = Item("ray", TITLE, 15, measure)
