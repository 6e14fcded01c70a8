"""Operations that torch computes slowly, as compiled kernels with a plain fallback."""

from __future__ import annotations

from deltafl.kernels.batch_norm_relu import normalise, normalise_plainly
from deltafl.kernels.conv_pool_relu import conv_pool_relu, dropout2d_scale, reference
from deltafl.kernels.narrow_conv import NARROW, NarrowConv2d, narrow_conv
from deltafl.kernels.native import available, narrow_pays, reason

__all__ = [
    "NARROW",
    "NarrowConv2d",
    "available",
    "conv_pool_relu",
    "dropout2d_scale",
    "narrow_conv",
    "narrow_pays",
    "normalise",
    "normalise_plainly",
    "reason",
    "reference",
]
