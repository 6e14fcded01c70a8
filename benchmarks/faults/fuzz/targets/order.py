"""What a server sends a node: the configuration, the facts of the data, the order itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from benchmarks.faults.fuzz.target import Target, files, together
from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.flower.node import Node
from deltafl.flower.wire import CONFIG, MalformedError, Order, read_order

FACTS = {
    "name": "own",
    "shape": [1, 3, 3],
    "classes": ["a", "b"],
    "mean": [0.5],
    "std": [0.5],
    "scale": 255.0,
    "augment": "none",
}


def _run(content: bytes, folder: Path) -> None:
    experiment, facts, fields = files(content, 3)
    np.savez(folder / "x.npz", inputs=np.zeros((2, 3, 3), np.uint8), labels=[0, 1])
    node = Node(0, data=str(folder / "x.npz"), memory=folder / "memory")
    record: Any = Order(
        experiment.decode(errors="replace"), facts.decode(errors="replace"), 0, 1, 0.0
    ).record()
    try:
        record = ConfigRecord(dict(record) | json.loads(fields))
    except (TypeError, ValueError, RecursionError):
        return  # nothing that Flower could carry
    order = read_order(SimpleNamespace(content=RecordDict({CONFIG: record})))  # type: ignore[arg-type]
    config = node.config(order)
    assert node.memory_of(config).parent == folder / "memory"
    node.dataset(config, order.facts)


def _seeds() -> Sequence[bytes]:
    config = Config.model_validate({"task": "own-mlp"}).to_toml()
    facts = json.dumps(FACTS)
    return [
        together(config, facts, "{}"),
        together(config, facts, '{"round": 2, "recall": 1, "remember": true}'),
        together('[client]\noptimizer = "os:system"', facts, "{}"),
        together(config, facts.replace("0.5", "NaN"), "{}"),
        together(config, "[]", '{"client": -1}'),
    ]


TARGET = Target(
    "order",
    "a server's order to a node",
    _run,
    _seeds,
    (UserError, MalformedError),
    words=(b'"shape"', b'"classes"', b'"std"', b'"scale"', b'"round"', b'"recall"', b"[client]"),
)
