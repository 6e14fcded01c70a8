"""How clients step whose weights are stacked: Delta-SGD, SPS and torch's own optimizers.

Each rule computes what the optimizer of the same name does, for several clients at once (or one),
with a step size each. The rule of Delta-SGD itself is the optimizer's, `next_step_size`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deltafl import optim
from deltafl.client import ClientMetrics, LocalWork
from deltafl.optim import SPS, DeltaSGD, StepRecord
from deltafl.optim.delta_sgd import next_step_size

# Optimizers that treat every element alike: to them a stack of clients is just more elements.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

# Options of torch's SGD that make it more than descent along the gradient.
BEYOND_DESCENT = ("momentum", "weight_decay", "maximize", "foreach", "fused", "differentiable")

Point = Mapping[str, Tensor]


class Decision(NamedTuple):
    """How every client of a stack stepped: the fields of a `StepRecord`, one number a client."""

    smoothness: Tensor | None
    growth: Tensor | None
    eta: Tensor
    theta: Tensor | None


class Loss(Protocol):
    """The objective of every client, which a rule asks for gradients."""

    def gradients(self, point: Point, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Point]:
        """Return one loss a client, and the gradients at a point.

        The first call of a step is at the clients' weights; another one sees the same randomness.
        """


def has_rule(work: LocalWork) -> bool:
    """Whether there is a rule for the optimizer with its options."""
    settings = optimizer_settings(work, 0.0)
    plain = not settings.get("weight_decay") and not settings.get("maximize")
    cls = optim.lookup(work.optimizer).cls
    return (
        cls in ELEMENTWISE
        or (cls is DeltaSGD and plain)
        or (cls is SPS and plain and settings["lr"] == 1)
    )


def optimizer_settings(work: LocalWork, progress: float) -> dict[str, Any]:
    """Return the optimizer's options as its own constructor checks and completes them."""
    placeholder = [torch.zeros((), requires_grad=True)]
    return build_optimizer(work, placeholder, progress).param_groups[0]


def build_optimizer(
    work: LocalWork, weights: Sequence[Tensor], progress: float
) -> torch.optim.Optimizer:
    """Build the optimizer of a client on some tensors."""
    return optim.build(work.optimizer, weights, lr=work.lr, options=work.options, progress=progress)


class Rule:
    """A client optimizer on a stack: how every client of it steps."""

    adapts = True
    """Whether it finds its own step sizes, so that they are worth recording."""

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


def build_rule(point: dict[str, Tensor], loss: Loss, work: LocalWork, progress: float) -> Rule:
    """Return the rule of a client optimizer; it changes the tensors of `point` in place."""
    cls = optim.lookup(work.optimizer).cls
    settings = optimizer_settings(work, progress)
    if cls is DeltaSGD:
        return DeltaRule(point, loss, settings)
    if cls is SPS:
        return PolyakRule(point, loss, settings)
    if cls is torch.optim.SGD and not any(settings[name] for name in BEYOND_DESCENT):
        return DescentRule(point, loss, settings["lr"])
    return ElementwiseRule(point, loss, build_optimizer(work, list(point.values()), progress))


class DescentRule(Rule):
    """SGD without momentum or weight decay: torch's optimizer spends its time on options."""

    adapts = False

    def __init__(self, point: dict[str, Tensor], loss: Loss, lr: float) -> None:
        super().__init__(point, loss)
        self._lr = lr

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Step all clients, and return their losses before."""
        losses, gradients = self._loss.gradients(self._point, inputs, labels)
        for name, value in self._point.items():
            value.add_(gradients[name], alpha=-self._lr)  # one rounding, as the optimizer does
        self.decisions.append(Decision(None, None, torch.full_like(losses, self._lr), None))
        return losses


class ElementwiseRule(Rule):
    """An optimizer that treats every element alike: torch's own, on the stack."""

    adapts = False

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
        eta_0 = min(self._settings["lr"], self._cap)
        eta = torch.full_like(losses, max(eta_0, torch.finfo(losses.dtype).tiny))
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
        eta = eta.clamp(max=torch.finfo(losses.dtype).max).to(losses.dtype)
        self.decisions.append(Decision(None, None, eta, None))
        self._descend(gradients, eta)
        return losses


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm over all tensors of each client, in float64 as the optimizers do."""
    squares = [tensor.double().flatten(1).square().sum(1) for tensor in tensors]
    total = squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)
    return total.sqrt_()


def client_metrics(losses: Tensor, rule: Rule, *, record: bool) -> list[ClientMetrics]:
    """Return how every client's steps went."""
    decisions = rule.decisions
    mean = torch.stack([decision.eta for decision in decisions]).mean(0)
    numbers = zip(losses.tolist(), mean.tolist(), strict=True)
    if not (record and rule.adapts):
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
