"""Many small clients at once: the fast path of `client.train` where dispatch outweighs arithmetic.

The weights of several clients are stacked along a leading axis, and every local step is done for
all of them with one batched operation. It computes what `client.train` computes, up to rounding
(the tests hold it to that), for clients with the same number of steps and the same batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl import optim
from deltafl.client import (
    ClientMetrics,
    LocalWork,
    Updates,
    local_steps,
    one_thread,
    sample_order,
)
from deltafl.data.augment import unchanged
from deltafl.data.dataset import Samples
from deltafl.models import Classifier
from deltafl.objective import CrossEntropy, FedProx
from deltafl.optim import DeltaSGD, StepRecord
from deltafl.optim.delta_sgd import next_step_size

# Floating point operations of a batched step below which torch's dispatch outweighs them: so many
# clients are stacked that together they reach it.
WORTHWHILE = 128e6
LARGEST = 64

# Optimizers that treat every element alike: to them a stack of clients is just more elements.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

Point = Mapping[str, Tensor]


class Decision(NamedTuple):
    """How every client of a stack stepped: the fields of a `StepRecord`, one number a client."""

    smoothness: Tensor | None
    growth: Tensor | None
    eta: Tensor
    theta: Tensor | None


def bundle_size(model: Classifier, work: LocalWork) -> int:
    """Return how many clients of a run to stack; 1 leaves them to `client.train`."""
    if not _stackable(model, work):
        return 1
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # A multiply-add a parameter and sample forward, and two backward.
    return int(min(LARGEST, max(1, WORTHWHILE // (6 * work.batch_size * parameters))))


def _stackable(model: Classifier, work: LocalWork) -> bool:
    settings = _settings(work, 0.0)
    plain = not settings.get("weight_decay") and not settings.get("maximize")
    cls = optim.lookup(work.optimizer).cls
    return (
        model.stacks
        and isinstance(work.objective, CrossEntropy | FedProx)
        and work.augment is unchanged
        and (
            cls in ELEMENTWISE
            or (cls is DeltaSGD and plain)
            or (cls is optim.SPS and plain and settings["lr"] == 1)
        )
    )


def _settings(work: LocalWork, progress: float) -> dict[str, Any]:
    """Return the optimizer's options as its own constructor checks and completes them."""
    return _build(work, [torch.zeros((), requires_grad=True)], progress).param_groups[0]


def _build(work: LocalWork, weights: Sequence[Tensor], progress: float) -> torch.optim.Optimizer:
    return optim.build(work.optimizer, weights, lr=work.lr, options=work.options, progress=progress)


def train(
    model: Classifier,
    work: LocalWork,
    weights: Point,
    samples: Samples,
    sizes: Sequence[int],
    seeds: Sequence[int],
    progress: float,
) -> Updates:
    """Train clients from the global weights; `samples` holds theirs one after the other."""
    device = next(model.parameters()).device
    with one_thread(), torch.no_grad():
        start = {name: value.to(device) for name, value in weights.items()}
        loss = Loss(model, work, start)
        point = {
            name: value.expand(len(sizes), *value.shape).clone() for name, value in start.items()
        }
        rule = _rule(point, loss, work, progress)
        losses = []
        for index in _schedule(work, sizes, seeds):
            inputs, labels = samples.batch(index.reshape(-1))
            shape = index.shape
            losses.append(
                rule.step(
                    inputs.view(*shape, *inputs.shape[1:]).to(device), labels.view(shape).to(device)
                )
            )
    metrics = _metrics(torch.stack(losses).mean(0), rule.decisions, work.record_step_sizes)
    return Updates(point, list(sizes), metrics)


def _schedule(work: LocalWork, sizes: Sequence[int], seeds: Sequence[int]) -> Tensor:
    """Return the rows of every step, [step, client, sample of the batch]."""
    steps = local_steps(sizes[0], work.epochs, work.batch_size)
    batch = min(work.batch_size, work.epochs * sizes[0])
    orders, offset = [], 0
    for size, seed in zip(sizes, seeds, strict=True):
        orders.append(sample_order(size, work.epochs, seed)[: steps * batch].add_(offset))
        offset += size
    return torch.stack(orders).view(len(sizes), steps, batch).transpose(0, 1)


class Loss:
    """The objective of every client of a stack on its own batch."""

    def __init__(self, model: Classifier, work: LocalWork, anchors: Point) -> None:
        self._model = model
        self._anchors = anchors
        self._mu = work.objective.mu if isinstance(work.objective, FedProx) else 0.0

    def __call__(self, point: Point, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return one loss a client."""
        logits = self._model.stacked(point, inputs)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = each.view(labels.shape).mean(1)
        if self._mu:
            squares = [
                (value - self._anchors[name]).square().flatten(1).sum(1)
                for name, value in point.items()
            ]
            losses = losses + self._mu / 2 * torch.stack(squares).sum(0)
        return losses

    def gradients(self, point: Point, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Point]:
        """Return the losses and their gradients; clients share nothing, so a sum keeps them."""
        leaves = {name: value.detach().requires_grad_() for name, value in point.items()}
        with torch.enable_grad():
            losses = self(leaves, inputs, labels)
            gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        return losses.detach(), dict(zip(leaves, gradients, strict=True))


class Rule:
    """A client optimizer on a stack: how every client of it steps."""

    def __init__(self, point: dict[str, Tensor], loss: Loss) -> None:
        self._point = point
        self._loss = loss
        self.decisions: list[Decision] = []

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Step all clients, and return their losses before."""
        raise NotImplementedError

    def _descend(self, gradients: Point, eta: Tensor) -> None:
        for name, value in self._point.items():
            value.sub_(gradients[name] * eta.view(-1, *[1] * (value.ndim - 1)))


def _rule(point: dict[str, Tensor], loss: Loss, work: LocalWork, progress: float) -> Rule:
    cls = optim.lookup(work.optimizer).cls
    if cls in ELEMENTWISE:
        return ElementwiseRule(point, loss, _build(work, list(point.values()), progress))
    settings = _settings(work, progress)
    return (
        DeltaRule(point, loss, settings) if cls is DeltaSGD else PolyakRule(point, loss, settings)
    )


class ElementwiseRule(Rule):
    """An optimizer that treats every element alike: torch's own, on the stack."""

    def __init__(
        self, point: dict[str, Tensor], loss: Loss, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(point, loss)
        self._optimizer = optimizer

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Step all clients, and return their losses before."""
        losses, gradients = self._loss.gradients(self._point, inputs, labels)
        for name, value in self._point.items():
            value.grad = gradients[name]
        self._optimizer.step()
        rate = torch.full_like(losses, float(self._optimizer.param_groups[0]["lr"]))
        self.decisions.append(Decision(None, None, rate, None))
        return losses


class DeltaRule(Rule):
    """Delta-SGD (Algorithm 1), a step size a client."""

    def __init__(self, point: dict[str, Tensor], loss: Loss, settings: Mapping[str, Any]) -> None:
        super().__init__(point, loss)
        self._settings = settings
        self._cap = math.inf if settings["max_lr"] is None else float(settings["max_lr"])
        self._before: Point = {}

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Step all clients, and return their losses before."""
        losses, gradients = self._loss.gradients(self._point, inputs, labels)
        same_batch = self._settings["curvature"] == "same-batch"
        if not self.decisions:
            self.decisions.append(self._first(losses))
        else:
            last = self.decisions[-1]
            if same_batch:
                _, there = self._loss.gradients(self._before, inputs, labels)
                moved = _norms([self._point[name] - self._before[name] for name in self._point])
            else:
                there = self._before
                moved = last.eta.double() * _norms(list(there.values()))
            turned = _norms([gradients[name] - there[name] for name in gradients])
            assert last.theta is not None
            chosen = next_step_size(
                moved,
                turned,
                last.eta,
                last.theta,
                gamma=self._settings["gamma"],
                delta=self._settings["delta"],
                cap=self._cap,
            )
            self.decisions.append(Decision(*chosen))
        if same_batch:
            self._before = {name: value.clone() for name, value in self._point.items()}
        else:
            self._before = gradients
        self._descend(gradients, self.decisions[-1].eta)
        return losses

    def _first(self, losses: Tensor) -> Decision:
        eta = torch.full_like(losses, min(self._settings["lr"], self._cap))
        return Decision(None, None, eta, torch.full_like(losses, self._settings["theta0"]))


class PolyakRule(Rule):
    """SPS, a step size a client."""

    def __init__(self, point: dict[str, Tensor], loss: Loss, settings: Mapping[str, Any]) -> None:
        super().__init__(point, loss)
        self._settings = settings

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Step all clients, and return their losses before."""
        losses, gradients = self._loss.gradients(self._point, inputs, labels)
        squares = _norms(list(gradients.values())).square()
        eta = (losses.double() - self._settings["f_star"]) / (self._settings["c"] * squares)
        eta = torch.where(torch.isfinite(eta) & (eta > 0), eta, 0.0)
        if self._settings["max_lr"] is not None:
            eta = eta.clamp(max=self._settings["max_lr"])
        eta = eta.to(losses.dtype)
        self.decisions.append(Decision(None, None, eta, None))
        self._descend(gradients, eta)
        return losses


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm over all tensors of each client, in float64 as the optimizers do."""
    squares = [tensor.double().flatten(1).square().sum(1) for tensor in tensors]
    return torch.stack(squares).sum(0).sqrt()


def _metrics(losses: Tensor, decisions: Sequence[Decision], record: bool) -> list[ClientMetrics]:
    mean = torch.stack([decision.eta for decision in decisions]).mean(0)
    numbers = zip(losses.tolist(), mean.tolist(), strict=True)
    if not record or decisions[-1].theta is None:
        return [ClientMetrics(loss, eta) for loss, eta in numbers]
    steps = [[_column(values) for values in decision] for decision in decisions]
    return [
        ClientMetrics(loss, eta, tuple(_record(step, client) for step in steps))
        for client, (loss, eta) in enumerate(numbers)
    ]


def _record(step: Sequence[list[float] | None], client: int) -> StepRecord:
    smoothness, growth, eta, theta = (None if c is None else c[client] for c in step)
    assert eta is not None
    return StepRecord(smoothness, growth, eta, theta)


def _column(values: Tensor | None) -> list[float] | None:
    return None if values is None else values.tolist()
