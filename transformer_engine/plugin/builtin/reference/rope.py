# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and its transposed map; see `builtin.rope`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.core.ops import qkv_format_name
from transformer_engine.pytorch.cpp_extensions.values import exact


def _positions(
    t: Tensor, form: str, starts: Tensor | None, cu_seqlens: Tensor | None, ranks: tuple[int, int]
) -> Tensor:
    """Position of each token: [s, b], [b, s] or [tokens]; -1 for one of no sequence."""
    size, rank = ranks
    if form == "thd":
        limits = [int(each) // size for each in cu_seqlens.tolist()]
        found = torch.full(t.shape[:1], -1)
        for i, (first, end) in enumerate(zip(limits, limits[1:], strict=False)):
            start = 0 if starts is None else int(starts[i])
            found[first:end] = _of_rank(end - first, size, rank) + start
        return found.to(t.device)
    length, batch = (t.shape[0], t.shape[1]) if form == "sbhd" else (t.shape[1], t.shape[0])
    found = _of_rank(length, size, rank)[None].repeat(batch, 1).to(t.device)
    if starts is not None:
        found = found + starts.long()[:, None]
    return found.t() if form == "sbhd" else found


def _of_rank(length: int, size: int, rank: int) -> Tensor:
    """Positions of a sequence's tokens on a rank: two chunks of 2 * size."""
    at = torch.arange(length)
    if size == 1:
        return at
    half = length // 2
    return torch.where(at < half, at + rank * half, at + (2 * size - 2 - rank) * half)


def _rotated(t: Tensor, freqs: Tensor, positions: Tensor, interleaved: bool, form: str) -> Tensor:
    """Compute t cos + rot(t) sin over the first channels."""
    inside = (positions >= 0)[..., None, None]
    freqs = exact("rope", "freqs", freqs)
    if freqs.shape[1] > 1:  # of each batch entry
        entry = torch.arange(freqs.shape[1], device=t.device)
        angles = freqs[positions, entry if form == "sbhd" else entry[:, None]]
    else:
        angles = freqs[positions.clamp(min=0), 0]
    count = angles.shape[-1]
    turned, rest = t[..., :count].to(angles.dtype), t[..., count:]
    if interleaved:
        partners = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        partners = torch.cat((-second, first), -1)
    made = turned * angles.cos() + partners * angles.sin()
    return torch.cat((torch.where(inside, made, turned).to(t.dtype), rest), -1)


def _transposed(function: Callable[[Tensor], Any], like: Tensor, grads: Any) -> Tensor:
    """The transposed map of a linear one."""
    source = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        made = function(source)
    return torch.autograd.grad(made, source, grads)[0]


@operator
def fused_rope_forward(call: Any) -> Tensor:
    """Compute t cos + rot(t) sin over the first channels."""
    form, t = qkv_format_name("fused_rope_forward", call.qkv_format), call.input.detach()
    at = _positions(t, form, call.start_positions, call.cu_seqlens, (call.cp_size, call.cp_rank))
    return _rotated(t, call.freqs, at, call.interleaved, form)


@operator
def fused_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_rope_forward` without start positions."""
    form, grads = qkv_format_name("fused_rope_backward", call.qkv_format), call.output_grads
    at = _positions(grads, form, None, call.cu_seqlens, (call.cp_size, call.cp_rank))
    return _transposed(lambda t: _rotated(t, call.freqs, at, call.interleaved, form), grads, grads)


def _parts(call: Any, op: str, qkv: Tensor, starts: Tensor | None) -> tuple[Tensor, ...]:
    """Queries and keys of a projection, rotated, and values."""
    form, sizes = qkv_format_name(op, call.qkv_format), [int(n) for n in call.qkv_split_arg_list]
    at = _positions(qkv, form, starts, None, (call.cp_size, call.cp_rank))
    query, key, value = qkv.split(sizes, -1)
    query = query.reshape(*qkv.shape[:-2], -1, sizes[1])
    pairs = (query, call.q_freqs), (key, call.k_freqs)
    turned = (_rotated(t, freqs, at, call.interleaved, form) for t, freqs in pairs)
    return *turned, value.contiguous()


@operator
def fused_qkv_rope_forward(call: Any) -> tuple[Tensor, ...]:
    """Queries and keys, rotated, and values."""
    return _parts(call, "fused_qkv_rope_forward", call.qkv_input.detach(), call.start_positions)


@operator
def fused_qkv_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_qkv_rope_forward` without start positions."""
    op, key = "fused_qkv_rope_backward", call.k_grad_out
    like = key.new_empty(*key.shape[:-1], sum(call.qkv_split_arg_list))
    grads = call.q_grad_out, key, call.v_grad_out
    return _transposed(lambda qkv: _parts(call, op, qkv, None), like, grads)
