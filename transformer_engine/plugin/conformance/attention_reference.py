# SPDX-License-Identifier: Apache-2.0
"""Attention in float64, sequence by sequence, and its tensors in every layout."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Draw

__all__ = ["Problem", "Setting", "slopes"]


@dataclass(frozen=True)
class Setting:
    """What an attention is, but for the values of its tensors."""

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
    def packed(self) -> bool:
        """Sequences lie one behind the other."""
        return self.layout.startswith("t")


class Problem:
    """Tensors of an attention and its results in float64.

    Queries, keys and values are `tensors`, in the layout; `sequences` takes one apart into
    [heads, tokens, channels] of each sequence, without what lies between or behind them.
    """

    def __init__(self, draw: Draw, setting: Setting, dtype: torch.dtype) -> None:
        self.setting, self.dtype, self.device = setting, dtype, draw.device
        each = setting.each or tuple((n,) * setting.batch for n in setting.lengths)
        self.each = each
        sums = [torch.tensor([0, *lengths]).cumsum(0) for lengths in each]
        self.counted = [s.to(draw.device, torch.int32) for s in sums]
        apart = torch.arange(len(each[0]) + 1) * 2 * setting.gaps
        self.starts = [s + apart for s in sums]
        self.padded = [
            s.to(draw.device, torch.int32) if setting.gaps else None for s in self.starts
        ]
        self.scale = setting.scale or 1.3 / math.sqrt(setting.channels[0])
        self.forms = self._forms()
        self.tensors = self._tensors(draw)
        self.bias = self.offset = None
        heads = setting.heads[0]
        if setting.bias == "post_scale_bias":
            full = zip("bhqk", (len(each[0]), heads, *setting.lengths), strict=True)
            shape = [n if name in setting.bias_dims else 1 for name, n in full]
            self.bias = draw.normal(shape, dtype)
        if setting.softmax == "learnable":
            self.offset = draw.normal((1, heads, 1, 1), torch.float32)

    def _forms(self) -> tuple[str, str]:
        parts = ["".join(c for c in part if c.isalpha()) for part in self.setting.layout.split("_")]
        return parts[0], parts[-1]

    def _tensors(self, draw: Draw) -> list[Tensor]:
        """Three tensors, views of one where a number in the layout says so."""
        setting, made = self.setting, []
        for part in setting.layout.split("_"):
            keys = int(bool(made))
            sizes = {
                "b": len(self.each[0]),
                "s": setting.lengths[keys],
                "t": int(self.starts[keys][-1]),
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

    def sequences(self, tensor: Tensor, keys: bool = False) -> list[Tensor]:
        """[heads, tokens, channels] of each sequence of queries, or of keys."""
        form, which = self.forms[keys], int(keys)
        made = []
        for i, length in enumerate(self.each[which]):
            if form == "thd":
                first = int(self.starts[which][i])
                rows = tensor[first : first + length]
            else:
                rows = (tensor[:, i] if form == "sbhd" else tensor[i])[:length]
            made.append(rows.transpose(0, 1))
        return made

    def joined(self, parts: list[Tensor], shape: tuple, fill: float = 0.0) -> Tensor:
        """Undo `sequences` of queries: a tensor in their format."""
        made = torch.full(shape, fill, dtype=parts[0].dtype, device=self.device)
        for rows, part in zip(self.sequences(made), parts, strict=True):
            rows.copy_(part)
        return made

    def _allowed(self, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """Which keys queries attend, and how far they are from the diagonal."""
        mask, (left, right) = self.setting.mask, self.setting.window
        at = torch.arange(queries, device=self.device)[:, None]
        at = at + (keys - queries if "bottom_right" in mask else 0)
        apart = torch.arange(keys, device=self.device)[None] - at
        allowed = torch.ones_like(apart, dtype=torch.bool)
        if "causal" in mask:
            right = 0
        if left >= 0:
            allowed &= apart >= -left
        if right >= 0:
            allowed &= apart <= right
        return allowed, apart.abs()

    def attend(
        self,
        tensors: list[Tensor],
        bias: Tensor | None,
        offset: Tensor | None,
        kept: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """(outputs, logarithms of sums [heads, queries], largest scores [heads]), float64.

        `kept` are factors of the probabilities of each sequence: of dropout.
        """
        heads = self.setting.heads[0]
        split = [self.sequences(t, i > 0) for i, t in enumerate(tensors)]
        outs, sums = [], []
        top = torch.full((heads,), -math.inf, dtype=torch.float64, device=self.device)
        for i, rows in enumerate(zip(*split, strict=True)):
            q, k, v = (t.repeat_interleave(heads // len(t), 0) for t in rows)
            allowed, apart = self._allowed(q.shape[1], k.shape[1])
            scores = self.scale * q @ k.transpose(1, 2)
            if bias is not None:
                one = bias[i if len(bias) > 1 else 0]
                scores = scores + one[..., : q.shape[1], : k.shape[1]]
            if self.setting.bias == "alibi":
                scores = scores - slopes(heads).to(scores)[:, None, None] * apart
            scores = scores.masked_fill(~allowed, -math.inf)
            if scores.numel():
                top = torch.maximum(top, scores.detach().amax((1, 2)))
            with_sink = scores
            if self.setting.softmax != "vanilla":
                sink = torch.zeros(heads).to(scores) if offset is None else offset.flatten()
                sink = sink[:, None, None].expand(-1, q.shape[1], 1)
                with_sink = torch.cat((scores, sink), -1)
            total = with_sink.logsumexp(-1)
            weights = (scores - total.masked_fill(total == -math.inf, 0)[..., None]).exp()
            weights = weights if kept is None else weights * kept[i]
            outs.append(weights @ v)
            sums.append(total)
        return outs, sums, top

    def exact(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """What `attend` makes of the tensors."""
        return self.attend([t.double() for t in self.tensors], *self._wide())

    def _wide(self) -> list[Tensor | None]:
        return [None if t is None else t.double() for t in (self.bias, self.offset)]

    def gradients(
        self, grad: Tensor, kept: list[Tensor] | None = None
    ) -> list[Tensor | None]:  # fmt: skip
        """Of queries, keys, values, bias and offset, by that of the output."""
        given = [*self.tensors, self.bias, self.offset]
        with torch.enable_grad():
            wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
            outs, *_ = self.attend(wide[:3], *wide[3:], kept)
            parts = zip(outs, self.sequences(grad), strict=True)
            total = sum((out * part.double()).sum() for out, part in parts)
            found = torch.autograd.grad(total, [t for t in wide if t is not None])
        made = iter(found)
        return [None if t is None else next(made) for t in given]


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes: powers of 2^(-8 / n), and every second one of 2^(-4 / n) for the rest.

    n is the largest power of two of at most as many as there are heads.
    """
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    rest = [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(first + rest, dtype=torch.float64)
