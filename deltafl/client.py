"""One client's local work: the only definition of it (Algorithm 1, lines 5 to 11).

A client turns (global weights, its samples, its memory, a seed) into (its weights, its number of
samples, metrics, its memory). Every engine calls exactly `train`, so the same inputs give the same
bits wherever a client runs. `deltafl.fast` does the same work faster, and is held to this by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from deltafl import optim
from deltafl.data.augment import Augmentation, unchanged
from deltafl.data.dataset import AnySamples
from deltafl.models import Classifier
from deltafl.objective import LocalLoss, Objective
from deltafl.seeding import derive, torch_generator


@dataclass(frozen=True)
class LocalWork:
    """What every client of a run does in a round."""

    objective: Objective
    optimizer: str
    lr: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    epochs: int = 1
    batch_size: int = 64
    keep_last: bool = False
    augment: Augmentation = unchanged
    record_step_sizes: bool = False


class ClientMetrics(NamedTuple):
    """How a client's round went. `steps` holds the step-size record where one was asked for."""

    loss: float
    step_size: float
    steps: tuple[optim.StepRecord, ...] = ()


@dataclass(frozen=True)
class Updates:
    """What some clients send back, side by side: every tensor has a leading axis of clients.

    The tensors may be the model's own: use them before its next work overwrites them.
    """

    weights: Mapping[str, Tensor]
    samples: Sequence[int]
    metrics: Sequence[ClientMetrics]

    def __len__(self) -> int:
        return len(self.samples)


class Steps(Protocol):
    """How a client's steps are taken; a faster way computes the same up to rounding."""

    def step(self, inputs: Any, labels: Tensor) -> Tensor:
        """Take a step, and return the loss before it."""

    def metrics(self, loss: float, record: bool) -> ClientMetrics:
        """Return how the steps went."""


class OptimizerSteps:
    """The plain way: a torch optimizer on the model's parameters."""

    def __init__(
        self, model: Classifier, loss_of: LocalLoss, work: LocalWork, progress: float
    ) -> None:
        self._loss_of = loss_of
        self._optimizer = optim.build(
            work.optimizer, model.parameters(), lr=work.lr, options=work.options, progress=progress
        )
        if isinstance(self._optimizer, optim.DeltaSGD | optim.SPS):
            self._optimizer.recording = True

    def step(self, inputs: Any, labels: Tensor) -> Tensor:
        """Take a step, and return the loss before it."""

        def closure() -> Tensor:
            self._optimizer.zero_grad()
            loss = self._loss_of(inputs, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        # torch types a closure's loss as float, and hands on whatever it returns.
        loss = cast(Tensor, self._optimizer.step(closure))  # type: ignore[arg-type]
        # A large model's gradients would lie beside those of the next step.
        self._optimizer.zero_grad()
        return loss

    def metrics(self, loss: float, record: bool) -> ClientMetrics:
        """Return how the steps went."""
        if not isinstance(self._optimizer, optim.DeltaSGD | optim.SPS):
            return ClientMetrics(loss, float(self._optimizer.param_groups[0]["lr"]))
        steps = tuple(self._optimizer.records)
        mean = sum(step.eta for step in steps) / len(steps)
        return ClientMetrics(loss, mean, steps if record else ())


def train(
    model: Classifier,
    work: LocalWork,
    weights: Mapping[str, Tensor],
    samples: AnySamples,
    memory: Mapping[str, Tensor] | None,
    seed: int,
    progress: float,
    stepping: Callable[[Classifier, LocalLoss, LocalWork, float], Steps] = OptimizerSteps,
) -> Updates:
    """Train `model` from the global `weights` on one client's samples.

    `memory` is what the client kept from its last round (its weights, for objectives that
    remember), `progress` the share of the rounds that is done, for schedules over rounds, and
    `stepping` how steps are taken.
    """
    device = next(model.parameters()).device
    with one_thread(), isolated_randomness(derive(seed, "torch"), device):
        model.load_state_dict(weights)
        model.train()
        loss_of = work.objective.start(model, weights, memory)
        steps = stepping(model, loss_of, work, progress)
        augmenting = torch_generator(seed, "augment")
        losses = []
        grouping = torch_generator(seed, "groups")
        for index in samples.grouped(batches(len(samples), work, seed), grouping):
            inputs, labels = samples.batch(index)
            inputs = work.augment(inputs, augmenting)
            losses.append(steps.step(inputs.to(device), labels.to(device)))
    metrics = steps.metrics(float(torch.stack(losses).mean()), work.record_step_sizes)
    trained = {name: value.unsqueeze(0) for name, value in model.state_dict().items()}
    return Updates(trained, [len(samples)], [metrics])


def batches(samples: int, work: LocalWork, seed: int) -> Iterator[Tensor]:
    """Yield the samples of each local step: K = floor(E n / b) batches, at least one.

    A client with fewer samples than a batch uses all it has. Where the last, incomplete batch is
    kept there is one more step.
    """
    order = sample_order(samples, work.epochs, seed)
    complete = local_steps(samples, work.epochs, work.batch_size)
    steps = -(-len(order) // work.batch_size) if work.keep_last else complete
    for step in range(steps):
        yield order[step * work.batch_size : (step + 1) * work.batch_size]


def sample_order(
    samples: int, epochs: int, seed: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return the order in which a client sees its samples: a permutation an epoch.

    It is one stream that is cut into batches, so no epoch loses its remainder. Who asks for many
    clients lends a `generator`, which is seeded anew for each.
    """
    generator = (generator or torch.Generator()).manual_seed(derive(seed, "batches"))
    passes = [torch.randperm(samples, generator=generator) for _ in range(epochs)]
    return passes[0] if epochs == 1 else torch.cat(passes)


def local_steps(samples: int, epochs: int, batch_size: int) -> int:
    """Return K, the number of steps a client takes in a round (Section 4, FL setup)."""
    return max(1, epochs * samples // batch_size)


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global randomness (dropout draws from it) and put it back afterwards."""
    cpu = device.type == "cpu"
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        # torch.manual_seed would note a stack trace for every accelerator: a millisecond a client.
        torch.default_generator.manual_seed(seed)
        if not cpu:
            torch.get_device_module(device).manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: a sum that is split over threads has other bits."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
