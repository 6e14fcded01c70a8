"""Aggregation and server optimizers: how a round's client weights become the global ones."""

from __future__ import annotations

from deltafl.server.aggregate import Average, problem
from deltafl.server.optimizer import WEIGHTINGS, Server, Weighting, names
from deltafl.server.weights import Weights, trainable_names, weights_of
from deltafl.server.yogi import Yogi

__all__ = [
    "WEIGHTINGS",
    "Average",
    "Server",
    "Weighting",
    "Weights",
    "Yogi",
    "names",
    "problem",
    "trainable_names",
    "weights_of",
]
