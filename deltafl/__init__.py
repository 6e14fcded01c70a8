"""Federated learning whose clients tune their own step sizes."""

from __future__ import annotations

from deltafl.data import Dataset
from deltafl.errors import UserError
from deltafl.experiment import Comparison, Config, Result, compare, run, tune
from deltafl.optim import SPS, DeltaSGD
from deltafl.version import __version__

__all__ = [
    "SPS",
    "Comparison",
    "Config",
    "Dataset",
    "DeltaSGD",
    "Result",
    "UserError",
    "__version__",
    "compare",
    "run",
    "tune",
]
