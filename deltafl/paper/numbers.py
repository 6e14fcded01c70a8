"""The paper's own numbers: Tables 1 to 7, final test accuracies in percent.

Table 7 also gives standard deviations over three seeds; the paper prints them as fractions.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import NamedTuple


class Cell(NamedTuple):
    """Where a number stands in a table."""

    item: str
    task: str
    alpha: float
    optimizer: str


class Number(NamedTuple):
    """An accuracy in percent, with its deviation over seeds where the paper gives one."""

    accuracy: float
    std: float | None


@cache
def published() -> dict[Cell, Number]:
    """Return every number of the paper's tables."""
    text = resources.files("deltafl.paper").joinpath("numbers.csv").read_text(encoding="utf-8")
    return {
        Cell(row["item"], row["task"], float(row["alpha"]), row["optimizer"]): Number(
            float(row["accuracy"]), float(row["std"]) if row["std"] else None
        )
        for row in csv.DictReader(text.splitlines())
    }
