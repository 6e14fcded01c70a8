"""Multi-Krum (Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017).

A client's score is the sum of the squared distances to its n - f - 2 nearest others; the n - f
clients with the smallest scores are averaged. With few clients at least one neighbour counts. Of
equal scores, that of the client with the lower number comes first.
"""

from __future__ import annotations

import torch

from deltafl.server.stack import Stack


def multi_krum(stack: Stack, attackers: int) -> list[float]:
    """Return each client's share: 1 for those that are averaged, 0 for the others."""
    clients = len(stack)
    distances = stack.squared_distances().fill_diagonal_(torch.inf)
    neighbours = max(1, clients - attackers - 2)
    scores = distances.sort(1).values[:, :neighbours].sum(1)
    chosen = scores.argsort(stable=True)[: clients - attackers].tolist()
    return [float(client in chosen) for client in range(clients)]
