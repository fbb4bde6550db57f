# SPDX-License-Identifier: Apache-2.0
"""Modules without attention, under the path where programs look for them."""

from transformer_engine.common import absent
from transformer_engine.jax.flax.layernorm_mlp import LayerNormMLP
from transformer_engine.jax.flax.linear import (
    DenseGeneral,
    LayerNorm,
    LayerNormDenseGeneral,
    Softmax,
    TransformerEngineBase,
    make_dot_general_cls,
    wrap_function_in_te_state_module,
)
from transformer_engine.jax.flax.parameters import (
    _apply_low_rank_adaptation as _apply_low_rank_adaptation,
    _normalize_axes as _normalize_axes,
)

__all__ = [
    "DenseGeneral",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "Softmax",
    "TransformerEngineBase",
    "make_dot_general_cls",
    "wrap_function_in_te_state_module",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals())
