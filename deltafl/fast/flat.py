"""All trainable parameters of a model as one vector: the fast path of a client's steps.

The step's own arithmetic, norms and updates, then takes a handful of operations instead of a
handful for every layer, and Delta-SGD's second gradient is taken without the general guards of the
optimizer, since the client knows what its loss touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deltafl.client import ClientMetrics, LocalWork
from deltafl.fast.rules import Point, build_rule, client_metrics, has_rule
from deltafl.models import Classifier
from deltafl.objective import LocalLoss

VECTOR = "vector"

LARGEST = 1_000_000
"""Parameters beyond which the overhead of a step no longer matters, but copies do."""


def flattens(model: Classifier, work: LocalWork) -> bool:
    """Whether a client's steps can and should be taken on a vector, which is on the CPU."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return (
        {(p.dtype, p.device.type) for p in trained} == {(torch.float32, "cpu")}
        # Others (channels last) would keep the vector's layout after the first client.
        and all(p.stride() == torch.empty(p.shape).stride() for p in trained)
        and sum(p.numel() for p in trained) <= LARGEST
        and has_rule(work)
    )


class FlatSteps:
    """A client's steps on the vector of its parameters."""

    def __init__(
        self, model: Classifier, loss_of: LocalLoss, work: LocalWork, progress: float
    ) -> None:
        self._loss = FlatLoss(model, loss_of)
        self._rule = build_rule({VECTOR: self._loss.live}, self._loss, work, progress)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Take a step, and return the loss before it."""
        with torch.no_grad():
            return self._rule.step(inputs, labels)[0]

    def metrics(self, loss: float, record: bool) -> ClientMetrics:
        """Return how the steps went."""
        losses = torch.tensor([loss], dtype=torch.float64)
        return client_metrics(losses, self._rule, record=record)[0]


class FlatLoss:
    """The loss of a model whose parameters look into a vector, [1, number of parameters]."""

    def __init__(self, model: Classifier, loss_of: LocalLoss) -> None:
        self._model = model
        self._loss_of = loss_of
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.live = torch.cat([p.detach().flatten() for p in self._parameters]).unsqueeze(0)
        sizes = [p.numel() for p in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(self.live[0], sizes), strict=True):
            parameter.data = part.view_as(parameter)

    def gradients(self, point: Point, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Point]:
        """Return the loss and its gradient at the weights, or elsewhere in the same step."""
        if point[VECTOR] is self.live:
            self._randomness = torch.default_generator.get_state()
            return self._evaluate(inputs, labels)
        # Both evaluations draw the same numbers, so this one leaves the generator where it was.
        torch.default_generator.set_state(self._randomness)
        here = self.live.clone()
        self.live.copy_(point[VECTOR])
        with kept_buffers(self._model):
            result = self._evaluate(inputs, labels)
        self.live.copy_(here)
        return result

    def _evaluate(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Point]:
        with torch.enable_grad():
            loss = self._loss_of(inputs, labels)
            parts = torch.autograd.grad(loss, self._parameters, materialize_grads=True)
        gradient = torch.cat([part.flatten() for part in parts]).unsqueeze(0)
        return loss.detach().unsqueeze(0), {VECTOR: gradient}


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put the model's buffers back, so that a second gradient is not counted in BatchNorm."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, value in kept:
        buffer.copy_(value)
