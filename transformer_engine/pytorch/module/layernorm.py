# SPDX-License-Identifier: Apache-2.0
"""`LayerNorm`."""

from transformer_engine import _core
from transformer_engine.pytorch.module.norm import AffineNorm

__all__ = ["LayerNorm"]


class LayerNorm(AffineNorm):
    """(x - mean) / sqrt(variance + eps) * gamma + beta over the last dims, in fp32 inside.

    Parameters
    ----------
    normalized_shape : int or iterable of int
        The last dims.
    eps : float, default 1e-5
        Added to the variance.
    sequence_parallel : bool, optional
        Set as an attribute of the parameters, for frameworks that reduce their gradients.
    params_dtype, hidden_size
        Older names of `dtype` and `normalized_shape`.
    zero_centered_gamma : bool, default False
        The factor is 1 + gamma, which begins at 0.
    elementwise_affine : bool, default True
        Have gamma and beta; without, the output is normalized and no more. By name only: in
        `torch.nn` it stands where `sequence_parallel` stands here.
    bias : bool, default True
        Have beta, where there is gamma. By name only.
    device : torch.device or str, optional
        Of the parameters; as of `Linear`.
    dtype : torch.dtype, optional
        Of the parameters; torch's default dtype where None.
    sm_margin : int or dict, default 0
        Multiprocessors to leave free: not there yet.

    Attributes
    ----------
    weight, bias : Parameter or None
        gamma and beta, of shape `normalized_shape`; None where there is none.
    """

    KIND = _core.NORM_LAYERNORM
    HAS_BIAS = True
    fwd_ln_sm_margin = bwd_ln_sm_margin = inf_ln_sm_margin = 0
    """Older names of `sm_margin` in each direction."""

    def reset_layer_norm_parameters(self) -> None:
        """Older name of `reset_parameters`."""
        self.reset_parameters()
