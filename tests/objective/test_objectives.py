"""The catalog, and what holds for every objective in it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch.nn import functional as F

from deltafl import models, objective
from deltafl.errors import UserError


def copy_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def problem(seed=0):
    """A model with dropout, a batch, and weights of three moments."""
    model = models.build("cnn", shape=(1, 16, 16), classes=3, seed=seed)
    at_start = copy_of(models.build("cnn", shape=(1, 16, 16), classes=3, seed=seed + 1))
    memory = copy_of(models.build("cnn", shape=(1, 16, 16), classes=3, seed=seed + 2))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 1, 16, 16, generator=generator)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    return model, at_start, memory, inputs, labels


def test_names():
    assert objective.names() == ("cross-entropy", "fedprox", "moon")


@pytest.mark.parametrize(
    ("name", "remembers"), [("cross-entropy", False), ("fedprox", False), ("moon", True)]
)
def test_who_remembers(name, remembers):
    assert objective.build(name).remembers is remembers


def test_defaults_are_the_paper_s():
    assert objective.build("fedprox") == objective.FedProx(mu=1.0)
    assert objective.build("moon", {}) == objective.Moon(mu=1.0, temperature=0.5)


def test_options_arrive_and_cannot_change():
    built = objective.build("moon", {"mu": 5.0, "temperature": 0.1})
    assert built == objective.Moon(mu=5.0, temperature=0.1)
    with pytest.raises(FrozenInstanceError):
        built.mu = 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedpro", {}, r"unknown objective 'fedpro': did you mean 'fedprox'\?"),
        ("cross-entropy", {"mu": 1.0}, "'cross-entropy' has no option 'mu': leave it out"),
        ("fedprox", {"nu": 1.0}, r"unknown option of objective 'fedprox' 'nu': .*'mu'"),
        ("moon", {"temprature": 1.0}, r"did you mean 'temperature'\?"),
        ("fedprox", {"mu": -1.0}, "mu -1.0 of objective 'fedprox' is wrong: use 0 or more"),
        ("fedprox", {"mu": float("nan")}, "mu nan of objective 'fedprox'"),
        ("moon", {"mu": float("inf")}, "mu inf of objective 'moon'"),
        ("moon", {"temperature": 0.0}, "temperature 0.0 of objective 'moon' .*: use more than 0"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_line(name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        objective.build(name, options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("name", objective.names())
def test_a_loss_is_a_pure_function_of_weights_batch_and_random_state(name, remembered):
    model, at_start, memory, inputs, labels = problem()
    model.train()
    loss = objective.build(name).start(model, at_start, memory if remembered else None)
    before = copy_of(model)
    torch.manual_seed(0)
    first = loss(inputs, labels)
    gradients = torch.autograd.grad(first, list(model.parameters()))
    torch.manual_seed(0)
    second = loss(inputs, labels)
    assert torch.equal(first, second)
    again = torch.autograd.grad(second, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert all(torch.equal(before[entry], now) for entry, now in model.state_dict().items())
    torch.manual_seed(1)
    assert not torch.equal(loss(inputs, labels), first)  # the dropout is on


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("name", objective.names())
def test_a_loss_draws_no_more_randomness_than_one_forward_pass(name, remembered):
    model, at_start, memory, inputs, labels = problem()
    model.train()
    loss = objective.build(name).start(model, at_start, memory if remembered else None)
    torch.manual_seed(0)
    model(inputs)
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    loss(inputs, labels)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("name", objective.names())
def test_a_loss_follows_the_model_and_not_the_tensors_it_was_started_with(name):
    model, _, memory, inputs, labels = problem()
    model.eval()
    shared = model.state_dict()  # the model's own tensors, as an engine in one process may pass
    loss = objective.build(name).start(model, shared, memory)
    moved = objective.build(name).start(model, copy_of(model), memory)
    before = loss(inputs, labels).item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert loss(inputs, labels).item() == moved(inputs, labels).item()
    assert loss(inputs, labels).item() != before


@pytest.mark.parametrize("name", ["fedprox", "moon"])
def test_mu_zero_is_cross_entropy(name):
    model, at_start, memory, inputs, labels = problem()
    model.eval()
    loss = objective.build(name, {"mu": 0.0}).start(model, at_start, memory)
    assert torch.equal(loss(inputs, labels), F.cross_entropy(model(inputs), labels))


def test_cross_entropy_by_hand():
    model = models.build("softmax", shape=(1, 1, 1), classes=2, seed=0)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[0.0], [1.0]]))
        model.head.bias.zero_()
    loss = objective.CrossEntropy().start(model, copy_of(model), None)
    inputs = torch.tensor([0.0, 3.0]).log1p().reshape(2, 1, 1, 1)  # odds of 1 and 4
    expected = -(torch.tensor(1 / 2).log() + torch.tensor(4 / 5).log()) / 2
    torch.testing.assert_close(loss(inputs, torch.tensor([0, 1])), expected)
