# SPDX-License-Identifier: Apache-2.0
"""What softmax and attention make of scores, and which query attends which key.

All computes in the dtype of its arguments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.definitions.layers import cap_scores
from transformer_engine.pytorch.attention.masks import alibi_bias, padding_mask, window_mask
from transformer_engine.pytorch.attention.problem import Sequences, to_packed, to_padded

INF = torch.inf


class Weighed(NamedTuple):
    """A softmax over the last dim."""

    weights: Tensor  # 0 where the score is -Inf
    top: Tensor  # [.., 1] the largest score, which all were lowered by; 0 where there is none
    total: Tensor  # [.., 1] sum of the exponentials of the lowered scores and of the sink

    def log_sums(self, empty: float) -> Tensor:
        """The logarithms of the sums of exponentiated scores [..]; `empty` where none is added."""
        sums = self.top + self.total.log()
        return torch.where(self.total == 0.0, empty, sums)[..., 0]


def weigh(scores: Tensor, sink: Tensor | None = None) -> Weighed:
    """Softmax of [batch, heads, queries, keys], in which -Inf forbids a key.

    NaN or +Inf make all of their row NaN but for forbidden keys. A sink [heads] is a score of each
    row without a key.
    """
    top = scores.detach().new_full((*scores.shape[:-1], 1), -INF)
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(scores.dtype)[:, None, None]
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == INF, torch.nan, torch.where(top == -INF, 0.0, top))
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    weights = powers / torch.where(total == 0.0, 1.0, total)
    return Weighed(torch.where(scores == -INF, 0.0, weights), top, total)


def softmax_gradient(weights: Tensor, grad: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Gradient of scores before their scale, and the means [.., 1] of `grad`, by the weights."""
    mean = (grad * weights).sum(-1, keepdim=True)
    return scale * (weights * (grad - mean)), mean


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product, to which a 0 of `a` adds nothing, be what it multiplies NaN or Inf."""
    width, finite = b.shape[-1], b.nan_to_num(0.0, 0.0, 0.0)
    left, right = a.detach(), b.detach()
    is_inf = right.isinf()
    found = (left != 0.0).to(a.dtype) @ torch.cat((right.isnan(), is_inf), -1).to(a.dtype)
    nans, infs = found[..., :width], found[..., width:]
    signs = torch.where(is_inf, right.sign(), 0.0)
    balance = left.sign().nan_to_num(0.0) @ signs  # positive ones less negative ones
    unknown = (nans > 0.0) | (infs > balance.abs())
    special = torch.where(balance > 0.0, INF, torch.where(balance < 0.0, -INF, 0.0))
    return a @ finite + torch.where(unknown, torch.nan, special)


# ---- sequences -----------------------------------------------------------------------------------


class Side(NamedTuple):
    """The sequences of queries, or of keys."""

    lengths: Tensor  # [batch] int64
    longest: int
    tokens: int  # of the tensors
    valid: Tensor | None = None  # [batch]: lengths and places that can be; None: all
    rows: Tensor | None = None  # of packed sequences, as `Sequences.token_rows` has them
    first: Tensor | None = None  # the token with which each packed sequence begins, int64

    def pad(self, tensor: Tensor) -> Tensor:
        """[batch, length, heads, ..] or packed [1, tokens, heads, ..] as [batch, heads, ..]."""
        tensor = tensor if self.rows is None else to_padded(tensor[0], self.rows)
        return tensor.transpose(1, 2)

    def unpad(self, tensor: Tensor, wrong: Tensor | None, fill: float = 0.0) -> Tensor:
        """And back: NaN of the sequences that are `wrong`; `fill` of tokens of no sequence."""
        tensor = tensor.transpose(1, 2)
        if self.rows is not None:
            tensor = to_packed(tensor, self.rows, self.tokens, fill)[None]
        if wrong is None:
            return tensor
        spoilt = self._tokens_of(wrong)
        spoilt = spoilt.view(*spoilt.shape, *(1,) * (tensor.dim() - 2))
        return torch.where(spoilt, torch.nan, tensor)

    def _tokens_of(self, sequences: Tensor) -> Tensor:
        """Which tokens are of these sequences: [batch, 1], or [1, tokens] of packed ones."""
        if self.first is None:
            return sequences[:, None]
        token, first = torch.arange(self.tokens, device=self.first.device), self.first[:, None]
        own = (token >= first) & (token < first + self.lengths[:, None])
        return (own & sequences[:, None]).any(0)[None]


def side_of(fields: Mapping[str, Any], name: str, tensor: Tensor) -> Side:
    """The sequences of a tensor; `name` is "query" or "key" in the fields of `_core.attention`."""
    offsets, lengths = fields.get(f"{name}_offsets"), fields.get(f"{name}_lengths")
    batch, tokens = tensor.shape[:2]
    if offsets is not None:
        longest = fields["max_queries" if name == "query" else "max_keys"]
        sequences = Sequences(offsets, lengths, longest)
        counts, rows = sequences.token_counts().long(), sequences.token_rows(tokens)
        valid = sequences.valid(tokens)
        return Side(counts, longest, tokens, valid, rows, offsets[:-1].long())
    if lengths is None:
        return Side(torch.full((batch,), tokens, device=tensor.device), tokens, tokens)
    valid = (lengths >= 0) & (lengths <= tokens)
    return Side(lengths.long(), tokens, tokens, valid)


def wrong_of(queries: Side, keys: Side) -> Tensor | None:
    """Which sequences can not be, [batch]; None: none."""
    found = [~side.valid for side in (queries, keys) if side.valid is not None]
    return torch.stack(found).any(0) if found else None


# ---- scores --------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """What the queries of a call may attend."""

    outside: Tensor  # [batch, 1, queries, 1]: not a query
    masked: Tensor  # [batch, 1 or heads, queries, keys]
    diagonal: Tensor  # [batch, 1, 1, 1]: the key on that of query 0


def limits_of(fields: Mapping[str, Any], queries: Side, keys: Side) -> Limits:
    """Lengths, window and mask of a call of `_core.attention`."""
    counts, diagonal = (queries.longest, keys.longest), fields.get("diagonal", 0)
    shift = (keys.lengths - queries.lengths)[:, None, None, None] * fields["bottom_right"]
    outside = padding_mask(queries.lengths, queries.longest).transpose(2, 3)
    masked = outside | padding_mask(keys.lengths, keys.longest)
    window = window_mask((fields["window_left"], fields["window_right"]), shift + diagonal, *counts)
    for more in (window, None if fields.get("mask") is None else fields["mask"] != 0):
        masked = masked if more is None else masked | more
    return Limits(outside, masked, shift + diagonal)


def scores_of(
    fields: Mapping[str, Any], query: Tensor, key: Tensor, limits: Limits
) -> tuple[Tensor, Tensor | None]:
    """Scores [batch, heads, queries, keys], -Inf where masked, and the slope of their cap.

    Of queries and keys [batch, heads, length, channels].
    """
    queries, keys = query.shape[2], key.shape[2]
    scores, slope = fields["scale"] * (query @ key.transpose(2, 3)), None
    if fields.get("softcap"):
        scores, slope = cap_scores(scores, fields["softcap"])
    if fields.get("bias") is not None:
        scores = scores + fields["bias"][..., :queries, :keys].to(query.dtype)
    if fields.get("slopes") is not None:
        scores = scores + alibi_bias(fields["slopes"], queries, keys, limits.diagonal)
    return scores.masked_fill(limits.masked, -INF), slope
