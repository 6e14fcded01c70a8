"""What an optimizer remembers survives saving, copying and pickling, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from deltafl.optim import SPS, DeltaSGD

from .problems import reused

Build = Callable[[Any], Optimizer]
BUILDS: dict[str, Build] = {
    "reused": lambda params: reused(params, weight_decay=0.01),
    "same-batch": lambda params: DeltaSGD(params, curvature="same-batch"),
    "group": lambda params: reused([{"params": [p]} for p in params], scope="group"),
    "sps": lambda params: SPS(params, max_lr=0.3),
}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for k in steps:
        generator = torch.Generator().manual_seed(k)
        inputs = torch.randn(10, 5, generator=generator).to(dtype)
        labels = torch.randint(3, (10,), generator=generator)

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_saved_state_goes_on_bit_identically(build: Build, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = build(model.parameters())
    train(model, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(5, 10))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model = network(dtype)
    resumed_model.load_state_dict(saved["model"])
    resumed = build(resumed_model.parameters())
    resumed.load_state_dict(saved["optimizer"])
    train(resumed_model, resumed, range(5, 10))
    assert_same(model, resumed_model)
    assert resumed.step_sizes == optimizer.step_sizes


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_goes_on_bit_identically(build: Build, duplicate: Callable[[Any], Any]) -> None:
    model = network(torch.float32)
    optimizer = build(model.parameters())
    optimizer.recording = True
    train(model, optimizer, range(5))
    other_model, other = duplicate((model, optimizer))
    train(model, optimizer, range(5, 10))
    train(other_model, other, range(5, 10))
    assert_same(model, other_model)
    assert other.recording
    assert other.records == optimizer.records


def test_a_loaded_state_brings_its_options() -> None:
    model = network(torch.float32)
    optimizer = DeltaSGD(model.parameters(), gamma=1.0, curvature="same-batch")
    train(model, optimizer, range(2))
    other = reused(network(torch.float32).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["gamma"] == 1.0
    with pytest.raises(TypeError, match="same-batch"):
        other.step()


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_foreach_and_single_tensor_kernels_agree_bit_for_bit(
    build: Build, dtype: torch.dtype
) -> None:
    models = network(dtype), network(dtype)
    for model, foreach in zip(models, (False, True), strict=True):
        optimizer = build(model.parameters())
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        train(model, optimizer, range(8))
    assert_same(*models)


def test_foreach_takes_mixed_types() -> None:
    """bfloat16, float32 and float64 parameters share one step size in both kernels."""
    results = []
    for foreach in (False, True):
        torch.manual_seed(0)
        params = [
            torch.randn(4, 3).to(dtype).requires_grad_()
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        ]
        optimizer = reused(params, foreach=foreach, weight_decay=0.1, maximize=True)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(4, 3).to(p.dtype)
            optimizer.step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


class Reads(TorchDispatchMode):
    """Counts how often a tensor becomes a number, which waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("foreach", [False, True])
def test_no_step_waits_for_the_device(build: Build, foreach: bool) -> None:
    model = network(torch.float32)
    optimizer = build(model.parameters())
    optimizer.recording = True
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    with Reads() as reads:
        train(model, optimizer, range(4))
        assert reads.count == 0
        assert len(optimizer.records) >= 4
        assert reads.count >= 4  # the records were read just now


def test_named_parameters_keep_their_names() -> None:
    model = network(torch.float32)
    optimizer = reused(model.named_parameters())
    train(model, optimizer, range(2))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


def test_step_hooks_run_around_the_step() -> None:
    model = network(torch.float32)
    optimizer = reused(model.parameters())
    seen: list[tuple[str, float]] = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(("before", opt.step_size)))
    optimizer.register_step_post_hook(lambda opt, *_: seen.append(("after", opt.step_size)))
    train(model, optimizer, range(2))
    names = [name for name, _ in seen]
    assert names == ["before", "after"] * 2
    assert seen[1][1] == seen[2][1] == pytest.approx(0.2)
    assert seen[3][1] == optimizer.step_size != seen[2][1]


def test_a_gradient_scaler_skips_a_step_that_overflowed() -> None:
    x = torch.ones(2, requires_grad=True)
    optimizer = reused([x])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for gradient in (1.0, torch.inf, 0.5):
        x.grad = torch.full((2,), 4 * gradient)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update(4.0)
    twin = torch.ones(2, requires_grad=True)
    plain = reused([twin])
    for gradient in (1.0, 0.5):
        twin.grad = torch.full((2,), gradient)
        plain.step()
    assert torch.equal(x, twin)
