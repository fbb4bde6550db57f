# SPDX-License-Identifier: Apache-2.0
"""Names and numbers of what fused attention is told, as programs pass them.

The numbers are those of the enumerations of `transformer_engine.plugin.core.ops`, whose operators
``fused_attn_fwd`` and ``fused_attn_bwd`` take them.
"""

import operator
from enum import IntEnum
from typing import Any

from transformer_engine.common import absent
from transformer_engine.plugin.core.ops import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine.pytorch.constants import (
    FP8BwdTensorIdx,
    FP8FwdTensorIdx,
    TE_DType as TORCH_DType,
)
from transformer_engine_torch import get_fused_attn_backend

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "BACKEND_F16arb_ELTS_PER_THREADS",
    "BACKEND_FP8_THREADS_PER_CTA",
    "FusedAttnBackend",
    "META_DO",
    "META_DP",
    "META_DQKV",
    "META_O",
    "META_QKV",
    "META_S",
    "QKVFormat",
    "QKVLayout",
    "SoftmaxType",
    "TORCH_DType",
    "get_fused_attn_backend",
    *absent.names_of(__name__),
]


def _by_name(kind: type[IntEnum], suffix: str = "") -> dict[str, IntEnum]:
    """Enumerators by what programs call them: without "NVTE_" and the suffix, in lower case."""
    found = {each.name.lower().removeprefix("nvte_"): each for each in kind}
    return {name.removesuffix(suffix): each for name, each in found.items()}


QKVFormat = _by_name(NVTE_QKV_Format)
"""By the names of `DotProductAttention`: "sbhd", "bshd", "thd", "thd_2bshd", ..."""
QKVLayout = _by_name(NVTE_QKV_Layout)
"""By the names of `AttentionParams`: "sb3hd", "thd_thd_thd", "paged_kv_bshd_bshd_bshd", ..."""
AttnBiasType = _by_name(NVTE_Bias_Type)
"""By the names of `DotProductAttention`: "no_bias", "alibi", ..."""
AttnMaskType = {
    name if name == "no_mask" else name.removesuffix("_mask"): each
    for name, each in _by_name(NVTE_Mask_Type).items()
}
"""By the names of `DotProductAttention`: "no_mask", "padding_causal", ..."""
SoftmaxType = {
    name.replace("off_by_one", "off-by-one"): each
    for name, each in _by_name(NVTE_Softmax_Type, "_softmax").items()
}
"""By the names of `DotProductAttention`: "vanilla", "off-by-one", "learnable"."""


class FusedAttnBackend(IntEnum):
    """Kinds of fused attention: the third answer of `get_attention_backend`."""

    No_Backend = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    F16_arbitrary_seqlen = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    FP8 = NVTE_Fused_Attn_Backend.NVTE_FP8

    @classmethod
    def cast(cls, backend: Any) -> "FusedAttnBackend":
        """The kind of one of these, of an `NVTE_Fused_Attn_Backend` or of its number.

        TypeError for what is no number, ValueError for another number.
        """
        return cls(operator.index(backend))


META_QKV, META_O, META_S = (
    FP8FwdTensorIdx.GEMM1_OUTPUT,
    FP8FwdTensorIdx.GEMM2_INPUT,
    FP8FwdTensorIdx.GEMM3_OUTPUT,
)
"""Slots of the state of FP8 attention: queries, keys and values; the output; the weights."""
META_DQKV, META_DO, META_DP = (
    FP8BwdTensorIdx.GRAD_OUTPUT1,
    FP8BwdTensorIdx.GRAD_INPUT2,
    FP8BwdTensorIdx.GRAD_INPUT3,
)
"""Those of their gradients."""

BACKEND_F16arb_ELTS_PER_THREADS, BACKEND_FP8_THREADS_PER_CTA = 16, 128
"""Random numbers that a thread draws, and threads of a block, as programs count them that move a
generator on for an attention. Dropout here draws one pair for each call."""
