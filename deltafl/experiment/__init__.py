"""The typed configuration of an experiment, and the rounds that run it."""

from __future__ import annotations

from deltafl.experiment.comparison import Comparison, compare, tune
from deltafl.experiment.config import Config
from deltafl.experiment.execute import DivergedError, Listener, Result, run

__all__ = ["Comparison", "Config", "DivergedError", "Listener", "Result", "compare", "run", "tune"]
