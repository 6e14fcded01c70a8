"""The stacked path computes what `client.train` computes, client by client, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafl import Config, client, models, objective, optim, run
from deltafl.client import LocalWork, sample_order
from deltafl.data.dataset import Samples
from deltafl.engine import workbench
from deltafl.fast import rules, stacked

OPTIMIZERS = [
    *[(name, {}) for name in optim.names()],
    ("delta-sgd", {"max_lr": 0.15, "gamma": 1.0, "delta": 1.0, "theta0": 0.5}),
    ("delta-sgd-reused", {"max_lr": 0.25}),
    ("sps", {"max_lr": 0.3, "c": 2.0, "f_star": 0.1}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def federation(sizes: list[int]) -> list[Samples]:
    generator = torch.Generator().manual_seed(3)
    return [
        Samples(
            torch.randn(size, 1, 4, 4, generator=generator),
            torch.randint(5, (size,), generator=generator),
        )
        for size in sizes
    ]


def together(clients: list[Samples]) -> Samples:
    return Samples(
        torch.cat([held.inputs for held in clients]), torch.cat([held.labels for held in clients])
    )


@pytest.mark.parametrize("model_name", ["softmax", "mlp"])
@pytest.mark.parametrize("loss", ["cross-entropy", "fedprox"])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_every_client_of_a_stack_is_as_if_alone(model_name, loss, optimizer, options):
    model = models.build(model_name, shape=(1, 4, 4), classes=5, seed=1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    work = LocalWork(
        objective.build(loss),
        optimizer,
        options=options,
        epochs=2,
        batch_size=8,
        record_step_sizes=True,
    )
    assert stacked.bundle_size(model, work) > 1
    clients = federation([20, 23, 20, 22])
    seeds = [5, 6, 7, 8]
    sizes = [len(held) for held in clients]
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    updates = stacked.train(model, work, weights, together(clients), rows, seeds, 0.6)
    assert updates.samples == sizes
    for place, (held, seed) in enumerate(zip(clients, seeds, strict=True)):
        alone = client.train(model, work, weights, held, None, seed, 0.6)
        for name, value in alone.weights.items():
            torch.testing.assert_close(
                updates.weights[name][place], value[0], rtol=1e-4, atol=1e-5, msg=name
            )
        ours, theirs = updates.metrics[place], alone.metrics[0]
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.step_size == pytest.approx(theirs.step_size, rel=1e-3)
        assert len(ours.steps) == len(theirs.steps)
        assert bool(theirs.steps) == optimizer.startswith(("delta", "sps"))
        if theirs.steps:
            for step, other in zip(ours.steps, theirs.steps, strict=True):
                for value, want in zip(step, other, strict=True):
                    assert value == (want if want is None else pytest.approx(want, rel=1e-3))


def test_step_sizes_stay_in_range_as_the_optimizers_keep_them():
    model = models.build("softmax", shape=(1, 4, 4), classes=5, seed=1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    held = federation([20])[0]
    for optimizer, lr, options in (("delta-sgd", 1e-50, {}), ("sps", None, {"f_star": -1e38})):
        work = LocalWork(
            objective.build("cross-entropy"),
            optimizer,
            lr=lr,
            options=options,
            batch_size=8,
            record_step_sizes=True,
        )
        updates = stacked.train(model, work, weights, held, [np.arange(20)], [3], 0.0)
        alone = client.train(model, work, weights, held, None, 3, 0.0)
        etas = [[step.eta for step in each.metrics[0].steps] for each in (updates, alone)]
        assert etas[0] == pytest.approx(etas[1], rel=1e-3)
        assert all(0 <= eta < float("inf") for eta in etas[0])
        assert etas[0][0] > 0


def test_what_cannot_be_stacked_is_left_to_the_plain_path():
    softmax = models.build("softmax", shape=(1, 4, 4), classes=5, seed=1)
    cnn = models.build("cnn", shape=(1, 28, 28), classes=5, seed=1)
    plain = objective.build("cross-entropy")

    def size(model=softmax, loss=plain, optimizer="delta-sgd", **options):
        return stacked.bundle_size(model, LocalWork(loss, optimizer, **options))

    assert size() > 1
    assert size(model=cnn) == 1
    assert size(loss=objective.build("moon")) == 1
    assert size(optimizer="torch.optim.RAdam") == 1
    assert size(options={"weight_decay": 0.1}) == 1
    assert size(optimizer="sps", lr=0.5) == 1
    wide = models.build("mlp", shape=(3, 32, 32), classes=10, width=512, seed=1)
    assert size(model=wide) == 1


@pytest.mark.parametrize("samples", [30, (5, 90)])
def test_a_whole_run_agrees_with_the_plain_path(small: Config, samples):
    config = small.override(
        **{"federation.samples": samples, "federation.participation": 1.0, "run.rounds": 4}
    )
    fast, plain = (run(config.override(**{"engine.fast": fast})) for fast in (True, False))
    for row, want in zip(fast.metrics, plain.metrics, strict=True):
        assert row["test_loss"] == pytest.approx(want["test_loss"], rel=1e-4)
        assert row["step_size"] == pytest.approx(want["step_size"], rel=1e-3)


@pytest.mark.parametrize("model_name", ["softmax", "mlp"])
@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 14, 64])
def test_gradients_written_out_have_the_bits_of_autograd(model_name, mu, batch):
    model = models.build(model_name, shape=(1, 8, 8), classes=5, seed=1)
    anchors = dict(sorted(model.state_dict().items()))
    generator = torch.Generator().manual_seed(4)
    point = {
        name: value + 0.1 * torch.randn(6, *value.shape, generator=generator)
        for name, value in anchors.items()
    }
    inputs = torch.randn(6, batch, 1, 8, 8, generator=generator)
    labels = torch.randint(5, (6, batch), generator=generator)
    loss = objective.build("fedprox", {"mu": mu}) if mu else objective.build("cross-entropy")
    work = LocalWork(loss, "sgd")
    with torch.no_grad():
        losses, gradients = stacked.StackedLoss(model, work, anchors).gradients(
            point, inputs, labels
        )
    wanted, references = autograd(model, mu, anchors, point, inputs, labels)
    assert torch.equal(losses, wanted)
    assert gradients.keys() == references.keys()
    assert all(torch.equal(gradients[name], value) for name, value in references.items())


def autograd(model, mu, anchors, point, inputs, labels):
    """The losses and gradients of a stack as one would write them down."""
    leaves = {name: value.clone().requires_grad_() for name, value in point.items()}
    logits = model.stacked(leaves, inputs)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none").mean(1)
    if mu:
        squares = [(v - anchors[name]).square().flatten(1).sum(1) for name, v in leaves.items()]
        losses = losses + mu / 2 * torch.stack(squares).sum(0)
    gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
    return losses.detach(), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("model_name", ["softmax", "mlp"])
def test_a_model_may_leave_going_back_to_autograd(model_name):
    model = models.build(model_name, shape=(1, 8, 8), classes=5, seed=1)
    weights = {name: value.expand(3, *value.shape) for name, value in model.state_dict().items()}
    inputs, gradient = torch.randn(3, 7, 1, 8, 8), torch.randn(3, 5, 7)
    with torch.no_grad():
        ours, theirs = (
            pullback(model, weights, inputs)
            for pullback in (type(model).stacked_pullback, models.Classifier.stacked_pullback)
        )
    assert torch.equal(ours[0], theirs[0])
    found, wanted = ours[1](gradient), theirs[1](gradient)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_plain_descent_has_the_bits_of_torch_sgd():
    class Slope:
        def gradients(self, point, inputs, labels):
            return torch.ones(3), {name: value * inputs for name, value in point.items()}

    work = LocalWork(objective.build("cross-entropy"), "sgd", lr=0.07)
    start = torch.randn(3, 1001, generator=torch.Generator().manual_seed(2))
    ours, theirs = {"x": start.clone()}, {"x": start.clone()}
    rule = rules.build_rule(ours, Slope(), work, 0.5)
    assert isinstance(rule, rules.DescentRule)
    optimizer = rules.build_optimizer(work, [theirs["x"]], 0.5)
    reference = rules.ElementwiseRule(theirs, Slope(), optimizer)
    for factor in torch.linspace(-1.3, 2, 9):
        rule.step(factor, None)
        reference.step(factor, None)
    assert torch.equal(ours["x"], theirs["x"])
    assert torch.equal(rule.decisions[-1].eta, reference.decisions[-1].eta)
    for more in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}):
        work = LocalWork(objective.build("cross-entropy"), "sgd", options=more)
        assert isinstance(rules.build_rule(ours, Slope(), work, 0.0), rules.ElementwiseRule)


def test_a_lent_generator_changes_no_order():
    lent = torch.Generator()
    for size, epochs, seed in ((14, 1, 3), (500, 2, 4), (1, 3, 5)):
        order = sample_order(size, epochs, seed, lent)
        assert torch.equal(order, sample_order(size, epochs, seed))


def test_a_set_that_is_kept_ready_gives_the_bits_of_one_that_is_not(small: Config, monkeypatch):
    config = small.override(**{"federation.samples": (5, 90), "federation.participation": 1.0})
    kept = run(config).summary["weights_sha256"]
    monkeypatch.setattr(workbench, "KEPT", 0)
    assert run(config).summary["weights_sha256"] == kept
