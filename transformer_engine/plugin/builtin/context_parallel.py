# SPDX-License-Identifier: Apache-2.0
"""Work of context parallelism on packed sequences between its steps, by torch.

A rank has an even number of tokens of each sequence: a first half and a second one. ``cu_seqlens``
[b + 1] int32 are the first token of each sequence on this rank, and their sum; tokens lie along
dim 0 of [tokens, heads, channels], or dim 1 of [2, tokens, heads, channels]. The logarithms of the
sums of exponentiated scores ("lse") are fp32 [heads, tokens] where they are packed, else
[b, heads, tokens of the longest sequence].
"""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.layouts import places_of
from transformer_engine.plugin.builtin.signatures import operator


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Tokens of packed sequences that a rank of context parallelism owns.

    Each sequence is cut into 2 * world_size chunks; rank r has chunk r and chunk
    2 * world_size - 1 - r. The result is [total_tokens / world_size] int32, on the device of
    `cu_seqlens`. ValueError for a length that is no multiple of 2 * world_size, or sequences that
    do not have `total_tokens`.
    """
    starts = cu_seqlens.tolist()
    pieces = []
    for start, end in zip(starts, starts[1:], strict=False):
        chunk, rest = divmod(end - start, 2 * world_size)
        if rest:
            raise ValueError(
                f"thd_get_partitioned_indices: a sequence of {end - start} tokens, expected a "
                f"multiple of {2 * world_size}"
            )
        for index in (rank, 2 * world_size - 1 - rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    found = torch.cat(pieces).to(cu_seqlens.device, torch.int32)
    if len(found) != total_tokens // world_size:
        raise ValueError(
            f"thd_get_partitioned_indices: total_tokens={total_tokens}, but the sequences of "
            f"cu_seqlens have {starts[-1] - starts[0]}"
        )
    return found


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
