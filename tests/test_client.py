from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from deltafl import client, models, objective
from deltafl.client import LocalWork
from deltafl.data.dataset import Samples


def softmax_model() -> models.Classifier:
    return models.build("softmax", shape=(1, 2, 2), classes=3, seed=0)


def some_samples(count: int = 20) -> Samples:
    generator = torch.Generator().manual_seed(1)
    return Samples(
        torch.randn(count, 1, 2, 2, generator=generator),
        torch.randint(3, (count,), generator=generator),
    )


def train(optimizer: str = "delta-sgd", *, seed: int = 5, model=None, samples=None, **options):
    model = model or softmax_model()
    weights = {name: value.clone() for name, value in softmax_model().state_dict().items()}
    options = {"objective": objective.build("cross-entropy"), "batch_size": 6} | options
    work = LocalWork(optimizer=optimizer, **options)
    update = client.train(model, work, weights, samples or some_samples(), None, seed, 0.0)
    assert len(update) == 1
    return {name: value[0].clone() for name, value in update.weights.items()}, update


@given(
    samples=st.integers(1, 200),
    epochs=st.integers(1, 4),
    size=st.integers(1, 70),
    seed=st.integers(),
)
def test_local_steps_are_floor_en_over_b_and_at_least_one(samples, epochs, size, seed):
    work = LocalWork(objective.build("cross-entropy"), "sgd", epochs=epochs, batch_size=size)
    drawn = [index.tolist() for index in client.batches(samples, work, seed)]
    assert len(drawn) == max(1, epochs * samples // size)
    used = [i for index in drawn for i in index]
    if epochs * samples >= size:
        assert all(len(index) == size for index in drawn)
    else:
        assert sorted(used) == sorted(list(range(samples)) * epochs)
    # A stream of whole permutations: every epoch's part has no sample twice.
    for start in range(0, len(used), samples):
        epoch = used[start : start + samples]
        assert len(set(epoch)) == len(epoch)
    # Keeping the last batch adds what is left, and nothing else.
    keeping = dataclasses.replace(work, keep_last=True)
    kept = [index.tolist() for index in client.batches(samples, keeping, seed)]
    assert kept[: len(drawn)] == drawn
    assert sum(len(index) for index in kept) == epochs * samples
    assert len(kept) - len(drawn) in (0, 1)


def test_one_full_batch_of_sgd_is_one_gradient_step_by_hand():
    samples = some_samples(6)
    after, update = train("sgd", lr=0.5, samples=samples)
    weight, bias = (softmax_model().state_dict()[n].numpy() for n in after)
    inputs = samples.inputs.flatten(1).numpy()
    logits = inputs @ weight.T + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    residual = (shares - np.eye(3)[samples.labels.numpy()]) / 6
    weight_after, bias_after = (after[name].numpy() for name in after)
    np.testing.assert_allclose(weight_after, weight - 0.5 * residual.T @ inputs, atol=1e-6)
    np.testing.assert_allclose(bias_after, bias - 0.5 * residual.sum(0), atol=1e-6)
    truth = -np.log(shares[np.arange(6), samples.labels.numpy()]).mean()
    assert update.metrics[0].loss == pytest.approx(truth, rel=1e-5)
    assert update.metrics[0].step_size == 0.5
    assert update.samples == [6]


@pytest.mark.parametrize("optimizer", ["delta-sgd", "delta-sgd-reused", "sgd", "adam", "sps"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(optimizer):
    first, _ = train(optimizer)
    torch.rand(7)  # whatever happened before in this process
    again, _ = train(optimizer)
    other, _ = train(optimizer, seed=6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_used_model_gives_the_bits_of_a_new_one():
    model = models.build("cnn", shape=(1, 16, 16), classes=3, seed=0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(12, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    samples = Samples(images, torch.arange(12) % 3)
    work = LocalWork(objective.build("cross-entropy"), "delta-sgd", batch_size=4)

    def once():
        update = client.train(model, work, weights, samples, None, 3, 0.0)
        return {name: value.clone() for name, value in update.weights.items()}

    first, second = once(), once()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_random_state_and_the_threads_outside_stay_as_they_were():
    threads = torch.get_num_threads()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    train("sgd")
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_local_work_runs_on_one_thread():
    seen = []

    class Spy:
        remembers = False

        def start(self, model, weights, memory):
            def loss(inputs, labels):
                seen.append(torch.get_num_threads())
                return F.cross_entropy(model(inputs), labels)

            return loss

    train("sgd", objective=Spy())
    assert set(seen) == {1}


def test_step_sizes_are_recorded_on_demand():
    _, plain = train("delta-sgd")
    _, recorded = train("delta-sgd", record_step_sizes=True)
    assert plain.metrics[0].steps == ()
    steps = recorded.metrics[0].steps
    assert len(steps) == 3  # floor(20 / 6)
    assert steps[0].eta == pytest.approx(0.2)
    assert recorded.metrics[0].step_size == pytest.approx(np.mean([step.eta for step in steps]))
    for step in steps[1:]:
        assert step.eta == pytest.approx(min(step.smoothness, step.growth))


def test_a_client_with_one_sample_takes_one_step():
    _, update = train("delta-sgd", samples=some_samples(1), record_step_sizes=True)
    assert len(update.metrics[0].steps) == 1


def test_decay_follows_the_rounds_not_the_local_steps():
    work = LocalWork(objective.build("cross-entropy"), "sgd-decay", lr=0.4, batch_size=6)
    weights = {name: value.clone() for name, value in softmax_model().state_dict().items()}

    def step_size(progress):
        update = client.train(softmax_model(), work, weights, some_samples(), None, 5, progress)
        return update.metrics[0].step_size

    rates = [step_size(progress) for progress in (0.0, 0.49, 0.5, 0.74, 0.75, 0.99)]
    assert rates == pytest.approx([0.4, 0.4, 0.04, 0.04, 0.004, 0.004])
