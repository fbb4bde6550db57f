# SPDX-License-Identifier: Apache-2.0
"""Random numbers of the library's dropouts: one (seed, offset) pair for each call.

The pair is drawn on the device from torch's current generator, so that seeds, recompute, random
state trackers and captured graphs mean what they mean for torch's own operators. Kernels read it by
pointer; it is saved for the backward in place of a mask.
"""

import torch
from torch import Tensor

from transformer_engine.pytorch import torch_ops


def _draw(like: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device=like.device).random_()


torch_ops.define(
    "draw_pair(Tensor like) -> Tensor",
    _draw,
    lambda like: like.new_empty(2, dtype=torch.int64),
    (torch.Tag.nondeterministic_seeded,),
)


def draw_pair(like: Tensor) -> Tensor:
    """Draw the (seed, offset) of one call, [2] int64, not negative, on the device of `like`."""
    if torch_ops.behind_operators(like):
        # An operator of our own: a compiler would draw other bits for torch's than eager code does.
        return torch.ops.transformer_engine.draw_pair(like)
    return _draw(like)
