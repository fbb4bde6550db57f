# SPDX-License-Identifier: Apache-2.0
"""Packed sequences (thd): where they lie, and the same tokens as a padded batch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention import masks
from transformer_engine.pytorch.attention.options import AttentionOptions

_NAME = "DotProductAttention"


class Sequences(NamedTuple):
    """The queries, or the keys, of packed sequences."""

    offsets: Tensor  # [batch + 1] int32: the token with which each begins
    lengths: Tensor | None  # [batch] int32; None: each ends where the next one begins
    longest: int  # a bound of the lengths

    def ends(self) -> Tensor:
        """Their lengths."""
        return self.offsets[1:] - self.offsets[:-1] if self.lengths is None else self.lengths

    def rows(self, tokens: int) -> Tensor:
        """Which token each row of a padded batch is [batch, longest]; `tokens`: none."""
        row = torch.arange(self.longest, device=self.offsets.device)
        is_token = row < self.ends()[:, None]
        return torch.where(is_token, (self.offsets[:-1, None] + row).clamp(0, tokens), tokens)

    def fit(self, tokens: int) -> Tensor:
        """Whether each lies within its bound and its place among so many tokens, [batch] bool."""
        first, after, lengths = self.offsets[:-1], self.offsets[1:], self.ends()
        is_long = (lengths < 0) | (lengths > self.longest)
        return ~(is_long | (first < 0) | (first + lengths > after) | (after > tokens))


def sizes_of(options: AttentionOptions, queries: int, keys: int) -> tuple[int, int, int]:
    """(sequences, bound of their queries, bound of their keys) of so many tokens of each.

    Bounds that are not given are read from the device, and rounded up to a multiple of 64.
    ValueError for offsets that are missing or have another dtype or shape.
    """
    of_queries, of_keys = _cumulative(options, queries, keys)
    bounds = options.max_seqlen_q, options.max_seqlen_kv
    if of_keys is of_queries and bounds[1] is None:
        bounds = bounds[0], bounds[0]
    most = [
        _longest(cumulative) if bound is None else int(bound)
        for cumulative, bound in zip((of_queries, of_keys), bounds, strict=True)
    ]
    return of_queries.shape[0] - 1, *most


def starts_of(options: AttentionOptions) -> tuple[Tensor | None, Tensor | None]:
    """The tokens with which the sequences of queries and of keys begin, as they are given."""
    given = options.cu_seqlens_q, options.cu_seqlens_kv
    padded = options.cu_seqlens_q_padded, options.cu_seqlens_kv_padded
    queries, keys = (b if a is None else a for a, b in zip(padded, given, strict=True))
    return queries, queries if given[1] is None and padded[1] is None else keys


def sequences_of(
    options: AttentionOptions, sizes: tuple[int, ...], tokens: tuple[int, int]
) -> tuple[Sequences, Sequences]:
    """Queries and keys of a call, of `sizes` (batch, heads, bound of queries, bound of keys)."""
    cumulative = _cumulative(options, *tokens)
    padded = [options.cu_seqlens_q_padded, options.cu_seqlens_kv_padded]
    if cumulative[1] is cumulative[0] and padded[1] is None:
        padded[1] = padded[0]
    queries = _sequences(cumulative[0], padded[0], sizes[2], "q")
    # Lengths that are one object say that queries and keys have one bound, too: see `Limits`.
    if cumulative[1] is cumulative[0] and padded[1] is padded[0] and sizes[2] == sizes[3]:
        return queries, queries
    return queries, _sequences(cumulative[1], padded[1], sizes[3], "kv")


def _cumulative(options: AttentionOptions, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """The sums of lengths of queries and keys; one object where one stands for both."""
    of_queries, of_keys = options.cu_seqlens_q, options.cu_seqlens_kv
    if of_queries is None:
        raise ValueError(
            f"{_NAME}: cu_seqlens_q: None, with qkv_format='thd', which needs cu_seqlens_q: the "
            "sums of the lengths, torch.int32 [batch + 1]"
        )
    if of_keys is None:
        if queries != keys:
            raise ValueError(
                f"{_NAME}: cu_seqlens_kv: None, with {queries} queries, {keys} keys: give the "
                "lengths of the keys"
            )
        of_keys = of_queries
    _check(of_queries, None, "cu_seqlens_q")
    if of_keys is not of_queries:
        _check(of_keys, of_queries.shape[0], "cu_seqlens_kv")
    return of_queries, of_keys


def _check(cumulative: Any, length: int | None, label: str) -> None:
    """Raise for what is no tensor (TypeError), or no int32 vector of a length (ValueError)."""
    masks.check_tensor(cumulative, label)
    if (
        cumulative.dtype is not torch.int32
        or cumulative.dim() != 1
        or cumulative.shape[0] != (length or max(cumulative.shape[0], 1))
    ):
        expected = "[batch + 1]" if length is None else f"[batch + 1] = [{length}]"
        raise ValueError(
            f"{_NAME}: {label}: {cumulative.dtype} of shape {tuple(cumulative.shape)}, expected "
            f"torch.int32 {expected}"
        )


def _longest(cumulative: Tensor) -> int:
    if cumulative.shape[0] < 2:
        return 0
    return -(-int((cumulative[1:] - cumulative[:-1]).max()) // 64) * 64


def _sequences(cumulative: Tensor, padded: Tensor | None, longest: int, side: str) -> Sequences:
    if padded is None or padded is cumulative:
        return Sequences(cumulative, None, longest)
    _check(padded, cumulative.shape[0], f"cu_seqlens_{side}_padded")
    return Sequences(padded, cumulative[1:] - cumulative[:-1], longest)


# ---- as a padded batch ---------------------------------------------------------------------------


def to_padded(tensor: Tensor, rows: Tensor) -> Tensor:
    """[tokens, ...] as [batch, longest, ...], with 0 where there is no token; see `rows`."""
    return torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))[rows]


def to_packed(tensor: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """The inverse, with 0 for tokens of no sequence."""
    packed = tensor.new_zeros(tokens + 1, *tensor.shape[2:])
    return packed.index_copy(0, rows.flatten(), tensor.flatten(0, 1))[:tokens]
