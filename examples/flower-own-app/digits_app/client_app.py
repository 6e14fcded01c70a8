"""The nodes' side. `train_with_delta_sgd` stands where an optimizer's loop would."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from deltafl.flower import train_with_delta_sgd
from digits_app.task import batches_of, build_model

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on this node's samples."""
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part, parts = int(context.node_config["partition-id"]), int(context.run_config["nodes"])
    metrics = train_with_delta_sgd(model, batches_of(part, parts), epochs=2)
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)
