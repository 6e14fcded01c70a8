"""Batch normalisation, the sum with a shortcut and relu as one operation.

It is what stands between the convolutions of a ResNet. The compiled kernel (`batch_norm_relu.c`)
equals `normalise_plainly` up to float32 rounding.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from deltafl.kernels import native


def normalise(
    inputs: Tensor, norm: nn.Module, shortcut: Tensor | None = None, *, relu: bool = True
) -> Tensor:
    """Return relu(norm(inputs) + shortcut).

    Fast for an nn.BatchNorm2d that trains in float32 on the CPU where the compiled kernels are
    available, plain torch otherwise.

    Args:
        inputs: Maps, [N, C, H, W].
        norm: A layer that normalises; its running statistics are moved as it would.
        shortcut: Maps to add, as many; None is zeros.
        relu: Whether negative ones become zero.
    """
    if not _fast(inputs, norm, shortcut):
        return normalise_plainly(inputs, norm, shortcut, relu=relu)
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    maps: Tensor = _Normalise.apply(inputs, norm.weight, norm.bias, shortcut, norm, relu)  # type: ignore[no-untyped-call]
    return maps


def normalise_plainly(
    inputs: Tensor, norm: nn.Module, shortcut: Tensor | None = None, *, relu: bool = True
) -> Tensor:
    """Return what `normalise` does, one plain operation after the other."""
    maps: Tensor = norm(inputs)
    if shortcut is not None:
        maps = maps + shortcut
    return maps.relu() if relu else maps


def _fast(inputs: Tensor, norm: nn.Module, shortcut: Tensor | None) -> bool:
    """Whether the compiled kernel computes this; what is wrong is for torch to explain."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        # Hooks, such as those that prune weights, are called with the layer.
        and not (norm._forward_pre_hooks or norm._forward_hooks or norm._backward_hooks)
        and all(map(_lies_plainly, _of_channels(norm), repeat(norm.num_features)))
        and native.readable(inputs)
        and (shortcut is None or native.readable(shortcut))
        and inputs.dim() == 4
        and inputs.shape[1] == norm.num_features
        and inputs.numel() > norm.num_features
        and inputs.is_contiguous()
        and (shortcut is None or (shortcut.shape == inputs.shape and shortcut.is_contiguous()))
        and native.available()
    )


def _of_channels(norm: nn.BatchNorm2d) -> tuple[Tensor | None, ...]:
    return norm.weight, norm.bias, norm.running_mean, norm.running_var


def _lies_plainly(tensor: Tensor | None, count: int) -> bool:
    return (
        tensor is not None
        and tensor.shape == (count,)
        and tensor.is_contiguous()
        and native.readable(tensor)
    )


class _Normalise(torch.autograd.Function):
    """The compiled kernel with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        norm: nn.BatchNorm2d,
        relu: bool,
    ) -> Tensor:
        found = native.library().norm_forward(inputs, norm, shortcut, relu=relu)
        ctx.save_for_backward(inputs, weight, found.mean, found.scale, found.maps if relu else None)
        return found.maps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        native.refuse_second_derivative("normalise")
        inputs, weight, mean, scale, maps = ctx.saved_tensors
        gradients = native.library().norm_backward(
            *(inputs, weight, mean, scale, maps, gradient.contiguous()),
            to_shortcut=ctx.needs_input_grad[3],
        )
        return *gradients, None, None
