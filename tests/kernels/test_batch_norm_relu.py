"""Normalisation, shortcut and relu in one against plain torch, which computes them in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deltafl import kernels
from deltafl.kernels import normalise, normalise_plainly

compiled = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.reason()}")

Shape = tuple[int, int, int, int]


def make(shape: Shape, seed: int = 0) -> tuple[Tensor, nn.BatchNorm2d, Tensor]:
    """Return inputs, a layer that has seen a batch, and a shortcut."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(shape[1], momentum=0.3)
        nn.init.normal_(norm.weight, mean=1.0)
        nn.init.normal_(norm.bias)
        inputs = 3 + 2 * torch.randn(shape)
        norm(2 * inputs + 1)
        return inputs, norm, torch.randn(shape)


def outcome(
    function: Callable[..., Tensor],
    inputs: Tensor,
    norm: nn.Module,
    shortcut: Tensor | None,
    **options: Any,
) -> dict[str, Tensor]:
    """Return the outputs, all gradients, and what became of the layer's statistics."""
    norm = copy.deepcopy(norm)
    leaves = {"inputs": inputs.detach().clone().requires_grad_(), **dict(norm.named_parameters())}
    if shortcut is not None:
        leaves["shortcut"] = shortcut = shortcut.detach().clone().requires_grad_()
    maps = function(leaves["inputs"], norm, shortcut, **options)
    cotangent = torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
    gradients = torch.autograd.grad(maps, list(leaves.values()), cotangent.to(maps.dtype))
    found = {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {"maps": maps.detach(), **found, **dict(norm.named_buffers())}


def assert_right(
    inputs: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None, relu: bool = True
) -> None:
    assert uses_kernel(normalise(inputs, copy.deepcopy(norm), shortcut, relu=relu))
    found = outcome(normalise, inputs, norm, shortcut, relu=relu)
    double = None if shortcut is None else shortcut.double()
    exact = copy.deepcopy(norm).double()
    right = outcome(normalise_plainly, inputs.double(), exact, double, relu=relu)
    rounded = outcome(normalise_plainly, inputs, norm, shortcut, relu=relu)
    assert list(found) == list(right)
    for name, value in right.items():
        assert found[name].shape == value.shape
        # Torch's own rounding, and that of a few hundred terms.
        bound = 2 * (rounded[name] - value).abs().max() + 2e-5 * value.abs().max().clamp_min(1.0)
        assert float((found[name] - value).abs().max()) <= float(bound), name


class Around(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs: Tensor) -> Tensor:
        return normalise(inputs, self.norm)


def uses_kernel(maps: Tensor) -> bool:
    return type(maps.grad_fn).__name__ == "_NormaliseBackward"


@compiled
@pytest.mark.parametrize("shape", [(16, 8, 32, 32), (16, 16, 16, 16), (16, 64, 4, 4)])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shortcut", [True, False])
def test_the_layers_of_narrow_resnets(shape: Shape, relu: bool, shortcut: bool) -> None:
    inputs, norm, other = make(shape)
    assert_right(inputs, norm, other if shortcut else None, relu)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    batch, channels, height, width = (draw(st.integers(1, most)) for most in (6, 9, 12, 12))
    assume(batch * height * width > 1)
    return batch, channels, height, width


@compiled
@settings(max_examples=100)
@given(shape=shapes(), relu=st.booleans(), shortcut=st.booleans(), seed=st.integers(0, 1000))
def test_any_shape(shape: Shape, relu: bool, shortcut: bool, seed: int) -> None:
    inputs, norm, other = make(shape, seed)
    assert_right(inputs, norm, other if shortcut else None, relu)


@compiled
def test_a_mean_far_from_zero_costs_no_digits() -> None:
    inputs, norm, shortcut = make((8, 3, 9, 9))
    assert_right(inputs + 1000, norm, shortcut)


@compiled
def test_maps_that_are_all_the_same() -> None:
    """Their variance is zero, and eps alone keeps the scale finite."""
    inputs, norm, shortcut = make((4, 3, 5, 5))
    assert_right(torch.full_like(inputs, 0.7), norm, shortcut)


@compiled
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_comes_through(value: float) -> None:
    inputs, norm, shortcut = make((4, 3, 5, 5))
    inputs[1, 2, 3, 3] = value
    shortcut[0, 0, 1, 1] = math.nan
    found, right = (
        f(inputs, copy.deepcopy(norm), shortcut) for f in (normalise, normalise_plainly)
    )
    assert torch.equal(found.isnan(), right.isnan())
    assert found[:, 2].isnan().all()
    assert torch.allclose(found[:, :2], right[:, :2], atol=1e-5, equal_nan=True)


@compiled
def test_the_same_batch_gives_the_same_bits() -> None:
    inputs, norm, shortcut = make((5, 4, 7, 9))
    one, other = (outcome(normalise, inputs, norm, shortcut) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs, norm, shortcut: (inputs, norm.eval(), shortcut),
        lambda inputs, norm, shortcut: (inputs.double(), norm.double(), shortcut.double()),
        lambda inputs, norm, shortcut: (inputs.mT, norm, shortcut.mT),
        lambda inputs, norm, shortcut: (inputs, norm, shortcut[:, :, :1]),  # broadcast
        lambda inputs, norm, shortcut: (inputs, nn.GroupNorm(2, 4), shortcut),
        lambda inputs, norm, shortcut: (inputs, nn.BatchNorm2d(4, affine=False), shortcut),
        lambda inputs, norm, shortcut: (inputs, nn.BatchNorm2d(4, momentum=None), shortcut),
        lambda inputs, norm, shortcut: (
            *(inputs, nn.BatchNorm2d(4, track_running_stats=False)),
            shortcut,
        ),
    ],
    ids=["eval", "float64", "strides", "shapes", "group", "plain", "mean", "statistics"],
)
def test_torch_computes_the_rest(change: Callable[..., tuple[Tensor, nn.Module, Tensor]]) -> None:
    inputs, norm, shortcut = change(*make((3, 4, 5, 5)))
    twin = copy.deepcopy(norm)
    found = normalise(inputs.requires_grad_(), norm, shortcut)
    assert not uses_kernel(found)
    assert torch.equal(found, normalise_plainly(inputs, twin, shortcut))
    for one, other in zip(norm.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_is_not_as_it_was_built() -> None:
    """Its tensors may lie anywhere, and its hooks want to be called."""
    inputs, norm, shortcut = make((3, 4, 5, 5))
    scattered = copy.deepcopy(norm)
    assert scattered.running_mean is not None
    scattered.running_mean = scattered.running_mean.repeat_interleave(2)[::2]
    stopped = copy.deepcopy(norm)
    stopped.track_running_stats = False
    calls = []
    hooked = copy.deepcopy(norm)
    hooked.register_forward_hook(lambda *_: calls.append("called"))
    for layer in (scattered, stopped, hooked):
        twin = copy.deepcopy(layer)
        found = normalise(inputs, layer, shortcut)
        assert torch.equal(found, normalise_plainly(inputs, twin, shortcut))
        assert all(map(torch.equal, layer.buffers(), twin.buffers()))
    assert calls == ["called", "called"]


@compiled
def test_without_relu_the_output_may_be_changed() -> None:
    inputs, norm, _ = make((3, 4, 5, 5))
    normalise(inputs.requires_grad_(), norm, relu=False).mul_(2).sum().backward()


def test_torch_explains_what_is_wrong() -> None:
    inputs, norm, _ = make((3, 4, 5, 5))
    with pytest.raises(RuntimeError, match="running_mean"):
        normalise(inputs[:, :2].contiguous(), norm)
    with pytest.raises(RuntimeError, match="weight should contain 4 elements"):
        torch.func.functional_call(Around(norm), {"norm.weight": torch.ones(1)}, inputs)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        normalise(inputs[:1, :, :1, :1].contiguous(), norm)


@compiled
def test_a_second_derivative_is_refused() -> None:
    inputs, norm, shortcut = make((3, 4, 5, 5))
    loss = normalise(inputs.requires_grad_(), norm, shortcut).square().sum()
    with pytest.raises(RuntimeError, match="normalise has no second derivative"):
        torch.autograd.grad(loss, inputs, create_graph=True)
