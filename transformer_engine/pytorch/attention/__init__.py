# SPDX-License-Identifier: Apache-2.0
"""Attention: dot products, heads, rotary positions."""

from transformer_engine.common import absent
from transformer_engine.pytorch.attention.core import DotProductAttention
from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.attention.scores import softcap

__getattr__, __dir__ = absent.attach(
    globals(),
    ("inference",),
    {
        "InferenceParams": "transformer_engine.pytorch.attention.inference",
        "MultiheadAttention": "transformer_engine.pytorch.layer.multi_head_attention",
        "_SplitAlongDim": "transformer_engine.pytorch.utils",
    },
)
__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    "softcap",
    *absent.names_of(__name__),
]
