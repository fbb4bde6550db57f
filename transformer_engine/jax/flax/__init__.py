# SPDX-License-Identifier: Apache-2.0
"""Flax modules."""

from transformer_engine.jax.flax.layernorm_mlp import LayerNormMLP
from transformer_engine.jax.flax.linear import (
    DenseGeneral,
    LayerNorm,
    LayerNormDenseGeneral,
    make_dot_general_cls,
    make_grouped_dense_cls,
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
    "make_grouped_dense_cls",
    "wrap_function_in_te_state_module",
]
