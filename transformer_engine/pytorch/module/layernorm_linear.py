# SPDX-License-Identifier: Apache-2.0
"""`LayerNormLinear`: y = norm(x) W^T + b in one call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.module.normed import NormedModule
from transformer_engine.pytorch.module.parameters import (
    Split,
    checked_dtype,
    device_of,
    positive_sizes,
    refuse_options,
)
from transformer_engine.pytorch.module.weights import WeightModule

__getattr__, __dir__ = absent.attach(
    globals(), lazy={"general_gemm": "transformer_engine.pytorch.cpp_extensions.gemm"}
)
__all__ = ["LayerNormLinear"]


class LayerNormLinear(NormedModule, WeightModule):
    """LayerNorm or RMSNorm, then a linear layer; inside `autocast` the norm casts to FP8 itself.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of an input and an output sample.
    eps : float, default 1e-5
        Added to the variance.
    tp_group, tp_size, parallel_mode, sequence_parallel, symmetric_ar_type, \
fuse_wgrad_accumulation, get_rng_state_tracker, init_method, bias, return_bias, params_dtype, \
parameters_split, device, delay_wgrad_compute, name, ub_overlap_ag, ub_overlap_rs, \
ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad, ub_name
        As of `Linear`.
    normalization : {"LayerNorm", "RMSNorm"}
        The norm.
    return_layernorm_output : bool, default False
        Return the norm's output too.
    return_layernorm_output_gathered : bool, default False
        The whole sequence of it, which is what one rank has.
    zero_centered_gamma : bool, default False
        The norm's factor is 1 + gamma, which begins at 0.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : Parameter
        [in_features]; RMSNorm has no bias.
    weight, bias : Parameter
        As of `Linear`.
    """

    SLOTS = (3, 2)

    def __init__(  # noqa: PLR0913 - the argument list that users know
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        del sequence_parallel, symmetric_ar_type, return_layernorm_output_gathered
        del ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad
        self._set_parallel(tp_group, tp_size, parallel_mode, ub_name)
        positive_sizes("LayerNormLinear", in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bool(bias)
        self.return_bias = bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self.name = name
        self._set_norm(normalization, eps, zero_centered_gamma, return_layernorm_output)
        self._init_method = init_method
        self._rng = (get_rng_state_tracker, None)
        self._split = Split.of("LayerNormLinear", parameters_split, out_features)
        self._begin(fuse_wgrad_accumulation, delay_wgrad_compute)
        self._check_split()
        device = device_of(device)
        dtype = checked_dtype("LayerNormLinear", params_dtype)
        self._make_norm(in_features, device, dtype)
        self._make_parameters(device, dtype)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; see `Linear.reset_parameters`."""
        if defer_init:
            return
        self.reset_layer_norm_parameters()
        super().reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and what differs from the defaults."""
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts += [f"bias={self.use_bias}", f"eps={self.eps}", self.normalization]
        return ", ".join(parts + self._flags_text())

    def _parameter_names(self) -> tuple[str | None, ...]:
        return (*self._norm_names(), *super()._parameter_names())

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the norm and the linear layer.

        Parameters
        ----------
        inp : Tensor
            [..., in_features]; dtypes as of `Linear.forward`.
        is_first_microbatch : bool, optional
            As of `Linear.forward`.
        fp8_output, fp8_grad : bool
            Not there yet.

        Returns
        -------
        Tensor or tuple of Tensor
            [..., out_features]; then the bias, not added, with `return_bias`; then the norm's
            output [..., in_features] with `return_layernorm_output`.

        Raises
        ------
        TypeError
            dtypes or kinds of tensors that do not go together.
        ValueError
            The last dim is not `in_features`.
        """
        if fp8_output or fp8_grad:
            options = {"fp8_output": (fp8_output, False), "fp8_grad": (fp8_grad, False)}
            refuse_options("LayerNormLinear", **options)
        out = self._call(inp, is_first_microbatch)
        if not (self.return_bias or self.return_layernorm_output):
            return out
        dtype = (out[0] if self.return_layernorm_output else out).dtype
        return self._results(inp, out, self._returned_bias(dtype) if self.return_bias else None)
