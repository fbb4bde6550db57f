# SPDX-License-Identifier: Apache-2.0
"""Functions for `CustomRecipe` that quantize as one recipe of this library does by default.

``CustomRecipe(current_scaling_factory)`` has the bits of ``Float8CurrentScaling()``, and so on.
Each is called with a `QuantizerRole`; None, or a role without a tensor type, is a boundary, and
gets what an input gets.
"""

from transformer_engine.common.recipe import DelayedScalingRequest, QuantizerRole
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from transformer_engine.pytorch.tensor.quantizer import Quantizer

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
    "tensor_of",
]

_GRADIENTS = ("grad_output", "grad_input", "do", "dp")


def tensor_of(role: QuantizerRole | None) -> str:
    """Kind of a role: "weight", "gradient", or "input" for everything else."""
    kind = "" if role is None else role.tensor_type
    return kind if kind == "weight" else "gradient" if kind in _GRADIENTS else "input"


def high_precision_factory(role: QuantizerRole | None) -> Quantizer:
    """Cast nothing."""
    del role
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """As `DelayedScaling`: E4M3, gradients E5M2."""
    del role
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """As `Float8CurrentScaling`: E4M3, gradients E5M2."""
    gradient = tensor_of(role) == "gradient"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3)


def float8_block_scaling_factory(role: QuantizerRole | None) -> Quantizer:
    """As `Float8BlockScaling`: E4M3, a scale for 128 x 128 of a weight, for 1 x 128 of others."""
    dims = 2 if tensor_of(role) == "weight" else 1
    return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=dims)


def mxfp8_factory(role: QuantizerRole | None) -> Quantizer:
    """As `MXFP8BlockScaling`: E4M3, a scale for 32 values."""
    del role
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> Quantizer:
    """As `NVFP4BlockScaling`: squares of weights, transformed columns of others.

    Gradients are rounded stochastically.
    """
    tensor = tensor_of(role)
    return NVFP4Quantizer(
        with_rht=tensor != "weight",
        with_post_rht_amax=tensor != "weight",
        with_2d_quantization=tensor == "weight",
        stochastic_rounding=tensor == "gradient",
    )
