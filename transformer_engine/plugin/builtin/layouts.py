# SPDX-License-Identifier: Apache-2.0
"""Copies from one layout to another, and work of context parallelism, by torch.

Each is little more than one copy, which no kernel makes cheaper.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.attention.context_parallel import places_of, tokens_of_rank
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


# ---- context parallelism -------------------------------------------------------------------------


# Work of context parallelism on packed sequences between its steps. A rank has an even number of
# tokens of each sequence: a first half and a second one. ``cu_seqlens`` [b + 1] int32 are the first
# token of each sequence on this rank, and their sum; tokens lie along dim 0 of [tokens, heads,
# channels], or dim 1 of [2, tokens, heads, channels]. The logarithms of the sums of exponentiated
# scores ("lse") are fp32 [heads, tokens] where they are packed, else [b, heads, tokens of the
# longest sequence].


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Tokens of packed sequences that a rank of context parallelism owns.

    Each sequence is cut into 2 * world_size chunks; rank r has chunk r and chunk
    2 * world_size - 1 - r. The result is [total_tokens / world_size] int32, on the device of
    `cu_seqlens`. ValueError for a length that is no multiple of 2 * world_size, sequences that do
    not have `total_tokens`, or no such rank.
    """
    op = "thd_get_partitioned_indices"
    return tokens_of_rank(op, cu_seqlens, total_tokens, world_size, rank)


def _half(cu_seqlens: Tensor, tokens: int, half: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token, sequence, place in its half) of each token of one half of all sequences.

    `tokens` are those of both halves.
    """
    limits = cu_seqlens.long()
    entry, place = places_of(limits // 2, tokens // 2)
    place = place + half * (limits.diff()[entry] // 2)
    return limits[entry] + place, entry, place


def _dim(op: str, tensor: Tensor) -> int:
    """Where the tokens are."""
    if tensor.dim() not in (3, 4):
        raise ValueError(f"{op}: shape {tuple(tensor.shape)}, expected 3 or 4 dims")
    return tensor.dim() - 3


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """The first (0) or second (1) halves of the sequences, one behind the other."""
    op = "thd_read_half_tensor"
    if half_idx not in (0, 1):
        raise ValueError(f"{op}: half_idx={half_idx}, expected 0 or 1")
    dim = _dim(op, tensor)
    return tensor.detach().index_select(dim, _half(cu_seqlens, tensor.shape[dim], half_idx)[0])


def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """The lse of second halves, [heads, n] packed, else [b, heads, n] with zeros behind the end.

    n is `second_half_lse_seqlen`.
    """
    if lse_packed:
        at, *_ = _half(cu_seqlens, 2 * second_half_lse_seqlen, 1)
        return lse.detach()[:, at]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // 2
    place = torch.arange(second_half_lse_seqlen, device=lse.device)
    inside = place < lengths[:, None]
    at = torch.where(inside, lengths[:, None] + place, 0)[:, None].expand(-1, lse.shape[1], -1)
    return torch.where(inside[:, None], lse.detach().gather(2, at), 0.0)


def _places_of_lse(
    cu_seqlens: Tensor, tokens: int, second_half: bool, packed: bool
) -> tuple[tuple, tuple]:
    """Indices of an lse of whole sequences and of that of a step, which give [tokens, heads]."""
    if second_half:
        at, entry, place = _half(cu_seqlens, tokens, 1)
        step = torch.arange(len(at), device=at.device)
        places = place, place - cu_seqlens.diff()[entry] // 2
    else:
        at = step = torch.arange(tokens, device=cu_seqlens.device)
        entry, place = places_of(cu_seqlens, tokens)
        places = place, place
    if packed:
        return (slice(None), at), (slice(None), step)
    return (entry, slice(None), places[0]), (entry, slice(None), places[1])


def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """Add the sums of a step that had second halves alone to those in `lse`, in place."""
    tokens = lse.shape[1] if lse_packed else int(cu_seqlens[-1])
    whole, step = _places_of_lse(cu_seqlens, tokens, True, lse_packed)
    lse.detach()[whole] = torch.logaddexp(lse.detach()[whole], lse_per_step.detach()[step])


@operator
def thd_out_correction(call: Any) -> None:
    """Add a step's output to `out`, in place: times exp(lse_per_step - lse).

    `out` is [tokens, heads, channels]; `out_per_step` has those tokens, or with `only_second_half`
    those of the second halves.
    """
    out, lse, packed = call.out.detach(), call.lse, call.lse_packed
    given = call.cu_seqlens, out.shape[0]
    whole, step = _places_of_lse(*given, call.only_second_half, packed)
    weights = (call.lse_per_step[step].float() - lse[whole].float()).exp()
    weights = weights.t() if packed else weights  # [tokens, heads]
    added = call.out_per_step.detach().float() * weights[..., None]
    at = torch.arange(out.shape[0], device=out.device)
    if call.only_second_half:
        at, *_ = _half(*given, 1)
    out.index_copy_(0, at, (out.index_select(0, at).float() + added).to(out.dtype))


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Bring a step's gradient into `grad`, in place, for each half: "add", "copy" or "none".

    With "none" for a half `grad_per_step` has the tokens of the other one alone. ValueError for
    another word, or "none" twice.
    """
    op = "thd_grad_correction"
    words = first_half, second_half
    if set(words) - {"add", "copy", "none"} or words == ("none", "none"):
        raise ValueError(f"{op}: first_half, second_half = {words}, expected add, copy or none")
    dim = _dim(op, grad)
    tokens = grad.shape[dim]
    alone = "none" in words
    for half, word in enumerate(words):
        if word == "none":
            continue
        at, *_ = _half(cu_seqlens, tokens, half)
        source = grad_per_step.detach()
        source = source if alone else source.index_select(dim, at)
        if word == "add":
            source = (grad.detach().index_select(dim, at).float() + source.float()).to(grad.dtype)
        grad.detach().index_copy_(dim, at, source.to(grad.dtype))
