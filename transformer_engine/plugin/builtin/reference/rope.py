# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and its transposed map; see `builtin.rope`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.core.ops import qkv_format_name
from transformer_engine.pytorch.attention.rope import Positions, turn_by_torch


def _transposed(function: Callable[[Tensor], Any], like: Tensor, grads: Any) -> Tensor:
    """The transposed map of a linear one."""
    source = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        made = function(source)
    return torch.autograd.grad(made, source, grads)[0]


def _turned(op: str, call: Any, t: Tensor, starts: Tensor | None) -> Tensor:
    """Compute t cos + rot(t) sin over the first channels."""
    form = qkv_format_name(op, call.qkv_format)
    positions = Positions(form, starts, call.cu_seqlens, call.cp_size, call.cp_rank)
    return turn_by_torch(t, call.freqs, positions, call.interleaved)


@operator
def fused_rope_forward(call: Any) -> Tensor:
    """Compute t cos + rot(t) sin over the first channels."""
    return _turned("fused_rope_forward", call, call.input.detach(), call.start_positions)


@operator
def fused_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_rope_forward` without start positions."""
    grads, op = call.output_grads, "fused_rope_backward"
    return _transposed(lambda t: _turned(op, call, t, None), grads, grads)


def _parts(op: str, call: Any, qkv: Tensor, starts: Tensor | None) -> tuple[Tensor, ...]:
    """Queries and keys of a projection, rotated, and values."""
    form, sizes = qkv_format_name(op, call.qkv_format), [int(n) for n in call.qkv_split_arg_list]
    positions = Positions(form, starts, None, call.cp_size, call.cp_rank)
    query, key, value = qkv.split(sizes, -1)
    query = query.reshape(*qkv.shape[:-2], -1, sizes[1])
    pairs = (query, call.q_freqs), (key, call.k_freqs)
    turned = (turn_by_torch(t, freqs, positions, call.interleaved) for t, freqs in pairs)
    return *turned, value.contiguous()


@operator
def fused_qkv_rope_forward(call: Any) -> tuple[Tensor, ...]:
    """Queries and keys, rotated, and values."""
    return _parts("fused_qkv_rope_forward", call, call.qkv_input.detach(), call.start_positions)


@operator
def fused_qkv_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_qkv_rope_forward` without start positions."""
    op, key = "fused_qkv_rope_backward", call.k_grad_out
    like = key.new_empty(*key.shape[:-1], sum(call.qkv_split_arg_list))
    grads = call.q_grad_out, key, call.v_grad_out
    return _transposed(lambda qkv: _parts(op, call, qkv, None), like, grads)
