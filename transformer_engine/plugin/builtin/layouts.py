# SPDX-License-Identifier: Apache-2.0
"""Copies from one layout to another, by torch: each is one copy, which no kernel makes cheaper."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import checked


def swap_first_dims(tensor: Tensor, *, out: Tensor) -> Tensor:
    """Copy [a, b, ...] to [b, a, ...], into `out`, which is returned; a new one where it is None.

    ValueError for less than two dims, or another shape of `out`.
    """
    if tensor.dim() < 2:
        raise ValueError(f"swap_first_dims: tensor: shape {tuple(tensor.shape)}, expected 2 dims")
    swapped = tensor.detach().transpose(0, 1)
    if out is None:
        return swapped.contiguous()
    if out.shape != swapped.shape:
        raise ValueError(
            f"swap_first_dims: out: shape {tuple(out.shape)}, expected {tuple(swapped.shape)}"
        )
    out.detach().copy_(swapped)
    return out


def fa_prepare_fwd(qkvi: Tensor) -> Tensor:
    """Queries, keys and values [3, b, s, heads, d] of memory [s, b, heads, 3 d].

    `qkvi` are the queries in that memory: a view [s, b, heads, d] whose heads are 3 d apart.
    ValueError for another one, TypeError for no tensor.
    """
    qkvi = checked("fa_prepare_fwd", "qkvi", qkvi)
    if qkvi.dim() != 4 or qkvi.stride(3) != 1 or qkvi.stride(2) != 3 * qkvi.shape[3]:
        raise ValueError(
            f"fa_prepare_fwd: qkvi: shape {tuple(qkvi.shape)}, strides {qkvi.stride()}: expected "
            "[s, b, heads, d], a view of the first of [s, b, heads, 3 d]"
        )
    d = qkvi.shape[3]
    whole = qkvi.as_strided((*qkvi.shape[:3], 3, d), (*qkvi.stride()[:3], d, 1))
    return whole.permute(3, 1, 0, 2, 4).contiguous()


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[s, b, heads, 3 d] of gradients [b, s, heads, d]: what `fa_prepare_fwd` has taken apart."""
    if not q.shape == k.shape == v.shape or q.dim() != 4:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"fa_prepare_bwd: q, k, v: shapes {shapes}: expected three of 4 dims")
    return torch.cat([t.detach().transpose(0, 1) for t in (q, k, v)], dim=-1)


# ---- packed sequences ------------------------------------------------------------------------


def places_of(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence of each token, and its place in that."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    limits = cu_seqlens.long()
    entry = torch.searchsorted(limits[1:].contiguous(), at, right=True).clamp(max=len(limits) - 2)
    return entry, at - limits[entry]


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Packed tokens [t, ...] as [b, max_seq_len, ...], zeros behind the end of each sequence.

    `cu_seqlens` [b + 1] int32 are the first token of each sequence, and their sum; tokens behind
    that are left out.
    """
    entry, place = places_of(cu_seqlens, tensor.shape[0])
    inside = place < (cu_seqlens[1:] - cu_seqlens[:-1])[entry]
    made = tensor.new_zeros(b * max_seq_len + 1, *tensor.shape[1:])
    rows = torch.where(inside & (place < max_seq_len), entry * max_seq_len + place, len(made) - 1)
    made.index_copy_(0, rows, tensor.detach())
    return made[:-1].view(b, max_seq_len, *tensor.shape[1:])


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """The tokens of sequences, [b, s, ...], packed to [t, ...]; zeros behind the last one."""
    entry, place = places_of(cu_seqlens, t)
    length = tensor.shape[1]
    inside = place < (cu_seqlens[1:] - cu_seqlens[:-1])[entry].clamp(max=length)
    rows = torch.where(inside, entry * length + place, 0)
    made = tensor.detach().reshape(-1, *tensor.shape[2:]).index_select(0, rows)
    return made.masked_fill_(~inside.view(-1, *[1] * (made.dim() - 1)), 0)


# ---- rows of groups --------------------------------------------------------------------------


def _row_groups(
    op: str, call: Any, of_output: Sequence[int], rows: Sequence[int], room: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each group of `input` and of `output`; ValueError where the lists do not fit."""
    if len(rows) != len(room) or any(n > m for n, m in zip(rows, room, strict=True)):
        raise ValueError(f"{op}: groups of {list(rows)} rows, with room for {list(room)}")
    parts = []
    for name, each in (("input", call.input_row_list), ("output", of_output)):
        tensor = getattr(call, name).detach()
        if sum(each) != tensor.shape[0]:
            raise ValueError(f"{op}: {name} of {tensor.shape[0]} rows, the list has {list(each)}")
        parts.append(tensor.split(list(each)))
    return zip(*parts, strict=True)


@operator
def fused_multi_row_padding(call: Any) -> None:
    """Copy groups of rows [sum of the first list, columns] to places with room behind them.

    `output` has as many rows as the second list adds up to; rows behind a group become 0.
    ValueError where the lists do not fit.
    """
    op, rows, room = "fused_multi_row_padding", call.input_row_list, call.padded_input_row_list
    for group, place in _row_groups(op, call, room, rows, room):
        place[: len(group)].copy_(group)
        place[len(group) :].zero_()


@operator
def fused_multi_row_unpadding(call: Any) -> None:
    """Undo `fused_multi_row_padding`: `input` has the rows of the first list."""
    op, rows, room = "fused_multi_row_unpadding", call.unpadded_input_row_list, call.input_row_list
    for place, group in _row_groups(op, call, rows, rows, room):
        group.copy_(place[: len(group)])
