# SPDX-License-Identifier: Apache-2.0
"""Settings of attention, its tensors in every layout, and its arguments as operators take them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.attention_kinds import kinds_of
from transformer_engine.plugin.conformance.cases import Draw


@dataclass(frozen=True)
class Setting:
    """Settings of an attention: all but the values of its tensors."""

    name: str
    layout: str = "bshd_bshd_bshd"
    mask: str = "no_mask"
    window: tuple[int, int] = (-1, -1)  # keys to the left and to the right; -1: all
    bias: str = "no_bias"
    bias_dims: str = "hqk"  # dims of the bias that are not 1, of "bhqk"
    softmax: str = "vanilla"
    batch: int = 2
    lengths: tuple[int, int] = (9, 12)  # the longest sequences of queries, of keys
    each: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # all of them, where they differ
    heads: tuple[int, int] = (4, 2)
    channels: tuple[int, int] = (16, 16)
    gaps: bool = False  # between packed sequences
    scale: float | None = None  # None: a bit more than 1 / sqrt(channels)
    whole: int = 0  # queries and keys are integers up to this one: their products are exact

    @property
    def kinds(self) -> tuple:
        """As the operators take them: layout, bias, mask, softmax, window."""
        mask = self.mask.removesuffix("_mask")
        return *kinds_of(self.layout, self.bias, mask, self.softmax), self.window


class Problem:
    """Tensors of an attention: queries, keys and values are `tensors`, in the layout."""

    def __init__(self, draw: Draw, setting: Setting, dtype: torch.dtype) -> None:
        self.setting, self.dtype = setting, dtype
        each = setting.each or tuple((n,) * setting.batch for n in setting.lengths)
        self.batch, heads = len(each[0]), setting.heads[0]
        sums = [torch.tensor([0, *lengths]).cumsum(0) for lengths in each]
        starts = [s + torch.arange(self.batch + 1) * 2 * setting.gaps for s in sums]
        self._rows = [int(s[-1]) for s in starts]
        self.counted = [s.to(draw.device, torch.int32) for s in sums]
        self.padded = [s.to(draw.device, torch.int32) if setting.gaps else None for s in starts]
        self.scale = setting.scale or 1.3 / math.sqrt(setting.channels[0])
        self.tensors = self._tensors(draw)
        self.bias = self.offset = None
        if setting.bias == "post_scale_bias":
            full = zip("bhqk", (self.batch, heads, *setting.lengths), strict=True)
            shape = [n if name in setting.bias_dims else 1 for name, n in full]
            self.bias = draw.normal(shape, dtype)
        if setting.softmax == "learnable":
            self.offset = draw.normal((1, heads, 1, 1), torch.float32)

    def _tensors(self, draw: Draw) -> list[Tensor]:
        """Three tensors, views of one where a number in the layout says so."""
        setting, made = self.setting, []
        for part in setting.layout.split("_"):
            keys = int(bool(made))
            sizes = {
                "b": self.batch,
                "s": setting.lengths[keys],
                "t": self._rows[keys],
                "h": setting.heads[keys],
                "d": setting.channels[int(len(made) == 2)],
            }
            shape = [int(c) if c.isdigit() else sizes[c] for c in part]
            whole = draw.normal(shape, self.dtype)
            if setting.whole:
                whole = (draw.uniform(shape) * (2 * setting.whole + 1)).floor() - setting.whole
                whole = whole.to(self.dtype)
            count = [i for i, c in enumerate(part) if c.isdigit()]
            made += whole.unbind(count[0]) if count else [whole]
        return made

    @property
    def added(self) -> list[Tensor]:
        """Bias and offset, where there are such."""
        return [t for t in (self.bias, self.offset) if t is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return (*self.tensors[0].shape[:-1], self.setting.channels[1])

    @property
    def depth(self) -> int:
        """Terms of the longest sum."""
        return max(*self.setting.lengths, *self.setting.channels)


def forward_arguments(
    problem: Problem, training: bool = True, top: bool = False, p: float = 0.0
) -> tuple:
    """Of `fused_attn_fwd`."""
    setting = problem.setting
    return (
        *setting.lengths, training, problem.scale, p, True, *setting.kinds, *problem.counted,
        *problem.tensors, problem.dtype, *problem.padded, None, None, None, None, problem.bias,
        problem.offset, None, 4, top,
    )  # fmt: skip


def backward_arguments(
    problem: Problem, out: Tensor, grad: Tensor, aux: list[Any], p: float = 0.0
) -> tuple:
    """Of `fused_attn_bwd`."""
    setting = problem.setting
    return (
        *setting.lengths, problem.scale, p, True, *setting.kinds, False, *problem.counted,
        *problem.tensors, out, grad, problem.dtype, problem.dtype, aux, *problem.padded,
        None, None, None,
    )  # fmt: skip
