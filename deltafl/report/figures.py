"""The paper's figures as Altair charts: accuracy curves, heterogeneity, step sizes.

Each function turns plain data into a chart that serves both a static file (`save`) and an
interactive page: tooltips and legends that can be clicked cost nothing in an SVG.

Colours are Okabe and Ito's and Paul Tol's, which stay apart for colour-blind readers; where
lines cross, width and dashes repeat what colour says.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd

from deltafl.errors import UserError
from deltafl.report.labels import (
    DELTA_SGD,
    SETTING,
    require,
    require_fractions,
    setting_label,
)

AnyChart = alt.Chart | alt.LayerChart | alt.ConcatChart
"""What the functions of this module return."""

MAX_POINTS = 300
"""Points kept of each curve: more than a panel has pixels would only make files large."""

_COLUMNS = 3

_RED, _BLUE, _GREEN = "#D55E00", "#0072B2", "#009E73"


def save(chart: AnyChart, path: str | os.PathLike[str]) -> Path:
    """Write `chart` to `path` in the format its suffix names, whole or not at all.

    Formats: .svg, .png (at twice the size), .pdf, .html (self-contained, works offline) and
    .json (Vega-Lite). Missing folders are made.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise UserError(
            f"cannot write a figure to {path}: its suffix must be one of {', '.join(_FORMATS)}"
        )
    content = _render(chart, suffix)
    # The rename makes the file appear at once; a reader never sees half of it.
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write the figure {path}: {error.strerror or error}") from error
    return path


_FORMATS: dict[str, Literal["svg", "png", "pdf", "html", "json"]] = {
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".html": "html",
    ".json": "json",
}


def _render(chart: AnyChart, suffix: str) -> bytes:
    """Return the bytes of the file; everything that can fail but the disk fails here."""
    kind = _FORMATS[suffix]
    if kind in ("png", "pdf"):
        raw = io.BytesIO()
        chart.save(raw, format=kind, scale_factor=2 if kind == "png" else 1)
        return raw.getvalue()
    text = io.StringIO()
    chart.save(text, format=kind, inline=kind == "html")
    return text.getvalue().encode()


def accuracy_curves(frame: pd.DataFrame) -> AnyChart:
    """Draw test accuracy over rounds, a panel per setting and a line per optimizer.

    Lines are means over seeds, bands ± one sample standard deviation where there are at least
    two seeds. Panels of the same task share their y range, so that the effect of alpha shows.

    Args:
        frame: One row a run and round: task, alpha, optimizer, seed, round, test_accuracy
            (0..1). Rounds that were not evaluated (NaN) are left out.
    """
    what = "the figure of accuracies"
    require(frame, [*SETTING, "optimizer", "seed", "round", "test_accuracy"], what)
    frame = frame.dropna(subset=["test_accuracy"])
    require(frame, [], what)
    require_fractions(frame["test_accuracy"], what)

    titles = [setting_label(*row) for row in zip(frame["task"], frame["alpha"], strict=True)]
    frame = frame.assign(panel=titles)
    styles = line_styles([str(name) for name in frame["optimizer"].unique()])
    # Painted in the order of the rows: what is first in the legend belongs on top.
    depth = {name: -place for place, name in enumerate(styles)}
    curves = _mean_curves(frame).sort_values(
        "optimizer", key=lambda names: names.map(depth), kind="stable"
    )
    highlight = alt.selection_point(name="optimizer", fields=["optimizer"], bind="legend")
    width, height = _panel_size(frame["panel"].nunique())
    charts: list[alt.LayerChart | alt.FacetChart] = []
    for index, title in enumerate(frame["panel"].unique()):
        panel = curves[curves["panel"] == title]
        scale, axis = _accuracy_axis(curves[curves["task"] == panel["task"].iloc[0]])
        y_title = "Test accuracy (%)" if index % _COLUMNS == 0 else None
        y = alt.Y(title=y_title, scale=scale, axis=axis)
        band, line = _band_and_line(panel, styles, highlight, y)
        # One panel declares the selection; every panel obeys it.
        line = line.add_params(highlight) if index == 0 else line
        charts.append(alt.layer(band, line, title=title, width=width, height=height))
    return alt.concat(*charts, columns=_COLUMNS, spacing=24, config=LOOK)


def final_accuracies(frame: pd.DataFrame, x_title: str) -> AnyChart:
    """Draw final accuracies side by side: a panel a question, a line an optimizer.

    Args:
        frame: One row a mark: panel, place (its name along x), optimizer, mean and std in percent
            (std may be missing). Panels, places and optimizers are drawn in their order.
        x_title: What the places are.
    """
    what = "the figure of final accuracies"
    require(frame, ["panel", "place", "optimizer", "mean", "std"], what)
    require_fractions(frame["mean"] / 100, what)
    styles = line_styles([str(name) for name in frame["optimizer"].unique()])
    frame = frame.assign(
        low=(frame["mean"] - frame["std"]).clip(lower=0),
        high=(frame["mean"] + frame["std"]).clip(upper=100),
    )
    strokes = stroke_encodings("optimizer", styles, alt.Legend(title=None, **STROKE_SYMBOL))
    width, height = _panel_size(frame["panel"].nunique())
    charts: list[alt.LayerChart | alt.FacetChart] = []
    for index, title in enumerate(frame["panel"].unique()):
        panel = frame[frame["panel"] == title]
        scale, axis = _accuracy_axis(panel)
        places = [str(place) for place in panel["place"].unique()]
        y = partial(
            alt.Y,
            title="Final test accuracy (%)" if index % _COLUMNS == 0 else None,
            scale=scale,
            axis=axis,
        )
        base = alt.Chart(inline_data(panel.drop(columns="panel"))).encode(
            x=alt.X("place:N", sort=places, title=x_title, axis=alt.Axis(labelAngle=0)),
            y=y("mean:Q"),
        )
        # The deviations share the scale too: left to itself, theirs would begin at zero.
        error = base.mark_rule(opacity=0.5).encode(
            y=y("low:Q"), y2="high:Q", color=strokes["color"]
        )
        line = base.mark_line(strokeJoin="round").encode(**strokes)
        point = base.mark_point(filled=True, opacity=1, size=40).encode(
            color=strokes["color"],
            tooltip=[
                "optimizer:N",
                "place:N",
                alt.Tooltip("mean:Q", title="accuracy (%)", format=".1f"),
                alt.Tooltip("std:Q", title="± over seeds", format=".1f"),
            ],
        )
        charts.append(alt.layer(error, line, point, title=title, width=width, height=height))
    return alt.concat(*charts, columns=_COLUMNS, spacing=24, config=LOOK)


def every_run(frame: pd.DataFrame) -> AnyChart:
    """Draw final accuracies run by run, where a mean would hide that some runs fail.

    Args:
        frame: One row a run: panel, place (its name along x; a comma begins a new line),
            optimizer, seed and accuracy in percent. Panels and places are drawn in their order.
    """
    what = "the figure of every run"
    require(frame, ["panel", "place", "optimizer", "seed", "accuracy"], what)
    require_fractions(frame["accuracy"] / 100, what)
    styles = line_styles([str(name) for name in frame["optimizer"].unique()])
    color = stroke_encodings("optimizer", styles, alt.Legend(title=None, symbolOpacity=1))["color"]
    width, height = _panel_size(frame["panel"].nunique())
    charts: list[alt.LayerChart | alt.FacetChart] = []
    for index, title in enumerate(frame["panel"].unique()):
        panel = frame[frame["panel"] == title]
        y = alt.Y(
            "accuracy:Q",
            title="Test accuracy (%)" if index % _COLUMNS == 0 else None,
            scale=alt.Scale(domain=[0, 100], nice=False),
        )
        places = [str(place) for place in panel["place"].unique()]
        axis = alt.Axis(labelAngle=0, labelExpr="split(datum.label, ', ')")
        dots = (
            alt.Chart(inline_data(panel.drop(columns="panel")))
            .mark_point(filled=True, size=70, opacity=0.45)  # dots at one height add up
            .encode(
                x=alt.X("place:N", sort=places, title=None, axis=axis),
                y=y,
                color=color,
                tooltip=["place:N", "seed:O", alt.Tooltip("accuracy:Q", format=".1f")],
            )
        )
        charts.append(alt.layer(dots, title=title, width=width, height=height))
    return alt.concat(*charts, columns=_COLUMNS, spacing=24, config=LOOK)


def _mean_curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean, low, high and n in percent by line and round, with few enough rounds."""
    line = ["panel", "task", "optimizer"]
    percent = frame.assign(accuracy=100.0 * frame["test_accuracy"])
    groups = percent.groupby([*line, "round"])["accuracy"]
    curves = groups.agg(["mean", "std", "count"]).reset_index().rename(columns={"count": "n"})
    curves["low"] = curves["mean"] - curves["std"]
    curves["high"] = curves["mean"] + curves["std"]
    kept = pd.concat(curve.iloc[spread(len(curve))] for _, curve in curves.groupby(line))
    # A thousandth of a point is below a pixel; more digits only make files large.
    return kept.round({"mean": 3, "std": 3, "low": 3, "high": 3})


def spread(length: int) -> npt.NDArray[np.intp]:
    """Return at most MAX_POINTS evenly spread positions, the first and the last among them."""
    kept = np.linspace(0, length - 1, num=min(length, MAX_POINTS))
    return np.round(kept).astype(np.intp)


def _accuracy_axis(curves: pd.DataFrame) -> tuple[alt.Scale, alt.Axis]:
    """Return a y range within 0 to 100 percent that holds all of these lines and bands.

    It ends on ticks, so that the titles of neighbouring panels keep the same height.
    """
    low = max(0.0, float(curves[["low", "mean"]].min().min()))
    high = min(100.0, float(curves[["high", "mean"]].max().max()))
    step = next(step for step in (2, 5, 10, 20) if high - low <= 5 * step)
    top = max(step * math.ceil(high / step), step)
    bottom = min(step * math.floor(low / step), top - step)
    ticks = list(range(bottom, top + 1, step))
    return alt.Scale(domain=[bottom, top], nice=False), alt.Axis(values=ticks)


def _band_and_line(
    curves: pd.DataFrame, styles: Mapping[str, Style], highlight: alt.Parameter, y: alt.Y
) -> tuple[alt.Chart, alt.Chart]:
    """Draw the deviations and the means of one setting, both along `y`."""
    legend = alt.Legend(title="Client optimizer", **STROKE_SYMBOL)
    strokes = stroke_encodings("optimizer", styles, legend)
    base = alt.Chart(inline_data(curves.drop(columns=["panel", "task"]))).encode(
        x=alt.X(
            "round:Q",
            title="Round",
            axis=alt.Axis(tickMinStep=1, tickCount=6),
            scale=alt.Scale(nice=False),
        )
    )
    band = base.mark_area(clip=True).encode(
        y=y.copy().field("low").type("quantitative"),
        y2="high:Q",
        color=strokes["color"],
        opacity=alt.when(highlight).then(alt.value(0.15)).otherwise(alt.value(0.02)),
    )
    line = base.mark_line(clip=True, strokeJoin="round").encode(
        y=y.copy().field("mean").type("quantitative"),
        opacity=alt.when(highlight).then(alt.value(1.0)).otherwise(alt.value(0.12)),
        tooltip=[
            alt.Tooltip("optimizer:N", title="optimizer"),
            alt.Tooltip("round:Q", title="round"),
            alt.Tooltip("mean:Q", title="accuracy (%)", format=".1f"),
            alt.Tooltip("std:Q", title="± over seeds", format=".1f"),
            alt.Tooltip("n:Q", title="seeds"),
        ],
        **strokes,
    )
    return band, line


class Style(NamedTuple):
    """How a line looks."""

    color: str
    width: float
    dash: list[int]


_SOLID, _DASHED, _DOTTED = [1, 0], [5, 3], [2, 2]

# A variant keeps the colour of its optimizer and turns dashed: the two belong together.
_KNOWN_STYLES = {
    DELTA_SGD: Style(_RED, 2.8, _SOLID),
    f"{DELTA_SGD} (reused)": Style(_RED, 2.0, _DASHED),
    "SGD": Style(_BLUE, 1.6, _SOLID),
    "SGD (↓)": Style(_BLUE, 1.6, _DASHED),
    "SGDM": Style("#56B4E9", 1.6, _SOLID),
    "SGDM (↓)": Style("#56B4E9", 1.6, _DASHED),
    "Adam": Style(_GREEN, 1.6, _SOLID),
    "Adagrad": Style("#CC79A7", 1.6, _SOLID),
    "SPS": Style("#B8860B", 1.6, _SOLID),
}

_OTHER_COLORS = ["#000000", "#882255", "#44AA99", "#332288", "#999933", "#777777"]


def line_styles(names: Sequence[str]) -> dict[str, Style]:
    """Return a style by label in legend order: Δ-SGD first, then as given."""
    others = sorted(set(names) - set(_KNOWN_STYLES))
    styles = _KNOWN_STYLES | {
        name: Style(_OTHER_COLORS[place % len(_OTHER_COLORS)], 1.6, _DOTTED)
        for place, name in enumerate(others)
    }
    return {name: styles[name] for name in sorted(names, key=lambda name: name != DELTA_SGD)}


STROKE_SYMBOL: dict[str, Any] = {"symbolType": "stroke", "symbolSize": 400, "symbolOpacity": 1}


def stroke_encodings(field: str, styles: Mapping[str, Style], legend: alt.Legend) -> dict[str, Any]:
    """Return the encodings that give each value of `field` its style.

    The legend is the same on all three channels, which makes Vega-Lite merge them into one.
    """
    names = list(styles)
    colors, widths, dashes = zip(*styles.values(), strict=True)

    def options(values: Sequence[Any]) -> dict[str, Any]:
        # Named ordinal, or Vega-Lite would blend widths between the first and the last.
        return {
            "scale": alt.Scale(type="ordinal", domain=names, range=values),
            "legend": legend,
        }

    return {
        "color": alt.Color(f"{field}:N", **options(colors)),
        "strokeWidth": alt.StrokeWidth(f"{field}:N", **options(widths)),
        "strokeDash": alt.StrokeDash(f"{field}:N", **options(dashes)),
    }


def heterogeneity_bars(
    counts: npt.ArrayLike | Mapping[str, npt.ArrayLike],
    classes: Sequence[str] | None = None,
    title: str | None = None,
    *,
    shares: bool = True,
) -> AnyChart:
    """Draw which classes each client holds: a row a client, a bar stacked by class.

    Args:
        counts: Samples [clients, classes]; a mapping of panel titles to such arrays puts
            several side by side, one alpha each in the paper.
        classes: The names of the classes; by default their indices.
        title: The title above all panels.
        shares: Draw each client's shares; otherwise its numbers of samples.
    """
    panels = counts if isinstance(counts, Mapping) else {"": counts}
    if not panels:
        raise UserError("the figure of heterogeneity has nothing to show: no panel was given")
    tables = {name: _checked_counts(table) for name, table in panels.items()}
    widest = max(table.shape[1] for table in tables.values())
    names = [str(name) for name in classes] if classes is not None else [*map(str, range(widest))]
    if any(table.shape[1] != len(names) for table in tables.values()):
        raise UserError(
            f"the figure of heterogeneity has {len(names)} class names, which is not the number "
            "of columns of its counts"
        )
    width, _ = _panel_size(len(tables))
    charts = [
        _bars(table, names, shares, y_title="Client" if index % _COLUMNS == 0 else None).properties(
            width=width, title=name
        )
        for index, (name, table) in enumerate(tables.items())
    ]
    chart = alt.concat(*charts, columns=_COLUMNS, spacing=24, config=LOOK)
    if title:
        chart = chart.properties(title=alt.Title(title, frame="bounds", anchor="middle", offset=12))
    return chart


def _checked_counts(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the counts as an array, refusing what cannot be drawn."""
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise UserError(
            f"the figure of heterogeneity needs counts [clients, classes], got shape {table.shape}"
        )
    if not np.isfinite(table).all() or (table < 0).any():
        raise UserError("the figure of heterogeneity needs counts that are at least 0")
    return table


# Paul Tol's "muted" scheme: ten classes that stay apart for colour-blind readers.
CLASS_COLORS = [
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#BBBBBB",
]


def _bars(
    table: npt.NDArray[np.float64], names: Sequence[str], shares: bool, y_title: str | None
) -> alt.Chart:
    """Draw the clients of one panel."""
    clients = len(table)
    # Only what is held: with a small alpha nearly every count is zero.
    held = np.argwhere(table > 0)
    totals = table.sum(axis=1)
    rows = pd.DataFrame(
        {
            "client": held[:, 0],
            "index": held[:, 1],
            "class": [names[index] for index in held[:, 1]],
            "samples": table[held[:, 0], held[:, 1]],
            "share": table[held[:, 0], held[:, 1]] / totals[held[:, 0]],
        }
    )
    few = len(names) <= len(CLASS_COLORS)
    if few:
        color = alt.Color(
            "class:N",
            title="Class",
            scale=alt.Scale(domain=list(names), range=CLASS_COLORS[: len(names)]),
            sort=list(names),
        )
    else:
        # Too many for a legend to help: hues only tell neighbours apart.
        color = alt.Color(
            "index:Q",
            scale=alt.Scale(scheme="rainbow", domain=[0, len(names)]),
            legend=None,
        )
    x = (
        alt.X("share:Q", title="Share of its samples", scale=alt.Scale(domain=[0, 1])).axis(
            format="%"
        )
        if shares
        else alt.X("samples:Q", title="Samples", scale=alt.Scale(nice=False))
    )
    label_every = max(1, math.ceil(clients / 20 / 5) * 5) if clients > 20 else 1
    chart: alt.Chart = (
        # One label for each of the many bars would only make the file large.
        alt.Chart(inline_data(rows))
        .mark_bar(aria=False)
        .encode(
            x=x.stack("zero"),
            y=alt.Y(
                "client:O",
                title=y_title,
                scale=alt.Scale(domain=list(range(clients)), paddingInner=0.12, paddingOuter=0),
                axis=alt.Axis(values=list(range(0, clients, label_every)), ticks=False),
            ),
            color=color,
            order="index:O",
            tooltip=[
                alt.Tooltip("client:O", title="client"),
                alt.Tooltip("class:N", title="class"),
                alt.Tooltip("samples:Q", title="samples"),
                alt.Tooltip("share:Q", title="share", format=".1%"),
            ],
        )
        .properties(height=alt.Step(min(16.0, max(1.0, 360 / clients))))
    )
    return chart


# The step size covers whichever condition is the smaller: that one must show around it.
_CONDITIONS = {
    "smoothness": ("first condition (local smoothness)", Style(_GREEN, 1.2, _SOLID)),
    "growth": ("second condition (growth)", Style("#56B4E9", 4, _SOLID)),
    "eta": ("step size η (the minimum)", Style(_RED, 1.6, _SOLID)),
}


def step_sizes(frame: pd.DataFrame | Mapping[str, pd.DataFrame], *, log: bool = True) -> AnyChart:
    """Draw the two conditions of Δ-SGD's step size, and the step size, their minimum.

    Args:
        frame: One row a local step: step (running over rounds), smoothness (the first
            condition, infinite where the gradient did not change), growth (the second) and
            eta. Values that have no place on the axis leave a gap. A mapping of titles to
            frames puts several below each other.
        log: A logarithmic y axis; the first condition spans orders of magnitude.
    """
    highlight = alt.selection_point(name="condition", fields=["condition"], bind="legend")
    if not isinstance(frame, Mapping):
        chart = _step_sizes(frame, log, highlight).add_params(highlight)
        return chart.properties(config=LOOK)
    if not frame:
        raise UserError("the figure of step sizes has nothing to show: no run recorded them")
    charts = [
        _step_sizes(panel, log, highlight).properties(title=name) for name, panel in frame.items()
    ]
    charts[0] = charts[0].add_params(highlight)  # one for all panels
    return alt.concat(*charts, columns=1, config=LOOK)


def _step_sizes(frame: pd.DataFrame, log: bool, highlight: alt.Parameter) -> alt.Chart:
    require(frame, ["step", *_CONDITIONS], "the figure of step sizes")
    # Painted in the order of the columns: the widest line below, the step size on top.
    painted = ["step", "growth", "smoothness", "eta"]
    rows = frame[painted].melt("step", var_name="condition", value_name="value")
    drawable = np.isfinite(rows["value"]) & ((rows["value"] > 0) | (not log))
    if not drawable.any():
        raise UserError("the figure of step sizes has nothing to show: no step size is finite")
    rows["value"] = rows["value"].where(drawable)
    rows["condition"] = rows["condition"].map({key: name for key, (name, _) in _CONDITIONS.items()})
    if log:
        # Left to itself the axis would end on powers of ten, and leave half of itself empty.
        limits = [rows["value"].min() / 1.2, rows["value"].max() * 1.2]
        scale = alt.Scale(type="log", domain=limits, nice=False)
    else:
        scale = alt.Scale(zero=True)
    legend = alt.Legend(title=None, orient="top", **STROKE_SYMBOL)
    chart: alt.Chart = (
        alt.Chart(inline_data(rows), width=640, height=280)
        .mark_line(strokeJoin="round")
        .encode(
            x=alt.X("step:Q", title="Local step", scale=alt.Scale(nice=False)),
            y=alt.Y("value:Q", title="Step size", scale=scale),
            opacity=alt.when(highlight).then(alt.value(1.0)).otherwise(alt.value(0.12)),
            tooltip=["step:Q", "condition:N", alt.Tooltip("value:Q", format=".3g")],
            **stroke_encodings("condition", dict(_CONDITIONS.values()), legend),
        )
    )
    return chart


def _panel_size(panels: int) -> tuple[int, int]:
    """Return the width and height of a panel: the fewer there are, the larger each."""
    return {1: (440, 300), 2: (340, 240)}.get(panels, (260, 200))


def inline_data(frame: pd.DataFrame) -> alt.InlineData:
    """Return the rows as data of the chart, beyond the 5000 that Altair takes of a frame."""
    rows = frame.astype(object).where(frame.notna(), None)
    columns = [str(column) for column in rows.columns]
    return alt.InlineData(
        values=[dict(zip(columns, row, strict=True)) for row in rows.itertuples(index=False)]
    )


LOOK = alt.Config(
    background="white",
    font="sans-serif",
    view=alt.ViewConfig(stroke=None),
    axis=alt.AxisConfig(
        gridColor="#E8E8E8",
        domainColor="#888888",
        tickColor="#888888",
        labelFlush=False,
        labelFontSize=11,
        titleFontSize=12,
        titleFontWeight="normal",
    ),
    title=alt.TitleConfig(frame="group", fontSize=13, fontWeight="bold"),
    legend=alt.LegendConfig(
        labelFontSize=12, titleFontSize=12, titleFontWeight="normal", labelLimit=260
    ),
)
"""The look all figures share."""
