"""Convolutions of few channels, which keep the size of the image.

Narrow ResNets are made of them. Below 16 channels torch's convolutions are slow on processors with
AVX-512: there the compiled kernel (`narrow_conv.c`) takes their place, up to float32 rounding.
Elsewhere torch computes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltafl.kernels import native

NARROW = 16
"""With as many channels on both sides, torch is as fast."""


class NarrowConv2d(nn.Conv2d):
    """An nn.Conv2d that is computed by `narrow_conv`; its settings are such that it can be."""

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether `narrow_conv` computes what a layer does, and faster."""
        return (
            type(layer) is nn.Conv2d
            and min(layer.in_channels, layer.out_channels) < NARROW
            and layer.kernel_size in ((1, 1), (3, 3))
            and layer.padding == (layer.kernel_size[0] // 2,) * 2
            and layer.padding_mode == "zeros"
            and layer.stride == layer.dilation == (1, 1)
            and layer.groups == 1
            and layer.bias is None
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Convolve a batch of images."""
        return narrow_conv(inputs, self.weight)


def narrow_conv(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return conv2d(inputs, weight, padding=K // 2).

    Args:
        inputs: Images, [N, I, H, W].
        weight: Square filters of an odd size, [O, I, K, K].
    """
    if not (native.readable(inputs, weight) and _fits(inputs, weight) and native.narrow_pays()):
        return F.conv2d(inputs, weight, padding=weight.shape[-1] // 2)
    if torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
        maps: Tensor = _NarrowConv.apply(inputs, weight)  # type: ignore[no-untyped-call]
        return maps
    return native.library().narrow_forward(inputs.contiguous(), weight.contiguous())


def _fits(inputs: Tensor, weight: Tensor) -> bool:
    """Whether the shapes are right; what is wrong with them is for torch to explain."""
    return (
        inputs.dim() == weight.dim() == 4
        and inputs.numel() > 0
        and weight.numel() > 0
        and inputs.shape[1] == weight.shape[1]
        and weight.shape[2] == weight.shape[3]
        and weight.shape[2] % 2 == 1
    )


class _NarrowConv(torch.autograd.Function):
    """The compiled kernel with its gradients."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        inputs, weight = inputs.contiguous(), weight.contiguous()
        ctx.save_for_backward(inputs, weight)
        return native.library().narrow_forward(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        native.refuse_second_derivative("narrow_conv")
        inputs, weight = ctx.saved_tensors
        to_inputs, to_weight = ctx.needs_input_grad
        return native.library().narrow_backward(
            inputs, weight, gradient.contiguous(), to_inputs=to_inputs, to_weight=to_weight
        )
