# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that are gathered from all ranks ("all_gather").

Each rank puts the keys of all ranks in order. Without a mask its queries attend to all of them;
else each of its two chunks attends to the keys that it may see. No query is in two steps, so
nothing is merged. The backward gathers again, which keeps no more than a rank's own keys, and
gradients of keys and values are added in fp32, over steps and ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist

from transformer_engine.pytorch.attention.chunks import Part, tokens_first
from transformer_engine.pytorch.attention.masks import NO_WINDOW
from transformer_engine.pytorch.attention.steps import Steps, readable, wide
from transformer_engine.pytorch.torchside.collectives import (
    as_bytes,
    gather_rows,
    reduce_scatter_along_first_dim,
)


class _Step(NamedTuple):
    """Which queries attend to which keys."""

    queries: Part
    keys: slice  # in the order of all
    limits: dict[str, Any]


class GatherCall:
    """One call; see `execution.autograd.Call`.

    Its tensors, the output and the parameters are as of `ring.RingCall`; `order` is
    `chunks.DenseOrder` or `PackedOrder` of the keys, `window` keys to the left and to the right of
    the diagonal.
    """

    label = "attention"
    traced = False

    def __init__(
        self, steps: Steps, tokens: Any, group: Any, order: Any, window: tuple, draw: Callable
    ) -> None:
        self.steps, self.tokens, self.group, self.order = steps, tokens, group, order
        self.window, self.draw = window, draw
        self.size, self.rank = group.size(), group.rank()

    def _steps(self, keys: int) -> list[_Step]:
        """The steps over so many keys of all ranks."""
        left, right = self.window
        limits: dict[str, Any] = {"window_left": left, "window_right": right}
        if self.window == NO_WINDOW:
            if self.tokens.packed:
                limits |= self.tokens.fields_of_all(self.rank, Part.ALL, False)
            return [_Step(Part.ALL, slice(keys), limits)]
        made, chunk = [], keys // (2 * self.size)
        for part, number in ((Part.FIRST, self.rank), (Part.SECOND, 2 * self.size - 1 - self.rank)):
            if self.tokens.packed:
                of_all = self.tokens.fields_of_all(self.rank, part, True)
                made.append(_Step(part, slice(keys), limits | of_all))
                continue
            begin = number * chunk
            start = 0 if left < 0 else max(0, begin - left)
            end = keys if right < 0 else min(keys, begin + chunk + right)
            made.append(_Step(part, slice(start, end), {**limits, "diagonal": begin - start}))
        return made

    def _gather(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keys and values of all ranks in order, as operators see them."""
        both = [tokens_first(self.steps.form, each) for each in (key, value)]
        flat = torch.cat([each.reshape(-1) for each in both])
        rows = gather_rows(as_bytes(flat)[None], self.group)[0].view(flat.dtype)
        parts = rows.split([each.numel() for each in both], 1)
        made = [
            self.order.natural(part.unflatten(1, each.shape))
            for part, each in zip(parts, both, strict=True)
        ]
        return [each[None] if self.tokens.packed else each.transpose(0, 1) for each in made]

    def _scatter(self, grads: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Sums of gradients of all keys and values, of this rank's, as these lie."""
        parts = [
            self.order.by_rank(each[0] if self.tokens.packed else each.transpose(0, 1))
            for each in grads
        ]
        flat = torch.cat([each.flatten(1) for each in parts], 1)
        mine = reduce_scatter_along_first_dim(flat, self.group)[0][0]
        made = []
        for each, part in zip(mine.split([p[0].numel() for p in parts]), parts, strict=True):
            rows = each.view(part.shape[1:]).to(like[0].dtype)
            made.append(tokens_first(self.steps.form, rows))
        return made

    def _added(self, step: _Step, bias: Any, sink: Any, pair: Any) -> dict[str, Any]:
        made = {**step.limits, "sink": sink, "rng": pair}
        if bias is not None:
            rows = self.tokens.rows(bias.shape[2], step.queries)
            made["bias"] = bias[:, :, rows, step.keys].contiguous()
        return made

    def run_forward(self, tensors: tuple) -> tuple[Any, Sequence[Tensor | None]]:
        """Gather and attend."""
        query, key, value, bias, sink = tensors
        query = readable(query)
        seen, keys = self.steps.seen(query), self._gather(key, value)
        steps = self._steps(keys[0].shape[1])
        pairs = [self.draw(query) for _ in steps] if self.steps.dropout > 0.0 else []
        total, tops, statistics = self.steps.empty(seen, value.shape[-1]), [], []
        for number, step in enumerate(steps):
            pair = pairs[number] if pairs else None
            heads = self._heads(seen, keys, step)
            # Of packed sequences a step makes 0 of the tokens of others.
            apart = self.tokens.packed and number > 0
            out = None if apart else self.tokens.taken(total, step.queries)
            made = self.steps.forward(heads, self._added(step, bias, sink, pair), out)
            if apart:
                total += made.output
            tops.append(made.top)
            statistics.append(made.statistics)
        out = self.steps.shown(total)
        saved = (query, key, value, out, bias, sink, *statistics, *pairs)
        if not self.steps.max_logit:
            return out, saved
        top = torch.stack(tops).amax(0)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        return (out, top), saved

    def _heads(self, query: Tensor, keys: list[Tensor], step: _Step) -> list[Tensor]:
        return [
            self.tokens.taken(query, step.queries),
            *(each if self.tokens.packed else each[:, step.keys] for each in keys),
        ]

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        """Gather again; None, then gradients of all that the forward was given."""
        query, key, value, out, bias, sink, *more = saved
        keys = self._gather(key, value)
        steps = self._steps(keys[0].shape[1])
        statistics, pairs = more[: len(steps)], more[len(steps) :]
        whole = [self.steps.seen(each) for each in (query, readable(grads[0]), out)]
        grad_query = torch.zeros_like(whole[0])
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_sink = None if sink is None else torch.zeros_like(sink)
        totals = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in keys]
        for number, step in enumerate(steps):
            limits = self._added(step, bias, sink, pairs[number] if pairs else None)
            added = {
                "grad_sink": None if sink is None else torch.empty_like(sink),
                "grad_bias": None if bias is None else torch.empty_like(limits["bias"]),
            }
            _, of_output, output = (self.tokens.taken(each, step.queries) for each in whole)
            heads = self._heads(whole[0], keys, step)
            made = output, statistics[number]
            found = [self.steps.empty(each, each.shape[-1]) for each in heads]
            self.steps.backward(of_output, heads, made, limits, found, added)
            self.tokens.taken(grad_query, step.queries).add_(found[0])  # to 0: no query comes again
            for total, each in zip(totals, found[1:], strict=True):
                (total if self.tokens.packed else total[:, step.keys]).add_(each)
            if bias is not None:
                rows = self.tokens.rows(bias.shape[2], step.queries)
                grad_bias[:, :, rows, step.keys] = added["grad_bias"]
            if sink is not None:
                grad_sink += added["grad_sink"]
        if sink is not None:
            dist.all_reduce(grad_sink, group=self.group)
        of_keys = self._scatter(totals, (key, value))
        return None, self.steps.shown(grad_query), *of_keys, grad_bias, grad_sink
