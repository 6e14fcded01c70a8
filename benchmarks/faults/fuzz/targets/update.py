"""What a node sends: its update, as arrays and metrics, and the bytes Flower carries them in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

from benchmarks.faults.fuzz.target import Target, files, switch, together
from deltafl.client import Updates
from deltafl.engine.base import ClientTask, Missing
from deltafl.experiment import Config
from deltafl.experiment.federation import build_setup
from deltafl.flower.engine import FlowerEngine, Holder
from deltafl.flower.wire import ARRAYS, METRICS, SAMPLES, Introduction, to_arrays

NUMBERS, DESCRIBED, CARRIED = range(3)
GOOD = {SAMPLES: 30, "loss": 1.0, "step-size": 0.1}


class Grid:
    """Flower's grid, with one reply that is taken apart when it is pulled."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def pull_messages(self, _ids: Sequence[str]) -> list[Any]:
        """Return the reply as Flower would."""
        content = recorddict_from_proto(Proto.FromString(self._content))
        return [SimpleNamespace(content=content, has_error=lambda: False)]


@cache
def _engine() -> FlowerEngine:
    config = Config.model_validate(
        {"task": "digits-softmax", "federation": {"clients": 6, "samples": 30}}
    )
    engine = FlowerEngine(Grid(b""), config.to_toml())  # type: ignore[arg-type]
    engine.open(build_setup(config))
    engine._holders = {0: Holder(1, Introduction(0, own_data=True))}
    return engine


def _content(arrays: dict[str, Array], metrics: Any) -> RecordDict:
    return RecordDict({ARRAYS: ArrayRecord(arrays), METRICS: MetricRecord(metrics)})


def _run(content: bytes, folder: Path) -> None:
    engine = _engine()
    task = ClientTask(0, 1, 0.0, remember=folder / "0-1.safetensors")
    way, rest = switch(content)
    arrays: dict[str, Array] = dict(to_arrays(engine._reference))
    name = next(iter(arrays))
    good = arrays[name]
    reply: Any
    if way % 3 == CARRIED:
        engine._grid = Grid(rest)  # type: ignore[assignment]
        reply = engine._pull("x")
    else:
        try:
            if way % 3 == NUMBERS:
                arrays[name] = Array(good.dtype, good.shape, good.stype, rest)
                reply = SimpleNamespace(content=_content(arrays, GOOD))
            else:
                described, data = files(rest, 2)
                arrays, metrics = _described(json.loads(described), data)
                reply = SimpleNamespace(content=_content(arrays, metrics))
        except (TypeError, ValueError, AttributeError, KeyError, RecursionError):
            return  # nothing that Flower could carry
    outcome = reply if isinstance(reply, Missing) else engine._read(task, reply)
    assert isinstance(outcome, Updates | Missing)


def _described(tree: Any, data: bytes) -> tuple[dict[str, Array], Any]:
    arrays = {
        one["name"]: Array(one["dtype"], tuple(one["shape"]), one["stype"], data)
        for one in tree["arrays"]
    }
    return arrays, tree["metrics"]


def _seeds() -> Sequence[bytes]:
    arrays = to_arrays(_engine()._reference)
    name, first = next(iter(arrays.items()))
    described = {
        "arrays": [
            {"name": n, "dtype": a.dtype, "shape": list(a.shape), "stype": a.stype}
            for n, a in arrays.items()
        ],
        "metrics": GOOD | {k: [1.0, 2.0] for k in ("smoothness", "growth", "eta", "theta")},
    }
    carried = recorddict_to_proto(_content(dict(arrays), GOOD)).SerializeToString()
    short = recorddict_to_proto(
        _content({name: Array("float32", (1,), "numpy.ndarray", b"")}, GOOD)
    )
    return [
        bytes([NUMBERS]) + first.data,
        bytes([NUMBERS]) + first.data[:200],
        bytes([NUMBERS]) + first.data.replace(b"(10, 64)", b"(9**9,)."),
        bytes([DESCRIBED]) + together(json.dumps(described), first.data),
        bytes([CARRIED]) + carried,
        bytes([CARRIED]) + short.SerializeToString(),
    ]


TARGET = Target(
    "update",
    "a client's update, as Flower carries it",
    _run,
    _seeds,
    words=(
        b"\x93NUMPY\x01\x00",
        b"'<f4'",
        b"'|O'",
        b"numpy.ndarray",
        b"num-examples",
        b"PK\x03\x04",
    ),
)
