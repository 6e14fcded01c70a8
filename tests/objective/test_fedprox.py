from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from deltafl import models
from deltafl.objective import FedProx


def build(seed):
    return models.build("mlp", shape=(1, 2, 2), classes=3, width=4, seed=seed)


INPUTS = torch.randn(5, 1, 2, 2, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1])


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_value_and_gradient(mu):
    model, anchor = build(0), build(1).state_dict()
    loss = FedProx(mu=mu).start(model, anchor, None)(INPUTS, LABELS)
    cross_entropy = F.cross_entropy(model(INPUTS), LABELS)
    distance = sum(
        float((parameter.double() - anchor[name].double()).square().sum())
        for name, parameter in model.state_dict().items()
    )
    assert loss.item() == pytest.approx(cross_entropy.item() + mu / 2 * distance, rel=1e-6)

    got = torch.autograd.grad(loss, list(model.parameters()))
    plain = torch.autograd.grad(cross_entropy, list(model.parameters()))
    for (name, parameter), mine, base in zip(model.named_parameters(), got, plain, strict=True):
        torch.testing.assert_close(mine, base + mu * (parameter - anchor[name]).detach())


def test_at_the_global_weights_it_is_cross_entropy():
    model = build(0)
    loss = FedProx().start(model, model.state_dict(), None)(INPUTS, LABELS)
    assert torch.equal(loss, F.cross_entropy(model(INPUTS), LABELS))


def test_parameters_that_do_not_train_are_not_in_the_norm():
    model, anchor = build(0), build(1).state_dict()
    whole = FedProx().start(model, anchor, None)(INPUTS, LABELS)
    model.hidden.requires_grad_(False)
    part = FedProx().start(model, anchor, None)(INPUTS, LABELS)
    frozen = sum(
        float((tensor - anchor[f"hidden.{name}"]).square().sum()) / 2
        for name, tensor in model.hidden.state_dict().items()
    )
    assert frozen > 0
    assert (whole - part).item() == pytest.approx(frozen, rel=1e-5)


def test_buffers_are_not_in_the_norm():
    model = models.build("resnet18", shape=(1, 8, 8), classes=2, width=2, seed=0).eval()
    shifted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, _ in model.named_buffers():
        shifted[name] += 7
    images = torch.ones(2, 1, 8, 8)
    labels = torch.tensor([0, 1])
    loss = FedProx().start(model, shifted, None)(images, labels)
    assert torch.equal(loss, F.cross_entropy(model(images), labels))
