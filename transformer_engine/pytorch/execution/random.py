# SPDX-License-Identifier: Apache-2.0
"""Random numbers of dropouts and stochastic rounding: one (seed, offset) pair for each.

The pair is drawn on the device from torch's current generator, so that seeds, recompute, random
state trackers and captured graphs mean what they mean for torch's own operators. Kernels read it by
pointer; it is saved for the backward in place of a mask.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.execution import plan_ops, recompute
from transformer_engine.pytorch.torchside.modes import keep_result, real_tensors, selective


def _draw(like: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=like.device).random_()


plan_ops.define(
    "draw_pair(Tensor like) -> Tensor",
    _draw,
    lambda like: like.new_empty(2, dtype=torch.int64),
    (torch.Tag.nondeterministic_seeded,),
    keep_result,
)


plan_ops.define(
    "draw_pairs(Tensor like, int count) -> Tensor[]",
    lambda like, count: [_draw(like) for _ in range(count)],
    lambda like, count: [like.new_empty(2, dtype=torch.int64) for _ in range(count)],
    (torch.Tag.nondeterministic_seeded,),
    keep_result,
)


def draw_pairs(
    like: Tensor, count: int, fills: Sequence[Callable[[Tensor], Any] | None] = ()
) -> list[Tensor]:
    """Draw several pairs, in order: a compiler would reorder operators that draw one each.

    `fills` has for each pair a function that fills it, say from the state of a tracker, or None for
    torch's current generator; () where that draws all. Graphs of torch always use the latter.
    """
    if plan_ops.behind_operators(like):
        return torch.ops.transformer_engine.draw_pairs(like, count)
    if not selective():
        return _draw_all(like, count, fills)
    with real_tensors():
        return recompute.same_pairs(_draw_all(like, count, fills))


def _draw_all(like: Tensor, count: int, fills: Sequence) -> list[Tensor]:
    if not fills:
        return [_draw(like) for _ in range(count)]
    pairs = []
    for fill in fills:
        pairs.append(torch.empty(2, dtype=torch.int64, device=like.device))
        if fill is None:
            pairs[-1].random_()
        else:
            fill(pairs[-1])
    return pairs


def draw_pair(like: Tensor) -> Tensor:
    """Draw the (seed, offset) of one call, [2] int64, not negative, on the device of `like`."""
    if plan_ops.behind_operators(like):
        # An operator of our own: a compiler would draw other bits for torch's than eager code does.
        return torch.ops.transformer_engine.draw_pair(like)
    return draw_pairs(like, 1)[0]
