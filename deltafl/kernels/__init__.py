"""Operations that torch computes slowly, as compiled kernels with a plain fallback."""

from __future__ import annotations

from deltafl.kernels.conv_pool_relu import conv_pool_relu, dropout2d_scale, reference
from deltafl.kernels.native import available, reason

__all__ = ["available", "conv_pool_relu", "dropout2d_scale", "reason", "reference"]
