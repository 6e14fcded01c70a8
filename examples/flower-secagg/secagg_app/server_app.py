"""The server's side: it gets the clients' sum, and no client's weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from secagg_app.task import build_model, test_accuracy, to_arrays, with_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and write what came out to the file `out`, if one is given."""
    nodes = int(context.run_config["nodes"])

    def evaluate(
        server_round: int, arrays: list[np.ndarray], config: dict[str, object]
    ) -> tuple[float, dict[str, float]]:
        return 0.0, {"accuracy": test_accuracy(with_arrays(arrays))}

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=nodes,
        min_available_clients=nodes,
        initial_parameters=ndarrays_to_parameters(to_arrays(build_model())),
        evaluate_fn=evaluate,
    )
    rounds = ServerConfig(num_rounds=int(context.run_config["rounds"]))
    legacy = LegacyContext(context, rounds, strategy)
    # Any two of the nodes can undo the masks of a third that drops out.
    secure = SecAggPlusWorkflow(num_shares=nodes, reconstruction_threshold=2, clipping_range=8.0)
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)
    if context.run_config["out"]:
        accuracies = [value for _, value in legacy.history.metrics_centralized["accuracy"]]
        report = json.dumps({"accuracies": accuracies})
        Path(str(context.run_config["out"])).write_text(report, encoding="utf-8")
