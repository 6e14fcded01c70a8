"""The picture of an item, drawn from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pandas as pd

from deltafl import data, optim
from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.experiment.federation import build_partition
from deltafl.paper import early
from deltafl.paper.cells import Result
from deltafl.paper.recipes import ALPHAS, Item
from deltafl.report import (
    accuracy_curves,
    every_run,
    final_accuracies,
    heterogeneity_bars,
    step_sizes,
)
from deltafl.report.figures import AnyChart
from deltafl.report.labels import setting_label


def draw(item: Item, cells: Sequence[Result]) -> AnyChart:
    """Return the picture of an item whose cells have been run, at least some of them."""
    run = [cell for cell in cells if cell.records]
    if not run:
        raise UserError(
            f"nothing of {item.name} has been run at this scale: deltafl paper run {item.name}"
        )
    return _DRAWINGS[item.drawing](run)


def partitions() -> AnyChart:
    """Draw the labels of the clients of CIFAR-10 (Figure 8)."""
    dataset = data.load("cifar10")
    counts = {}
    for alpha in ALPHAS:
        config = Config().override(task="cifar10-resnet18", **{"federation.alpha": alpha})
        counts[f"α = {alpha:g}"] = build_partition(config, dataset).counts()
    return heterogeneity_bars(counts, dataset.classes)


def _curves(cells: Sequence[Result]) -> AnyChart:
    """Draw accuracy over rounds (Figures 1, 5 and 6, and beside every table)."""
    return accuracy_curves(
        pd.DataFrame(
            {
                "task": cell.case.task,
                "alpha": cell.case.alpha,
                "optimizer": cell.case.label,
                "seed": record.configuration().run.seed,
                "round": round_,
                "test_accuracy": accuracy,
            }
            for cell in cells
            for record in cell.records
            for round_, accuracy in record.curve
        )
    )


def _by_alpha(cells: Sequence[Result]) -> AnyChart:
    """Draw final accuracy against heterogeneity, a panel a task (Figure 2)."""
    rows = [
        _mark(cell, cell.case.task, f"{alpha:g}")
        for alpha in ALPHAS
        for cell in cells
        if cell.case.alpha == alpha
    ]
    return final_accuracies(pd.DataFrame(rows), "Heterogeneity α")


def _by_task(cells: Sequence[Result]) -> AnyChart:
    """Draw final accuracy on two tasks that differ in one thing, a panel a pair (Figure 3)."""
    tasks = list(dict.fromkeys((cell.case.task, cell.case.alpha) for cell in cells))
    rows: list[dict[str, object]] = []
    for one, other in pairwise(tasks):
        if one[1] != other[1] or not _one_thing_differs(one[0], other[0]):
            continue
        what = "another model" if one[0].split("-")[0] == other[0].split("-")[0] else "other data"
        panel = f"{what}: {one[0]}, {other[0]}, α = {one[1]:g}"
        rows += [
            _mark(cell, panel, cell.case.task)
            for task in (one, other)
            for cell in cells
            if (cell.case.task, cell.case.alpha) == task
        ]
    if not rows:
        raise UserError("no two tasks that differ in one thing have been run at this scale yet")
    return final_accuracies(pd.DataFrame(rows), "Task")


def _one_thing_differs(one: str, other: str) -> bool:
    return sum(a == b for a, b in zip(one.split("-"), other.split("-"), strict=True)) == 1


def _by_variant(cells: Sequence[Result]) -> AnyChart:
    """Draw final accuracy against a setting of Δ-SGD, a line an alpha (Figure 4)."""
    rows = [
        _mark(cell, cell.case.task, cell.case.variant) | {"optimizer": f"α = {cell.case.alpha:g}"}
        for cell in cells
    ]
    return final_accuracies(pd.DataFrame(rows), "Setting of Δ-SGD")


def _by_seed(cells: Sequence[Result]) -> AnyChart:
    """Draw every run by itself, a panel a setting."""
    return every_run(
        pd.DataFrame(
            {
                "panel": setting_label(cell.case.task, cell.case.alpha),
                "place": cell.case.label,
                "optimizer": optim.lookup(cell.case.optimizer).label,
                "seed": record.configuration().run.seed,
                "accuracy": 100 * record.final,
            }
            for cell in cells
            for record in cell.records
        )
    )


def _mark(cell: Result, panel: str, place: str) -> dict[str, object]:
    return {
        "panel": panel,
        "place": place,
        "optimizer": cell.case.label,
        "mean": cell.ours,
        "std": cell.std,
    }


def _step_sizes(cells: Sequence[Result]) -> AnyChart:
    """Draw both conditions and their minimum, a panel an optimizer (Figure 7)."""
    frames = {}
    for cell in cells:
        steps = cell.records[0].steps
        if steps is not None:
            frame = pd.DataFrame(steps.model_dump()).astype(float)
            title = f"{cell.case.label}, {cell.case.task}, α = {cell.case.alpha:g}"
            frames[f"{title}: one client a round"] = frame.assign(step=range(1, len(frame) + 1))
    return step_sizes(frames)


def _grid(cells: Sequence[Result]) -> AnyChart:
    """Draw validation accuracy against the learning rate."""
    rows = [
        _mark(cell, cell.case.task, cell.case.variant)
        | {"optimizer": cell.case.label.partition(",")[0]}
        for cell in cells
    ]
    return final_accuracies(pd.DataFrame(rows), "Learning rate")


_DRAWINGS: dict[str, Callable[[Sequence[Result]], AnyChart]] = {
    "curves": _curves,
    "by-alpha": _by_alpha,
    "by-task": _by_task,
    "by-variant": _by_variant,
    "by-seed": _by_seed,
    "early": early.draw,
    "step-sizes": _step_sizes,
    "grid": _grid,
}
