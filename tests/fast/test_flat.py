"""Steps on a vector, and the kernels below them, agree with the plain path up to rounding."""

from __future__ import annotations

import pytest
import torch

from deltafl import client, kernels, models, objective, optim
from deltafl.client import LocalWork, OptimizerSteps
from deltafl.data.dataset import Samples
from deltafl.fast.flat import FlatSteps, flattens

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = Samples(
    torch.randn(40, 1, 16, 16, generator=GENERATOR), torch.randint(4, (40,), generator=GENERATOR)
)


def built(name: str, fast: bool = False, **options) -> models.Classifier:
    return models.build(name, shape=(1, 16, 16), classes=4, seed=1, fast=fast, **options)


def outcome(model, work, stepping, memory=None):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    update = client.train(model, work, weights, IMAGES, memory, 5, 0.6, stepping)
    return {name: value.clone() for name, value in update.weights.items()}, update.metrics[0]


def assert_agree(ours, theirs, optimizer):
    (weights, metrics), (want, wanted) = ours, theirs
    for name, value in want.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)
    assert metrics.loss == pytest.approx(wanted.loss, rel=1e-4)
    assert metrics.step_size == pytest.approx(wanted.step_size, rel=1e-3)
    assert len(metrics.steps) == len(wanted.steps)
    assert bool(wanted.steps) == optimizer.startswith(("delta", "sps"))
    for step, other in zip(metrics.steps, wanted.steps, strict=True):
        for value, number in zip(step, other, strict=True):
            assert value == (number if number is None else pytest.approx(number, rel=1e-3))


@pytest.mark.parametrize("loss", objective.names())
@pytest.mark.parametrize("optimizer", optim.names())
def test_a_client_on_a_vector_is_the_plain_one(optimizer, loss):
    work = LocalWork(objective.build(loss), optimizer, batch_size=8, record_step_sizes=True)
    memory = None
    if loss == "moon":
        other = models.build("cnn", shape=(1, 16, 16), classes=4, seed=2)
        memory = {name: value.clone() for name, value in other.state_dict().items()}
    assert flattens(built("cnn"), work)
    theirs = outcome(built("cnn"), work, OptimizerSteps, memory)
    assert_agree(outcome(built("cnn"), work, FlatSteps, memory), theirs, optimizer)
    assert_agree(outcome(built("cnn", fast=True), work, FlatSteps, memory), theirs, optimizer)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("optimizer", ["delta-sgd", "sgd"])
def test_batch_norm_counts_every_batch_once(optimizer, norm):
    work = LocalWork(
        objective.build("cross-entropy"), optimizer, batch_size=8, record_step_sizes=True
    )
    theirs = outcome(built("resnet18", width=4, norm=norm), work, OptimizerSteps)
    ours = outcome(built("resnet18", width=4, norm=norm), work, FlatSteps)
    assert_agree(ours, theirs, optimizer)
    counts = [value for name, value in ours[0].items() if name.endswith("num_batches_tracked")]
    assert all(count.item() == 5 for count in counts)
    assert bool(counts) == (norm == "batch")


@pytest.mark.parametrize("loss", objective.names())
@pytest.mark.parametrize("stepping", [OptimizerSteps, FlatSteps])
def test_fused_norms_count_every_batch_once(stepping, loss):
    """Also where a loss calls the halves of a model and not the model, as MOON's does."""
    work = LocalWork(objective.build(loss), "delta-sgd", batch_size=8)
    memory = built("resnet18", width=4).state_dict() if loss == "moon" else None
    weights, _ = outcome(built("resnet18", width=4, fast=True), work, stepping, memory)
    counts = [value for name, value in weights.items() if name.endswith("num_batches_tracked")]
    assert [count.item() for count in counts] == [5] * 20


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_channels_last_agree_with_channels_first(norm):
    # One step: through normalisation, rounding grows from step to step.
    work = LocalWork(objective.build("cross-entropy"), "sgd", batch_size=40)
    first = outcome(built("resnet18", width=16, norm=norm), work, OptimizerSteps)
    last = outcome(built("resnet18", width=16, norm=norm, fast=True), work, OptimizerSteps)
    assert_agree(last, first, "sgd")
    narrow = built("resnet18", width=4, fast=True)
    assert narrow.native == kernels.available()
    assert narrow.stem[0].weight.is_contiguous()  # four channels must not come last


def test_what_is_left_to_the_plain_way():
    plain = objective.build("cross-entropy")
    assert flattens(built("cnn"), LocalWork(plain, "delta-sgd"))
    assert not flattens(built("cnn"), LocalWork(plain, "torch.optim.RAdam"))
    assert not flattens(built("cnn").double(), LocalWork(plain, "delta-sgd"))
    assert not flattens(built("cnn"), LocalWork(plain, "delta-sgd", options={"weight_decay": 0.1}))
    assert not flattens(built("resnet18"), LocalWork(plain, "delta-sgd"))
