"""The two studies as charts."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd

from deltafl.paper.theory.convex_case import (
    APART,
    APART_PAIR,
    AVERAGED,
    FLAT,
    FLAT_PAIR,
    OWN,
)
from deltafl.paper.theory.nonconvex_case import (
    DEFAULTS,
    DISAGREEING,
    PROVED,
    SAME_BATCH,
    fit_from,
    slopes,
)
from deltafl.report.figures import (
    LOOK,
    STROKE_SYMBOL,
    AnyChart,
    Style,
    inline_data,
    stroke_encodings,
)
from deltafl.report.labels import require

_SOLID, _DASHED = [1, 0], [5, 3]

_CONVEX_STYLES = {
    OWN: Style("#0072B2", 2.4, _SOLID),
    AVERAGED: Style("#009E73", 2.4, _SOLID),
    APART: Style("#D55E00", 2.4, _SOLID),
    FLAT: Style("#56B4E9", 1.8, _DASHED),
    FLAT_PAIR: Style("#CC79A7", 1.8, _DASHED),
    APART_PAIR: Style("#000000", 1.8, _DASHED),
}

_NONCONVEX_STYLES = {
    PROVED: Style("#0072B2", 2.8, _SOLID),
    SAME_BATCH: Style("#009E73", 2.0, _SOLID),
    DEFAULTS: Style("#D55E00", 2.0, _SOLID),
    DISAGREEING: Style("#CC79A7", 2.0, _DASHED),
}


def convex_chart(frame: pd.DataFrame) -> AnyChart:
    """Draw V_t over V_1, and the gap over its bound, each for the worst problem of a case at t.

    Gaps below zero, which only clients without a common minimiser have, have no place on the axis.
    """
    require(frame, ["case", "seed", "t", "lyapunov", "gap", "bound"], "the figure of the lemma")
    first = frame.groupby(["case", "seed"])["lyapunov"].transform("first")
    panels = {
        "Lyapunov function, V_t / V_1 (Lemma 4)": frame["lyapunov"] / first,
        "Gap over its bound (Theorem 5)": frame["gap"] / frame["bound"],
    }
    charts = [_panel(frame.assign(value=values), title) for title, values in panels.items()]
    return alt.concat(*charts, columns=2, spacing=24, config=LOOK)


def _panel(frame: pd.DataFrame, title: str) -> alt.LayerChart:
    worst = frame.groupby(["case", "t"], sort=False)["value"].max().reset_index()
    drawn = worst.assign(value=worst["value"].where(worst["value"] > 0))
    legend = alt.Legend(title=None, orient="bottom", columns=2, **STROKE_SYMBOL)
    line = (
        alt.Chart(inline_data(drawn))
        .mark_line(clip=True, strokeJoin="round")
        .encode(
            x=alt.X("t:Q", title="Step t", scale=alt.Scale(nice=False)),
            y=alt.Y(
                "value:Q",
                title=None,
                scale=alt.Scale(type="log", domain=[1e-4, 1e3], nice=False),
                axis=alt.Axis(format="~g", values=[10.0**power for power in range(-4, 4)]),
            ),
            tooltip=["case:N", "t:Q", alt.Tooltip("value:Q", format=".3g")],
            **stroke_encodings("case", _CONVEX_STYLES, legend),
        )
    )
    limit = alt.Chart(inline_data(pd.DataFrame({"limit": [1.0]}))).mark_rule(color="#888888")
    layers = [limit.encode(y="limit:Q"), line]
    return alt.LayerChart(layer=layers, title=title, width=380, height=260)


def nonconvex_chart(frame: pd.DataFrame) -> AnyChart:
    """Draw the mean of |grad f(x_t)|^2 over the horizon T: means over seeds, ± one deviation.

    The legend gives the fitted slopes; the grey line has the slope of the theorem.
    """
    require(frame, ["arm", "horizon", "seed", "mean_square"], "the figure of Theorem 1")
    groups = frame.groupby(["arm", "horizon"], sort=False)["mean_square"]
    points = groups.agg(["mean", "std", "count"]).reset_index().rename(columns={"count": "n"})
    points["low"], points["high"] = points["mean"] - points["std"], points["mean"] + points["std"]
    labels = {
        arm: f"{arm}: slope {slope:.2f} ± {deviation:.2f}".replace("-", "−")
        for arm, slope, deviation, _ in slopes(frame, fit_from(frame)).itertuples(index=False)
    }
    points["label"] = points["arm"].map(labels)
    styles = {labels[arm]: style for arm, style in _NONCONVEX_STYLES.items() if arm in labels}
    legend = alt.Legend(title=None, orient="bottom", columns=1, labelLimit=420, **STROKE_SYMBOL)
    strokes = stroke_encodings("label", styles, legend)
    horizons = [int(horizon) for horizon in sorted(frame["horizon"].unique())]
    base = alt.Chart(inline_data(points.drop(columns="arm"))).encode(
        x=alt.X(
            "horizon:Q",
            title="Rounds T",
            scale=alt.Scale(type="log", base=2, domain=[horizons[0], horizons[-1]], nice=False),
            axis=alt.Axis(values=horizons, format="d"),
        )
    )
    limits = [float(points["mean"].min()) / 1.4, float(points["high"].max()) * 1.2]
    ticks = [step * 10.0**power for power in range(-4, 4) for step in (1, 2, 5)]
    y = alt.Y(
        title="Mean of |∇f(x_t)|² over the T rounds",
        scale=alt.Scale(type="log", domain=limits, nice=False),
        axis=alt.Axis(format="~g", values=ticks),
    )
    band = base.mark_area(clip=True, opacity=0.15).encode(
        y=y.copy().field("low").type("quantitative"), y2="high:Q", color=strokes["color"]
    )
    line = base.mark_line(point=alt.OverlayMarkDef(size=22)).encode(
        y=y.copy().field("mean").type("quantitative"),
        tooltip=["label:N", "horizon:Q", alt.Tooltip("mean:Q", format=".3g"), "n:Q"],
        **strokes,
    )
    layers = [_theorem(points, horizons), band, line]
    return alt.LayerChart(layer=layers, width=440, height=300, config=LOOK)


def _theorem(points: pd.DataFrame, horizons: Sequence[int]) -> alt.LayerChart:
    """Draw the slope -1/2, ending a little below the lowest arm."""
    ends = [horizons[0], horizons[-1]]
    lowest = points.loc[points["horizon"] == ends[1], "mean"].min() / 1.25
    values = [lowest * float(np.sqrt(ends[1] / end)) for end in ends]
    rows = pd.DataFrame({"horizon": ends, "mean": values, "text": ["", "slope −1/2"]})
    base = alt.Chart(inline_data(rows)).encode(x="horizon:Q", y="mean:Q")
    line = base.mark_line(color="#888888", strokeDash=[2, 2], strokeWidth=1.4, clip=True)
    text = base.mark_text(align="right", dx=-40, dy=-2, color="#666666").encode(text="text:N")
    return alt.LayerChart(layer=[line, text])
