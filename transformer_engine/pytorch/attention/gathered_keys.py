# SPDX-License-Identifier: Apache-2.0
"""Attention to keys and values that are gathered from all ranks ("all_gather").

Each rank puts the keys of all ranks in order. Without a mask its queries attend to all of them;
else each of its two chunks attends to the keys that it may see. No query is in two steps, so
nothing is merged. The backward gathers again, which keeps no more than a rank's own keys, and
gradients of keys and values are added in fp32, over steps and ranks.

Chunks of sequences of one length go straight to their places on the ranks that attend to them, and
the gradients that a step makes straight back, in its dtype, while the next step runs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist

from transformer_engine.pytorch.attention.chunks import Part, tokens_first
from transformer_engine.pytorch.attention.hops import Hop, exchange
from transformer_engine.pytorch.attention.masks import NO_WINDOW
from transformer_engine.pytorch.attention.steps import Steps, add_into, readable, wide
from transformer_engine.pytorch.attention.steps_fp8 import StepCasts, read
from transformer_engine.pytorch.torchside.collectives import (
    gather_rows,
    reduce_scatter_along_first_dim,
)

# ---- keys of all ranks ---------------------------------------------------------------------------


def _meet(one: slice, other: slice) -> slice | None:
    """The rows of both, or None."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(start, stop) if start < stop else None


def _within(rows: slice, whole: slice) -> slice:
    """Rows counted from the first one of `whole`."""
    return slice(rows.start - whole.start, rows.stop - whole.start)


def _sum_rows(output: Tensor, parts: list[tuple[slice, Tensor]]) -> None:
    """Add parts of some rows each in fp32; one has all rows."""
    whole = slice(0, output.shape[0])
    (_, total), *others = sorted(parts, key=lambda part: part[0] != whole)
    sums = wide(output.dtype)
    for number, (rows, part) in enumerate(others, 1):
        into = total
        if rows == whole and number == len(others):
            into = output
        elif total.dtype != sums:
            into = torch.empty_like(total, dtype=sums) if rows == whole else total.to(sums)
            total = total if rows == whole else into
        add_into(into[rows], total[rows], part)
        total = into
    if total is not output:
        output.copy_(total)


@functools.lru_cache(maxsize=256)
def _chunks(size: int, keys: int) -> tuple[tuple[slice, slice], ...]:
    """Places of the chunks of each rank among all keys."""
    chunk = keys // (2 * size)
    chunks = [slice(number * chunk, (number + 1) * chunk) for number in range(2 * size)]
    return tuple((chunks[rank], chunks[-1 - rank]) for rank in range(size))


@functools.lru_cache(maxsize=256)
def _ranges(size: int, keys: int, window: tuple[int, int]) -> tuple[tuple[slice, ...], ...]:
    """The keys that each step of each rank attends to."""
    left, right = window
    if window == NO_WINDOW:
        return ((slice(0, keys),),) * size
    return tuple(
        tuple(
            slice(0 if left < 0 else max(0, chunk.start - left),
                  keys if right < 0 else min(keys, chunk.stop + right))
            for chunk in chunks
        )
        for chunks in _chunks(size, keys)
    )  # fmt: skip


class DenseKeys:
    """Keys and values of sequences of one length.

    Parameters
    ----------
    form : str
        Format of the tensors.
    group : ProcessGroup
    window : (int, int)
        Keys to the left and to the right of the diagonal.
    """

    def __init__(self, form: str, group: Any, window: tuple[int, int]) -> None:
        self._form, self._group, self._window = form, group, window
        self._size, self._rank = group.size(), group.rank()
        self._others = [(self._rank + n) % self._size for n in range(1, self._size)]
        self._hops: list[Hop] = []

    def _chunks(self, rank: int) -> tuple[slice, slice]:
        return _chunks(self._size, self._keys)[rank]

    def ranges(self, rank: int) -> tuple[slice, ...]:
        """The keys that each step of a rank attends to."""
        return _ranges(self._size, self._keys, self._window)[rank]

    def steps(self) -> list["_Step"]:
        """The steps of this rank."""
        limits: dict[str, Any] = {"window_left": self._window[0], "window_right": self._window[1]}
        if self._window == NO_WINDOW:
            return [_Step(Part.ALL, slice(0, self._keys), limits)]
        parts = zip((Part.FIRST, Part.SECOND), self._chunks(self._rank), self.ranges(self._rank),
                    strict=True)  # fmt: skip
        return [
            _Step(part, keys, {**limits, "diagonal": chunk.start - keys.start})
            for part, chunk, keys in parts
        ]

    def gather(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keys and values in order, as operators see them; of those that no step reads nothing."""
        own = [tokens_first(self._form, each).contiguous() for each in (key, value)]
        self._keys = own[0].shape[0] * self._size
        whole = [each.new_empty(self._keys, *each.shape[1:]) for each in own]
        halves = [each.chunk(2) for each in own]
        mine, sent, into = self._chunks(self._rank), [], []
        for other in self._others:
            for half, chunk in enumerate(mine):
                if any(_meet(chunk, each) for each in self.ranges(other)):
                    sent += [(other, each[half]) for each in halves]
            for chunk in self._chunks(other):
                if any(_meet(chunk, each) for each in self.ranges(self._rank)):
                    into += [(other, each[chunk]) for each in whole]
        hop = exchange(self._group, sent, into)
        for each, parts in zip(whole, halves, strict=True):
            for chunk, part in zip(mine, parts, strict=True):
                each[chunk] = part
        hop.wait()
        return [each.transpose(0, 1) for each in whole]

    def begin(self) -> None:
        """Begin to add gradients up."""
        self._parts: dict[tuple[int, int], list] = {}

    def places(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Where a step writes the gradients of keys and values, as operators see them."""
        made = []
        for each in heads:
            batch, tokens, *rest = each.shape
            made.append(each.new_empty(tokens, batch, *rest).transpose(0, 1))
        return made

    def add(self, number: int, grads: Sequence[Tensor]) -> None:
        """Take the gradients of a step; all ranks take them of steps in the same order."""
        found = [each.transpose(0, 1) for each in grads]
        own, sent, into = self.ranges(self._rank)[number], [], []
        mine = self._chunks(self._rank)
        for other in self._others:
            for chunk in self._chunks(other):
                rows = _meet(chunk, own)
                if rows is not None:
                    sent += [(other, each[_within(rows, own)]) for each in found]
            for half, chunk in enumerate(mine):
                rows = _meet(chunk, self.ranges(other)[number])
                for which, each in enumerate(found if rows is not None else ()):
                    place = each.new_empty(rows.stop - rows.start, *each.shape[1:])
                    into.append((other, place))
                    self._take(half, which, _within(rows, chunk), place)
        for half, chunk in enumerate(mine):
            rows = _meet(chunk, own)
            for which, each in enumerate(found if rows is not None else ()):
                self._take(half, which, _within(rows, chunk), each[_within(rows, own)])
        self._hops.append(exchange(self._group, sent, into))

    def _take(self, half: int, which: int, rows: slice, part: Tensor) -> None:
        self._parts.setdefault((half, which), []).append((rows, part))

    def end(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Gradients of this rank's keys and values, as these lie."""
        for hop in self._hops:
            hop.wait()
        self._hops.clear()
        made = []
        for which, like in enumerate((key, value)):
            total = torch.empty_like(tokens_first(self._form, like), dtype=dtype,
                                     memory_format=torch.contiguous_format)  # fmt: skip
            for half, rows in enumerate(total.chunk(2)):
                _sum_rows(rows, self._parts[half, which])
            made.append(tokens_first(self._form, total))
        self._parts.clear()
        return made


class PackedKeys:
    """Keys and values of packed sequences; arguments beside those of `DenseKeys` are in `chunks`.

    `order` is a `PackedOrder` of the keys.
    """

    def __init__(self, tokens: Any, order: Any, group: Any, window: tuple[int, int]) -> None:
        self._tokens, self._order, self._group, self._window = tokens, order, group, window
        self._grads: list[Sequence[Tensor]] = []

    def steps(self) -> list["_Step"]:
        """The steps of this rank."""
        limits: dict[str, Any] = {"window_left": self._window[0], "window_right": self._window[1]}
        causal = self._window != NO_WINDOW
        parts = (Part.FIRST, Part.SECOND) if causal else (Part.ALL,)
        of_all = [self._tokens.fields_of_all(self._group.rank(), part, causal) for part in parts]
        return [
            _Step(part, slice(None), limits | each)
            for part, each in zip(parts, of_all, strict=True)
        ]

    def gather(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keys and values in order, as operators see them."""
        own = [each.contiguous().view(torch.uint8) for each in (key, value)]
        flat = torch.cat([each.flatten() for each in own])
        parts = gather_rows(flat[None], self._group)[0].split([each.numel() for each in own], 1)
        pairs = zip(parts, own, strict=True)
        whole = [self._order.natural(part.unflatten(1, each.shape))[None] for part, each in pairs]
        return [each.view(key.dtype) for each in whole]

    def begin(self) -> None:
        """Begin to add gradients up."""
        self._grads.clear()

    def places(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Where a step writes the gradients of keys and values, as operators see them."""
        return [torch.empty_like(each) for each in heads]

    def add(self, number: int, grads: Sequence[Tensor]) -> None:
        """Take the gradients of a step."""
        del number
        self._grads.append(grads)

    def end(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Gradients of this rank's keys and values, as these lie."""
        first, *others = self._grads
        sums = [each.to(wide(dtype)) for each in first]
        for grads in others:
            for total, each in zip(sums, grads, strict=True):
                add_into(total, total, each)
        self._grads.clear()
        parts = [self._order.by_rank(each[0]) for each in sums]
        flat = torch.cat([each.flatten(1) for each in parts], 1)
        mine = reduce_scatter_along_first_dim(flat, self._group)[0][0]
        pairs = zip(mine.split([key.numel(), value.numel()]), (key, value), strict=True)
        return [each.view(like.shape).to(dtype) for each, like in pairs]


# ---- a call --------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Which queries attend to which keys."""

    queries: Part
    keys: slice  # in the order of all
    limits: dict[str, Any]


class GatherCall:
    """One call; see `execution.autograd.Call`.

    Its tensors, the output and the parameters are as of `ring.RingCall`; `keys` is `DenseKeys` or
    `PackedKeys`. In FP8 codes are gathered, of all ranks by one scale.
    """

    label = "attention"
    traced = False

    def __init__(
        self,
        steps: Steps,
        tokens: Any,
        group: Any,
        keys: Any,
        draw: Callable,
        casts: StepCasts | None = None,
    ) -> None:
        self.steps, self.tokens, self.group, self.keys = steps, tokens, group, keys
        self.draw, self.casts = draw, casts

    def _added(self, step: _Step, bias: Any, sink: Any, pair: Any) -> dict[str, Any]:
        made = {**step.limits, "sink": sink, "rng": pair}
        if bias is not None:
            rows = self.tokens.rows(bias.shape[2], step.queries)
            made["bias"] = bias[:, :, rows, step.keys].contiguous()
        return made

    def run_forward(self, tensors: tuple) -> tuple[Any, Sequence[Tensor | None]]:
        """Gather and attend."""
        query, key, value, bias, sink = tensors
        dtype, query, scales, common = query.dtype, readable(query), (None,) * 3, {}
        if self.casts is not None:
            (query, key, value), scales = zip(*self.casts.cast(query, key, value), strict=True)
            names = ("query_scales", "key_scales", "value_scales")
            common = dict(zip(names, scales, strict=True)) | self.casts.fields()
        seen, keys = self.steps.seen(query), self.keys.gather(key, value)
        steps = self.keys.steps()
        pairs = [self.draw(query) for _ in steps] if self.steps.dropout > 0.0 else []
        total, tops, statistics = self.steps.empty(seen, value.shape[-1], dtype), [], []
        for number, step in enumerate(steps):
            pair = pairs[number] if pairs else None
            heads = self._heads(seen, keys, step)
            # Of packed sequences a step makes 0 of the tokens of others.
            apart, place = self.tokens.packed and number > 0, self.tokens.taken(total, step.queries)
            writes = not apart and self.casts is None
            limits = self._added(step, bias, sink, pair) | common
            made = self.steps.forward(heads, limits, place if writes else None)
            if apart:
                total += made.output
            elif not writes:
                place.copy_(made.output)
            tops.append(made.top)
            statistics.append(made.statistics)
        out = self.steps.shown(total)
        saved = (query, key, value, *scales, out, bias, sink, *statistics, *pairs)
        if self.casts is not None:
            self.casts.end()
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
        query, key, value, *scales, out, bias, sink = saved[:9]
        keys, more, dtype = self.keys.gather(key, value), saved[9:], out.dtype
        if self.casts is not None:
            pairs_of_codes = zip((query, *keys), scales, strict=True)
            query, *keys = [read(codes, scale, dtype) for codes, scale in pairs_of_codes]
        steps = self.keys.steps()
        statistics, pairs = more[: len(steps)], more[len(steps) :]
        whole = [self.steps.seen(each) for each in (query, readable(grads[0]), out)]
        grad_query = self.steps.empty(whole[0], query.shape[-1])
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_sink = None if sink is None else torch.zeros_like(sink)
        self.keys.begin()
        for number in reversed(range(len(steps))):  # the longer one first
            step = steps[number]
            limits = self._added(step, bias, sink, pairs[number] if pairs else None)
            added = {
                "grad_sink": None if sink is None else torch.empty_like(sink),
                "grad_bias": None if bias is None else torch.empty_like(limits["bias"]),
            }
            _, of_output, output = (self.tokens.taken(each, step.queries) for each in whole)
            heads = self._heads(whole[0], keys, step)
            # Of packed sequences a step makes 0 of the tokens of others.
            apart = self.tokens.packed and number < len(steps) - 1
            place = self.tokens.taken(grad_query, step.queries)
            found = [torch.empty_like(place) if apart else place, *self.keys.places(heads[1:])]
            made = output, statistics[number]
            self.steps.backward(of_output, heads, made, limits, found, added)
            if apart:
                place += found[0]
            self.keys.add(number, found[1:])
            if bias is not None:
                rows = self.tokens.rows(bias.shape[2], step.queries)
                grad_bias[:, :, rows, step.keys] = added["grad_bias"]
            if sink is not None:
                grad_sink += added["grad_sink"]
        if sink is not None:
            dist.all_reduce(grad_sink, group=self.group)
        of_keys = self.keys.end(key, value, dtype)
        return None, self.steps.shown(grad_query), *of_keys, grad_bias, grad_sink
