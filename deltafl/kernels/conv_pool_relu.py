"""Convolution, channel dropout, 2x2 max-pool and relu as one operation.

The two convolutional layers of the paper's CNN are this operation, and one after the other its
parts spend their time on moving memory. The compiled kernel (`conv_pool_relu.c`) computes it in
one pass, skips what dropout drops, and sends gradients only through the positions that won their
pooling window. It equals `reference` up to float32 rounding, with one difference: what is skipped
cannot carry NaN, so a dropped channel is zero even where the plain product 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl.kernels import native


def conv_pool_relu(
    inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return relu(max_pool2d(scale[:, :, None, None] * conv2d(inputs, weight, bias), 2)).

    Fast for float32 on the CPU where the compiled kernels are available, plain torch otherwise.

    Args:
        inputs: Images, [N, I, H, W].
        weight: Square filters, [O, I, K, K].
        bias: [O].
        scale: A factor for each sample and channel, [N, O], as `dropout2d_scale` draws it; zero
            means dropped. No gradient flows to it. None is all ones.
    """
    if not _fast(inputs, weight, bias, scale):
        return reference(inputs, weight, bias, scale)
    if torch.is_grad_enabled() and (
        inputs.requires_grad or weight.requires_grad or bias.requires_grad
    ):
        maps: Tensor = _ConvPoolRelu.apply(inputs, weight, bias, scale)  # type: ignore[no-untyped-call]
        return maps
    contiguous = None if scale is None else scale.contiguous()
    return native.library().pool_forward(
        inputs.contiguous(), weight.contiguous(), bias.contiguous(), contiguous, record=False
    )[0]


def reference(inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return what `conv_pool_relu` does, one plain operation after the other."""
    maps = F.conv2d(inputs, weight, bias)
    if scale is not None:
        maps = maps * scale.detach()[:, :, None, None]
    return F.max_pool2d(maps, 2).relu()


def dropout2d_scale(maps: int, channels: int, p: float, like: Tensor) -> Tensor | None:
    """Draw the factors by which nn.Dropout2d(p) multiplies the channels of `maps` in training.

    They are the same factors, from the same random numbers: a model may change from the module to
    `conv_pool_relu` and see the same masks. None means that nothing is dropped.

    Args:
        maps: The number of samples.
        channels: The number of channels of each.
        p: The probability of dropping a channel.
        like: A tensor with the dtype and the device wanted.
    """
    if p == 0:
        return None
    if p == 1:
        return like.new_zeros(maps, channels)
    return like.new_empty(maps, channels).bernoulli_(1 - p).div_(1 - p)


def _fast(inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None) -> bool:
    """Whether the compiled kernel computes this; errors in the shapes are for torch to explain."""
    given = (inputs, weight, bias) if scale is None else (inputs, weight, bias, scale)
    return native.readable(*given) and _fits(inputs, weight, bias, scale) and native.available()


def _fits(inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None) -> bool:
    if inputs.dim() != 4 or weight.dim() != 4 or inputs.numel() == 0 or weight.numel() == 0:
        return False
    batch, channels, height, width = inputs.shape
    outputs, expected, kernel, across = weight.shape
    return (
        channels == expected
        and kernel == across
        and min(height, width) > kernel
        and height * width * (channels + 8) < 2**31
        and bias.shape == (outputs,)
        and (scale is None or scale.shape == (batch, outputs))
    )


class _ConvPoolRelu(torch.autograd.Function):
    """The compiled kernel with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None
    ) -> Tensor:
        inputs, weight = inputs.contiguous(), weight.contiguous()
        scale = None if scale is None else scale.contiguous()
        maps, winners = native.library().pool_forward(
            inputs, weight, bias.contiguous(), scale, record=True
        )
        ctx.save_for_backward(inputs, weight, scale, winners)
        return maps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        native.refuse_second_derivative("conv_pool_relu")
        inputs, weight, scale, winners = ctx.saved_tensors
        to_inputs, to_weight, to_bias, _ = ctx.needs_input_grad
        of_inputs, of_weight, of_bias = native.library().pool_backward(
            inputs,
            weight,
            scale,
            winners,
            gradient.contiguous(),
            to_inputs=to_inputs,
            to_filters=to_weight or to_bias,
        )
        return of_inputs, of_weight if to_weight else None, of_bias if to_bias else None, None
