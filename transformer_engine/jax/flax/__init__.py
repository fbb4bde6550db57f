# SPDX-License-Identifier: Apache-2.0
"""Flax modules."""

from transformer_engine.common import absent
from transformer_engine.jax.flax.module import (
    DenseGeneral,
    LayerNorm,
    LayerNormDenseGeneral,
    LayerNormMLP,
    make_dot_general_cls,
    wrap_function_in_te_state_module,
)
from transformer_engine.jax.flax.transformer import (
    DotProductAttention,
    MultiHeadAttention,
    RelativePositionBiases,
    TransformerLayer,
    TransformerLayerType,
    extend_logical_axis_rules,
)

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "make_dot_general_cls",
    "wrap_function_in_te_state_module",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals())
