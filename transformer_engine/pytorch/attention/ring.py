# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys and values go around a ring of ranks ("p2p").

In step i a rank attends to what is of rank r - i. Under a causal mask that is, for i = 0, its own
chunks with the mask; for i <= r the first chunk of another rank, which all of its queries follow;
else both chunks of another rank, which its second chunk follows alone: all ranks have equal work.
While a step runs, keys and values go on to the next rank, from where they are or as the buffer that
came. The backward goes around the other way, from the keys that came last; gradients of keys and
values follow them one hop behind, those of one step in its dtype and sums in fp32, and end where
they belong: only of the tokens that others attend to.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist

from transformer_engine.pytorch.attention.chunks import Part
from transformer_engine.pytorch.attention.hops import Hop, exchange
from transformer_engine.pytorch.attention.steps import (
    Made,
    Merged,
    Steps,
    Summand,
    add,
    joint,
    readable,
    wide,
)
from transformer_engine.pytorch.attention.steps_fp8 import StepCasts, read
from transformer_engine.pytorch.torchside.device import module_of

# ---- hops ----------------------------------------------------------------------------------------


def _hop(group: Any, direction: int, sent: Sequence[Tensor], into: Sequence[Tensor]) -> Hop:
    """Send tensors to the next rank (1) or the one before (-1), and receive those of the other."""
    place, size = group.rank(), group.size()
    to, source = (place + direction) % size, (place - direction) % size
    return exchange(group, [(to, each) for each in sent], [(source, each) for each in into])


_ROOM = 16
"""Bytes of the scales of keys and values, and what their memory begins at a multiple of."""


@functools.lru_cache(maxsize=1024)
def _dense(shape: torch.Size) -> tuple[int, tuple[int, ...]]:
    """Number of elements of a dense tensor, and its strides."""
    strides = [1]
    for size in reversed(shape):
        strides.insert(0, strides[0] * size)
    return strides[0], tuple(strides[1:])


class _Pair:
    """Keys and values in one buffer; codes in FP8 with the scales [2] of each behind them."""

    scales: Sequence[Tensor] = ()

    def __init__(self, like: Tensor, shapes: Sequence[torch.Size], flat: Any = None):
        (count, strides), (other, strides_of_values) = map(_dense, shapes)
        size, coded = count + other, like.element_size() == 1
        if flat is None:
            flat = like.new_empty(-(-size // _ROOM) * _ROOM + _ROOM if coded else size)
        self.flat = flat
        first = flat.storage_offset()
        self.key = flat.as_strided(shapes[0], strides, first)
        self.value = flat.as_strided(shapes[1], strides_of_values, first + count)
        if coded:
            self.scales = flat[-_ROOM:].view(torch.float32).view(2, -1).unbind()

    @classmethod
    def of(cls, key: Tensor, value: Tensor, scales: Sequence[Tensor] = ()) -> "_Pair":
        """A copy of two tensors, and of the scales of codes."""
        made = cls(key, (key.shape, value.shape))
        made.key.copy_(key)
        made.value.copy_(value)
        for own, given in zip(made.scales, scales, strict=True):
            own.copy_(given)
        return made

    def read(self, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values in high precision."""
        both = [self.key, self.value]
        if not self.scales:
            return both
        pairs = zip(both, self.scales, strict=True)
        return [read(codes, scales, dtype) for codes, scales in pairs]


# ---- steps ---------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Which queries attend to which keys."""

    owner: int  # rank whose keys they are
    queries: Part
    keys: Part
    causal: bool


@functools.lru_cache(maxsize=1024)
def _step(number: int, rank: int, size: int, causal: bool) -> _Step:
    owner = (rank - number) % size
    if not causal or number == 0:
        return _Step(owner, Part.ALL, Part.ALL, causal)
    if number <= rank:
        return _Step(owner, Part.ALL, Part.FIRST, False)
    return _Step(owner, Part.SECOND, Part.ALL, False)


class _Lanes:
    """Streams that steps alternate between: the current one, and a second one where it is given."""

    def __init__(self, second: Any, tensors: Sequence[Tensor]) -> None:
        self._second = second
        if second is None:
            return
        self._streams: Any = module_of(second.device.type)
        self._first = self._streams.current_stream()
        self._begun = self._first.record_event()  # what is read is there
        for tensor in tensors:
            tensor.record_stream(second)

    def run(self, number: int, received: Sequence[Tensor], hop: Hop, step: Callable) -> Any:
        """Run a step over what `hop` has received, which the current stream has waited for."""
        if self._second is None or number % 2 == 0:
            return step(), None
        with self._streams.stream(self._second):
            self._second.wait_event(self._begun)
            hop.wait()  # for this stream too; the current one is busy with the step before
            made = step()
            done = self._second.record_event()
        for tensor in received:
            tensor.record_stream(self._second)
        for tensor in made:
            if tensor is not None:
                tensor.record_stream(self._first)
        return made, done

    def join(self, done: Any) -> None:
        """Let the current stream wait for a step."""
        if done is not None:
            self._first.wait_event(done)


class RingCall:
    """One call; see `execution.autograd.Call`.

    Its tensors are queries, keys, values, a bias [b or 1, heads or 1, queries of this rank, keys of
    all ranks] and a sink [heads], which may be None. The output comes as [..., heads, channels],
    with the largest scores of all ranks where they are wanted.

    Parameters
    ----------
    steps : Steps
    tokens : DenseTokens or PackedTokens
    group : ProcessGroup
    causal : bool
    stream : Stream, optional
        Where every other step of the forward runs.
    draw : callable
        Draws the random pair of a step.
    casts : StepCasts, optional
        Of a call in FP8.
    """

    label = "attention"
    traced = False

    def __init__(
        self,
        steps: Steps,
        tokens: Any,
        group: Any,
        causal: bool,
        stream: Any,
        draw: Callable,
        casts: StepCasts | None = None,
    ) -> None:
        self.steps, self.tokens, self.group, self.causal = steps, tokens, group, causal
        self.stream, self.draw, self.casts = stream, draw, casts
        self.size, self.rank = group.size(), group.rank()

    def _limits(self, step: _Step, number: int, bias: Any, sink: Any, pair: Any) -> dict[str, Any]:
        """Fields of the operators for a step."""
        fields = self.tokens.fields(self.rank, step.queries, step.owner, step.keys)
        # Each query has one sum, so the term without a key is in one step.
        first = {"sink": sink if number == 0 else None}
        if bias is not None:
            first["bias"] = self._of_bias(bias, step)
        right = 0 if step.causal else -1
        return {**fields, **first, "window_right": right, "rng": pair}

    def _columns(self, keys: int, step: _Step) -> list[slice]:
        """Places of a step's keys among those of all ranks."""
        chunk = keys // (2 * self.size)
        chunks = [step.owner, 2 * self.size - 1 - step.owner]
        wanted = chunks if step.keys is Part.ALL else chunks[step.keys - 1 :][:1]
        return [slice(each * chunk, (each + 1) * chunk) for each in wanted]

    def _of_bias(self, bias: Tensor, step: _Step) -> Tensor:
        rows = bias[:, :, self.tokens.rows(bias.shape[2], step.queries)]
        return torch.cat([rows[..., each] for each in self._columns(bias.shape[3], step)], -1)

    def _heads(self, query: Tensor, keys: Sequence[Tensor], step: _Step) -> list[Tensor]:
        """Queries, keys and values of a step as operators see them."""
        return [
            self.tokens.taken(query, step.queries),
            *(self.tokens.taken(self.steps.seen(each), step.keys) for each in keys),
        ]

    def _further(self) -> dict[Part, int]:
        """How many steps behind the first one come to each part of the queries."""
        if self.causal and self.tokens.part(Part.FIRST) is Part.FIRST:
            return {Part.FIRST: self.rank, Part.SECOND: self.size - 1}
        return {Part.ALL: self.size - 1}

    def run_forward(self, tensors: tuple) -> tuple[Any, Sequence[Tensor | None]]:
        """Go around."""
        query, key, value, bias, sink = tensors
        dtype, size, query, of_query, common = query.dtype, self.size, readable(query), None, {}
        if self.casts is None:
            # Its own keys and values a rank sends from where they are.
            own = [readable(each.contiguous()) for each in (key, value)]
            now, scales = None, ()
        else:
            (query, of_query), key, value = self.casts.cast(query, key, value)
            now = _Pair.of(key[0], value[0], (key[1], value[1]))
            own, scales = [now.key, now.value], now.scales
            common = {"query_scales": of_query, **self.casts.fields()}
        seen, self._shapes = self.steps.seen(query), [each.shape for each in own]
        drops = self.steps.dropout > 0.0
        pairs = [self.draw(query) for _ in range(size)] if drops else []
        plan = [_step(number, self.rank, size, self.causal) for number in range(size)]
        # Made before steps begin, on the stream that all of them wait for.
        limits = [
            self._limits(step, number, bias, sink, pairs[number] if drops else None)
            for number, step in enumerate(plan)
        ]
        read = [value for each in limits for value in each.values() if isinstance(value, Tensor)]
        lanes = _Lanes(self.stream, (query, *own, *read))
        merged, waiting, hop, following = None, None, Hop(), Hop()
        for number in range(size):
            hop.wait()
            if number < size - 1:
                after = _Pair(own[0], self._shapes)
                sent, into = (own, [after.key, after.value]) if now is None else (
                    [now.flat], [after.flat]
                )  # fmt: skip
                following = _hop(self.group, 1, sent, into)
            fields = limits[number] | common
            if scales:
                fields["key_scales"], fields["value_scales"] = scales
            heads = self._heads(seen, own, plan[number])
            run = functools.partial(self.steps.forward, heads, fields)
            made, done = lanes.run(number, () if now is None else (now.flat,), hop, run)
            merged = self._take(merged, waiting, lanes, dtype)
            waiting = (self.tokens.part(plan[number].queries), made, done)
            if number < size - 1:
                now, hop = after, following
                own, scales = [now.key, now.value], now.scales
        merged = self._take(merged, waiting, lanes, dtype)
        out, top = self.steps.shown(merged.output()), merged.top
        saved = (query, of_query, now.flat, out, merged.statistics, bias, sink, *pairs)
        if self.casts is not None:
            self.casts.end()
        if top is None:
            return out, saved
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        return (out, top), saved

    def _take(
        self, merged: Merged | None, waiting: Any, lanes: _Lanes, dtype: torch.dtype
    ) -> Merged | None:
        """Merge a step that runs, while the one behind it does."""
        if waiting is None:
            return None
        part, made, done = waiting
        lanes.join(done)
        if merged is None:
            return Merged(self.tokens, Made(*made), self._further(), dtype)
        merged.add(part, made)
        return merged

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        """Go around the other way; None, then gradients of all that the forward was given."""
        query, of_query, flat, out, statistics, bias, sink, *pairs = saved
        grad, size, dtype = readable(grads[0]), self.size, out.dtype
        query = query if of_query is None else read(query, of_query, dtype)
        whole = [self.steps.seen(each) for each in (query, grad, out)]
        now, of_queries, total = _Pair(flat, self._shapes, flat), None, None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_sink = None if sink is None else torch.empty_like(sink)
        for number in range(size - 1, -1, -1):
            step = _step(number, self.rank, size, self.causal)
            first, last = total is None, number == 0
            sent, into, after, arriving = [], [], now, None
            if not last:
                after = _Pair(flat, self._shapes)
                sent, into = [now.flat], [after.flat]
            if not first:
                arriving = self._arriving(number, step.owner, out)
                sent, into = [*sent, total.flat], [*into, arriving.flat]
            hop = _hop(self.group, -1, sent, into)
            limits = self._limits(step, number, bias, sink, pairs[number] if pairs else None)
            added = {"grad_sink": grad_sink if number == 0 else None}
            if bias is not None:
                added["grad_bias"] = torch.empty_like(limits["bias"])
            _, of_output, output = (self.tokens.taken(each, step.queries) for each in whole)
            made = output, self.tokens.statistics(statistics, step.queries)
            heads = self._heads(whole[0], now.read(dtype), step)
            mine = self._grads(step.keys, out)
            places = [self.steps.empty(heads[0], heads[0].shape[-1]), *self._seen(mine)]
            self.steps.backward(of_output, heads, made, limits, places, added)
            if bias is not None:
                self._put_bias(grad_bias, added["grad_bias"], step)
            of_queries = self._of_queries(of_queries, step, places[0], last)
            hop.wait()
            now, total = after, mine if first else self._of_keys(arriving, mine, number, step)
        if sink is not None:
            dist.all_reduce(grad_sink, group=self.group)
        return (
            None, self.steps.shown(of_queries.grads[0]), total.key, total.value, grad_bias,
            grad_sink,
        )  # fmt: skip

    def _seen(self, pair: _Pair) -> list[Tensor]:
        return [self.steps.seen(each) for each in (pair.key, pair.value)]

    def _grads(self, part: Part, like: Tensor) -> _Pair:
        """A place for gradients of a part of some rank's keys and values."""
        shapes = self._shapes
        if self.tokens.part(part) is not Part.ALL:
            dim = self.steps.form.index("s")
            halves = [(*shape[:dim], shape[dim] // 2, *shape[dim + 1 :]) for shape in shapes]
            shapes = [torch.Size(each) for each in halves]
        return _Pair(like, shapes)

    def _given(self, owner: int) -> Part:
        """Which keys and values of a rank others attend to."""
        return self.tokens.part(Part.FIRST if self.causal and owner == 0 else Part.ALL)

    def _arriving(self, number: int, owner: int, out: Tensor) -> _Pair:
        """A place for the gradients that other ranks have added up, before this one's step.

        Those of a single step have the dtype that it makes, others are in fp32.
        """
        like = out.new_empty(0, dtype=out.dtype if number == self.size - 2 else wide(out.dtype))
        return self._grads(self._given(owner), like)

    def _of_queries(self, total: Summand | None, step: _Step, grad: Tensor, last: bool) -> Summand:
        """The gradient of queries with that of one more step."""
        found = Summand(self.tokens.part(step.queries), [grad])
        if total is None:
            return found
        into, sums = found.grads, wide(grad.dtype)
        if not last:
            before = total.grads[0]
            into = total.grads
            if before.dtype != sums or joint(total.part, found.part) is not total.part:
                shape = before if total.part is joint(total.part, found.part) else grad
                into = [torch.empty_like(shape, dtype=sums)]
        return add(self.tokens, total, found, into)

    def _of_keys(self, arriving: _Pair, mine: _Pair, number: int, step: _Step) -> _Pair:
        """The gradients of keys and values with those of this rank's step."""
        given = self._given(step.owner)
        total = Summand(given, self._seen(arriving))
        found = Summand(self.tokens.part(step.keys), self._seen(mine))
        into, sums = mine, wide(mine.flat.dtype)
        if number > 0:
            into = arriving
            if arriving.flat.dtype != sums:
                into = self._grads(given, mine.flat.new_empty(0, dtype=sums))
        add(self.tokens, total, found, self._seen(into))
        return into

    def _put_bias(self, whole: Tensor, grad: Tensor, step: _Step) -> None:
        """Put the gradient of a step's scores where they are; no other step has them."""
        rows = whole[:, :, self.tokens.rows(whole.shape[2], step.queries)]
        columns = self._columns(whole.shape[3], step)
        for place, each in zip(columns, grad.chunk(len(columns), -1), strict=True):
            rows[..., place] = each
