"""The names that tables and figures share, and the check of the frames they are given."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from deltafl.errors import UserError

DELTA_SGD = "Δ-SGD"
"""The label of Δ-SGD at its default settings; another setting of it needs another label."""

PAPER_OPTIMIZERS = (
    "SGD",
    "SGD (↓)",
    "SGDM",
    "SGDM (↓)",
    "Adam",
    "Adagrad",
    "SPS",
    DELTA_SGD,
)
"""The client optimizers of the paper, labelled and ordered as in its Table 1."""

SETTING = ["task", "alpha"]
"""The columns that name one setting: optimizers are compared within it, never across."""


def settings(frame: pd.DataFrame) -> list[tuple[str, float | None]]:
    """Return the settings (task, alpha) of a frame, in the order of first appearance."""
    distinct = frame.drop_duplicates(SETTING)
    return list(zip(distinct["task"], distinct["alpha"], strict=True))


def setting_label(task: str, alpha: float | None, separator: str = ", ") -> str:
    """Return "digits-mlp, α = 0.1", or the task alone where no alpha applies."""
    return task if pd.isna(alpha) else f"{task}{separator}α = {alpha:g}"


def require(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Refuse a frame that lacks a column or has no row, naming `what` it was meant for."""
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise UserError(f"{what} needs the column(s) {', '.join(missing)}")
    if frame.empty:
        raise UserError(f"{what} has nothing to show: there is no finished run in it")


def require_fractions(values: pd.Series[float], what: str) -> None:
    """Refuse accuracies outside 0..1: percents would silently be scaled a second time."""
    outside = values[~values.between(0.0, 1.0)]
    if not outside.empty:
        raise UserError(f"{what}: accuracies lie between 0 and 1, got {outside.iloc[0]}")
