# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding and its transposed map; see `builtin.rope`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.core.ops import qkv_format_name


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
    inside = (positions >= 0)[..., None, None]
    if freqs.shape[1] > 1:  # of each batch entry
        entry = torch.arange(freqs.shape[1], device=t.device)
        angles = freqs[positions, entry if form == "sbhd" else entry[:, None]].float()
    else:
        angles = freqs[positions.clamp(min=0), 0].float()
    count = angles.shape[-1]
    turned, rest = t[..., :count].float(), t[..., count:]
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
    """Compute t cos + rot(t) sin over the first channels."""
    form = qkv_format_name("fused_rope_forward", qkv_format)
    at = _positions(input, form, start_positions, cu_seqlens, (cp_size, cp_rank))
    return _rotated(input.detach(), freqs.detach(), at, interleaved, form)


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
    at = _positions(output_grads, form, None, cu_seqlens, (cp_size, cp_rank))
    run = lambda t: _rotated(t, freqs.detach(), at, interleaved, form)  # noqa: E731
    return _transposed(run, output_grads, output_grads)


def _parts(
    qkv: Tensor, freqs: tuple, sizes: Sequence[int], at: Tensor, interleaved: bool, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv.split([int(size) for size in sizes], -1)
    query = query.reshape(*qkv.shape[:-2], -1, sizes[1])
    turned = (
        _rotated(t, f, at, interleaved, form) for t, f in zip((query, key), freqs, strict=True)
    )
    return *turned, value.contiguous()


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
    """Queries and keys, rotated, and values."""
    form = qkv_format_name("fused_qkv_rope_forward", qkv_format)
    at = _positions(qkv_input, form, start_positions, None, (cp_size, cp_rank))
    freqs = q_freqs.detach(), k_freqs.detach()
    return _parts(qkv_input.detach(), freqs, qkv_split_arg_list, at, interleaved, form)


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
    at = _positions(k_grad_out, form, None, None, (cp_size, cp_rank))
    whole = k_grad_out.new_empty(*k_grad_out.shape[:-1], sum(qkv_split_arg_list))
    freqs = q_freqs.detach(), k_freqs.detach()
    run = lambda qkv: _parts(qkv, freqs, qkv_split_arg_list, at, interleaved, form)  # noqa: E731
    return _transposed(run, whole, (q_grad_out, k_grad_out, v_grad_out))
