# SPDX-License-Identifier: Apache-2.0
"""Functions for `CustomRecipe` that mix formats, between forward and backward or between layers.

The forward reads the row-wise forms of input and weight; the backward their column-wise forms and
the gradient of the output. Products of formats that no kernel reads together are multiplied out
(counter ``emulated.mixed``).
"""

from transformer_engine.common.recipe import QuantizerRole
from transformer_engine.pytorch.custom_recipes.quantizer_factories import (
    current_scaling_factory,
    mxfp8_factory,
    nvfp4_factory,
    tensor_of,
)
from transformer_engine.pytorch.tensor import HybridQuantizer, IdentityQuantizer, NVFP4Quantizer
from transformer_engine.pytorch.tensor.quantizer import Quantizer

__all__ = [
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_linear_fp8_dpa_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]


def _both(role: QuantizerRole | None, forward: Quantizer, backward: Quantizer) -> Quantizer:
    """One quantizer for the forms that the forward reads, another one for those of the backward."""
    if tensor_of(role) == "gradient":
        return backward
    return HybridQuantizer(rowwise_quantizer=forward, columnwise_quantizer=backward)


def _row_scaled(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 for a forward: inputs have an amax for each row, weights one, and no squares."""
    return NVFP4Quantizer(row_scaled_nvfp4=tensor_of(role) == "input")


def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in high precision, backward in MXFP8."""
    return _both(role, IdentityQuantizer(), mxfp8_factory(role))


def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in MXFP8, backward in high precision."""
    return _both(role, mxfp8_factory(role), IdentityQuantizer())


def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in MXFP8, backward in NVFP4, whose gradients are rounded stochastically."""
    gradient = tensor_of(role) == "gradient"
    return _both(role, mxfp8_factory(role), NVFP4Quantizer(stochastic_rounding=gradient))


def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with a scale for 16 values of a weight, too, in place of 16 x 16."""
    return NVFP4Quantizer() if tensor_of(role) == "weight" else nvfp4_factory(role)


def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 for linear layers, FP8 with current scaling for attention (``fp8_dpa=True``)."""
    dpa = role is not None and role.module_type == "dpa"
    return current_scaling_factory(role) if dpa else nvfp4_factory(role)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in NVFP4 with an amax for each row of an input, backward in high precision."""
    return _both(role, _row_scaled(role), IdentityQuantizer())


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Forward in NVFP4 with an amax for each row of an input, backward in MXFP8."""
    return _both(role, _row_scaled(role), mxfp8_factory(role))
