"""ResNet-18 and ResNet-50 for small images, the CIFAR models of the paper (Section 4).

He et al. 2016 with the stem that 32x32 images call for: a 3x3 convolution of stride 1 and no
max-pool, so that the four stages see 32, 16, 8 and 4 pixels. The authors' code normalises with
BatchNorm, which in the blocks of its ResNet-18 keeps no running statistics; here it keeps them.
Group norm is offered because clients with different data disagree about them. BatchNorm cannot
train on a single sample once the maps have shrunk to one pixel: there torch raises a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from deltafl import kernels
from deltafl.models.base import Classifier

Norm = Literal["batch", "group"]
NORMS: tuple[Norm, ...] = ("batch", "group")

_MakeNorm = Callable[[int], nn.Module]


def _norm(kind: Norm, width: int) -> _MakeNorm:
    """Return the constructor of the normalisation of a network with `width` base channels."""
    if kind == "batch":
        return nn.BatchNorm2d
    # Every layer has a multiple of `width` channels, so a divisor of `width` fits all of them.
    # The usual 32 groups where they fit, and two channels a group at least: a group of one
    # channel would be instance norm, which forgets how strong a channel is.
    groups = max(1, math.gcd(64, width) // 2)
    return lambda channels: nn.GroupNorm(groups, channels)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the image size but for its stride; a norm follows it."""
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class _Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1x1 convolution where shapes differ."""

    fused = False
    """Whether norms and what follows them are one operation."""

    def __init__(
        self, branch: nn.Sequential, inputs: int, outputs: int, stride: int, norm: _MakeNorm
    ) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, maps: Tensor) -> Tensor:
        if self.fused:
            return self._fused(maps)
        total: Tensor = self.branch(maps) + self.shortcut(maps)
        return total.relu()

    def _fused(self, maps: Tensor) -> Tensor:
        shortcut = maps
        if isinstance(self.shortcut, nn.Sequential):
            conv, norm = self.shortcut
            shortcut = kernels.normalise(conv(maps), norm, relu=False)
        layers = list(self.branch)  # a convolution, its norm, and relu after all but the last
        *inner, (last, norm) = zip(layers[::3], layers[1::3], strict=True)
        for conv, its_norm in inner:
            maps = kernels.normalise(conv(maps), its_norm)
        return kernels.normalise(last(maps), norm, shortcut)


class _Stem(nn.Sequential):
    """A convolution, its norm and relu."""

    fused = False
    """Whether the norm and relu are one operation."""

    def forward(self, maps: Tensor) -> Tensor:
        if not self.fused:
            plain: Tensor = super().forward(maps)  # type: ignore[no-untyped-call]
            return plain
        conv, norm, _ = self
        return kernels.normalise(conv(maps), norm)


def _basic(inputs: int, channels: int, stride: int, norm: _MakeNorm) -> _Residual:
    """Return the block of ResNet-18: two 3x3 convolutions."""
    branch = nn.Sequential(
        _conv(inputs, channels, 3, stride),
        norm(channels),
        nn.ReLU(),
        _conv(channels, channels, 3),
        norm(channels),
    )
    return _Residual(branch, inputs, channels, stride, norm)


def _bottleneck(inputs: int, channels: int, stride: int, norm: _MakeNorm) -> _Residual:
    """Return the block of ResNet-50: 1x1, 3x3 and 1x1 convolutions, four times wider outside."""
    branch = nn.Sequential(
        _conv(inputs, channels, 1),
        norm(channels),
        nn.ReLU(),
        _conv(channels, channels, 3, stride),
        norm(channels),
        nn.ReLU(),
        _conv(channels, 4 * channels, 1),
        norm(4 * channels),
    )
    return _Residual(branch, inputs, 4 * channels, stride, norm)


class ResNet(Classifier):
    """A residual network of four stages; the subclasses say which blocks, and how many."""

    _block: Callable[[int, int, int, _MakeNorm], _Residual]
    _expansion: int
    _depths: tuple[int, int, int, int]

    def __init__(
        self, shape: tuple[int, int, int], classes: int, width: int = 64, norm: Norm = "batch"
    ) -> None:
        super().__init__()
        self._width = width
        make_norm = _norm(norm, width)
        self.stem = _Stem(_conv(shape[0], width, 3), make_norm(width), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(self._depths):
            channels = width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(type(self)._block(inputs, channels, stride, make_norm))
                inputs = channels * self._expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def speed_up(self) -> None:
        """Keep a pixel's channels together, which the CPU's convolutions prefer.

        Only if they fill vectors: with 4 channels torch 2.13 writes past the end of its memory.
        Narrower networks run compiled kernels.
        """
        super().speed_up()
        if self._fills_vectors:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            return
        for part in self.modules():
            if kernels.NarrowConv2d.fits(part):
                part.__class__ = kernels.NarrowConv2d
            elif isinstance(part, _Residual | _Stem):
                part.fused = True

    @property
    def _fills_vectors(self) -> bool:
        return self._width % kernels.NARROW == 0

    @property
    def native(self) -> bool:
        """Whether layers run in compiled kernels: norms over the batch, convolutions."""
        fused = self.fast and not self._fills_vectors
        normalises = isinstance(self.stem[1], nn.BatchNorm2d) and kernels.available()
        return fused and (normalises or kernels.narrow_pays())

    def represent(self, inputs: Tensor) -> Tensor:
        """Return the maps of the last stage, averaged over the pixels."""
        if self.fast and self._fills_vectors:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        maps: Tensor = self.blocks(self.stem(inputs))
        return maps.mean(dim=(2, 3))

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits of averaged maps."""
        logits: Tensor = self.head(representation)
        return logits


class ResNet18(ResNet):
    """ResNet-18: 11,173,962 parameters for 3-channel images and 10 classes."""

    _block = staticmethod(_basic)
    _expansion = 1
    _depths = (2, 2, 2, 2)


class ResNet50(ResNet):
    """ResNet-50: 23,520,842 parameters for 3-channel images and 10 classes."""

    _block = staticmethod(_bottleneck)
    _expansion = 4
    _depths = (3, 4, 6, 3)
