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
from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.torchside.collectives import as_bytes, gather_rows


def _all_to_all(parts: list[Tensor], group: Any) -> list[Tensor]:
    """Of tensors [ranks, ...] the rows of each rank, from all: one collective."""
    sent = torch.cat([each.flatten(1) for each in parts], 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=group)
    rows = received.split([each[0].numel() for each in parts], 1)
    return [row.unflatten(1, each.shape[1:]) for row, each in zip(rows, parts, strict=True)]


def _to_heads(tensors: Sequence[Tensor], form: str, orders: Sequence, group: Any) -> list[Tensor]:
    size = group.size()
    first = [tokens_first(form, each).unflatten(-2, (size, -1)).movedim(-3, 0) for each in tensors]
    made = _all_to_all(first, group)
    pairs = zip(orders, made, strict=True)
    return [tokens_first(form, order.natural(each)) for order, each in pairs]


def _to_tokens(tensors: Sequence[Tensor], form: str, orders: Sequence, group: Any) -> list[Tensor]:
    pairs = zip(orders, tensors, strict=True)
    first = [order.by_rank(tokens_first(form, each)) for order, each in pairs]
    made = _all_to_all(first, group)
    return [tokens_first(form, each.movedim(0, -3).flatten(-3, -2)) for each in made]


class _Exchange:
    """One exchange; see `execution.autograd.Call`."""

    traced = False

    def __init__(self, forth: bool, form: str, orders: Sequence, group: Any) -> None:
        self.label = "heads_for_tokens" if forth else "tokens_for_heads"
        ways = (_to_heads, _to_tokens) if forth else (_to_tokens, _to_heads)
        self.forward, self.backward = ways
        self.given = form, orders, group

    def run_forward(self, tensors: tuple) -> tuple[Any, tuple]:
        made = self.forward(tensors, *self.given)
        return made[0] if len(made) == 1 else tuple(made), ()

    def run_backward(self, grads: tuple, saved: tuple) -> tuple:
        del saved
        return None, *self.backward(grads, *self.given)


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


def heads_for_tokens(tensors: Sequence[Tensor], form: str, orders: Sequence, group: Any) -> tuple:
    """Queries, keys and values of all tokens and a part of the heads, for those of a rank.

    `form` is the format of the tensors [.., heads, channels], `orders` how tokens of each lie
    (`chunks.DenseOrder` or `PackedOrder`). The ranks divide the heads. Differentiable.
    """
    return run_call(_Exchange(True, form, orders, group), *tensors)


def tokens_for_heads(tensor: Tensor, form: str, order: Any, group: Any) -> Tensor:
    """Undo `heads_for_tokens` for one tensor."""
    return run_call(_Exchange(False, form, (order,), group), tensor)


def own_heads(tensor: Tensor, group: Any) -> Tensor:
    """The part of [heads] that this rank has; each gets the gradient of all. Differentiable."""
    return run_call(_OwnHeads(group), tensor)
