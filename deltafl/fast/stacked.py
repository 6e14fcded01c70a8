"""Many small clients at once: the fast path of `client.train` where dispatch outweighs arithmetic.

The weights of several clients are stacked along a leading axis, and every local step is done for
all of them with one batched operation. It computes what `client.train` computes, up to rounding
(the tests hold it to that), for clients with the same number of steps and the same batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl.client import LocalWork, Updates, local_steps, one_thread, sample_order
from deltafl.data.augment import unchanged
from deltafl.data.dataset import AnySamples
from deltafl.fast.rules import Point, build_rule, client_metrics, has_rule
from deltafl.models import Classifier
from deltafl.objective import CrossEntropy, FedProx

Rows = npt.NDArray[np.int64]

# Floating point operations of a batched step below which torch's dispatch outweighs them: so many
# clients are stacked that together they reach it.
WORTHWHILE = 128e6
LARGEST = 64


def bundle_size(model: Classifier, work: LocalWork) -> int:
    """Return how many clients of a run to stack; 1 leaves them to `client.train`."""
    if not _stackable(model, work):
        return 1
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # A multiply-add a parameter and sample forward, and two backward.
    return int(min(LARGEST, max(1, WORTHWHILE // (6 * work.batch_size * parameters))))


def _stackable(model: Classifier, work: LocalWork) -> bool:
    return (
        model.stacks
        and isinstance(work.objective, CrossEntropy | FedProx)
        and work.augment is unchanged
        and not work.keep_last
        and has_rule(work)
    )


def train(
    model: Classifier,
    work: LocalWork,
    weights: Point,
    samples: AnySamples,
    rows: Sequence[Rows],
    seeds: Sequence[int],
    progress: float,
) -> Updates:
    """Train clients from the global weights; `rows` says which of the samples each one holds."""
    sizes = [len(held) for held in rows]
    device = next(model.parameters()).device
    with one_thread(), torch.no_grad():
        # By name: engines hand the weights over in different orders, and sums follow it.
        start = {name: weights[name].to(device) for name in sorted(weights)}
        loss = StackedLoss(model, work, start)
        point = {
            name: value.expand(len(sizes), *value.shape).clone() for name, value in start.items()
        }
        rule = build_rule(point, loss, work, progress)
        losses = []
        for index in _schedule(work, rows, seeds):
            inputs, labels = samples.batch(index.reshape(-1))
            shape = index.shape
            losses.append(
                rule.step(
                    inputs.view(*shape, *inputs.shape[1:]).to(device), labels.view(shape).to(device)
                )
            )
    metrics = client_metrics(torch.stack(losses).mean(0), rule, record=work.record_step_sizes)
    return Updates(point, sizes, metrics)


def _schedule(work: LocalWork, rows: Sequence[Rows], seeds: Sequence[int]) -> Tensor:
    """Return the samples of every step, [step, client, sample of the batch]."""
    sizes = [len(held) for held in rows]
    steps = local_steps(sizes[0], work.epochs, work.batch_size)
    batch = min(work.batch_size, work.epochs * sizes[0])
    generator = torch.Generator()
    orders = []
    for size, seed in zip(sizes, seeds, strict=True):
        order = sample_order(size, work.epochs, seed, generator)
        # A slice takes as long as a third of all the rest.
        orders.append(order if work.epochs * size == steps * batch else order[: steps * batch])
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    places = torch.stack(orders).add_(starts.unsqueeze(1))
    samples = torch.from_numpy(np.concatenate(rows)).index_select(0, places.view(-1))
    return samples.view(len(sizes), steps, batch).transpose(0, 1)


class StackedLoss:
    """The objective of every client of a stack on its own batch."""

    def __init__(self, model: Classifier, work: LocalWork, anchors: Point) -> None:
        self._model = model
        self._anchors = anchors
        self._mu = work.objective.mu if isinstance(work.objective, FedProx) else 0.0

    def gradients(self, point: Point, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Point]:
        """Return one loss a client, and the gradients that autograd would find."""
        logits, pull_back = self._model.stacked_pullback(point, inputs)
        scores = logits.log_softmax(1)
        losses = F.nll_loss(scores, labels, reduction="none").mean(1)
        share = torch.zeros_like(scores).scatter_(1, labels.unsqueeze(1), -1 / labels.shape[1])
        gradients = pull_back(
            torch.ops.aten._log_softmax_backward_data(share, scores, 1, scores.dtype)
        )
        if self._mu:
            away = {name: value - self._anchors[name] for name, value in point.items()}
            squares = [tensor.square().flatten(1).sum(1) for tensor in away.values()]
            losses = losses + self._mu / 2 * torch.stack(squares).sum(0)
            for name, tensor in away.items():
                gradients[name].add_(tensor.mul_(self._mu))
        return losses, gradients
