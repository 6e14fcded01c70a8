"""Parts for a Flower app of your own: Δ-SGD in its clients, and a guard around its strategy.

They work with Flower's Message API, with any model and any strategy of `flwr.serverapp.strategy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log
from torch import Tensor, nn
from torch.nn import functional as F

from deltafl.flower.wire import SAMPLES, MalformedError, from_arrays
from deltafl.optim import DeltaSGD
from deltafl.server import problem


def train_with_delta_sgd(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    *,
    epochs: int = 1,
    lr: float = 0.2,
    gamma: float = 2.0,
    delta: float = 0.1,
    max_lr: float | None = None,
) -> dict[str, int | float]:
    """Train a model in place for a round with Δ-SGD, which needs no learning rate.

    `batches` are pairs of inputs and labels, on any device, gone through `epochs` times. The step
    size starts from `lr` (eta_0), as in every round of Algorithm 1. Returns metrics for the reply:
    `num-examples`, by which Flower weighs clients, the mean `loss` and the mean `step-size`.
    """
    device = next(model.parameters()).device
    optimizer = DeltaSGD(
        model.parameters(), lr=lr, gamma=gamma, delta=delta, max_lr=max_lr, curvature="same-batch"
    )
    optimizer.recording = True
    model.train()
    samples, losses = 0, []
    for epoch in range(epochs):
        for inputs, labels in batches:
            inputs, labels = inputs.to(device), labels.to(device)  # noqa: PLW2901

            def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            losses.append(torch.as_tensor(optimizer.step(closure)).detach())  # type: ignore[arg-type]
            samples += len(labels) if epoch == 0 else 0
    if not losses:
        raise ValueError("there is no batch to train on: give at least one")
    steps = [record.eta for record in optimizer.records]
    return {
        SAMPLES: samples,
        "loss": float(torch.stack(losses).mean()),
        "step-size": sum(steps) / len(steps),
    }


class Guarded(Strategy):
    """A strategy that never sees an update it could not use.

    A reply with other names, shapes or dtypes than the model, or with a number that is not finite,
    is turned into an error. Flower's averages then go on without it. Its wrappers for differential
    privacy leave the round out instead, because their noise counts on every sampled client: so
    wrap them, `Guarded(DifferentialPrivacy...(FedAvg()))`, and no broken reply reaches them.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.refused: dict[int, dict[int, str]] = {}
        """Why updates were refused, by round and node."""
        self._reference: dict[str, Tensor] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Note what an update has to look like, and let the strategy choose the nodes."""
        if server_round == 1 or not self._reference:
            self._reference = dict(arrays.to_torch_state_dict())
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the replies on, with an error in place of each that cannot be used."""
        given = list(replies)
        usual = _usual_metrics(given)
        checked = [self._checked(server_round, reply, usual) for reply in given]
        arrays, metrics = self.strategy.aggregate_train(server_round, checked)
        return (None if arrays is None else self._typed(arrays)), metrics

    def _checked(self, server_round: int, reply: Message, usual: frozenset[str]) -> Message:
        if reply.has_error():
            return reply
        try:
            self._check(reply, usual)
        except MalformedError as wrong:
            node = reply.metadata.src_node_id
            self.refused.setdefault(server_round, {})[node] = str(wrong)
            log(WARNING, "refused the update of node %s: %s", node, wrong)
            error = Error(ErrorCode.MESSAGE_UNAVAILABLE, f"refused: {wrong}")
            return make_message(metadata=reply.metadata, error=error)
        return reply

    def _check(self, reply: Message, usual: frozenset[str]) -> None:
        records = list(reply.content.array_records.values())
        if len(records) != 1:
            raise MalformedError(f"{len(records)} records of arrays, not one")
        fault = problem(from_arrays(records[0], self._reference), self._reference)
        if fault is not None:
            raise MalformedError(fault)
        metrics = list(reply.content.metric_records.values())
        if len(metrics) != 1 or frozenset(metrics[0]) != usual:
            raise MalformedError("its metrics are not those of the others")
        weight = metrics[0].get(SAMPLES, 1)
        if isinstance(weight, list) or not (math.isfinite(weight) and weight > 0):
            raise MalformedError(f"{SAMPLES} is {str(weight)[:30]}")

    def _typed(self, arrays: ArrayRecord) -> ArrayRecord:
        """Give entries their dtypes back: an average of integers comes as float64."""
        return ArrayRecord(
            {
                name: Array(_cast(arrays[name].numpy(), wanted))
                for name, wanted in self._reference.items()
            }
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy choose the nodes."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Leave it to the strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what the strategy is."""
        self.strategy.summary()


def _usual_metrics(replies: list[Message]) -> frozenset[str]:
    """Return the names of metrics that most replies have: one odd reply must not end a round."""
    kinds = Counter(
        frozenset(record)
        for reply in replies
        if not reply.has_error()
        for record in reply.content.metric_records.values()
    )
    return kinds.most_common(1)[0][0] if kinds else frozenset()


def _cast(values: npt.NDArray[Any], wanted: Tensor) -> npt.NDArray[Any]:
    dtype = wanted.numpy().dtype
    return np.asarray(values if dtype.kind == "f" else np.rint(values)).astype(dtype)
