# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and its transposed map, by `attention.rope`.

Tensors are [sequence, batch, heads, channels] (SBHD), [batch, sequence, heads, channels] (BSHD) or
[tokens, heads, channels] (THD, with `cu_seqlens`); angles [positions, 1, 1, rotated channels].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.core.ops import qkv_format_name
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.execution.overrides import native


@native
@torch.no_grad()
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate the first channels; see `apply_rotary_pos_emb`, whose arguments these are.

    `qkv_format` is an `NVTE_QKV_Format`, or its name. TypeError or ValueError for shapes or
    arguments that do not go together.
    """
    return rope.apply_rotary_pos_emb(
        input,
        freqs,
        qkv_format_name("fused_rope_forward", qkv_format),
        start_positions,
        interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


@native
@torch.no_grad()
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Gradient of the input of `fused_rope_forward` without start positions."""
    form = qkv_format_name("fused_rope_backward", qkv_format)
    given = form, None, cu_seqlens, cp_size, cp_rank
    return rope.rotate_back(output_grads, freqs, interleaved, *given)


@native
@torch.no_grad()
def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values apart and rotate the first two.

    See `apply_fused_qkv_rotary_pos_emb`; the formats are SBHD and BSHD.
    """
    return rope.apply_fused_qkv_rotary_pos_emb(
        qkv_input,
        q_freqs,
        k_freqs,
        qkv_split_arg_list,
        qkv_format_name("fused_qkv_rope_forward", qkv_format),
        start_positions,
        interleaved,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


@native
@torch.no_grad()
def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Gradient of the input of `fused_qkv_rope_forward` without start positions."""
    form = qkv_format_name("fused_qkv_rope_backward", qkv_format)
    grads = q_grad_out, k_grad_out, v_grad_out
    sizes = [int(size) for size in qkv_split_arg_list]
    return rope.join_back(grads, (q_freqs, k_freqs), sizes, interleaved, form, cp_size, cp_rank)
