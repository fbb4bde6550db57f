# SPDX-License-Identifier: Apache-2.0
"""Questions about libraries and attention, and the empty state of delayed scaling."""

import ctypes
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from transformer_engine.plugin.builtin.attention import no_backend_because
from transformer_engine.plugin.builtin.signatures import signature
from transformer_engine.plugin.core import ops


@functools.cache
def get_cublasLt_version() -> int:
    """Version of the cuBLASLt that torch has loaded, as its own function gives it; 0: none."""
    if torch.version.cuda is None:
        return 0
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        ask = ctypes.CDLL(name).cublasLtGetVersion
    except (OSError, AttributeError):
        return 0
    ask.restype = ctypes.c_size_t
    return int(ask())


def get_cudnn_version() -> int:
    """Version of cuDNN, as its own function gives it; 0 where there is none."""
    return int(torch.backends.cudnn.version() or 0)


def get_num_cublas_streams() -> int:
    """Streams that GEMMs of a group run on: 1, the current one."""
    return 1


def create_fp8_tensor_meta() -> ops.FP8TensorMeta:
    """Make a state of delayed scaling, to be filled by its caller."""
    return ops.FP8TensorMeta()


# ---- attention -----------------------------------------------------------------------------------


_FIELDS = {"q_dtype": "qkv_dtype", "kv_dtype": "qkv_dtype", "p_dropout": "dropout"}
"""Arguments of the operator whose fields have other names."""


@dataclass
class FusedAttentionParams:
    """A call of ``fused_attn_fwd`` and its backward: enumerators or their numbers, and sizes.

    The answer depends on `qkv_dtype`, `qkv_layout`, `bias_type`, `num_attn_heads`,
    `num_gqa_groups`, `head_dim_qk`, `head_dim_v` and `return_max_logit`, and with a plug-in's
    implementation on whatever of `scalars` it reads. The other fields change no answer.
    """

    is_training: bool = True
    deterministic: bool = False
    cuda_graph: bool = False
    return_max_logit: bool = False
    attn_mask_type: Any = ops.NVTE_Mask_Type.NVTE_NO_MASK
    bias_type: Any = ops.NVTE_Bias_Type.NVTE_NO_BIAS
    window_size_left: int = -1
    window_size_right: int = -1
    bottom_right_diagonal: bool = True
    softmax_type: Any = ops.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    scaling_mode: Any = 0
    dropout: float = 0.0
    attn_scale: float = 1.0
    qkv_dtype: Any = ops.DType.kBFloat16
    o_dtype: Any = ops.DType.kBFloat16
    do_dtype: Any = ops.DType.kBFloat16
    dqkv_dtype: Any = ops.DType.kBFloat16
    qkv_layout: Any = ops.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD
    o_format: Any = ops.NVTE_QKV_Format.NVTE_SBHD
    do_format: Any = ops.NVTE_QKV_Format.NVTE_SBHD
    dqkv_layout: Any = ops.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD
    qkv_scale_inv_format: Any = None
    do_scale_inv_format: Any = None
    batch_size: int = 0
    num_attn_heads: int = 0
    num_gqa_groups: int = 0
    head_dim_qk: int = 0
    head_dim_v: int = 0
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
    num_pages_k: int = 0
    num_pages_v: int = 0
    page_size_k: int = 0
    page_size_v: int = 0
    max_pages_per_seq_k: int = 0
    max_pages_per_seq_v: int = 0
    bias_batch_size: int = 0
    bias_num_heads: int = 0
    bias_seqlen_q: int = 0
    bias_seqlen_kv: int = 0

    def scalars(self) -> dict[str, Any]:
        """The same as arguments of the operator of that name, which plug-ins implement."""
        names = signature("get_fused_attn_backend").parameters
        return {name: getattr(self, _FIELDS.get(name, name)) for name in names}


def why_none(params: FusedAttentionParams) -> str:
    """Why no fused attention takes a call that is described, where none does."""
    reason = no_backend_because(SimpleNamespace(**params.scalars()))
    return reason or "get_fused_attn_backend: the implementation in force takes no such call"
