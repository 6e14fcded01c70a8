"""A Flower client app: the plain local training, on the data that the actor keeps in memory."""

from __future__ import annotations

import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from benchmarks.systems.local import Federation

FOLDER = "BENCHMARKS_FOLDER"

app = ClientApp()


@cache
def tools() -> tuple[Federation, nn.Module, torch.optim.Optimizer]:
    """Return what an actor needs for any client; made once an actor."""
    torch.set_num_threads(1)
    federation = Federation.read(os.environ[FOLDER], channels_last=True)
    net = federation.net()
    return federation, net, torch.optim.SGD(net.parameters(), lr=federation.lr)


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train one client from the weights in the message."""
    federation, net, optimizer = tools()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    federation.train(net, optimizer, client)
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(federation.rows[client])}),
    }
    return Message(content=RecordDict(content), reply_to=message)
