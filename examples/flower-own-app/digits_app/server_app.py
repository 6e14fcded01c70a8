"""The server's side: Flower's own strategies, behind a guard against broken updates."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Strategy,
)

from deltafl.flower import Guarded
from digits_app.task import build_model, test_accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and write what came out to the file `out`, if one is given."""
    nodes = int(context.run_config["nodes"])
    strategy: Strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )
    if context.run_config["privacy"] == "central":
        strategy = DifferentialPrivacyServerSideFixedClipping(
            strategy, noise_multiplier=0.05, clipping_norm=5.0, num_sampled_clients=nodes
        )
    guarded = Guarded(strategy)
    result = guarded.start(
        grid,
        initial_arrays=ArrayRecord(build_model().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=evaluate,
    )
    if context.run_config["out"]:
        accuracies = [row["accuracy"] for row in result.evaluate_metrics_serverapp.values()]
        report = {"accuracies": accuracies, "refused": guarded.refused}
        Path(str(context.run_config["out"])).write_text(json.dumps(report), encoding="utf-8")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return how the global model does on the test samples."""
    model = build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test_accuracy(model)})
