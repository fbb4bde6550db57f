# SPDX-License-Identifier: Apache-2.0
"""Steps of an attention that is spread over ranks: calls of the operators, and their exact merge.

A step attends to some of the keys. With the logarithm l of the sum of its exponentiated scores (its
statistic), outputs and statistics of several steps are those of one attention to all their keys:
L = log(sum e^l), O = sum e^(l - L) o. Outputs are added in fp32 and rounded once; what a step has
rounded is weighted by at most 1, so the sum errs by no more than one rounding beside that of a
single call. The backward of each step reads L and O of all, and gradients add up in fp32. The
operator `attention_merge` does both, in one pass over two of them.
"""

import functools
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

_OPERATORS = {
    name: _core.obeying(name) for name in ("attention", "attention_backward", "attention_merge")
}


@functools.cache
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

    def empty(self, like: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
        """An output for queries [batch, tokens, heads, channels], in the order of the format.

        In a dtype, that of the queries where None.
        """
        batch, tokens, heads, _ = like.shape
        lead = (tokens, batch) if self.form == "sbhd" else (batch, tokens)
        made = like.new_empty(*lead, heads, channels, dtype=dtype)
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
        grads: Sequence[Tensor],
        added: dict[str, Tensor | None],
    ) -> None:
        """Write the gradients of a step's queries, keys and values, as operators see them.

        `made` are output and statistics of all steps, `added` where gradients of a bias and a sink
        go.
        """
        names = ("grad_query", "grad_key", "grad_value")
        _OPERATORS["attention_backward"](
            grad, *heads, *made, **dict(zip(names, grads, strict=True)), **added,
            deterministic=self.deterministic, **self._given(limits),
        )  # fmt: skip

    def seen(self, tensor: Tensor) -> Tensor:
        """A tensor as the operators see it."""
        return seen(self.form, tensor)

    def shown(self, tensor: Tensor) -> Tensor:
        """Undo `seen`."""
        return shown(self.form, tensor)


# ---- what several steps give ---------------------------------------------------------------------


class Merged:
    """Output and statistics of the steps so far; the first one has all queries.

    Outputs are added in fp32, and where a part of the queries has no further step they are written
    in `dtype` at once.

    Parameters
    ----------
    tokens : DenseTokens or PackedTokens
        Of `chunks`.
    first : Made
        What the first step has given; its memory is used.
    further : dict
        How many steps come to each part of the queries; the parts are all queries.
    dtype : torch.dtype
        Of the output.
    """

    def __init__(
        self, tokens: Any, first: Made, further: dict[Part, int], dtype: torch.dtype
    ) -> None:
        self._tokens, self._further = tokens, dict(further)
        sums, self.statistics, self.top = first
        self._at = dict.fromkeys(further, sums)
        self._sums = None if sums.dtype == dtype else sums  # in fp32
        self._output = sums if sums.dtype == dtype else torch.empty_like(sums, dtype=dtype)

    def _next(self, part: Part) -> Tensor:
        """Where the next sum of a part goes."""
        if self._further[part] == 1:
            return self._output
        if self._sums is None:
            self._sums = torch.empty_like(self._output, dtype=wide(self._output.dtype))
        return self._sums

    def add(self, part: Part, step: Made) -> None:
        """Take a step of some queries."""
        own = [each for each in self._at if part in (Part.ALL, each)]
        ways = [(self._at[each], self._next(each)) for each in own]
        if all(way[0] is ways[0][0] and way[1] is ways[0][1] for way in ways):
            self._merge(part, step.output, step.statistics, ways[0])
        else:
            for each, way in zip(own, ways, strict=True):
                output = self._tokens.taken(step.output, each)
                self._merge(each, output, self._tokens.statistics(step.statistics, each), way)
        for each, way in zip(own, ways, strict=True):
            self._at[each] = way[1]
            self._further[each] -= 1
        if step.top is not None:
            self.top = torch.maximum(self.top, step.top)

    def _merge(self, part: Part, step: Tensor, of_step: Tensor, way: tuple[Tensor, Tensor]) -> None:
        tokens = self._tokens
        total, output = (tokens.taken(each, part) for each in way)
        statistics = tokens.taken(tokens.weights(self.statistics), part)
        _OPERATORS["attention_merge"](
            total, step, output, total_statistics=statistics,
            step_statistics=tokens.weights(of_step), statistics=statistics,
        )  # fmt: skip

    def output(self) -> Tensor:
        """The output of all, in its dtype."""
        for part, found in self._at.items():
            if found is not self._output:  # no step came to it
                taken = self._tokens.taken
                taken(self._output, part).copy_(taken(found, part))
        return self._output


def add_into(output: Tensor, total: Tensor, step: Tensor) -> None:
    """Add two tensors of four dims and any dtypes in fp32; `output` may be one of them."""
    _OPERATORS["attention_merge"](total, step, output)


class Summand(NamedTuple):
    """Gradients of a part of the tokens, as operators see them."""

    part: Part
    grads: Sequence[Tensor]


def joint(one: Part, other: Part) -> Part:
    """The part that has the tokens of both."""
    return one if one is other else Part.ALL


def add(tokens: Any, total: Summand, found: Summand, into: Sequence[Tensor]) -> Summand:
    """Add gradients up, into what may be those of `total` or `found`, and has the tokens of both.

    Of parts that differ one is all tokens.
    """
    whole = joint(total.part, found.part)
    common = total.part if found.part is Part.ALL else found.part
    for before, each, place in zip(total.grads, found.grads, into, strict=True):
        if total.part is found.part:
            add_into(place, before, each)
            continue
        larger = before if total.part is Part.ALL else each
        if place is not larger:
            rest = Part.FIRST if common is Part.SECOND else Part.SECOND
            tokens.taken(place, rest).copy_(tokens.taken(larger, rest))
        before, each = (
            grad if part is common else tokens.taken(grad, common)
            for grad, part in ((before, total.part), (each, found.part))
        )
        add_into(tokens.taken(place, common), before, each)
    return Summand(whole, into)
