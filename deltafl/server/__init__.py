"""Aggregation and server optimizers: how a round's client weights become the global ones."""

from __future__ import annotations

from deltafl.server.aggregate import Average
from deltafl.server.check import problem
from deltafl.server.collect import Collector
from deltafl.server.optimizer import WEIGHTINGS, Server, Weighting, names
from deltafl.server.robust import MEAN, Rule, aggregates
from deltafl.server.weights import Weights, trainable_names, weights_of
from deltafl.server.yogi import Yogi

__all__ = [
    "MEAN",
    "WEIGHTINGS",
    "Average",
    "Collector",
    "Rule",
    "Server",
    "Weighting",
    "Weights",
    "Yogi",
    "aggregates",
    "names",
    "problem",
    "trainable_names",
    "weights_of",
]
