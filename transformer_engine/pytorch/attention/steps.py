# SPDX-License-Identifier: Apache-2.0
"""Steps of an attention that is spread over ranks: calls of the operators, and their exact merge.

A step attends to some of the keys. With the logarithm l of the sum of its exponentiated scores (its
statistic), outputs and statistics of several steps are those of one attention to all their keys:
L = log(sum e^l), O = sum e^(l - L) o. Outputs are added in fp32 and rounded once; what a step has
rounded is weighted by at most 1, so the sum errs by no more than one rounding beside that of a
single call. The backward of each step reads L and O of all, and gradients add up in fp32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.attention.chunks import Part, seen, shown
from transformer_engine.pytorch.execution.custom_ops import contiguous_like, is_aligned
from transformer_engine.pytorch.torchside.device import reads_vectors

INVERSE, SCALES = 0, 2
"""Of the scales of FP8: the one to multiply codes with, and how many (``TE_TENSOR_SCALES``)."""

_OPERATORS = {name: _core.obeying(name) for name in ("attention", "attention_backward")}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that outputs and gradients of steps are added in."""
    return torch.promote_types(dtype, torch.float32)


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where kernels would not read it."""
    if tensor.stride(-1) == 1 and (not reads_vectors(tensor) or is_aligned(tensor)):
        return tensor
    return contiguous_like(tensor).copy_(tensor)


class Made(NamedTuple):
    """What a step gives."""

    output: Tensor
    statistics: Tensor
    top: Tensor | None  # [heads] fp32: its largest scores


class Steps(NamedTuple):
    """What the steps of a call have in common: fields of the operators, and more."""

    form: str  # format of the tensors
    scale: float
    dropout: float
    softcap: float
    deterministic: bool
    max_logit: bool

    def _given(self, limits: dict[str, Any]) -> dict[str, Any]:
        numbers = {"scale": self.scale, "dropout": self.dropout, "softcap": self.softcap}
        return {"window_left": -1, "window_right": -1, **numbers, **limits}

    def empty(self, like: Tensor, channels: int) -> Tensor:
        """An output for queries [batch, tokens, heads, channels], in the order of the format."""
        batch, tokens, heads, _ = like.shape
        lead = (tokens, batch) if self.form == "sbhd" else (batch, tokens)
        made = like.new_empty(*lead, heads, channels)
        return made.transpose(0, 1) if self.form == "sbhd" else made

    def forward(self, heads: Sequence[Tensor], limits: dict[str, Any], out: Any = None) -> Made:
        """Attend: queries, keys and values as operators see them, which write to `out`.

        Of codes in FP8, whose scales are among the `limits`, the output is read again, in fp32.
        """
        query, _, value = heads
        batch, tokens, count, _ = query.shape
        in_fp8 = query.element_size() == 1
        if out is None:
            out = self.empty(query, value.shape[-1])
        shape = (1, tokens, count) if self.form == "thd" else (batch, count, tokens)
        dtype = torch.float32 if in_fp8 else wide(query.dtype)
        statistics = query.new_empty(shape, dtype=dtype)
        top = statistics.new_empty(count) if self.max_logit else None
        given = self._given(limits)
        if in_fp8:
            given["output_scales"] = statistics.new_empty(SCALES)
        _OPERATORS["attention"](*heads, out, statistics=statistics, top=top, **given)
        if in_fp8:
            out = out.to(dtype) * given["output_scales"][INVERSE]
        return Made(out, statistics, top)

    def backward(
        self,
        grad: Tensor,
        heads: Sequence[Tensor],
        made: tuple[Tensor, Tensor],
        limits: dict[str, Any],
        added: dict[str, Tensor | None],
    ) -> list[Tensor]:
        """Gradients of queries, keys and values of a step, as operators see them.

        `made` are output and statistics of all steps, `added` where gradients of a bias and a sink
        go.
        """
        grads = [self.empty(each, each.shape[-1]) for each in heads]
        names = ("grad_query", "grad_key", "grad_value")
        _OPERATORS["attention_backward"](
            grad, *heads, *made, **dict(zip(names, grads, strict=True)), **added,
            deterministic=self.deterministic, **self._given(limits),
        )  # fmt: skip
        return grads

    def seen(self, tensor: Tensor) -> Tensor:
        """A tensor as the operators see it."""
        return seen(self.form, tensor)

    def shown(self, tensor: Tensor) -> Tensor:
        """Undo `seen`."""
        return shown(self.form, tensor)


class Merged:
    """Output and statistics of the steps so far; the first one has all queries.

    `tokens` are `chunks.DenseTokens` or `PackedTokens`.
    """

    def __init__(self, tokens: Any, first: Made) -> None:
        self._tokens, self._dtype = tokens, first.output.dtype
        self._sum, self.statistics, self.top = first

    def add(self, part: Part, step: Made) -> None:
        """Take a step of some queries."""
        self._sum = self._sum.to(wide(self._dtype))
        rows = self._tokens.rows(self._sum.shape[1], part)
        before = self._tokens.statistics(self.statistics, part)
        after = torch.logaddexp(before, step.statistics)
        total = self._sum[:, rows]
        total.mul_(self._weights(before, after))
        total.addcmul_(step.output, self._weights(step.statistics, after))
        if self._tokens.packed:
            self.statistics = after
        else:
            self.statistics[..., rows] = after
        if step.top is not None:
            self.top = torch.maximum(self.top, step.top)

    def _weights(self, statistics: Tensor, of_all: Tensor) -> Tensor:
        """Share of a step in each output; of queries without keys 0."""
        share = (statistics - of_all).exp_().masked_fill_(of_all == -torch.inf, 0.0)
        return self._tokens.weights(share)

    def output(self) -> Tensor:
        """The output of all, rounded."""
        return self._sum.to(self._dtype)
