# SPDX-License-Identifier: Apache-2.0
"""Tokens of sequences that are spread over ranks: which of them a step reads, and their order.

A rank r of n has two chunks of each sequence, r and 2 n - 1 - r of 2 n: its first half and its
second one. Steps see tensors as the operators do, [batch, tokens, heads, channels]. Where sequences
have one length a half is a slice. Packed sequences are read where they lie: a half is offsets and
lengths, and what is made of other tokens is 0 (of statistics -Inf), so steps of halves add up.
"""

import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.context_parallel import places_of


class Part(enum.IntEnum):
    """Of the tokens that a rank has of each sequence."""

    ALL = 0
    FIRST = 1
    SECOND = 2


def seen(form: str, tensor: Tensor) -> Tensor:
    """A tensor of a format as [batch, tokens, heads, channels]; packed, the batch is 1."""
    return tensor[None] if form == "thd" else tensor.transpose(0, 1) if form == "sbhd" else tensor


def shown(form: str, tensor: Tensor) -> Tensor:
    """Undo `seen`."""
    return tensor[0] if form == "thd" else tensor.transpose(0, 1) if form == "sbhd" else tensor


def tokens_first(form: str, tensor: Tensor) -> Tensor:
    """A tensor of a format with the tokens in the first dim; its own inverse."""
    return tensor.transpose(0, 1) if form == "bshd" else tensor


# ---- sequences of one length ---------------------------------------------------------------------


class DenseTokens:
    """Queries and keys of sequences of one length."""

    packed = False

    def rows(self, length: int, part: Part) -> slice:
        """Of the tokens of a rank, `length` of each sequence, those of a part."""
        half = length // 2
        return (slice(None), slice(half), slice(half, None))[part]

    def part(self, part: Part) -> Part:
        """The part that tensors of a step have."""
        return part

    def taken(self, tensor: Tensor, part: Part) -> Tensor:
        """The tokens of a part, as a view."""
        return tensor if part is Part.ALL else tensor[:, self.rows(tensor.shape[1], part)]

    def statistics(self, statistics: Tensor, part: Part) -> Tensor:
        """Their statistics [batch, heads, tokens], dense."""
        return statistics[..., self.rows(statistics.shape[-1], part)].contiguous()

    def fields(self, *parts: Any) -> dict[str, Any]:
        """Fields of the operators that say which tokens they are."""
        del parts
        return {}

    def weights(self, statistics: Tensor) -> Tensor:
        """Statistics as [batch, tokens, heads, 1], the dims of outputs."""
        return statistics.transpose(1, 2)[..., None]


# ---- packed sequences ----------------------------------------------------------------------------


class _Side(NamedTuple):
    """Packed queries, or keys, of all ranks."""

    lengths: Tensor  # [2 n, b] int32: real tokens of each chunk
    chunk: Tensor  # [b] int32: tokens of a chunk
    padded: Tensor  # [b + 1] int32: where sequences begin
    offsets: tuple[Tensor, Tensor]  # [b + 1] int32: where on a rank sequences, second halves begin
    longest: int  # bound of the tokens that a rank has of a sequence


class PackedTokens:
    """Queries and keys of packed sequences.

    Parameters
    ----------
    size : int
        Number of ranks.
    queries, keys : (Tensor, Tensor, int)
        Of each side the sums of the lengths of sequences and of what is padded, [b + 1] int32, and
        the bound of the latter's lengths, all of them of the tokens of all ranks.
    """

    packed = True

    def __init__(self, size: int, queries: tuple, keys: tuple) -> None:
        self._size = size
        self._queries = self._side(*queries)
        same = queries[0] is keys[0] and queries[1] is keys[1]
        self._keys = self._queries if same else self._side(*keys)

    def _side(self, cumulative: Tensor, padded: Tensor, longest: int) -> _Side:
        size = self._size
        starts, chunk = padded // size, padded.diff() // (2 * size)
        first = torch.arange(2 * size, dtype=torch.int32, device=padded.device)[:, None] * chunk
        lengths = torch.minimum((cumulative.diff() - first).clamp(min=0), chunk).int()
        halves = torch.cat((starts[:-1] + chunk, starts[-1:]))
        return _Side(lengths, chunk, padded, (starts, halves), -(-longest // (2 * size)) * 2)

    def rows(self, length: int, part: Part) -> slice:
        """All: as for what follows, the lengths of a step say what it reads."""
        del length, part
        return slice(None)

    def part(self, part: Part) -> Part:
        """All: what is not of a step is there."""
        del part
        return Part.ALL

    def taken(self, tensor: Tensor, part: Part) -> Tensor:
        """The tensor."""
        del part
        return tensor

    def statistics(self, statistics: Tensor, part: Part) -> Tensor:
        """The statistics [1, tokens, heads]."""
        del part
        return statistics

    def weights(self, statistics: Tensor) -> Tensor:
        """Statistics as [batch, tokens, heads, 1], the dims of outputs."""
        return statistics[..., None]

    def fields(self, rank: int, part: Part, of_keys: int, part_of_keys: Part) -> dict[str, Any]:
        """Fields for a part of the queries of one rank, and one of the keys of another."""
        made = {}
        for name, side, of, which in (
            ("query", self._queries, rank, part),
            ("key", self._keys, of_keys, part_of_keys),
        ):
            made[f"{name}_offsets"] = side.offsets[which is Part.SECOND]
            made[f"{name}_lengths"] = self._lengths(side, of, which)
        longest = self._queries.longest, self._keys.longest
        return {**made, "max_queries": longest[0], "max_keys": longest[1]}

    def fields_of_all(self, rank: int, part: Part, causal: bool) -> dict[str, Any]:
        """Fields for a part of the queries of one rank, and the keys of all in their order.

        Where it is `causal` those up to the last query of the part, which the diagonal ends at.
        """
        made = self.fields(rank, part, rank, part)
        made["key_offsets"] = self._keys.padded
        made["max_keys"] = self._size * self._keys.longest
        if not causal:
            return {**made, "key_lengths": self._keys.lengths.sum(0, dtype=torch.int32)}
        number = rank if part is Part.FIRST else 2 * self._size - 1 - rank
        before = number * self._keys.chunk
        return {**made, "key_lengths": made["query_lengths"] + before, "bottom_right": True}

    def _lengths(self, side: _Side, rank: int, part: Part) -> Tensor:
        first, second = side.lengths[rank], side.lengths[2 * self._size - 1 - rank]
        return (first + second, first, second)[part]


class PackedOrder:
    """Packed tokens of all ranks, and in order of sequences; arguments as of `_places`."""

    def __init__(self, padded: Tensor, size: int, tokens: int) -> None:
        self._size, self._at = size, _places(padded, size, tokens)

    def natural(self, parts: Tensor) -> Tensor:
        """[ranks, tokens of a rank, ...] as [tokens, ...] in the order of the sequences."""
        return parts.flatten(0, 1).index_select(0, self._at)

    def by_rank(self, tokens: Tensor) -> Tensor:
        """Undo `natural`."""
        made = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        return made.index_copy_(0, self._at, tokens).unflatten(0, (self._size, -1))


def _places(padded: Tensor, size: int, tokens: int) -> Tensor:
    """Where each of `tokens` packed tokens is in those of all ranks, one behind the other: int64.

    `padded` [b + 1] are the first tokens of sequences, whose lengths are multiples of 2 * size.
    Tokens behind the last one are dealt in order. The host reads nothing of the device.
    """
    limits, of_rank = padded.long(), tokens // size
    entry, place = places_of(limits, tokens)
    chunk = (limits.diff()[entry] // (2 * size)).clamp(min=1)
    number = place // chunk
    rank = torch.minimum(number, 2 * size - 1 - number)
    within = limits[entry] // size + place % chunk + chunk * (number >= size)
    # Behind the last sequence each rank has as many.
    spare = limits[-1] // size
    behind = torch.arange(tokens, device=padded.device) - limits[-1]
    count = (of_rank - spare).clamp(min=1)
    ends = behind >= 0
    rank = torch.where(ends, behind // count, rank)
    within = torch.where(ends, spare + behind % count, within)
    return rank * of_rank + within
