# SPDX-License-Identifier: Apache-2.0
"""The norm that `LayerNormLinear` and `LayerNormMLP` begin with: its parameters and settings."""

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.operands import CallTensors
from transformer_engine.pytorch.module.parameters import checked_eps, one_of, reset_norm

NORMS = {"LayerNorm": _core.NORM_LAYERNORM, "RMSNorm": _core.NORM_RMSNORM}
_obeying_norm = _core.obeying("norm")


class NormedModule(LinearBase):
    """Base of modules that begin with a norm of their own."""

    def _set_norm(
        self,
        normalization: str,
        eps: float,
        zero_centered_gamma: bool,
        returned: tuple[bool, bool],
    ) -> None:
        """Check and keep the settings.

        `returned`: return_layernorm_output and return_layernorm_output_gathered.
        """
        one_of(type(self).__name__, NORMS, normalization=normalization)
        self.normalization = normalization
        self.NORM = NORMS[normalization]
        self.eps = checked_eps(type(self).__name__, eps)
        self.zero_centered_gamma = bool(zero_centered_gamma)
        self.return_layernorm_output = bool(returned[0])
        self.return_layernorm_output_gathered = all(returned)

    def _make_norm(self, features: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the parameters, without values."""
        weight = torch.empty(features, device=device, dtype=dtype)
        self.layer_norm_weight = Parameter(weight)
        self.register_parameter("layer_norm_bias", None)
        if self.NORM == _core.NORM_LAYERNORM:
            self.layer_norm_bias = Parameter(torch.empty_like(weight))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def reset_layer_norm_parameters(self) -> None:
        """Give gamma 1 (0 where it is zero-centred) and beta 0."""
        reset_norm(self, "layer_norm_")

    def _flags_text(self) -> list[str]:
        return [f"eps={self.eps}", self.normalization, *super()._flags_text()]

    def _calibration_inputs(self, tensors: CallTensors) -> list[Tensor]:
        (inp,), (gamma, beta) = super()._calibration_inputs(tensors), tensors.norm
        return [self._normed(inp, gamma, beta, inp.dtype)]

    def _normed(
        self, inp: Tensor, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the norm of `inp`, in a dtype."""
        out = torch.empty(inp.shape, dtype=dtype, device=inp.device)
        operands = {"wide": out, "gamma": gamma, "beta": beta, "eps": self.eps}
        _obeying_norm(inp, kind=self.NORM, zero_centered=self.zero_centered_gamma, **operands)
        return out

    def _norm_names(self) -> tuple[str, str | None]:
        """Attributes of `_norm_tensors`."""
        has_bias = self.NORM == _core.NORM_LAYERNORM
        return "layer_norm_weight", "layer_norm_bias" if has_bias else None

    def _norm_tensors(self) -> tuple[Tensor, Tensor | None] | None:
        return self.layer_norm_weight, self.layer_norm_bias
