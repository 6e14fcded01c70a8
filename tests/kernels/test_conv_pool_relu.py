"""The fused operation against plain torch, which computes it in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from deltafl import kernels
from deltafl.kernels import conv_pool_relu, dropout2d_scale, native, reference

compiled = pytest.mark.skipif(not kernels.available(), reason=f"no kernels: {kernels.reason()}")

# Sums of up to a few hundred terms in float32: 60 roundings' worth, relative to the largest value.
TOLERANCE = 60 * torch.finfo(torch.float32).eps

PAPER = [(64, 1, 10, 28, 28, 5), (64, 10, 20, 12, 12, 5)]
"""Batch, input and output channels, height, width and kernel of the paper's two layers."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, int, int]:
    kernel = draw(st.integers(1, 6))
    batch, inputs, outputs = (draw(st.integers(1, most)) for most in (5, 12, 12))
    # One more than the kernel: with less, there is nothing to pool.
    height, width = (draw(st.integers(kernel + 1, 30)) for _ in range(2))
    return batch, inputs, outputs, height, width, kernel


def make(
    shape: tuple[int, int, int, int, int, int], *, dropped: bool = True, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return random inputs, weight, bias and scale."""
    batch, inputs, outputs, height, width, kernel = shape
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, inputs, height, width, generator=generator)
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    keep = torch.rand(batch, outputs, generator=generator) < 0.5
    return images, weight / weight[0].numel() ** 0.5, bias, 2.0 * keep if dropped else None


def gradients(
    function: Callable[..., Tensor], given: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> list[Tensor]:
    """Return the outputs and the gradients of inputs, weight and bias."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given[:3]]
    maps = function(*leaves, given[3])
    cotangent = torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
    return [maps.detach(), *torch.autograd.grad(maps, leaves, cotangent.to(maps.dtype))]


def exact(given: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> list[Tensor]:
    inputs, weight, bias, scale = given
    factors = None if scale is None else scale.double()
    return gradients(reference, (inputs.double(), weight.double(), bias.double(), factors))


def assert_close(found: list[Tensor], right: list[Tensor]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        assert ours.shape == theirs.shape
        size = max(1.0, float(theirs.abs().max()))
        assert float((ours - theirs).abs().max()) <= TOLERANCE * size


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def uses_kernel(result: Tensor) -> bool:
    return type(result.grad_fn).__name__ == "_ConvPoolReluBackward"


@compiled
@pytest.mark.parametrize("shape", PAPER)
@pytest.mark.parametrize("dropped", [False, True])
def test_the_papers_layers(shape: tuple[int, int, int, int, int, int], dropped: bool) -> None:
    given = make(shape, dropped=dropped)
    assert_close(gradients(conv_pool_relu, given), exact(given))


@compiled
@settings(max_examples=150)
@given(shape=shapes(), dropped=st.booleans(), seed=st.integers(0, 1000))
def test_any_shape(shape: tuple[int, int, int, int, int, int], dropped: bool, seed: int) -> None:
    given = make(shape, dropped=dropped, seed=seed)
    assert uses_kernel(conv_pool_relu(given[0].requires_grad_(), *given[1:]))
    assert_close(gradients(conv_pool_relu, given), exact(given))


@compiled
@pytest.mark.parametrize("shape", [(2, 3, 7, 23, 27, 9), (2, 20, 3, 40, 35, 17)])
def test_large_filters(shape: tuple[int, int, int, int, int, int]) -> None:
    given = make(shape)
    assert_close(gradients(conv_pool_relu, given), exact(given))


@compiled
def test_a_negative_scale_turns_the_maximum_around() -> None:
    inputs, weight, bias, _ = make((2, 3, 5, 12, 11, 3))
    given = inputs, weight, bias, torch.linspace(-1.5, 2.0, 10).view(2, 5)
    assert_close(gradients(conv_pool_relu, given), exact(given))


@compiled
@pytest.mark.parametrize("pattern", range(16))
def test_the_first_of_equal_maxima_wins(pattern: int) -> None:
    """Every window has the same set of maxima, one of the 15 possible, or no positive value."""
    window = torch.tensor([[pattern & 1, pattern >> 1 & 1], [pattern >> 2 & 1, pattern >> 3 & 1]])
    inputs = window.float().repeat(1, 1, 5, 5).requires_grad_()
    weight, bias = torch.ones(1, 1, 1, 1), torch.zeros(1)
    found, right = (
        torch.autograd.grad(function(inputs, weight, bias).sum(), inputs)[0]
        for function in (conv_pool_relu, reference)
    )
    assert torch.equal(found, right)
    assert found.sum() == (25 if pattern else 0)


@compiled
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["inputs", "weight", "bias"])
def test_what_is_not_finite_comes_through(value: float, place: str) -> None:
    inputs, weight, bias, scale = make((2, 2, 7, 13, 12, 3))
    spoilt = {"inputs": inputs[1, 0, 5], "weight": weight[2, 1, 1], "bias": bias[3:]}[place]
    spoilt[0] = value
    found = conv_pool_relu(inputs, weight, bias, scale)
    plain = reference(inputs, weight, bias, scale)
    assert scale is not None
    alive = (scale != 0)[:, :, None, None].expand_as(found)
    assert torch.equal(found[alive].isnan(), plain[alive].isnan())
    assert torch.equal(found[alive].isposinf(), plain[alive].isposinf())
    finite = alive & plain.isfinite()
    assert torch.allclose(found[finite], plain[finite], atol=1e-5)
    # A dropped channel is not computed, where plain torch has 0 * NaN = NaN.
    assert bool((found[~alive] == 0).all())


@compiled
@pytest.mark.parametrize("where", [[0], [3], [0, 1], [1, 2], [2, 3], [0, 1, 2, 3]])
def test_the_last_nan_of_a_window_gets_its_gradient(where: list[int]) -> None:
    inputs = torch.tensor([1.0, 4.0, 3.0, 2.0])
    inputs[where] = math.nan
    inputs = inputs.view(1, 1, 2, 2).requires_grad_()
    weight, bias = torch.ones(1, 1, 1, 1), torch.zeros(1)
    found = conv_pool_relu(inputs, weight, bias)
    plain = reference(inputs, weight, bias)
    assert found.isnan().all()
    cotangent = torch.full_like(found, 5.0)
    (ours,) = torch.autograd.grad(found, inputs, cotangent)
    (theirs,) = torch.autograd.grad(plain, inputs, cotangent)
    assert torch.equal(ours, theirs)


@compiled
def test_nan_in_the_gradient_stays_in_its_sample() -> None:
    given = make((3, 4, 5, 12, 12, 3), dropped=False)
    inputs = given[0].requires_grad_()
    maps = conv_pool_relu(inputs, *given[1:])
    cotangent = torch.ones_like(maps)
    cotangent[1] = math.nan
    (found,) = torch.autograd.grad(maps, inputs, cotangent)
    assert found[1].isnan().any()
    assert found[[0, 2]].isfinite().all()


@compiled
def test_all_channels_dropped() -> None:
    inputs, weight, bias, _ = make((3, 2, 4, 9, 9, 2))
    found = gradients(conv_pool_relu, (inputs, weight, bias, torch.zeros(3, 4)))
    assert all(not tensor.any() for tensor in found)


@compiled
@pytest.mark.parametrize("wanted", range(1, 8))
def test_only_the_gradients_asked_for(wanted: int) -> None:
    given = make((3, 2, 4, 9, 10, 4))
    right = exact(given)[1:]
    leaves = [
        tensor.clone().requires_grad_(bool(wanted >> i & 1)) for i, tensor in enumerate(given[:3])
    ]
    maps = conv_pool_relu(*leaves, given[3])
    maps.backward(torch.randn(maps.shape, generator=torch.Generator().manual_seed(7)))
    for leaf, expected in zip(leaves, right, strict=True):
        if leaf.requires_grad:
            assert leaf.grad is not None
            assert_close([leaf.grad], [expected])
        else:
            assert leaf.grad is None


@compiled
@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format])
def test_tensors_that_are_not_contiguous(format: torch.memory_format) -> None:
    inputs, weight, bias, scale = make((4, 3, 6, 14, 11, 3))
    assert scale is not None
    right = exact((inputs, weight, bias, scale))
    scattered = (
        inputs.to(memory_format=format).transpose(2, 3).contiguous().transpose(2, 3),
        weight.to(memory_format=torch.channels_last),
        bias.repeat_interleave(2)[::2],
        scale.t().contiguous().t(),
    )
    assert not any(tensor.is_contiguous() for tensor in scattered)
    assert_close(gradients(conv_pool_relu, scattered), right)
    # A cotangent that is expanded, as that of a sum.
    leaf = inputs.requires_grad_()
    (found,) = torch.autograd.grad(conv_pool_relu(leaf, weight, bias, scale).sum(), leaf)
    (plain,) = torch.autograd.grad(reference(leaf, weight, bias, scale).sum(), leaf)
    assert torch.allclose(found, plain, atol=1e-5)


@compiled
@pytest.mark.parametrize("shape", PAPER)
def test_the_same_bits_twice(shape: tuple[int, int, int, int, int, int]) -> None:
    given = make(shape)
    for one, other in zip(*(gradients(conv_pool_relu, given) for _ in range(2)), strict=True):
        assert same_bits(one, other)


@compiled
@settings(max_examples=30)
@given(shape=shapes())
def test_a_sample_does_not_depend_on_its_batch(
    shape: tuple[int, int, int, int, int, int],
) -> None:
    inputs, weight, bias, scale = make(shape)
    assert scale is not None
    maps, of_inputs, *_ = gradients(
        lambda *given: 3 * conv_pool_relu(*given), (inputs, weight, bias, scale)
    )
    cotangent = 3 * torch.randn(maps.shape, generator=torch.Generator().manual_seed(7))
    for n in range(len(inputs)):
        alone = inputs[n : n + 1].clone().requires_grad_()
        found = conv_pool_relu(alone, weight, bias, scale[n : n + 1])
        assert same_bits(3 * found, maps[n : n + 1])
        (gradient,) = torch.autograd.grad(found, alone, cotangent[n : n + 1])
        assert same_bits(gradient, of_inputs[n : n + 1])


@compiled
def test_a_channel_does_not_depend_on_which_others_are_dropped() -> None:
    inputs, weight, bias, _ = make((1, 3, 11, 12, 13, 5))
    everything = conv_pool_relu(inputs, weight, bias)
    for count in range(1, 11):
        scale = torch.zeros(1, 11)
        scale[0, :count] = 1
        found = conv_pool_relu(inputs, weight, bias, scale)
        assert same_bits(found[:, :count].contiguous(), everything[:, :count].contiguous())


@compiled
def test_no_grad_and_inference_mode_compute_the_same() -> None:
    inputs, weight, bias, scale = make((4, 3, 6, 14, 11, 3))
    weight.requires_grad_()
    right = conv_pool_relu(inputs, weight, bias, scale)
    with torch.no_grad():
        found = conv_pool_relu(inputs, weight, bias, scale)
    assert not found.requires_grad
    assert same_bits(found, right.detach())
    with torch.inference_mode():
        assert same_bits(conv_pool_relu(inputs, weight, bias, scale), right.detach())


@compiled
def test_backward_twice_and_no_second_derivative() -> None:
    inputs, weight, bias, scale = make((4, 3, 6, 14, 11, 3))
    inputs.requires_grad_()
    maps = conv_pool_relu(inputs, weight, bias, scale)
    one, other = (torch.autograd.grad(maps.sum(), inputs, retain_graph=True)[0] for _ in range(2))
    assert same_bits(one, other)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(maps.square().sum(), inputs, create_graph=True)


@compiled
def test_weights_changed_before_backward_are_noticed() -> None:
    inputs, weight, bias, scale = make((2, 3, 6, 14, 11, 3))
    weight.requires_grad_()
    maps = conv_pool_relu(inputs, weight, bias, scale)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        maps.sum().backward()


def test_no_gradient_flows_to_the_scale() -> None:
    inputs, weight, bias, scale = make((2, 3, 6, 14, 11, 3))
    assert scale is not None
    scale.requires_grad_()
    for function in (conv_pool_relu, reference):
        leaf = inputs.clone().requires_grad_()
        function(leaf, weight, bias, scale).sum().backward()
        assert leaf.grad is not None
        assert scale.grad is None
        assert not function(inputs, weight, bias, scale).requires_grad


def test_other_tensors_take_plain_torch() -> None:
    inputs, weight, bias, scale = make((2, 3, 6, 14, 11, 3))
    assert scale is not None
    tall = torch.randn(6, 3, 3, 2)
    plain = {
        "float64": (inputs.double(), weight.double(), bias.double(), scale.double()),
        "meta": tuple(tensor.to("meta") for tensor in (inputs, weight, bias, scale)),
        "oblong": (inputs, tall, bias, scale),
        "empty": (inputs[:0], weight, bias, scale[:0]),
        "unbatched channels": (inputs, weight, bias, scale[:, :1]),
    }
    for tensors in plain.values():
        found, right = conv_pool_relu(*tensors), reference(*tensors)
        assert found.dtype == right.dtype
        assert found.device == right.device
        assert found.shape == right.shape
        assert found.is_meta or torch.equal(found, right)


def test_inside_transforms_and_autocast() -> None:
    inputs, weight, bias, _ = make((2, 3, 6, 14, 11, 3))

    def loss(weight: Tensor) -> Tensor:
        return conv_pool_relu(inputs, weight, bias).sum()

    found = torch.func.grad(loss)(weight)
    leaf = weight.clone().requires_grad_()
    (right,) = torch.autograd.grad(reference(inputs, leaf, bias).sum(), leaf)
    assert torch.allclose(found, right, atol=1e-4)
    stacked = torch.func.vmap(lambda w: conv_pool_relu(inputs, w, bias))(weight[None])
    assert torch.allclose(stacked[0], reference(inputs, weight, bias), atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv_pool_relu(inputs, weight, bias).dtype == torch.bfloat16


def test_torch_explains_wrong_shapes() -> None:
    inputs, weight, bias, scale = make((2, 3, 6, 14, 11, 3))
    with pytest.raises(RuntimeError, match="channels"):
        conv_pool_relu(inputs[:, :2], weight, bias, scale)
    with pytest.raises(RuntimeError):
        conv_pool_relu(inputs[:, :, :2], weight, bias, scale)
    with pytest.raises(RuntimeError):
        conv_pool_relu(inputs[:, :, :3], weight, bias, scale)  # one row: nothing to pool


def test_the_reference_has_the_gradients_of_its_value() -> None:
    inputs, weight, bias, scale = make((2, 2, 3, 7, 6, 3))
    assert scale is not None
    leaves = [tensor.double().requires_grad_() for tensor in (inputs, weight, bias)]
    assert torch.autograd.gradcheck(
        lambda *given: reference(*given, scale.double()), leaves, fast_mode=True
    )


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(64, 20, 8, 8), (1, 1, 3, 3), (7, 13, 1, 5), (40, 100, 2, 2)])
def test_the_scale_is_that_of_dropout2d(shape: tuple[int, int, int, int], p: float) -> None:
    """The same factors, and the random numbers after it are the same too."""
    maps = torch.ones(shape)
    module = nn.Dropout2d(p).train()
    for seed in range(5):
        torch.manual_seed(seed)
        dropped = module(maps)
        after = torch.rand(3)
        torch.manual_seed(seed)
        scale = dropout2d_scale(shape[0], shape[1], p, maps)
        assert torch.equal(torch.rand(3), after)
        assert torch.equal(dropped, maps if scale is None else scale[:, :, None, None] * maps)


@compiled
def test_the_papers_cnn_with_the_same_masks() -> None:
    """The two convolutional layers with dropout, plain and fused, from the same seed."""
    torch.manual_seed(3)
    first, second = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
    images = torch.randn(64, 1, 28, 28)

    torch.manual_seed(4)
    maps = F.max_pool2d(first(images), 2).relu()
    maps = F.max_pool2d(nn.Dropout2d(0.5)(second(maps)), 2).relu()
    plain = [maps, *torch.autograd.grad(maps.square().mean(), [first.weight, second.weight])]

    torch.manual_seed(4)
    maps = conv_pool_relu(images, first.weight, first.bias)  # type: ignore[arg-type]
    scale = dropout2d_scale(64, 20, 0.5, maps)
    maps = conv_pool_relu(maps, second.weight, second.bias, scale)  # type: ignore[arg-type]
    fused = [maps, *torch.autograd.grad(maps.square().mean(), [first.weight, second.weight])]

    for ours, theirs in zip(fused, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@compiled
def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.library()
    inputs, weight, bias, scale = make((2, 3, 6, 14, 11, 3))
    inputs.requires_grad_()
    maps = conv_pool_relu(inputs, weight, bias, scale)
    monkeypatch.setattr(library, "_pool_forward", lambda *_: 1)
    monkeypatch.setattr(library, "_pool_backward", lambda *_: 1)
    with pytest.raises(MemoryError):
        conv_pool_relu(inputs, weight, bias, scale)
    with pytest.raises(MemoryError):
        maps.sum().backward()
