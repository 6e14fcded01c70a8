"""The nodes' side: Δ-SGD within a NumPyClient, and SecAgg+ around it."""

from __future__ import annotations

import numpy as np
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from deltafl.flower import train_with_delta_sgd
from secagg_app.task import batches_of, to_arrays, with_arrays


class DigitsClient(NumPyClient):
    """Trains on one part of the digits."""

    def __init__(self, part: int, parts: int) -> None:
        self._batches = batches_of(part, parts)

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, object]
    ) -> tuple[list[np.ndarray], int, dict[str, object]]:
        """Train, and say nothing of how it went: metrics are not masked."""
        model = with_arrays(parameters)
        metrics = train_with_delta_sgd(model, self._batches)
        return to_arrays(model), int(metrics["num-examples"]), {}


def client_fn(context: Context) -> Client:
    """Return the client of this node."""
    part, parts = int(context.node_config["partition-id"]), int(context.run_config["nodes"])
    return DigitsClient(part, parts).to_client()


app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod])
