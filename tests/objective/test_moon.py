from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from deltafl import models
from deltafl.models import Classifier
from deltafl.objective import Moon

INPUTS = torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def build(seed, name="cnn"):
    return models.build(name, shape=(1, 16, 16), classes=3, seed=seed)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.1)])
def test_value_is_the_formula(mu, temperature):
    model, at_start, previous = build(0).eval(), build(1).eval(), build(2).eval()
    loss = Moon(mu, temperature).start(model, at_start.state_dict(), previous.state_dict())
    with torch.no_grad():
        z, z_glob, z_prev = (
            m.represent(INPUTS).double() / m.represent(INPUTS).double().norm(dim=1, keepdim=True)
            for m in (model, at_start, previous)
        )
    glob = ((z * z_glob).sum(1) / temperature).exp()
    prev = ((z * z_prev).sum(1) / temperature).exp()
    contrast = -(glob / (glob + prev)).log().mean().item()
    expected = F.cross_entropy(model(INPUTS), LABELS).item() + mu * contrast
    assert loss(INPUTS, LABELS).item() == pytest.approx(expected, rel=1e-5)


def test_gradient_is_that_of_the_formula():
    model, at_start, previous = build(0).eval(), build(1).eval(), build(2).eval()
    loss = Moon().start(model, at_start.state_dict(), previous.state_dict())
    z = model.represent(INPUTS)
    similar = torch.stack(
        [
            F.cosine_similarity(z, other.represent(INPUTS).detach())
            for other in (at_start, previous)
        ],
        dim=1,
    )
    # The contrast is the cross entropy of picking the global model of the two.
    contrast = F.cross_entropy(similar / 0.5, torch.zeros(6, dtype=torch.long))
    expected = gradients(F.cross_entropy(model.classify(z), LABELS) + contrast, model)
    for got, wanted in zip(gradients(loss(INPUTS, LABELS), model), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_contrast_pulls_to_the_global_model_and_away_from_the_previous():
    model, at_start, previous = build(0, "mlp"), build(1, "mlp"), build(2, "mlp")
    loss = Moon(mu=100.0).start(model, at_start.state_dict(), previous.state_dict())

    def margin():
        with torch.no_grad():
            z = model.represent(INPUTS)
            near = F.cosine_similarity(z, at_start.represent(INPUTS)).mean()
            return (near - F.cosine_similarity(z, previous.represent(INPUTS)).mean()).item()

    before = margin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        loss(INPUTS, LABELS).backward()
        optimizer.step()
    assert margin() > before + 0.1


@pytest.mark.parametrize("mu", [1.0, 5.0])
def test_the_first_time_the_previous_model_is_the_global_one(mu):
    model, at_start = build(0).eval(), build(1).state_dict()
    first = Moon(mu=mu).start(model, at_start, None)(INPUTS, LABELS)
    spelled_out = Moon(mu=mu).start(model, at_start, at_start)(INPUTS, LABELS)
    plain = F.cross_entropy(model(INPUTS), LABELS)
    torch.testing.assert_close(first, spelled_out)
    torch.testing.assert_close(first, plain + mu * math.log(2))
    wanted = gradients(plain, model)
    for loss in (first, spelled_out):
        for got, expected in zip(gradients(loss, model), wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_the_frozen_models_do_not_drop_out_and_do_not_learn():
    model = build(0).train()
    at_start, memory = build(1).state_dict(), build(2).state_dict()
    before = [tensor.clone() for tensor in (*at_start.values(), *memory.values())]
    loss = Moon().start(model, at_start, memory)
    torch.manual_seed(0)
    value = loss(INPUTS, LABELS)
    value.backward()
    after = (*at_start.values(), *memory.values())
    assert all(torch.equal(then, now) for then, now in zip(before, after, strict=True))
    # By hand, with the mask of one training pass and the representations of two eval passes.
    torch.manual_seed(0)
    z = model.represent(INPUTS)
    logits = model.classify(z)
    near = [F.cosine_similarity(z, build(seed).eval().represent(INPUTS)) / 0.5 for seed in (1, 2)]
    expected = F.cross_entropy(logits, LABELS) + F.softplus(near[1] - near[0]).mean()
    torch.testing.assert_close(value, expected)


class Counting(Classifier):
    """Counts its forward passes, over all of its copies."""

    def __init__(self, calls):
        super().__init__()
        self.inner = build(0, "mlp")
        self.calls = calls

    def __deepcopy__(self, memo):
        twin = Counting(self.calls)
        twin.load_state_dict(self.state_dict())
        return twin

    def represent(self, inputs):
        self.calls.append("represent")
        return self.inner.represent(inputs)

    def classify(self, representation):
        self.calls.append("classify")
        return self.inner.classify(representation)


def test_a_batch_costs_one_pass_of_each_model():
    calls = []
    model = Counting(calls)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Moon().start(model, weights, weights)(INPUTS, LABELS)
    assert sorted(calls) == ["classify", "represent", "represent", "represent"]
    calls.clear()
    Moon().start(model, weights, None)(INPUTS, LABELS)
    assert sorted(calls) == ["classify", "represent"]


def test_a_dead_representation_has_a_finite_gradient():
    model, at_start, previous = build(0, "mlp"), build(1, "mlp"), build(2, "mlp")
    with torch.no_grad():
        model.hidden.bias.fill_(-1e6)
    value = Moon().start(model, at_start.state_dict(), previous.state_dict())(INPUTS, LABELS)
    assert not model.represent(INPUTS).any()
    assert all(gradient.isfinite().all() for gradient in gradients(value, model))


def test_a_tiny_temperature_does_not_overflow():
    model, at_start, previous = build(0, "mlp"), build(1, "mlp"), build(2, "mlp")
    objective = Moon(temperature=1e-4)
    value = objective.start(model, at_start.state_dict(), previous.state_dict())(INPUTS, LABELS)
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(value, model))
