"""Numbers as files keep them."""

from __future__ import annotations

import pandas as pd


def six_digits(frame: pd.DataFrame) -> pd.DataFrame:
    """Round to six significant digits: what a file keeps is what a summary was made from."""
    rounded = frame.copy()
    for column in frame.select_dtypes("float"):
        rounded[column] = [float(f"{value:.6g}") for value in frame[column]]
    return rounded
