"""The second evaluation of a step leaves no trace, and sees the same randomness."""

from __future__ import annotations

import copy
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltafl.optim import DeltaSGD

Closure = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """Dropout, BatchNorm, a buffer that is replaced instead of changed, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.body(inputs)


def batch(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    inputs = torch.randn(12, 6, generator=generator)
    return inputs, torch.randint(3, (12,), generator=generator)


def closure_of(optimizer: DeltaSGD, model: Callable[[Tensor], Tensor], k: int) -> Closure:
    inputs, labels = batch(k)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    return closure


def eager(module: nn.Module) -> nn.Module:
    return module


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


COMPILERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": eager,
    "dynamo": lambda module: torch.compile(module, backend="eager"),
    "aot": lambda module: torch.compile(module, backend="aot_eager"),
    "in place": compiled_in_place,
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_step_leaves_what_one_evaluation_leaves(compiler: str) -> None:
    torch.manual_seed(0)
    model = Net()
    called = COMPILERS[compiler](model)
    optimizer = DeltaSGD(model.parameters(), curvature="same-batch")
    optimizer.recording = True
    for k in range(4):
        twin = Net()
        twin.load_state_dict(model.state_dict())
        watcher = DeltaSGD(twin.parameters(), lr=1e-30)
        before = torch.get_rng_state()
        twin_loss = closure_of(watcher, COMPILERS[compiler](twin), k)()
        after = torch.get_rng_state()

        torch.set_rng_state(before)
        loss = optimizer.step(closure_of(optimizer, called, k))

        assert torch.equal(loss, twin_loss)
        assert torch.equal(torch.get_rng_state(), after)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, twin.get_buffer(name)), name
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
            # The move started from x_k, bit for bit.
            eta = optimizer.param_groups[0]["eta"]
            assert torch.equal(p, q.detach() - q.grad * eta)
    assert model.calls == 4
    assert all(np.isfinite(record.smoothness) for record in optimizer.records[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # while inductor is imported
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_code_is_evaluated_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels change BatchNorm's statistics themselves."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    statistics = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        optimizer = DeltaSGD(model.parameters(), curvature="same-batch")
        optimizer.recording = True
        called = torch.compile(model) if compiled else model
        for k in range(3):
            optimizer.step(closure_of(optimizer, called, k))
        assert model[1].num_batches_tracked == 3
        statistics.append((model[1].running_mean, [r.eta for r in optimizer.records]))
    torch.testing.assert_close(*statistics)


def test_the_same_mask_gives_a_difference_of_exactly_zero() -> None:
    """Nothing moved, so any difference could only come from the dropout mask."""
    torch.manual_seed(0)
    model = Net()
    optimizer = DeltaSGD(model.parameters(), curvature="same-batch")
    optimizer.recording = True
    start = copy.deepcopy(model.state_dict())
    optimizer.step(closure_of(optimizer, model, 0))
    model.load_state_dict(start)  # the point before and the point now are the same
    optimizer.step(closure_of(optimizer, model, 1))
    assert optimizer.records[1].smoothness == np.inf


def test_the_first_step_of_a_round_evaluates_once() -> None:
    x = torch.ones(2, requires_grad=True)
    optimizer = DeltaSGD([x], curvature="same-batch")
    calls = []

    def closure() -> Tensor:
        calls.append(x.detach().clone())
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    optimizer.reset()
    optimizer.step(closure)
    assert len(calls) == 1 + 2 + 1
    assert torch.equal(calls[1], calls[0])  # x_{k-1} first
    assert not torch.equal(calls[2], calls[1])


def test_every_generator_sees_the_same_numbers() -> None:
    x = torch.ones(1, requires_grad=True)
    optimizer = DeltaSGD([x], curvature="same-batch")
    drawn = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        loss = (x**2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    first, rehearsed, second = drawn
    assert rehearsed == second
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("zero_in_place", [False, True])
def test_gradients_a_closure_adds_to_are_added_to_once(zero_in_place: bool) -> None:
    torch.manual_seed(0)
    x, other = torch.ones(2, requires_grad=True), nn.Linear(2, 1)
    optimizer = DeltaSGD([x], curvature="same-batch")
    optimizer.recording = True

    def closure() -> Tensor:
        if zero_in_place:
            optimizer.zero_grad(set_to_none=False)
        loss = (other(x) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    held, held_other = x.grad, other.weight.grad
    expected = torch.zeros(2) if zero_in_place else x.grad.clone()
    expected_other = other.weight.grad.clone()
    here = torch.autograd.grad((other(x) ** 2).sum(), [x, other.weight])
    optimizer.step(closure)
    assert x.grad is held
    assert other.weight.grad is held_other
    torch.testing.assert_close(x.grad, expected + here[0])
    torch.testing.assert_close(other.weight.grad, expected_other + here[1])
    # What was there before is in both gradients: 2 |w|^2 is the curvature along w.
    curvature = 2 * other.weight.square().sum().item()
    assert optimizer.records[1].smoothness == pytest.approx(1 / curvature, rel=1e-5)


def test_an_error_in_the_closure_restores_everything() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = DeltaSGD(model.parameters(), curvature="same-batch")
    optimizer.step(closure_of(optimizer, model, 0))
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    generator = torch.get_rng_state()

    def broken() -> Tensor:
        closure_of(optimizer, model, 1)()
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        optimizer.step(broken)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())


def test_two_models_in_one_closure_are_both_restored() -> None:
    torch.manual_seed(0)
    model, critic = Net(), Net()
    optimizer = DeltaSGD(model.parameters(), curvature="same-batch")

    def closure() -> Tensor:
        optimizer.zero_grad()
        inputs, labels = batch(0)
        loss = F.cross_entropy(model(inputs) + critic(inputs) + critic(-inputs), labels)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert model.calls == 3
    assert critic.calls == 6
    assert critic.body[1].num_batches_tracked == 6


def test_a_model_that_another_thread_runs_is_left_alone() -> None:
    torch.manual_seed(0)
    model, foreign = Net(), Net()
    optimizer = DeltaSGD(model.parameters(), curvature="same-batch")

    def closure() -> Tensor:
        optimizer.zero_grad()
        thread = threading.Thread(target=foreign, args=(batch(0)[0],))
        thread.start()
        thread.join()
        inputs, labels = batch(0)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert foreign.calls == 3
    assert model.calls == 2


def test_warnings_of_the_closure_are_shown_once() -> None:
    """Muting torch's remark on global hooks must not bring old warnings back every step."""
    model = Net()
    optimizer = DeltaSGD(model.parameters(), curvature="same-batch")

    def closure() -> Tensor:
        warnings.warn("look at this", UserWarning, stacklevel=1)
        return closure_of(optimizer, model, 0)()

    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step(closure)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(5):
            optimizer.step(closure)
    assert len(shown) == 1


def test_without_a_closure_it_says_what_to_do() -> None:
    x = torch.ones(1, requires_grad=True)
    optimizer = DeltaSGD([x], curvature="same-batch")
    x.grad = torch.ones(1)
    with pytest.raises(TypeError, match=r"step\(closure\).*curvature=\"reused\""):
        optimizer.step()
    assert x.item() == 1.0


def test_parameters_without_gradients() -> None:
    """x^2 y has no gradient for y where a switch leaves it out; norms skip it there."""
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = DeltaSGD([x, y], lr=0.1, curvature="same-batch")
    optimizer.recording = True

    def closure(use_y: bool) -> Tensor:
        optimizer.zero_grad()
        loss = (x**2 * y if use_y else 2 * x**2).sum()
        loss.backward()
        return loss

    optimizer.step(lambda: closure(False))  # g = 4: x is 0.6
    optimizer.step(lambda: closure(True))
    # y did not move but its gradient x^2 did: |dx| = 0.4, dg = (2 * 2 * 0.4, 1 - 0.36).
    expected = 0.4 / np.hypot(1.6, 0.64)
    assert optimizer.records[1].smoothness == pytest.approx(expected, rel=1e-12)
    optimizer.step(lambda: closure(False))  # y moved, but has no gradient: only x counts
    assert optimizer.records[2].smoothness == pytest.approx(1 / 4, rel=1e-12)
    assert y.grad is None
    assert y not in optimizer.state
