from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deltafl.paper.cells import Result
from deltafl.paper.early import draw, lost_by_choosing
from deltafl.paper.recipes import Case


def cell(optimizer: str, *accuracies: float, alpha: float = 1.0, final: float | None = None) -> Any:
    curve = [(10 * place, value) for place, value in enumerate(accuracies, start=1)]
    end = accuracies[-1] if final is None else final
    record = SimpleNamespace(curve=curve, final=end)
    return Result(Case("mnist-cnn", alpha, optimizer), "paper", (record,), 1, None)


def test_a_leader_that_ends_low_costs_what_it_falls_behind():
    cells = [cell("sgd", 0.5, 0.7, 0.9), cell("adagrad", 0.6, 0.8, 0.65)]
    frame = lost_by_choosing(cells)
    assert list(frame["round"]) == [10, 20, 30]
    assert list(frame["leader"]) == ["Adagrad", "Adagrad", "SGD"]
    assert [round(lost, 9) for lost in frame["lost"]] == [25.0, 25.0, 0.0]


def test_settings_are_judged_apart():
    cells = [
        cell("sgd", 0.5),
        cell("adam", 0.4),
        cell("sgd", 0.1, alpha=0.1),
        cell("adam", 0.2, alpha=0.1),
    ]
    frame = lost_by_choosing(cells)
    assert list(zip(frame["alpha"], frame["leader"], strict=True)) == [(1.0, "SGD"), (0.1, "Adam")]
    assert list(frame["lost"]) == [0.0, 0.0]


def test_a_run_that_diverged_leads_no_further():
    cells = [cell("sgd", 0.5, 0.6), cell("sps", 0.9, final=0.1)]
    frame = lost_by_choosing(cells)
    assert list(frame["leader"]) == ["SPS", "SGD"]
    assert [round(lost, 9) for lost in frame["lost"]] == [50.0, 0.0]


def test_the_picture_has_a_panel_a_task_and_a_line_an_alpha():
    cells = [cell("sgd", 0.5, 0.6), cell("sgd", 0.4, 0.5, alpha=0.01)]
    spec = draw(cells).to_dict()
    (panel,) = spec["concat"]
    assert panel["title"] == "mnist-cnn"
    (rows,) = spec["datasets"].values()
    assert {row["heterogeneity"] for row in rows} == {"α = 1", "α = 0.01"}
