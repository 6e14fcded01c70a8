"""Draw the anatomy of a step from the last full run: `python -m benchmarks.figure`."""

from __future__ import annotations

import json

import altair as alt
import pandas as pd

from benchmarks.environments import ROOT
from benchmarks.items.anatomy import KINDS, PIECES
from deltafl import report

PARTS = [piece for piece in PIECES if piece != "whole step"]


def main() -> None:
    """Read results/benchmarks/latest.json and write docs/images/step.svg."""
    text = (ROOT / "results" / "benchmarks" / "latest.json").read_text(encoding="utf-8")
    raw = json.loads(text)["anatomy"]["raw"]
    frame = pd.DataFrame(
        {"path": kind, "part": part, "ms": 1e3 * raw["anatomy"][kind][part], "order": place}
        for kind in KINDS
        for place, part in enumerate(PARTS)
    )
    bars = (
        alt.Chart(frame)
        .mark_bar(height=26)
        .encode(
            x=alt.X("ms:Q", title="Milliseconds of processor time, one thread"),
            y=alt.Y("path:N", title=None, sort=list(KINDS)),
            color=alt.Color("part:N", title=None, sort=PARTS, scale=alt.Scale(scheme="tableau10")),
            order="order:Q",
        )
    )
    limit = pd.DataFrame({"ms": [1e3 * raw["limit"]], "text": ["the arithmetic alone"]})
    line = alt.Chart(limit).mark_rule(strokeDash=[4, 3], size=2).encode(x="ms:Q")
    label = (
        alt.Chart(limit).mark_text(align="left", dx=6, fontSize=12).encode(x="ms:Q", text="text:N")
    )
    print(report.save((bars + line + label).properties(width=560, height=110), _TARGET))


_TARGET = ROOT / "docs" / "images" / "step.svg"


if __name__ == "__main__":
    main()
