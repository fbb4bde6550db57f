# SPDX-License-Identifier: Apache-2.0
"""`RMSNorm`."""

from transformer_engine import _core
from transformer_engine.pytorch.module.norm import AffineNorm

__all__ = ["RMSNorm"]


class RMSNorm(AffineNorm):
    """x / sqrt(mean of squares + eps) * gamma over the last dims; parameters as of `LayerNorm`.

    Attributes
    ----------
    weight : Parameter
        gamma, of shape `normalized_shape`.
    """

    KIND = _core.NORM_RMSNORM
    HAS_BIAS = False
