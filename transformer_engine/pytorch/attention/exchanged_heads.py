# SPDX-License-Identifier: Apache-2.0
"""Heads for tokens: each rank of a group gets all tokens of its part of the heads ("a2a").

Any attention runs over these as over those of one rank; its output goes back the same way. The
gradient of an exchange is the other one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed as dist

from transformer_engine.pytorch.attention.chunks import tokens_first
from transformer_engine.pytorch.attention.hops import exchange
from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.torchside.collectives import as_bytes, gather_rows

# ---- sequences of one length ---------------------------------------------------------------------


class DenseHeads:
    """Exchanges of tensors of a format whose sequences have one length.

    Chunks go straight to their places, so each tensor is copied once: in front of what is sent to
    get tokens, or behind what comes to get heads.
    """

    def __init__(self, form: str, group: Any) -> None:
        self._form, self._group = form, group
        self._size, self._rank = group.size(), group.rank()
        self._others = [(self._rank + n) % self._size for n in range(1, self._size)]

    def _chunks(self, tokens: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """What a rank has of all tokens [tokens, ...]."""
        chunks = tokens.chunk(2 * self._size)
        return chunks[rank], chunks[-1 - rank]

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All tokens of this rank's part of the heads."""
        made, sent, into = [], [], []
        for tensor in tensors:
            parts = tokens_first(self._form, tensor).unflatten(-2, (self._size, -1)).unbind(-3)
            tokens, *rest = parts[0].shape
            whole = tensor.new_empty(tokens * self._size, *rest)
            for other in self._others:
                sent += [(other, half) for half in parts[other].contiguous().chunk(2)]
                into += [(other, half) for half in self._chunks(whole, other)]
            own = zip(self._chunks(whole, self._rank), parts[self._rank].chunk(2), strict=True)
            for place, half in own:
                place.copy_(half)
            made.append(whole)
        exchange(self._group, sent, into).wait()
        return [tokens_first(self._form, each) for each in made]

    def to_tokens(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All heads of this rank's tokens."""
        made, sent, into, found = [], [], [], []
        for tensor in tensors:
            whole = tokens_first(self._form, tensor).contiguous()
            tokens, batch, *rest = whole.shape
            both = tensor.new_empty(tokens // self._size, batch, self._size, *rest)
            for other in self._others:
                part = both.new_empty(both.shape[0], batch, *rest)
                sent += [(other, half) for half in self._chunks(whole, other)]
                into += [(other, half) for half in part.chunk(2)]
                found.append((both[:, :, other], part))
            own = both[:, :, self._rank].chunk(2)
            for place, half in zip(own, self._chunks(whole, self._rank), strict=True):
                place.copy_(half)
            made.append(both)
        exchange(self._group, sent, into).wait()
        for place, part in found:
            place.copy_(part)
        return [tokens_first(self._form, each.flatten(2, 3)) for each in made]


# ---- packed sequences ----------------------------------------------------------------------------


class PackedHeads:
    """Exchanges of packed tensors, whose tokens lie as `chunks.PackedOrder` of each says."""

    def __init__(self, orders: Sequence, group: Any) -> None:
        self._orders, self._group = orders, group

    def _all_to_all(self, parts: list[Tensor]) -> list[Tensor]:
        """Of tensors [ranks, ...] the rows of each rank, from all: one collective."""
        sent = torch.cat([each.flatten(1) for each in parts], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=self._group)
        rows = received.split([each[0].numel() for each in parts], 1)
        return [row.unflatten(1, each.shape[1:]) for row, each in zip(rows, parts, strict=True)]

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All tokens of this rank's part of the heads."""
        size = self._group.size()
        made = self._all_to_all([t.unflatten(-2, (size, -1)).movedim(-3, 0) for t in tensors])
        return [order.natural(each) for order, each in zip(self._orders, made, strict=False)]

    def to_tokens(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All heads of this rank's tokens."""
        pairs = zip(self._orders, tensors, strict=False)
        made = self._all_to_all([order.by_rank(each) for order, each in pairs])
        return [each.movedim(0, -3).flatten(-3, -2) for each in made]


# ---- calls of autograd ---------------------------------------------------------------------------


class _Exchange:
    """One exchange; see `execution.autograd.Call`."""

    traced = False

    def __init__(self, forth: bool, way: DenseHeads | PackedHeads) -> None:
        self.label = "heads_for_tokens" if forth else "tokens_for_heads"
        ways = (way.to_heads, way.to_tokens) if forth else (way.to_tokens, way.to_heads)
        self.forward, self.backward = ways

    def run_forward(self, tensors: tuple) -> tuple[Any, tuple]:
        made = self.forward(tensors)
        return made[0] if len(made) == 1 else tuple(made), ()

    def run_backward(self, grads: tuple, saved: tuple) -> tuple:
        del saved
        return None, *self.backward(grads)


class _OwnHeads:
    """The part of [heads] that a rank has; all get the gradient; see `execution.autograd.Call`."""

    label = "own_heads"
    traced = False

    def __init__(self, group: Any) -> None:
        self.group = group

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return tensors[0].chunk(self.group.size())[self.group.rank()].clone(), ()

    def run_backward(self, grads: tuple, saved: tuple) -> tuple:
        del saved
        return None, gather_rows(grads[0], self.group)[0]


def heads_for_tokens(tensors: Sequence[Tensor], way: DenseHeads | PackedHeads) -> tuple:
    """Queries, keys and values of all tokens and a part of the heads, for those of a rank.

    Tensors are [.., heads, channels]; the ranks divide the heads. Differentiable.
    """
    return run_call(_Exchange(True, way), *tensors)


def tokens_for_heads(tensor: Tensor, way: DenseHeads | PackedHeads) -> Tensor:
    """Undo `heads_for_tokens` for what has the tokens of the queries."""
    return run_call(_Exchange(False, way), tensor)


def own_heads(tensor: Tensor, group: Any) -> Tensor:
    """The part of [heads] that this rank has; each gets the gradient of all. Differentiable."""
    return run_call(_OwnHeads(group), tensor)
