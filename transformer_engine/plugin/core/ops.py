# SPDX-License-Identifier: Apache-2.0
"""Enumerations and classes that operators take and give, under the fork's path.

Numbers are those of NVIDIA Transformer Engine's native library.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.constants import DType, FP8BwdTensors, FP8FwdTensors  # noqa: F401

_ELSEWHERE = {
    **dict.fromkeys(
        ("TEFLBackendBase", "TEFLModule", "get_tefl_module", "reset_tefl_module"),
        "transformer_engine.plugin.core.backend_base",
    ),
    **dict.fromkeys(
        ("get_manager", "get_registry", "reset_registry"), "transformer_engine.plugin.core.manager"
    ),
}
__getattr__, __dir__ = absent.attach(globals(), lazy=_ELSEWHERE)

_ENUMERATIONS = {
    "Float8BlockScaleTensorFormat": ("How scales of tiles lie.", "GEMM_READY COMPACT"),
    "NVTE_Activation_Type": (
        "Activations.",
        "GELU GEGLU SILU SWIGLU RELU REGLU QGELU QGEGLU SRELU SREGLU CLAMPED_SWIGLU",
    ),
    "NVTE_Bias_Type": (
        "What is added to attention scores.",
        "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    ),
    "NVTE_Mask_Type": (
        "Which keys a query attends.",
        "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
    "NVTE_Softmax_Type": (
        "What joins the sum that exponentiated scores are divided by.",
        "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    ),
    "NVTE_Fused_Attn_Backend": (
        "Kinds of fused attention.",
        "NVTE_No_Backend NVTE_F16_max512_seqlen NVTE_F16_arbitrary_seqlen NVTE_FP8",
    ),
    "NVTE_QKV_Format": (
        "Order of the dims of queries, and of keys and values where they differ.",
        "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD "
        "NVTE_THD_2SBHD",
    ),
    "NVTE_QKV_Layout": (
        "Order of the dims of queries, keys and values, and which of them share a tensor.",
        "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD "
        "NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD "
        "NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
        "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
        "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
        "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD",
    ),
    "CommOverlapType": ("Collectives that overlap with GEMMs.", "RS AG"),
    "CommOverlapAlgo": (
        "How they overlap.",
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
        "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P "
        "EXTERNAL_BULK_OVERLAP_AG",
    ),
    "CommGemmOverlapRole": ("What a tensor is to a GEMM.", "INPUT OUTPUT"),
}
"""Name of each: what it is, and its members; the first is 0, of the backends -1."""

for _name, (_what, _members) in _ENUMERATIONS.items():
    _first = -1 if _name == "NVTE_Fused_Attn_Backend" else 0
    globals()[_name] = IntEnum(_name, _members.split(), start=_first, module=__name__)
    globals()[_name].__doc__ = _what

NAMES = ("DType", "FP8BwdTensors", "FP8FwdTensors", "FP8TensorMeta", *_ENUMERATIONS)
"""Names that `transformer_engine_torch` has, too."""
__all__ = [  # noqa: PLE0604 - texts, all of them
    *NAMES,
    "FlashAttentionBase",
    *_ELSEWHERE,
    *absent.names_of(__name__),
]


def qkv_format_name(op: str, value: Any) -> str:
    """Name of an `NVTE_QKV_Format`, "sbhd", "bshd" or "thd"; given as that or its number.

    ValueError for another one.
    """
    try:
        name = value if isinstance(value, str) else globals()["NVTE_QKV_Format"](value).name
    except ValueError:
        name = ""
    found = name.lower().removeprefix("nvte_")
    if found not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"{op}: qkv_format={value!r}, expected NVTE_SBHD, NVTE_BSHD or NVTE_THD")
    return found


class FP8TensorMeta:
    """State of delayed scaling: `scale` [slots] and `amax_history` [length, slots], fp32.

    `scale_inv` are the inverse scales, where somebody keeps them.
    """

    def __init__(self) -> None:
        self.scale = torch.empty(0)
        self.scale_inv = torch.empty(0)
        self.amax_history = torch.empty(0, 0)


class FlashAttentionBase(torch.nn.Module, ABC):
    """Base of what the operator `get_flash_attention_class` gives: attention of one layer.

    Parameters
    ----------
    softmax_scale : float
        Factor of the scores.
    attention_dropout : float, default 0
        Probability that an attention probability is dropped, in training.
    attention_dropout_ctx : callable, optional
        Gives a context in which dropout is drawn.
    attention_type : str, default "self"
        "self" or "cross".
    layer_number : int, optional
        From 1.
    deterministic : bool, default False
        Gradients are the same from run to run, bit for bit.
    """

    def __init__(
        self,
        softmax_scale: float,
        attention_dropout: float = 0.0,
        attention_dropout_ctx: Callable | None = None,
        attention_type: str = "self",
        layer_number: int | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.attention_dropout = attention_dropout
        self.attention_dropout_ctx = attention_dropout_ctx or contextlib.nullcontext
        self.attention_type = attention_type
        self.layer_number = 1 if layer_number is None else layer_number
        self.deterministic = deterministic

    @property
    def backend_name(self) -> str:
        """Whose it is."""
        return type(self).__name__

    @abstractmethod
    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_layout: str = "sbh3d",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        alibi_slopes: Tensor | None = None,
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        fp8: bool = False,
        fp8_meta: Any = None,
        quantizers: Any = None,
        inference_params: Any = None,
        flash_attention_backend: Any = None,
        fp8_output: bool = False,
    ) -> Tensor:
        """Attend: [.., heads, channels] of queries, keys and values to [.., heads * channels]."""
