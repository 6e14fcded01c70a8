from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest

from deltafl.errors import UserError
from deltafl.report import (
    PAPER_OPTIMIZERS,
    accuracy_curves,
    every_run,
    final_accuracies,
    heterogeneity_bars,
    save,
    step_sizes,
)


def curves(
    optimizers: tuple[str, ...] = ("SGD", "Δ-SGD"),
    settings: tuple[tuple[str, float | None], ...] = (("digits-mlp", 0.1),),
    seeds: int = 2,
    rounds: int = 4,
) -> pd.DataFrame:
    """Accuracy 0.5 in every round, 0.1 more for each seed after the first."""
    return pd.DataFrame(
        [
            {
                "task": task,
                "alpha": alpha,
                "optimizer": optimizer,
                "seed": seed,
                "round": number,
                "test_accuracy": 0.5 + 0.1 * seed,
            }
            for task, alpha in settings
            for optimizer in optimizers
            for seed in range(seeds)
            for number in range(1, rounds + 1)
        ]
    )


def panels(chart: Any) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The (spec, rows) of every panel of a validated chart."""
    spec = chart.to_dict()
    found = []
    for panel in spec["concat"]:
        # Altair lifts data that all views share.
        data = panel.get("data") or spec.get("data") or panel["layer"][0]["data"]
        found.append((panel, spec["datasets"][data["name"]]))
    return found


def line(panel: dict[str, Any]) -> dict[str, Any]:
    encoding: dict[str, Any] = panel["layer"][1]["encoding"]
    return encoding


def styles(encoding: dict[str, Any]) -> dict[str, tuple[str, float, list[int]]]:
    """Colour, width and dash by label, as one merged legend gives them."""
    scales = [encoding[channel]["scale"] for channel in ("color", "strokeWidth", "strokeDash")]
    assert {scale["type"] for scale in scales} == {"ordinal"}
    assert len({tuple(scale["domain"]) for scale in scales}) == 1
    ranges = zip(*(scale["range"] for scale in scales), strict=True)
    return dict(zip(scales[0]["domain"], ranges, strict=True))


def test_curves_are_means_with_bands_of_one_deviation_in_percent() -> None:
    ((panel, rows),) = panels(accuracy_curves(curves(seeds=2, rounds=1)))
    assert panel["title"] == "digits-mlp, α = 0.1"
    assert {row["optimizer"] for row in rows} == {"SGD", "Δ-SGD"}
    for row in rows:
        assert (row["round"], row["mean"], row["n"]) == (1, 55.0, 2)
        assert (row["std"], row["low"], row["high"]) == (7.071, 47.929, 62.071)
    assert line(panel)["y"]["title"] == "Test accuracy (%)"
    assert line(panel)["x"]["title"] == "Round"


def test_one_seed_has_a_line_but_no_band() -> None:
    ((_, rows),) = panels(accuracy_curves(curves(seeds=1)))
    assert {row["mean"] for row in rows} == {50.0}
    assert {(row["low"], row["high"]) for row in rows} == {(None, None)}


def test_a_panel_per_setting_in_the_given_order() -> None:
    settings = (("b", 1.0), ("a", 0.01), ("b", 0.1), ("iid", None))
    titles = [panel["title"] for panel, _ in panels(accuracy_curves(curves(settings=settings)))]
    assert titles == ["b, α = 1", "a, α = 0.01", "b, α = 0.1", "iid"]


def test_panels_of_a_task_share_their_range_and_other_tasks_do_not() -> None:
    frame = curves(settings=(("a", 1.0), ("a", 0.1), ("b", 1.0)), seeds=1)
    frame.loc[(frame["task"] == "a") & (frame["alpha"] == 0.1), "test_accuracy"] = 0.93
    axes = [line(panel)["y"] for panel, _ in panels(accuracy_curves(frame))]
    assert [axis["scale"]["domain"] for axis in axes] == [[50, 100], [50, 100], [48, 50]]
    assert axes[0]["axis"]["values"] == [50, 60, 70, 80, 90, 100]


@pytest.mark.parametrize(("accuracy", "domain"), [(0.0, [0, 2]), (1.0, [98, 100])])
def test_a_constant_curve_has_a_range(accuracy: float, domain: list[int]) -> None:
    frame = curves(seeds=1).assign(test_accuracy=accuracy)
    ((panel, _),) = panels(accuracy_curves(frame))
    assert line(panel)["y"]["scale"]["domain"] == domain


def test_the_range_stops_at_a_hundred_percent_even_where_the_band_does_not() -> None:
    frame = curves(rounds=1)
    frame["test_accuracy"] = 1.0 - 0.5 * frame["seed"]
    ((panel, rows),) = panels(accuracy_curves(frame))
    assert max(row["high"] for row in rows) > 100
    assert line(panel)["y"]["scale"]["domain"] == [20, 100]


def test_long_runs_are_thinned_to_three_hundred_rounds_with_both_ends() -> None:
    ((_, rows),) = panels(accuracy_curves(curves(optimizers=("SGD",), seeds=1, rounds=1000)))
    numbers = [row["round"] for row in rows]
    assert len(numbers) == 300
    assert (numbers[0], numbers[-1]) == (1, 1000)
    assert set(np.diff(numbers)) <= {3, 4}


def test_the_paper_s_optimizers_keep_their_look_whoever_else_is_shown() -> None:
    ((everyone, _),) = panels(accuracy_curves(curves(optimizers=PAPER_OPTIMIZERS)))
    ((some, _),) = panels(accuracy_curves(curves(optimizers=("Mine", "Δ-SGD", "SGD (↓)"))))
    looks, others = styles(line(everyone)), styles(line(some))
    assert list(looks) == ["Δ-SGD", *PAPER_OPTIMIZERS[:-1]]
    assert list(others) == ["Δ-SGD", "Mine", "SGD (↓)"]
    assert {name: others[name] for name in ("Δ-SGD", "SGD (↓)")} == {
        name: looks[name] for name in ("Δ-SGD", "SGD (↓)")
    }
    assert len({(color, tuple(dash)) for color, _, dash in looks.values()}) == 8
    widths = [width for _, width, _ in looks.values()]
    assert widths[0] > max(widths[1:])


def test_a_variant_of_delta_sgd_has_its_colour_but_not_its_line() -> None:
    ((panel, _),) = panels(accuracy_curves(curves(optimizers=("Δ-SGD (reused)", "Δ-SGD"))))
    (color, width, dash), (variant, thinner, dashed) = styles(line(panel)).values()
    assert (variant, thinner < width, dashed != dash) == (color, True, True)


def test_delta_sgd_is_painted_over_the_others() -> None:
    ((_, rows),) = panels(accuracy_curves(curves(optimizers=("Δ-SGD", "SGD", "Adam"))))
    assert list(dict.fromkeys(row["optimizer"] for row in rows)) == ["Adam", "SGD", "Δ-SGD"]


def test_rounds_without_evaluation_are_left_out() -> None:
    frame = curves(optimizers=("SGD",), seeds=1)
    frame.loc[frame["round"] == 2, "test_accuracy"] = float("nan")
    ((_, rows),) = panels(accuracy_curves(frame))
    assert [row["round"] for row in rows] == [1, 3, 4]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (curves().drop(columns=["round", "seed"]), r"needs the column\(s\) seed, round"),
        (curves().assign(test_accuracy=float("nan")), "nothing to show"),
        (curves().assign(test_accuracy=55.0), "between 0 and 1, got 55.0"),
    ],
)
def test_curves_that_cannot_be_drawn_are_refused(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=message):
        accuracy_curves(frame)


def test_bars_hold_each_client_s_shares() -> None:
    chart = heterogeneity_bars(
        {"α = 1": [[1, 3], [2, 0]], "α = 0.1": [[4, 0]]}, classes=["cat", "dog"], title="Who"
    )
    assert chart.to_dict()["title"]["text"] == "Who"
    (first, rows), (second, _) = panels(chart)
    assert (first["title"], second["title"]) == ("α = 1", "α = 0.1")
    assert [(r["client"], r["class"], r["samples"], r["share"]) for r in rows] == [
        (0, "cat", 1, 0.25),
        (0, "dog", 3, 0.75),
        (1, "cat", 2, 1.0),
    ]
    assert first["encoding"]["x"]["field"] == "share"
    assert first["encoding"]["x"]["scale"]["domain"] == [0, 1]
    assert first["encoding"]["color"]["scale"]["domain"] == ["cat", "dog"]


def test_bars_may_count_samples() -> None:
    ((panel, _),) = panels(heterogeneity_bars(np.eye(3), shares=False))
    assert panel["encoding"]["x"]["field"] == "samples"
    assert panel["encoding"]["x"]["title"] == "Samples"


def test_a_client_without_samples_keeps_its_row() -> None:
    ((panel, rows),) = panels(heterogeneity_bars([[0, 0], [1, 1]]))
    assert panel["encoding"]["y"]["scale"]["domain"] == [0, 1]
    assert {row["client"] for row in rows} == {1}


def test_ten_classes_have_ten_colours_and_a_hundred_no_legend() -> None:
    ((ten, _),) = panels(heterogeneity_bars(np.ones((100, 10))))
    colors = ten["encoding"]["color"]["scale"]["range"]
    assert len(set(colors)) == len(colors) == 10
    assert ten["encoding"]["y"]["axis"]["values"] == list(range(0, 100, 5))
    ((many, rows),) = panels(heterogeneity_bars(np.ones((100, 100))))
    assert len(rows) == 10_000
    assert many["encoding"]["color"]["legend"] is None
    assert many["encoding"]["color"]["scale"]["domain"] == [0, 100]


@pytest.mark.parametrize(
    ("counts", "classes", "message"),
    [
        ({}, None, "no panel"),
        ([1, 2], None, r"got shape \(2,\)"),
        (np.ones((0, 3)), None, r"got shape \(0, 3\)"),
        ([[1, -1]], None, "at least 0"),
        ([[1, float("nan")]], None, "at least 0"),
        ([[1, 2]], ["cat"], "1 class names"),
        ({"a": [[1, 2]], "b": [[1, 2, 3]]}, None, "3 class names"),
    ],
)
def test_counts_that_cannot_be_drawn_are_refused(counts: Any, classes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        heterogeneity_bars(counts, classes)


def test_final_accuracies_leave_no_empty_half() -> None:
    """All layers of a panel say which range they span, or the axis would begin at zero."""
    rows = [
        {"panel": "one", "place": place, "optimizer": "SGD", "mean": mean, "std": None}
        for place, mean in (("a", 82.1), ("b", 88.2))
    ]
    (panel,) = final_accuracies(pd.DataFrame(rows), "place").to_dict()["concat"]
    assert [layer["encoding"]["y"]["scale"]["domain"] for layer in panel["layer"]] == [[82, 90]] * 3


def test_every_run_is_a_dot_on_an_axis_from_nothing_to_all() -> None:
    rows = [
        {"panel": panel, "place": f"SGD, {lr}", "optimizer": "SGD", "seed": seed, "accuracy": found}
        for panel in ("one", "other")
        for lr in (0.5, 0.1)
        for seed, found in enumerate((9.8, 97.0, 9.8))
    ]
    drawn = panels(every_run(pd.DataFrame(rows)))
    assert [panel["title"] for panel, _ in drawn] == ["one", "other"]
    for panel, dots in drawn:
        encoding = panel["layer"][0]["encoding"]
        assert [dot["accuracy"] for dot in dots] == [9.8, 97.0, 9.8] * 2
        assert encoding["x"]["sort"] == ["SGD, 0.5", "SGD, 0.1"]
        assert encoding["y"]["scale"]["domain"] == [0, 100]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"accuracy": 120.0}, "between 0 and 1"), ({}, r"needs the column\(s\) seed")],
)
def test_runs_that_cannot_be_drawn_are_refused(change: dict[str, float], message: str) -> None:
    row = {"panel": "one", "place": "a", "optimizer": "SGD", "accuracy": 50.0}
    frame = pd.DataFrame([{**row, "seed": 0, **change} if change else row])
    with pytest.raises(UserError, match=message):
        every_run(frame)


STEPS = pd.DataFrame(
    {
        "step": [0, 1, 2],
        "smoothness": [0.4, float("inf"), 0.1],
        "growth": [0.2, 0.21, 0.22],
        "eta": [0.2, 0.21, 0.1],
    }
)
FIRST, SECOND, MINIMUM = (
    "first condition (local smoothness)",
    "second condition (growth)",
    "step size η (the minimum)",
)


def test_step_sizes_show_both_conditions_and_their_minimum_on_top() -> None:
    spec = step_sizes(STEPS).to_dict()
    rows = spec["datasets"][spec["data"]["name"]]
    values = {
        name: [row["value"] for row in rows if row["condition"] == name]
        for name in dict.fromkeys(row["condition"] for row in rows)
    }
    assert values == {
        SECOND: [0.2, 0.21, 0.22],
        FIRST: [0.4, None, 0.1],
        MINIMUM: [0.2, 0.21, 0.1],
    }
    assert list(values)[-1] == MINIMUM
    looks = {name: color for name, (color, _, _) in styles(spec["encoding"]).items()}
    assert looks == {FIRST: "#009E73", SECOND: "#56B4E9", MINIMUM: "#D55E00"}
    assert spec["encoding"]["y"]["scale"]["type"] == "log"
    assert spec["encoding"]["y"]["scale"]["domain"] == pytest.approx([0.1 / 1.2, 0.4 * 1.2])


def test_step_sizes_on_a_linear_axis_keep_zero() -> None:
    frame = STEPS.assign(eta=0.0)

    def etas(log: bool) -> list[float | None]:
        spec = step_sizes(frame, log=log).to_dict()
        rows = spec["datasets"][spec["data"]["name"]]
        return [row["value"] for row in rows if row["condition"] == MINIMUM]

    assert etas(log=False) == [0.0] * 3
    assert etas(log=True) == [None] * 3


def test_panels_of_step_sizes_share_one_legend_to_click() -> None:
    spec = step_sizes({"one": STEPS, "other": STEPS}).to_dict()
    (highlight,) = spec["params"]
    assert highlight["bind"] == "legend"
    for panel in spec["concat"]:
        (condition,) = panel["encoding"]["opacity"]["condition"]
        assert condition["param"] == highlight["name"]


def test_step_sizes_without_a_finite_value_are_refused() -> None:
    nothing = STEPS.assign(smoothness=float("nan"), growth=float("inf"), eta=float("nan"))
    with pytest.raises(UserError, match="no step size is finite"):
        step_sizes(nothing)
    with pytest.raises(UserError, match=r"needs the column\(s\) eta"):
        step_sizes(STEPS.drop(columns="eta"))


def test_curves_saved_as_svg_carry_every_label(tmp_path: Path) -> None:
    frame = curves(optimizers=PAPER_OPTIMIZERS, settings=(("digits-mlp", 0.1), ("b", 1.0)))
    text = save(accuracy_curves(frame), tmp_path / "new" / "curves.svg").read_text("utf-8")
    assert text.startswith("<svg")
    for label in (
        *PAPER_OPTIMIZERS,
        "digits-mlp, α = 0.1",
        "b, α = 1",
        "Round",
        "Client optimizer",
    ):
        assert f">{label}<" in text, label
    assert text.count(">Δ-SGD<") == 1, "one legend for all panels and channels"


def test_the_other_figures_save_as_svg(tmp_path: Path) -> None:
    bars = save(heterogeneity_bars({"α = 1": np.eye(3)}, ["x", "yy", "zzz"]), tmp_path / "a.svg")
    assert all(f">{label}<" in bars.read_text("utf-8") for label in ("α = 1", "Client", "zzz"))
    steps = save(step_sizes(STEPS), tmp_path / "b.svg").read_text("utf-8")
    assert all(f">{label}<" in steps for label in (FIRST, SECOND, MINIMUM, "Local step"))


@pytest.fixture
def chart() -> alt.Chart:
    drawn = step_sizes(STEPS)
    assert isinstance(drawn, alt.Chart)
    return drawn


def test_png_has_twice_the_size(chart: alt.Chart, tmp_path: Path) -> None:
    content = save(chart, tmp_path / "figure.PNG").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    # The plot is 640 by 280; axes and legend come on top.
    assert 2 * 640 < width < 2 * 740
    assert 2 * 280 < height < 2 * 380


def test_pdf_html_and_json(chart: alt.Chart, tmp_path: Path) -> None:
    assert save(chart, tmp_path / "a.pdf").read_bytes().startswith(b"%PDF-")
    assert json.loads(save(chart, tmp_path / "a.json").read_text("utf-8")) == chart.to_dict()
    page = save(chart, str(tmp_path / "a.html")).read_text("utf-8")
    assert MINIMUM in page or json.dumps(MINIMUM)[1:-1] in page
    assert "<script src=" not in page, "a page that works offline loads nothing"
    assert "vega" in page
    assert len(page) > 500_000


def test_an_unknown_suffix_is_refused(chart: alt.Chart, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"figure\.gif: its suffix must be one of \.svg, \.png"):
        save(chart, tmp_path / "figure.gif")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_one_line(chart: alt.Chart, tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    (tmp_path / "file").touch()
    for path, reason in (("taken.json", "Is a directory"), ("file/a.json", "File exists|Not a")):
        with pytest.raises(UserError, match=rf"^cannot write the figure .*: ({reason}).*$"):
            save(chart, tmp_path / path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.json"]


def test_a_full_disk_keeps_the_old_file(
    chart: alt.Chart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def half(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(UserError, match=r"a\.json: No space left on device$"):
        save(chart, path)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
