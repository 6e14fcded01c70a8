from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from deltafl import run
from deltafl.flower import FlowerEngine, Patience, client_app

Handler = Callable[[Message, Context], Message | None]


class FakeGrid:
    """Flower's grid without processes: every node is a call of the real ClientApp.

    A handler of a node's own may change its replies, or return None to stay silent.
    """

    def __init__(self, nodes: dict[int, dict[str, Any]]) -> None:
        self.nodes = nodes
        self.handlers: dict[int, Handler] = {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message | None] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: list[Message]) -> list[str | None]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str | None:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return None
        name = f"message-{len(self.sent)}"
        message.metadata.__dict__["_message_id"] = name
        self.sent.append(message)
        context = Context(1, node, self.nodes[node], RecordDict(), {})
        handler = self.handlers.get(node, client_app.app)
        self._replies[name] = handler(message, context)
        return name

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        replies = [self._replies.get(name) for name in message_ids]
        return [reply for reply in replies if reply is not None]


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Six nodes, one for each client of the small configuration."""
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr("deltafl.flower.engine.POLL_SECONDS", 0.01)
    return FakeGrid(
        {100 + c: {"partition-id": c, "memory": str(tmp_path / "memory")} for c in range(6)}
    )


@pytest.fixture
def federated():
    """Run a configuration on a grid, with little patience."""

    def start(config, grid, out=None, **more):
        patience = Patience(deadline=0.2, join=0.2)
        with FlowerEngine(grid, config.to_toml(), patience, **more) as engine:
            return run(config, out=out, engine=engine)

    return start
