# SPDX-License-Identifier: Apache-2.0
"""`LayerNormLinear`: y = norm(x) W^T + b in one call."""

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.common import absent
from transformer_engine.pytorch.module.normed import NormedModule
from transformer_engine.pytorch.module.parameters import checked_dtype, device_of
from transformer_engine.pytorch.module.weight_module import WeightModule

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
        With `sequence_parallel` return that of all ranks, which is gathered in high precision.
    zero_centered_gamma : bool, default False
        The norm's factor is 1 + gamma, which begins at 0.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : Parameter
        [in_features]; RMSNorm has no bias.
    weight, bias : Parameter
        As of `Linear`.
    """

    def __init__(
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
        self._set_parallel(
            tp_group, tp_size, parallel_mode, sequence_parallel=sequence_parallel,
            overlaps=(ub_overlap_ag, ub_overlap_rs), ub_name=ub_name,
            backward=(ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad),
            symmetric_ar_type=symmetric_ar_type,
        )  # fmt: skip
        gradients = (fuse_wgrad_accumulation, delay_wgrad_compute)
        self._begin(name, (bias, return_bias), gradients)
        returned = return_layernorm_output, return_layernorm_output_gathered
        self._set_norm(normalization, eps, zero_centered_gamma, returned)
        rng = (get_rng_state_tracker, None)
        self._set_linear(in_features, out_features, parameters_split, init_method, rng)
        device, dtype = device_of(device), checked_dtype("LayerNormLinear", params_dtype)
        self._make_norm(in_features, device, dtype)
        self._make_parameters(device, dtype)

    def _parameter_names(self) -> tuple[str | None, ...]:
        return (*self._norm_names(), *super()._parameter_names())
