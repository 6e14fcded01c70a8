"""The paper's theory, run: Theorem 1, and Lemma 4 with Theorem 5, the convex case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deltafl.errors import UserError
from deltafl.paper.theory.charts import convex_chart, nonconvex_chart
from deltafl.paper.theory.convex_case import convex, convex_summary
from deltafl.paper.theory.nonconvex_case import nonconvex, nonconvex_summary
from deltafl.report.figures import AnyChart


@dataclass(frozen=True)
class Study:
    """A theorem as something to run, to sum up and to draw."""

    compute: Callable[[], pd.DataFrame]
    summary: Callable[[pd.DataFrame], list[str]]
    chart: Callable[[pd.DataFrame], AnyChart]

    def draw(self, path: Path) -> AnyChart:
        """Return the chart of the numbers in a file that `deltafl paper run` wrote."""
        try:
            frame = pd.read_csv(path)
        except FileNotFoundError as error:
            raise UserError(
                f"there are no numbers in {path} yet: deltafl paper run {path.stem}"
            ) from error
        return self.chart(frame)


STUDIES = {
    "theory-convex": Study(convex, convex_summary, convex_chart),
    "theory-nonconvex": Study(nonconvex, nonconvex_summary, nonconvex_chart),
}
