"""deltafl on Ray: what it costs beside workers, and as clients, the model or nodes become more.

What a round costs the main process, which is where a cluster stops scaling, is measured in
processor seconds over rounds of different shapes and taken apart into a cost for each round, actor,
client and megabyte. The last table is arithmetic with these four numbers, up to a million clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from benchmarks import compare, fleet
from benchmarks.federation import CORES, Fields, W
from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table
from benchmarks.session import System
from deltafl import Config
from deltafl.engine.ray_cluster import SMALL
from deltafl.engine.shared import Layout
from deltafl.engine.workbench import build_model
from deltafl.experiment.federation import build_setup

TITLE = "On a Ray cluster"
CLIENTS = {10: 30, 1000: 5}
"""How many clients a round, and how many rounds a block."""
WIDTHS = {3_000: 20, 60_000: 5}
"""How many hidden units, and how many rounds a block."""
BYTES_A_UNIT = 4 * (64 + 1 + 10)
NODES = {1: CORES, 2: 1, 4: 1}
"""How many nodes, and how many CPUs each has."""
SHAPES = {
    (None, 10, 2): 30,
    (None, 10, 8): 30,
    (None, 1000, 2): 5,
    (300, 200, 2): 10,
    (6_000, 10, 2): 20,
    (60_000, 10, 2): 5,
}
"""Hidden units (None: softmax regression), clients a round, actors, and how many rounds a block."""
MODELLED = {
    "softmax regression on digits": (2_600, 0.001),
    "W's CNN": (87_000, 0.0125),
    "a ResNet-18": (45_000_000, 60.0),
}
"""Clients of the model of large rounds: the bytes of their weights, and seconds of their work."""
ACTORS = 100


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure the five questions one after the other."""
    outcome = Outcome(TITLE)
    _overhead(settings, progress, outcome)
    _clients(settings, progress, outcome)
    _model(settings, progress, outcome)
    _nodes(settings, progress, outcome)
    _costs(settings, progress, outcome)
    outcome.notes.append(
        "All are started anew for every block: Ray's own processes do not rest while they wait, "
        "and would slow down whoever is measured next."
    )
    return outcome


def _overhead(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Compare a round of W on Ray with the same on workers."""
    systems = _both(W)
    repeats, rounds = settings.choose(5, 60)
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
    repeats, _ = settings.choose(2, 1)
    for size, chosen in fields.items():
        results = compare.interleave(_both(chosen), progress, repeats=repeats, rounds=rounds[size])
        outcome.raw[f"{what}: {size}"] = compare.raw(results)
        for line in compare.rows(results, "deltafl"):
            lines.append([str(size), *line])
    outcome.tables.append(Table(title, (what, *compare.COLUMNS), lines))


def _nodes(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Time rounds of W on one node and on several, all on this machine."""
    systems: list[System] = [fleet.deltafl_on_nodes(W, *shape) for shape in NODES.items()]
    repeats, rounds = settings.choose(2, 30)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds)
    title = f"a round of W on nodes that share this machine's {CORES} cores; ratio to one node"
    rows = compare.rows(results, systems[0].name)
    outcome.tables.append(Table(title, compare.COLUMNS, rows))
    outcome.raw["nodes"] = compare.raw(results)


@dataclass(frozen=True)
class Shape:
    """What a round is made of, seen from the main process."""

    clients: int
    client_bytes: int
    actors: int

    @property
    def megabytes(self) -> float:
        """How much comes and goes; small weights go to every actor, large ones out once."""
        out = self.actors if self.client_bytes <= SMALL else 1
        return (self.clients + out) * self.client_bytes / 1e6

    @property
    def parts(self) -> list[float]:
        """What the four costs are multiplied by: a round, its actors, clients and megabytes."""
        return [1.0, float(self.actors), float(self.clients), self.megabytes]


PARTS = ("a round", "an actor", "a client", "a megabyte")


def fit(shapes: list[Shape], seconds: list[float]) -> list[float]:
    """Return the costs of the four parts that explain the seconds best, none of them negative.

    Errors count in proportion: a round of a second must not drown one of a millisecond.
    """
    scale = 1 / np.array(seconds)
    costs, _ = nnls(
        np.array([shape.parts for shape in shapes]) * scale[:, None], np.ones(len(scale))
    )
    return [float(cost) for cost in costs]


def _size(fields: Fields) -> int:
    """Return how many bytes a client's weights have on their way."""
    config = Config().override(**fields)
    return Layout.of(build_model(build_setup(config)).state_dict()).size


def _costs(settings: Settings, progress: Progress, outcome: Outcome) -> None:
    """Take apart what a round costs the main process, and say what larger ones would."""
    systems, shapes, rounds = [], [], {}
    for (width, sampled, actors), count in SHAPES.items():
        chosen = _almost_nothing("digits-mlp" if width else "digits-softmax") | {
            "federation.clients": 1000,
            "federation.participation": sampled / 1000,
        }
        chosen |= {"model.width": width} if width else {}
        shapes.append(Shape(sampled, _size(chosen), actors))
        name = f"{sampled} clients of {shapes[-1].client_bytes / 1e6:.3g} MB, {actors} actors"
        system = fleet.deltafl_on_nodes(chosen, CORES, actors // CORES, name, clock="processor")
        rounds[name] = settings.rounds or count
        systems.append(system)
    repeats, _ = settings.choose(2, 1)
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds)
    outcome.raw["costs"] = compare.raw(results)
    if any(not series.blocks for series in results.values()):
        outcome.notes.append("The costs of a round: failed, see the JSON.")
        return
    medians = [series.median for series in results.values()]
    costs = fit(shapes, medians)
    outcome.raw["costs of the parts"] = dict(zip(PARTS, costs, strict=True))
    lines = [
        [
            str(shape.clients),
            f"{shape.client_bytes / 1e6:.3g}",
            str(shape.actors),
            f"{series.median * 1e3:.3g}",
            f"{series.mad * 1e3:.2g}",
            str(len(series.seconds)),
            f"{1e3 * sum(a * b for a, b in zip(costs, shape.parts, strict=True)):.3g}",
        ]
        for shape, series in zip(shapes, results.values(), strict=True)
    ]
    columns = ("clients", "MB a client", "actors", "median ms", "MAD", "n", "by the four costs, ms")
    title = f"processor time of the main process for a round, {CORES} nodes"
    outcome.tables.append(Table(title, columns, lines))
    outcome.tables.append(
        Table(
            "the four costs of the main process, fitted to the table above",
            tuple(f"ms {part}" for part in PARTS),
            [[f"{cost * 1e3:.3g}" for cost in costs]],
        )
    )
    outcome.tables.append(_modelled(costs))


def _modelled(costs: list[float]) -> Table:
    """Return what rounds of many clients would cost: arithmetic, not a measurement."""
    lines = []
    for what, (size, work) in MODELLED.items():
        for clients in (1_000, 10_000, 100_000, 1_000_000):
            shape = Shape(clients, size, ACTORS)
            main = sum(a * b for a, b in zip(costs, shape.parts, strict=True))
            lines.append(
                [
                    f"{what}, {work:g} s",
                    f"{clients:,}",
                    f"{shape.megabytes / 1e3:.3g}",
                    f"{main:.3g}",
                    f"{clients * work / ACTORS:.3g}",
                    f"{clients * work / main:,.0f}",
                ]
            )
    title = f"modelled, not measured: rounds of many clients on {ACTORS} actors of a cluster"
    columns = (
        "clients",
        "a round",
        "GB",
        "main process, s",
        "actors, s",
        "actors at most",
    )
    return Table(title, columns, lines)


ITEM = Item("ray", TITLE, 10, measure)
