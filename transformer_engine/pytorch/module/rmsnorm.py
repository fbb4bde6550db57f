# SPDX-License-Identifier: Apache-2.0
"""`RMSNorm`."""

from transformer_engine import _core
from transformer_engine.pytorch.module.norm import AffineNorm

__all__ = ["RMSNorm"]


class RMSNorm(AffineNorm):
    """x / sqrt(mean of squares + eps) * gamma over the last dims.

    Parameters as of `LayerNorm`, without a bias; ``eps=None``, the default of `torch.nn.RMSNorm`,
    is 2^-23, the precision of fp32, as there. ``weight`` is gamma, of shape `normalized_shape`;
    None without `elementwise_affine`.
    """

    KIND = _core.NORM_RMSNORM
    HAS_BIAS = False
    EPS_IS_OPTIONAL = True
    fwd_rmsnorm_sm_margin = bwd_rmsnorm_sm_margin = inf_rmsnorm_sm_margin = 0
    """Older names of `sm_margin` in each direction."""

    def reset_rms_norm_parameters(self) -> None:
        """Older name of `reset_parameters`."""
        self.reset_parameters()
