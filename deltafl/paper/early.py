"""What it costs to stop a comparison early: the leader of a round, and where it ends.

Recipes that are cut to a laptop's hour rank optimizers by their first rounds. The runs at the
paper's length say what such a ranking is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from deltafl.paper.cells import Result
from deltafl.report.figures import LOOK, AnyChart, inline_data

_COLUMNS = ["task", "alpha", "round", "leader", "lost"]


def lost_by_choosing(cells: Sequence[Result]) -> pd.DataFrame:
    """Return how many points the leader of each round ends below the best, setting by setting.

    The first seed of each cell counts, since most cells have one. A run that has diverged leads
    nobody from then on.
    """
    rows = []
    for task, alpha in dict.fromkeys((cell.case.task, cell.case.alpha) for cell in cells):
        here = [c for c in cells if (c.case.task, c.case.alpha) == (task, alpha) and c.records]
        curves = {cell.case.label: dict(cell.records[0].curve) for cell in here}
        ends = {cell.case.label: 100 * cell.records[0].final for cell in here}
        for number in sorted({number for curve in curves.values() for number in curve}):
            reached = {label: curve[number] for label, curve in curves.items() if number in curve}
            leader = max(reached, key=lambda label: reached[label])
            rows.append((task, alpha, number, leader, max(ends.values()) - ends[leader]))
    return pd.DataFrame(rows, columns=_COLUMNS)


def draw(cells: Sequence[Result]) -> AnyChart:
    """Draw the points lost over the round of the choice, a panel a task and a line an alpha."""
    frame = lost_by_choosing(cells)
    charts = []
    for task in frame["task"].unique():
        panel = frame[frame["task"] == task]
        heterogeneity = panel["alpha"].map("α = {:g}".format)
        drawn = panel.drop(columns=["task", "alpha"]).assign(heterogeneity=heterogeneity)
        line = (
            alt.Chart(inline_data(drawn))
            .mark_line(interpolate="step-after", strokeJoin="round")
            .encode(
                x=alt.X(
                    "round:Q",
                    title="Round of the choice",
                    scale=alt.Scale(type="log", nice=False),
                    axis=alt.Axis(values=[10, 20, 50, 100, 200, 500, 1000], format="d"),
                ),
                y=alt.Y("lost:Q", title="Points below the best at the end"),
                color=alt.Color(
                    "heterogeneity:N",
                    sort=None,
                    legend=alt.Legend(title=None),
                    scale=alt.Scale(range=["#0072B2", "#D55E00", "#009E73"]),
                ),
                tooltip=[
                    "heterogeneity:N",
                    "round:Q",
                    "leader:N",
                    alt.Tooltip("lost:Q", format=".1f"),
                ],
            )
        )
        charts.append(line.properties(title=task, width=360, height=240))
    return alt.concat(*charts, columns=2, spacing=24, config=LOOK)
