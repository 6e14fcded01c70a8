"""What travels between the server and the nodes, and how it is read back without trusting it.

Weights are arrays with the exact bits of the tensors; everything else is a flat record of numbers
and text. Whoever reads says what has to be there, and `MalformedError` says what was not.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from deltafl.client import ClientMetrics
from deltafl.data import AnyDataset
from deltafl.engine import Evaluation
from deltafl.optim import StepRecord
from deltafl.server.check import Form, misfit
from deltafl.version import __version__

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
SAMPLES = "num-examples"
"""Flower's own strategies and wrappers weigh clients by the metric of this name."""

# What numpy writes before the numbers; a reply that is longer than that is not decoded at all.
_LONGEST_HEADER = 4096
_MOST_SAMPLES = 10**8

Value = TypeVar("Value", str, int, float, bool)


class MalformedError(Exception):
    """A message is not what it has to be; the text says what is wrong with it."""


def to_arrays(weights: Mapping[str, Tensor]) -> ArrayRecord:
    """Return weights as arrays to send; their bits stay as they are."""
    return ArrayRecord(
        {name: Array(value.detach().cpu().contiguous().numpy()) for name, value in weights.items()}
    )


def from_arrays(record: ArrayRecord, reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays as tensors, if their names, shapes and dtypes are those of `reference`."""
    wanted = {name: _form(tensor.detach().cpu().numpy()) for name, tensor in reference.items()}
    _fits({name: _form(array) for name, array in record.items()}, wanted)
    values = {name: _decoded(name, record[name], tensor) for name, tensor in reference.items()}
    # What an array says of itself need not be what is in it.
    _fits({name: _form(array) for name, array in values.items()}, wanted)
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in values.items()}


def _form(array: Array | npt.NDArray[Any]) -> Form:
    return tuple(array.shape), str(array.dtype)


def _fits(given: Mapping[str, Form], wanted: Mapping[str, Form]) -> None:
    if (fault := misfit(given, wanted)) is not None:
        raise MalformedError(fault)


def _decoded(name: str, array: Array, wanted: Tensor) -> npt.NDArray[Any]:
    if len(array.data) > wanted.numel() * wanted.element_size() + _LONGEST_HEADER:
        raise MalformedError(f"{name!r} has more bytes than its shape needs")
    try:
        values = array.numpy()  # it never unpickles
    except Exception as error:  # bytes of somebody else's may fail in any way
        raise MalformedError(f"{name!r} cannot be decoded: {error}") from None
    if not isinstance(values, np.ndarray):  # numpy also reads archives
        raise MalformedError(f"{name!r} cannot be decoded: it is no array")
    return values


@dataclass(frozen=True)
class Order:
    """What the server asks of one client in one round, beside the weights."""

    experiment: str
    """The configuration, as TOML."""
    facts: str
    """What a node with data of its own has to know of the data set, as JSON."""
    client: int
    round: int
    progress: float
    recall: int = 0
    """The round whose memory the client is to use; 0: none."""
    recall_sha256: str = ""
    remember: bool = False

    def record(self) -> ConfigRecord:
        """Return the order as a record to send."""
        return ConfigRecord(
            {
                "version": __version__,
                "experiment": self.experiment,
                "facts": self.facts,
                "client": self.client,
                "round": self.round,
                "progress": self.progress,
                "recall": self.recall,
                "recall-sha256": self.recall_sha256,
                "remember": self.remember,
            }
        )


def read_order(message: Message) -> Order:
    """Read an order back; `MalformedError` if anything in it is not of its kind."""
    record = _config(message)
    version = _value(record, "version", str)
    if version != __version__:
        raise MalformedError(f"the server runs deltafl {version[:20]}, this node {__version__}")
    order = Order(
        experiment=_value(record, "experiment", str),
        facts=_value(record, "facts", str),
        client=_value(record, "client", int),
        round=_value(record, "round", int),
        progress=_value(record, "progress", float),
        recall=_value(record, "recall", int),
        recall_sha256=_value(record, "recall-sha256", str),
        remember=_value(record, "remember", bool),
    )
    if not (
        order.client >= 0
        and order.round >= 1
        and 0 <= order.recall < order.round
        and 0 <= order.progress <= 1
    ):
        raise MalformedError(f"impossible client {order.client} or round {order.round}")
    return order


def read_experiment(text: str) -> dict[str, Any]:
    """Parse a configuration that was sent as TOML; it is not validated yet."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MalformedError(f"the configuration is not TOML: {error}") from None


@dataclass(frozen=True)
class Introduction:
    """What a node says of itself when the server asks."""

    client: int
    own_data: bool

    def record(self) -> ConfigRecord:
        """Return it as a record to send."""
        return ConfigRecord(
            {"version": __version__, "client": self.client, "own-data": self.own_data}
        )


def read_introduction(message: Message, clients: int) -> Introduction:
    """Read a node's introduction; `MalformedError` for another version or an unknown client."""
    record = _config(message)
    version = _value(record, "version", str)
    if version != __version__:
        raise MalformedError(f"it runs deltafl {version[:20]}, the server {__version__}")
    client = _value(record, "client", int)
    if not 0 <= client < clients:
        raise MalformedError(
            f"its partition-id is {client}, but there are {clients} clients (from 0)"
        )
    return Introduction(client, _value(record, "own-data", bool))


def _config(message: Message) -> ConfigRecord:
    record = message.content.get(CONFIG)
    if not isinstance(record, ConfigRecord):
        raise MalformedError("no record of its configuration")
    return record


def _value(record: ConfigRecord, name: str, kind: type[Value]) -> Value:
    value = record.get(name)
    if type(value) is not kind:  # a bool is an int, and is not meant by one
        raise MalformedError(f"{name!r} is not of type {kind.__name__}")
    return value


def to_metrics(samples: int, how: ClientMetrics) -> MetricRecord:
    """Return how a client's round went; where step sizes were recorded, with all of them."""
    record: dict[str, Any] = {SAMPLES: samples, "loss": how.loss, "step-size": how.step_size}
    for name in ("smoothness", "growth", "eta", "theta") if how.steps else ():
        # A number has to stand for "none"; none of the four is ever NaN otherwise.
        values = [getattr(step, name) for step in how.steps]
        record[name] = [math.nan if value is None else float(value) for value in values]
    return MetricRecord(record)


def read_metrics(content: RecordDict) -> tuple[int, ClientMetrics]:
    """Read back the number of samples and how the round went."""
    record = _metrics(content)
    loss, step_size = _number(record, "loss"), _number(record, "step-size")
    return _samples(record), ClientMetrics(loss, step_size, tuple(_steps(record)))


def to_evaluation(samples: int, evaluation: Evaluation) -> MetricRecord:
    """Return how weights do on a node's own data."""
    return MetricRecord(
        {SAMPLES: samples, "accuracy": evaluation.accuracy, "loss": evaluation.loss}
    )


def read_evaluation(content: RecordDict) -> tuple[int, Evaluation]:
    """Read back the number of samples and how the weights do on them."""
    record = _metrics(content)
    accuracy, loss = _number(record, "accuracy"), _number(record, "loss")
    return _samples(record), Evaluation(accuracy, loss)


def _metrics(content: RecordDict) -> MetricRecord:
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord):
        raise MalformedError("no record of metrics")
    return record


def _samples(record: MetricRecord) -> int:
    samples = record.get(SAMPLES)
    if type(samples) is not int or not 1 <= samples <= _MOST_SAMPLES:
        raise MalformedError(f"{SAMPLES} is {str(samples)[:30]}")
    return samples


def _number(record: MetricRecord, name: str) -> float:
    value = record.get(name)
    if not isinstance(value, float):
        raise MalformedError(f"{name!r} is not a number")
    return value


def _steps(record: MetricRecord) -> list[StepRecord]:
    if "eta" not in record:
        return []
    columns = []
    for name in ("smoothness", "growth", "eta", "theta"):
        values = record.get(name)
        if not isinstance(values, list) or not all(isinstance(v, float) for v in values):
            raise MalformedError(f"{name!r} is not a list of numbers")
        columns.append([None if math.isnan(value) else float(value) for value in values])
    if len({len(column) for column in columns}) != 1:
        raise MalformedError("the step sizes have different lengths")
    rows = zip(*columns, strict=True)
    return [StepRecord(first, second, eta or 0.0, theta) for first, second, eta, theta in rows]


def facts_of(dataset: AnyDataset) -> str:
    """Return what a node needs to feed data of its own to the model, as JSON."""
    return json.dumps(dataset.facts())
