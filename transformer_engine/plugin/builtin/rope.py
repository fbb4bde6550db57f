# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and its transposed map, by `attention.rope`.

Tensors are [sequence, batch, heads, channels] (SBHD), [batch, sequence, heads, channels] (BSHD) or
[tokens, heads, channels] (THD, with `cu_seqlens`); angles [positions, 1, 1, rotated channels].
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.core.ops import qkv_format_name
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.execution.overrides import native


def _natively(function: Callable) -> Callable:
    """Make a function an operator that asks nobody and records no gradients (decorator)."""
    return native(torch.no_grad()(operator(function)))


@_natively
def fused_rope_forward(call: Any) -> Tensor:
    """Rotate the first channels; see `apply_rotary_pos_emb`, whose arguments these are.

    `qkv_format` is an `NVTE_QKV_Format`, or its name. TypeError or ValueError for shapes or
    arguments that do not go together.
    """
    form = qkv_format_name("fused_rope_forward", call.qkv_format)
    given = call.input, call.freqs, form, call.start_positions, call.interleaved
    ranks = {"cp_size": call.cp_size, "cp_rank": call.cp_rank}
    return rope.apply_rotary_pos_emb(*given, cu_seqlens=call.cu_seqlens, **ranks)


@_natively
def fused_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_rope_forward` without start positions."""
    form = qkv_format_name("fused_rope_backward", call.qkv_format)
    given = call.output_grads, call.freqs, call.interleaved, form, None, call.cu_seqlens
    return rope.rotary_backward(*given, call.cp_size, call.cp_rank)


@_natively
def fused_qkv_rope_forward(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values apart and rotate the first two.

    See `apply_fused_qkv_rotary_pos_emb`; the formats are SBHD and BSHD.
    """
    form = qkv_format_name("fused_qkv_rope_forward", call.qkv_format)
    given = call.qkv_input, call.q_freqs, call.k_freqs, call.qkv_split_arg_list, form
    more = call.start_positions, call.interleaved, None, call.cp_size, call.cp_rank
    return rope.apply_fused_qkv_rotary_pos_emb(*given, *more)


@_natively
def fused_qkv_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_qkv_rope_forward` without start positions."""
    form = qkv_format_name("fused_qkv_rope_backward", call.qkv_format)
    grads = call.q_grad_out, call.k_grad_out, call.v_grad_out
    sizes = [int(size) for size in call.qkv_split_arg_list]
    given = grads, (call.q_freqs, call.k_freqs), sizes, call.interleaved, form
    return rope.fused_qkv_rotary_backward(*given, call.cp_size, call.cp_rank)
