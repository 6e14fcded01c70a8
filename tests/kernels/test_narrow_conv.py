"""Convolutions of few channels against plain torch, which computes them in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from deltafl import kernels
from deltafl.kernels import NarrowConv2d, narrow_conv, native
from deltafl.models.resnet import ResNet18, ResNet50

compiled = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.reason()}")

Shape = tuple[int, int, int, int, int, int]
"""Batch, input and output channels, height, width and kernel."""
RESNETS: list[Shape] = [
    (8, 3, 8, 32, 32, 3),
    (8, 8, 8, 32, 32, 3),
    (8, 4, 16, 32, 32, 1),
    (8, 32, 8, 16, 16, 1),
]


@pytest.fixture(autouse=True, scope="module")
def everywhere() -> Iterator[None]:
    """Take the kernel also on a processor for which it was not written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "narrow_pays", kernels.available)
        yield


def make(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random inputs and weight."""
    batch, inputs, outputs, height, width, kernel = shape
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, inputs, height, width, generator=generator)
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=generator)
    return images, weight / weight[0].numel() ** 0.5


def plain(inputs: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(inputs, weight, padding=weight.shape[-1] // 2)


def gradients(
    function: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, weight: Tensor
) -> list[Tensor]:
    """Return the outputs and the gradients of inputs and weight."""
    leaves = inputs.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    maps = function(*leaves)
    cotangent = torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
    return [maps.detach(), *torch.autograd.grad(maps, leaves, cotangent.to(maps.dtype))]


def assert_right(inputs: Tensor, weight: Tensor) -> None:
    found = gradients(narrow_conv, inputs, weight)
    right = gradients(plain, inputs.double(), weight.double())
    for ours, theirs in zip(found, right, strict=True):
        assert ours.shape == theirs.shape
        error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0)
        # Sums of up to some thousand terms in float32.
        assert float(error) <= 60 * torch.finfo(torch.float32).eps


def uses_kernel(maps: Tensor) -> bool:
    return type(maps.grad_fn).__name__ == "_NarrowConvBackward"


@compiled
@pytest.mark.parametrize("shape", RESNETS)
def test_the_layers_of_narrow_resnets(shape: Shape) -> None:
    assert_right(*make(shape))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    batch, inputs, outputs = (draw(st.integers(1, most)) for most in (4, 19, 19))
    height, width = (draw(st.integers(1, 40)) for _ in range(2))
    return batch, inputs, outputs, height, width, draw(st.sampled_from([1, 3, 5]))


@compiled
@settings(max_examples=150)
@given(shape=shapes(), seed=st.integers(0, 1000))
def test_any_shape(shape: Shape, seed: int) -> None:
    inputs, weight = make(shape, seed)
    assert uses_kernel(narrow_conv(inputs, weight.requires_grad_()))
    assert_right(inputs, weight)


@compiled
def test_a_sample_has_the_same_bits_in_every_batch() -> None:
    inputs, weight = make((5, 3, 11, 13, 17, 3))
    maps, of_inputs, _ = gradients(narrow_conv, inputs, weight)
    cotangent = torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
    for n in range(5):
        leaf = inputs[n : n + 1].clone().requires_grad_()
        alone = narrow_conv(leaf, weight)
        (of_leaf,) = torch.autograd.grad(alone, leaf, cotangent[n : n + 1])
        assert torch.equal(alone.detach(), maps[n : n + 1])
        assert torch.equal(of_leaf, of_inputs[n : n + 1])


@compiled
def test_without_a_gradient_the_bits_are_the_same() -> None:
    inputs, weight = make((3, 4, 6, 9, 9, 3))
    recorded = narrow_conv(inputs, weight.requires_grad_())
    with torch.no_grad():
        assert torch.equal(narrow_conv(inputs, weight), recorded)
    with torch.inference_mode():
        assert torch.equal(narrow_conv(inputs, weight), recorded)


@compiled
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_comes_through(value: float) -> None:
    inputs, weight = make((2, 2, 7, 13, 12, 3))
    inputs[1, 0, 5, 0] = value
    found, right = narrow_conv(inputs, weight), plain(inputs, weight)
    assert torch.equal(found.isfinite(), right.isfinite())
    assert torch.allclose(found[right.isfinite()], right[right.isfinite()], atol=1e-5)


@compiled
def test_only_what_is_asked_for() -> None:
    inputs, weight = make((2, 3, 5, 8, 8, 3))
    gradient = torch.ones(2, 5, 8, 8)
    both = native.library().narrow_backward(
        inputs, weight, gradient, to_inputs=True, to_weight=True
    )
    for to_inputs, to_weight in ((True, False), (False, True)):
        some = native.library().narrow_backward(
            inputs, weight, gradient, to_inputs=to_inputs, to_weight=to_weight
        )
        for found, right, asked in zip(some, both, (to_inputs, to_weight), strict=True):
            assert right is not None
            assert (found is not None and torch.equal(found, right)) if asked else found is None


@compiled
def test_tensors_that_are_not_contiguous() -> None:
    inputs, weight = make((4, 6, 5, 10, 12, 3))
    assert_right(inputs.transpose(2, 3), weight.transpose(2, 3))
    assert_right(inputs.to(memory_format=torch.channels_last), weight)


@pytest.mark.parametrize(
    "changed",
    [
        lambda inputs, weight: (inputs.double(), weight.double()),
        lambda inputs, weight: (inputs, weight[:, :, :2, :2].contiguous()),  # of an even size
        lambda inputs, weight: (inputs[:0], weight),
    ],
    ids=["float64", "even", "empty"],
)
def test_torch_computes_the_rest(changed: Callable[..., tuple[Tensor, Tensor]]) -> None:
    inputs, weight = changed(*make((2, 3, 5, 8, 8, 3)))
    weight.requires_grad_()
    assert not uses_kernel(narrow_conv(inputs, weight))
    assert torch.equal(narrow_conv(inputs, weight), plain(inputs, weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@torch.no_grad()
def test_what_a_kernel_cannot_see_is_left_to_torch() -> None:
    inputs, weight = make((2, 3, 5, 8, 8, 3))
    right = plain(-inputs, weight)
    assert torch.equal(narrow_conv(torch._neg_view(inputs), weight), right)
    with forward_ad.dual_level():
        dual = narrow_conv(forward_ad.make_dual(inputs, -inputs), weight)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, right)
    traced = torch.jit.trace(lambda images: narrow_conv(images, weight), inputs)
    assert torch.allclose(traced(-inputs), right, atol=1e-5)


def test_torch_explains_what_is_wrong() -> None:
    inputs, weight = make((2, 3, 5, 8, 8, 3))
    with pytest.raises(RuntimeError, match="expected input"):
        narrow_conv(inputs[:, :2], weight)


@compiled
def test_a_second_derivative_is_refused() -> None:
    inputs, weight = make((2, 3, 5, 8, 8, 3))
    loss = narrow_conv(inputs, weight.requires_grad_()).square().sum()
    with pytest.raises(RuntimeError, match="narrow_conv has no second derivative"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.Conv2d(8, 8, 3, padding=1, bias=False), True),
        (nn.Conv2d(64, 8, 1, bias=False), True),
        (nn.Conv2d(16, 16, 3, padding=1, bias=False), False),
        (nn.Conv2d(8, 8, 3, padding=1), False),
        (nn.Conv2d(8, 8, 3, bias=False), False),
        (nn.Conv2d(8, 8, 3, padding=1, stride=2, bias=False), False),
        (nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), False),
        (nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False), False),
        (nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", bias=False), False),
        (nn.Conv2d(8, 8, (3, 1), padding=(1, 0), bias=False), False),
        (nn.Conv2d(8, 8, 3, padding="same", bias=False), False),
        (nn.Linear(8, 8), False),
    ],
    ids=str,
)
def test_which_layers_it_takes_the_place_of(layer: nn.Module, fits: bool) -> None:
    assert NarrowConv2d.fits(layer) is fits


@compiled
@pytest.mark.parametrize(("kind", "width"), [(ResNet18, 8), (ResNet50, 4), (ResNet18, 3)])
def test_a_narrow_resnet_computes_the_same(kind: Any, width: int) -> None:
    def trained(fast: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = kind((3, 16, 16), 10, width)
        if fast:
            model.speed_up()
        loss = F.cross_entropy(model(torch.randn(12, 3, 16, 16)), torch.arange(12) % 10)
        loss.backward()
        found = {f"{name}, its gradient": p.grad for name, p in model.named_parameters()}
        return {"loss": loss.detach(), **found, **model.state_dict()}

    one, other = trained(fast=False), trained(fast=True)
    assert list(one) == list(other)
    for name, value in one.items():
        error = (other[name] - value).double().norm()
        assert error <= 1e-4 * value.double().norm() + 1e-6, name  # through 50 layers of rounding
