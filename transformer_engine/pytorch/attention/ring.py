# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys and values go around a ring of ranks ("p2p").

In step i a rank attends to what is of rank r - i. Under a causal mask that is, for i = 0, its own
chunks with the mask; for i <= r the first chunk of another rank, which all of its queries follow;
else both chunks of another rank, which its second chunk follows alone: all ranks have equal work.
While a step runs, keys and values go on to the next rank as one buffer. The backward goes around
the other way, from the keys that came last; gradients of keys and values follow them one hop
behind, in fp32, and end where they belong.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist

from transformer_engine.pytorch.attention.chunks import Part
from transformer_engine.pytorch.attention.ring_fp8 import RingCasts, read
from transformer_engine.pytorch.attention.steps import Made, Merged, Steps, readable, wide
from transformer_engine.pytorch.torchside.collectives import as_bytes
from transformer_engine.pytorch.torchside.device import module_of

# ---- hops ----------------------------------------------------------------------------------------


class _Hop(NamedTuple):
    """Tensors under way to a neighbour; they live until it is waited for."""

    works: Sequence[Any]
    sent: Sequence[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _hop(group: Any, direction: int, sent: Sequence[Tensor], into: Sequence[Tensor]) -> _Hop:
    """Send tensors to the next rank (1) or the one before (-1), and receive those of the other."""
    ranks = dist.get_process_group_ranks(group)
    place, size = group.rank(), len(ranks)
    to, source = ranks[(place + direction) % size], ranks[(place - direction) % size]
    works = [dist.P2POp(dist.isend, as_bytes(tensor), to, group) for tensor in sent]
    works += [dist.P2POp(dist.irecv, as_bytes(tensor), source, group) for tensor in into]
    return _Hop(dist.batch_isend_irecv(works) if works else (), sent)


_ROOM = 16
"""Bytes of the scales of keys and values, and what their memory begins at a multiple of."""


class _Pair:
    """Keys and values in one buffer; codes in FP8 with the scales [2] of each behind them."""

    scales: Sequence[Tensor] = ()

    def __init__(self, like: Tensor, shapes: tuple[torch.Size, torch.Size], flat: Any = None):
        counts = [shape.numel() for shape in shapes]
        if flat is None:
            size = sum(counts)
            if like.element_size() == 1:
                size = -(-size // _ROOM) * _ROOM + _ROOM
            flat = torch.empty(size, dtype=like.dtype, device=like.device)
        self.flat, self.shapes = flat, shapes
        key, value, rest = flat.split([*counts, flat.numel() - sum(counts)])
        self.key, self.value = key.view(shapes[0]), value.view(shapes[1])
        if len(rest):
            self.scales = rest[-_ROOM:].view(torch.float32).view(2, -1).unbind()

    @classmethod
    def of(cls, key: Tensor, value: Tensor, scales: Sequence[Tensor] = ()) -> "_Pair":
        """A copy of two tensors, and of the scales of codes."""
        made = cls(key, (key.shape, value.shape))
        made.key.copy_(key)
        made.value.copy_(value)
        for own, given in zip(made.scales, scales, strict=True):
            own.copy_(given)
        return made

    def empty(self) -> "_Pair":
        """Another one for the same."""
        return _Pair(self.flat, self.shapes)

    def empty_grads(self, like: Tensor) -> "_Pair":
        """Another one of the dtype of gradients."""
        return _Pair(like, self.shapes)

    def read(self, dtype: torch.dtype) -> "_Pair":
        """The same in high precision."""
        if not self.scales:
            return self
        both = [
            read(codes, scales, dtype)
            for codes, scales in zip((self.key, self.value), self.scales, strict=True)
        ]
        return _Pair.of(*both)


# ---- steps ---------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Which queries attend to which keys."""

    owner: int  # rank whose keys they are
    queries: Part
    keys: Part
    causal: bool


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

    def run(self, number: int, received: Sequence[Tensor], hop: _Hop, step: Callable) -> Any:
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
    casts : RingCasts, optional
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
        casts: RingCasts | None = None,
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
        wanted = chunks if step.keys is Part.ALL else chunks[step.keys.value - 1 :][:1]
        return [slice(each * chunk, (each + 1) * chunk) for each in wanted]

    def _of_bias(self, bias: Tensor, step: _Step) -> Tensor:
        rows = bias[:, :, self.tokens.rows(bias.shape[2], step.queries)]
        return torch.cat([rows[..., each] for each in self._columns(bias.shape[3], step)], -1)

    def _heads(self, query: Tensor, pair: _Pair, step: _Step) -> list[Tensor]:
        """Queries, keys and values of a step as operators see them."""
        keys = [self.steps.seen(each) for each in (pair.key, pair.value)]
        return [
            self.tokens.taken(query, step.queries),
            *(self.tokens.taken(each, step.keys) for each in keys),
        ]

    def run_forward(self, tensors: tuple) -> tuple[Any, Sequence[Tensor | None]]:
        """Go around."""
        query, key, value, bias, sink = tensors
        dtype, size, query, of_query, common = query.dtype, self.size, readable(query), None, {}
        if self.casts is None:
            now = _Pair.of(key, value)
        else:
            (query, of_query), key, value = map(self.casts.cast, (query, key, value))
            now = _Pair.of(key[0], value[0], (key[1], value[1]))
            common = {"query_scales": of_query, **self.casts.fields()}
        seen = self.steps.seen(query)
        drops = self.steps.dropout > 0.0
        pairs = [self.draw(query) for _ in range(size)] if drops else []
        plan = [_step(number, self.rank, size, self.causal) for number in range(size)]
        # Made before steps begin, on the stream that all of them wait for.
        limits = [
            self._limits(step, number, bias, sink, pairs[number] if drops else None)
            for number, step in enumerate(plan)
        ]
        read = [value for each in limits for value in each.values() if isinstance(value, Tensor)]
        lanes = _Lanes(self.stream, (query, now.flat, *read))
        merged, waiting, hop, following = None, None, _Hop((), ()), _Hop((), ())
        for number in range(size):
            after = now
            hop.wait()
            if number < size - 1:
                after = now.empty()
                following = _hop(self.group, 1, [now.flat], [after.flat])
            own = limits[number] | common
            if now.scales:
                own["key_scales"], own["value_scales"] = now.scales
            heads = self._heads(seen, now, plan[number])
            run = functools.partial(self.steps.forward, heads, own)
            made, done = lanes.run(number, (now.flat,), hop, run)
            merged = self._take(merged, waiting, lanes)
            waiting = (plan[number].queries, made, done)
            now, hop = after, following
        merged = self._take(merged, waiting, lanes)
        out, top = self.steps.shown(merged.output().to(dtype)), merged.top
        saved = (query, of_query, now.flat, out, merged.statistics, bias, sink, *pairs)
        if self.casts is not None:
            self.casts.end()
        self._shapes = now.shapes
        if top is None:
            return out, saved
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        return (out, top), saved

    def _take(self, merged: Merged | None, waiting: Any, lanes: _Lanes) -> Merged | None:
        """Merge a step that runs, while the one behind it does."""
        if waiting is None:
            return None
        part, made, done = waiting
        lanes.join(done)
        if merged is None:
            return Merged(self.tokens, Made(*made))
        merged.add(part, made)
        return merged

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        """Go around the other way; None, then gradients of all that the forward was given."""
        query, of_query, flat, out, statistics, bias, sink, *pairs = saved
        grad, size, dtype = readable(grads[0]), self.size, out.dtype
        query = query if of_query is None else read(query, of_query, dtype)
        whole = [self.steps.seen(each) for each in (query, grad, out)]
        now, total = _Pair(flat, self._shapes, flat), None
        grad_query = torch.empty_like(whole[0], dtype=wide(dtype))
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_sink = None if sink is None else torch.empty_like(sink)
        for number in range(size - 1, -1, -1):
            step = _step(number, self.rank, size, self.causal)
            first, last = total is None, number == 0
            after = now if last else now.empty()
            arriving = now.empty_grads(grad_query)
            sent, into = [] if last else [now.flat], [] if last else [after.flat]
            if not first:
                sent, into = [*sent, total.flat], [*into, arriving.flat]
            hop = _hop(self.group, -1, sent, into)
            limits = self._limits(step, number, bias, sink, pairs[number] if pairs else None)
            added = {"grad_sink": grad_sink if number == 0 else None}
            if bias is not None:
                added["grad_bias"] = torch.empty_like(limits["bias"])
            _, of_output, output = (self.tokens.taken(each, step.queries) for each in whole)
            made = output, self.tokens.statistics(statistics, step.queries)
            heads = self._heads(whole[0], now.read(dtype), step)
            found = self.steps.backward(of_output, heads, made, limits, added)
            add = Tensor.copy_ if first else Tensor.add_
            if first and step.queries is not Part.ALL:
                grad_query.zero_()
            add(self.tokens.taken(grad_query, step.queries), found[0])
            if bias is not None:
                self._put_bias(grad_bias, added["grad_bias"], step)
            hop.wait()
            if first and step.keys is not Part.ALL:
                arriving.flat.zero_()
            for into_, each in zip((arriving.key, arriving.value), found[1:], strict=True):
                add(self.tokens.taken(self.steps.seen(into_), step.keys), each)
            now, total = after, arriving
        if sink is not None:
            dist.all_reduce(grad_sink, group=self.group)
        of_keys = (total.key.to(dtype), total.value.to(dtype))
        return None, self.steps.shown(grad_query.to(dtype)), *of_keys, grad_bias, grad_sink

    def _put_bias(self, whole: Tensor, grad: Tensor, step: _Step) -> None:
        """Put the gradient of a step's scores where they are; no other step has them."""
        rows = whole[:, :, self.tokens.rows(whole.shape[2], step.queries)]
        columns = self._columns(whole.shape[3], step)
        for place, each in zip(columns, grad.chunk(len(columns), -1), strict=True):
            rows[..., place] = each
