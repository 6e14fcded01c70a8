"""Nearest-neighbour mixing (Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by
mixing: a recipe for optimal Byzantine ML under heterogeneity", AISTATS 2023).

Before a robust rule looks at the clients, each is replaced by the mean of the n - f clients nearest
to it, itself included. Clients that differ in their data come closer to each other by it, and a
rule that looks for the odd ones no longer takes them for attackers. Of equally near clients, the
one with the lower number comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafl.server.stack import Stack


def nearest_neighbours(stack: Stack, attackers: int) -> Tensor:
    """Return the matrix that mixes: row i has 1/(n - f) where a client is near client i."""
    kept = len(stack) - attackers
    distances = stack.squared_distances().fill_diagonal_(-1.0)  # itself first, also of equals
    nearest = distances.argsort(stable=True, dim=1)[:, :kept]
    return torch.zeros_like(distances).scatter_(1, nearest, 1 / kept)
