"""The functions of the compiled library, as functions of tensors.

All tensors are contiguous float32 on the CPU, but for the positions that won; `native.readable`
says which ones may be given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Normalised(NamedTuple):
    """What batch normalisation gives, and what its gradient needs to know."""

    maps: Tensor
    mean: Tensor
    scale: Tensor


class Library:
    """A loaded shared library."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        pointer = ctypes.c_void_p
        self._pool_forward = loaded.deltafl_conv_pool_relu_forward
        self._pool_forward.argtypes = [pointer] * 7
        self._pool_backward = loaded.deltafl_conv_pool_relu_backward
        self._pool_backward.argtypes = [pointer] * 9
        self._narrow_forward = loaded.deltafl_narrow_conv_forward
        self._narrow_forward.argtypes = [pointer] * 4
        self._narrow_backward = loaded.deltafl_narrow_conv_backward
        self._narrow_backward.argtypes = [pointer] * 6
        self._norm_forward = loaded.deltafl_batch_norm_relu_forward
        numbers = ctypes.c_int, ctypes.c_double, ctypes.c_double
        self._norm_forward.argtypes = [*[pointer] * 5, *numbers, *[pointer] * 5]
        self._norm_backward = loaded.deltafl_batch_norm_relu_backward
        self._norm_backward.argtypes = [pointer] * 11
        self.narrow_pays = bool(loaded.deltafl_narrow_conv_pays())
        """Whether narrow convolutions are faster here than torch's."""

    def pool_forward(
        self, inputs: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None, *, record: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the pooled maps and, to `record` for backward, which positions won."""
        batch, _, height, width = inputs.shape
        outputs, _, kernel, _ = weight.shape
        pooled = batch, outputs, (height - kernel + 1) // 2, (width - kernel + 1) // 2
        maps = inputs.new_empty(pooled)
        winners = inputs.new_empty(pooled, dtype=torch.int32) if record else None
        sizes = _sizes(inputs, weight)
        _call(self._pool_forward, sizes, inputs, weight, bias, scale, maps, winners)
        return maps, winners

    def pool_backward(
        self,
        inputs: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        winners: Tensor,
        gradient: Tensor,
        *,
        to_inputs: bool,
        to_filters: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of inputs, weight and bias; those not asked for are None."""
        of_inputs = torch.empty_like(inputs) if to_inputs else None
        of_weight = torch.empty_like(weight) if to_filters else None
        of_bias = weight.new_empty(len(weight)) if to_filters else None
        given = inputs, weight, scale, winners, gradient
        _call(self._pool_backward, _sizes(inputs, weight), *given, of_inputs, of_weight, of_bias)
        return of_inputs, of_weight, of_bias

    def narrow_forward(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution of stride 1 that keeps the size of images."""
        batch, _, height, width = inputs.shape
        maps = inputs.new_empty(batch, len(weight), height, width)
        _call(self._narrow_forward, _sizes(inputs, weight), inputs, weight, maps)
        return maps

    def narrow_backward(
        self, inputs: Tensor, weight: Tensor, gradient: Tensor, *, to_inputs: bool, to_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of inputs and weight; those not asked for are None."""
        of_inputs = torch.empty_like(inputs) if to_inputs else None
        of_weight = torch.empty_like(weight) if to_weight else None
        given = inputs, weight, gradient
        _call(self._narrow_backward, _sizes(inputs, weight), *given, of_inputs, of_weight)
        return of_inputs, of_weight

    def norm_forward(
        self, inputs: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None, *, relu: bool
    ) -> Normalised:
        """Normalise a batch in training, and move the running statistics."""
        channels = inputs.shape[1]
        found = Normalised(
            torch.empty_like(inputs), inputs.new_empty(channels), inputs.new_empty(channels)
        )
        assert norm.momentum is not None
        _call(
            self._norm_forward,
            _planes(inputs),
            *(inputs, norm.weight, norm.bias, shortcut, relu, norm.eps, norm.momentum),
            *(norm.running_mean, norm.running_var, *found),
        )
        return found

    def norm_backward(
        self,
        inputs: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
        maps: Tensor | None,
        gradient: Tensor,
        *,
        to_shortcut: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of inputs, weight, bias and shortcut.

        `maps` are the outputs; None says that there was no relu.
        """
        of_inputs, of_weight = torch.empty_like(inputs), torch.empty_like(weight)
        of_bias = torch.empty_like(weight)
        of_shortcut = torch.empty_like(gradient) if to_shortcut and maps is not None else None
        _call(
            self._norm_backward,
            _planes(inputs),
            *(inputs, weight, mean, scale, maps, gradient),
            *(of_inputs, of_weight, of_bias, of_shortcut),
        )
        if to_shortcut and maps is None:
            of_shortcut = gradient  # goes on as it is
        return of_inputs, of_weight, of_bias, of_shortcut


_Sizes = ctypes.Array[ctypes.c_int64]


def _sizes(inputs: Tensor, weight: Tensor) -> _Sizes:
    batch, channels, height, width = inputs.shape
    outputs, _, kernel, _ = weight.shape
    return (ctypes.c_int64 * 6)(batch, channels, outputs, height, width, kernel)


def _planes(inputs: Tensor) -> _Sizes:
    batch, channels, height, width = inputs.shape
    return (ctypes.c_int64 * 3)(batch, channels, height * width)


def _call(function: Callable[..., int], sizes: _Sizes, *given: Tensor | float | None) -> None:
    """Call a function with the addresses of tensors; None is no tensor."""
    if function(sizes, *(x.data_ptr() if isinstance(x, Tensor) else x for x in given)):
        raise MemoryError("no memory for a layer's maps")
