# SPDX-License-Identifier: Apache-2.0
"""Attention whose sequences are spread over the devices of an axis of the mesh.

Each device has a part of the queries, keys and values. By *all-gather* it gets all keys and values;
around the *ring* they go from device to device, and what a device has attended to so far is merged,
exactly, with what it attends to next. Which keys a query sees follows from segments and positions
of tokens, which go with the keys, so definitions run whatever the order of the tokens. Operators
need masks that they know: a causal one whose diagonal ends at the last query and the last key that
it sees. Each call of an operator is therefore of one piece of tokens that stand side by side, or of
pieces that advance alike, and of the keys up to its last query.

In step i of the ring device r has the keys of device r - i. Of rows that are dealt out in chunks
(device r of n has r and 2 n - 1 - r) what it sees of others is, for all of its queries, their first
chunk, if i <= r, and for its second chunk all of their keys if not: two lengths, which the operator
reads, with the second chunk in front. All devices have equal work.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from transformer_engine.jax import attention_calls as calls
from transformer_engine.jax.attention_calls import Kept
from transformer_engine.jax.definitions.attention import Limits, Problem, wide
from transformer_engine.jax.sequences import (
    ReorderStrategy,
    inverse_reorder_causal_load_balancing,
    order_of,
    packed_rows,
    reorder_causal_load_balancing,
)
from transformer_engine.jax.sharding import attention_axes

_LEAST_STRIPE = 8
"""Tokens of a stripe that are worth a call of their own."""

Tokens = tuple[Array, Array]
"""Segment ids and positions, int32 [batch or 1, tokens]."""
Heads = tuple[Array, Array, Array]


class Spread(NamedTuple):
    """How an attention is spread: what of it is no array."""

    axis: str  # of the mesh: sequences
    devices: int
    ring: bool
    order: ReorderStrategy | None  # None: device r has the r-th part
    stripe: int
    segments: int  # sequences of a row at most; 0: rows are whole
    batch: str | None = None  # axes of the mesh
    heads: str | None = None
    enters: tuple[str, ...] = ()  # axes that the call is cut along; none within jax.shard_map

    def rows(self) -> PartitionSpec:
        """Partition of [batch, tokens, heads, ..]."""
        return PartitionSpec(self.batch, self.axis, self.heads)

    def has_operators(self, problem: Problem) -> bool:
        """Return whether the masks of all steps are such that the operators know them."""
        left, right = problem.window
        if not problem.causal:
            return left < 0 and right < 0
        if not self.ring:
            return self.order is not ReorderStrategy.Striped or self.stripe >= _LEAST_STRIPE
        return left < 0 and (not self.segments or self.advance() > 0)

    def advance(self) -> int:
        """By how much positions advance between the tokens of a device; 0: not evenly."""
        if self.order is None:
            return 1
        return self.devices if self.order is ReorderStrategy.Striped and self.stripe == 1 else 0

    def pieces(self, tokens: int) -> int:
        """Pieces of a device's tokens that stand side by side."""
        if self.order is None:
            return 1
        return 2 if self.order is ReorderStrategy.DualChunkSwap else tokens // self.stripe

    def tokens(self, limits: Limits, reordered: bool, lengths: tuple[int, int]) -> tuple:
        """Return `Tokens` of queries and of keys, of all devices or of this one, as arrays are."""
        if limits.segments is None:
            return tuple(map(self._whole, lengths))
        if self.order is None or reordered:
            return limits.segments
        return jax.tree.map(self.dealt, limits.segments)

    def _whole(self, length: int) -> Tokens:
        """Of rows of one sequence."""
        total = length if self.enters else length * self.devices
        places = jnp.arange(total, dtype=jnp.int32)
        if self.order is not None:
            places = order_of(self.order, self.devices, total, self.stripe).astype(jnp.int32)
        if not self.enters:
            places = lax.dynamic_slice_in_dim(places, lax.axis_index(self.axis) * length, length)
        return jnp.ones((1, length), jnp.int32), places[None]

    def dealt(self, array: Array) -> Array:
        """The tokens [batch, tokens, ..] in the order in which devices have them."""
        if self.order is None:
            return array
        return reorder_causal_load_balancing(array, self.order, self.devices, 1, self.stripe)

    def natural(self, array: Array) -> Array:
        """Undo `dealt`."""
        if self.order is None:
            return array
        given = (self.order, self.devices, 1, self.stripe)
        return inverse_reorder_causal_load_balancing(array, *given)


# ---- which calls are spread ----------------------------------------------------------------------


class Asked(NamedTuple):
    """What a caller says of sequences over several devices."""

    axis: str  # of the mesh; "": the one that the names in force have for sequences
    ring: bool
    balanced: bool
    striped: bool  # where `balanced`: in stripes, not chunks
    stripe: int
    by_name: bool  # whether any of this was said


def _refused(
    problem: Problem, heads: Heads, bias: Array | None, limits: Limits, within: bool
) -> str | None:
    """What of a call has no way over several devices."""
    whole = limits.segments is None
    other = problem.causal and whole and heads[0].shape[1] != heads[1].shape[1]
    reasons = {
        "a bias": bias is not None,
        "a mask that is an array": limits.mask is not None,
        "a diagonal in the bottom right corner": problem.bottom_right,
        "a causal mask over other numbers of queries and keys": other,
        "sequences with lengths within jax.shard_map": within and not whole,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def spread_over(
    asked: Asked,
    problem: Problem,
    heads: Heads,
    bias: Array | None,
    limits: Limits,
    segments: int,
) -> Spread | None:
    """Return how a call is spread over devices; None where it is not.

    Parameters
    ----------
    asked, problem, heads, bias, limits
        The call.
    segments : int
        Sequences of a row at most.

    Raises
    ------
    NotImplementedError
        The caller has asked for what has no way over several devices. What it has not asked for,
        but the mesh has an axis for, is then by definition, which XLA divides.
    ValueError
        It has asked, and the devices do not divide the tokens.
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch, sequence, of_heads = attention_axes()
    axis = asked.axis or sequence or ""
    devices = mesh.shape.get(axis, 1)
    within = axis in mesh.manual_axes
    if devices == 1 or (within and not asked.axis):
        return None
    where = f"over {devices} devices (context_parallel_axis={axis!r})"
    refused = _refused(problem, heads, bias, limits, within)
    if refused is not None and asked.by_name:
        raise NotImplementedError(f"fused_attn: {refused}, {where}")
    order, parts = None, devices
    if asked.balanced:
        order = ReorderStrategy.Striped if asked.striped else ReorderStrategy.DualChunkSwap
        parts *= asked.stripe if asked.striped else 2
    lengths = [one.shape[1] * (devices if within else 1) for one in heads[:2]]
    fits = all(length % parts == 0 for length in lengths)
    if not fits and asked.by_name:
        raise ValueError(f"fused_attn: {lengths} tokens, which do not divide by {parts}, {where}")
    if refused is not None or not fits:
        return None
    segments = 0 if limits.segments is None else segments
    spread = Spread(axis, devices, asked.ring, order, asked.stripe, segments)
    if within:
        return spread

    def usable(name: str | None, *sizes: int) -> str | None:
        size = mesh.shape.get(name, 1)
        free = name not in (axis, *mesh.manual_axes) and size > 1
        return name if free and all(n % size == 0 for n in sizes) else None

    return spread._replace(
        batch=usable(batch, heads[0].shape[0]),
        heads=usable(of_heads, heads[0].shape[2], heads[1].shape[2]),
        enters=tuple(name for name in mesh.axis_names if name not in mesh.manual_axes),
    )


# ---- all-gather ----------------------------------------------------------------------------------


class _Gathered:
    """All keys, and the pieces of the queries that attend to them one by one."""

    def __init__(
        self, problem: Problem, spread: Spread, called: bool, heads: Heads, tokens: Any
    ) -> None:
        self._problem, self._spread, self._called = problem, spread, called
        (self._of_queries, of_keys), query = tokens, heads[0]
        self.pieces = spread.pieces(query.shape[1]) if called and problem.causal else 1
        gather = partial(lax.all_gather, axis_name=spread.axis, axis=1, tiled=True)
        everything = jax.tree.map(gather, (*heads[1:], of_keys))
        self._sorts = called and (problem.causal or spread.segments > 0)
        if self._sorts:
            everything = jax.tree.map(spread.natural, everything)
        *self.keys, self._of_keys = everything

    def scatter(self, grad: Array, like: Array) -> Array:
        """Tokens of this device, of the sum of all devices' gradients."""
        grad = self._spread.dealt(grad) if self._sorts else grad
        grad = lax.psum_scatter(grad, self._spread.axis, scatter_dimension=1, tiled=True)
        return grad.astype(like.dtype)

    def _limits(self, tokens: Tokens, batch: int) -> tuple[Problem, Limits]:
        """Problem and limits of a piece of the queries."""
        problem, spread = self._problem, self._spread
        if not self._called:
            return problem, Limits((tokens, self._of_keys), None)
        problem = problem._replace(bottom_right=problem.causal)
        if spread.segments:
            step = int(problem.causal)
            packed = packed_rows(tokens, self._of_keys, spread.segments, step, problem.causal)
            return problem, Limits((tokens, self._of_keys), None, None, packed)
        if not problem.causal:
            return problem, Limits(None, None)
        places = tokens[1]
        lengths = jnp.int32(places.shape[1]), places[0, -1] + 1
        return problem, Limits(None, None, tuple(jnp.broadcast_to(n, batch) for n in lengths))

    def map(self, call: Callable, carry: Any, key: Array | None, *arrays: Any) -> tuple:
        """Call it for each piece: (what it carries on, what it makes of all pieces).

        It is given what it carries, problem and limits, the piece's random key and the piece of
        each array [batch, tokens, ..].
        """
        batch = arrays[0].shape[0]

        def one(carry: Any, given: tuple) -> tuple:
            number, tokens, *own = given
            drawn = None if key is None else jax.random.fold_in(key, number)
            return call(carry, self._limits(tokens, batch), drawn, *own)

        given = jax.tree.map(self._cut, (self._of_queries, *arrays))
        given = (jnp.arange(self.pieces), *given)
        carry, made = lax.scan(one, carry, given, unroll=self.pieces <= 2)
        return carry, jax.tree.map(self._joined, made)

    def _cut(self, array: Array) -> Array:
        shape = (array.shape[0], self.pieces, -1, *array.shape[2:])
        return jnp.moveaxis(array.reshape(shape), 1, 0)

    def _joined(self, array: Array) -> Array:
        """Pieces of [batch, tokens, ..] behind each other."""
        joined = jnp.moveaxis(array, 0, 1)
        return joined.reshape(joined.shape[0], -1, *joined.shape[3:])


def _gather_forward(
    problem: Problem,
    spread: Spread,
    called: bool,
    heads: Heads,
    sink: Array | None,
    tokens: Any,
    key: Array | None,
) -> tuple[Array, Array, Array]:
    """Output, logarithms of sums [batch, queries, heads, 1] and largest scores of a device."""
    of = _Gathered(problem, spread, called, heads, tokens)

    def one(top: Array, limited: tuple, key: Array | None, query: Array) -> tuple:
        problem, limits = limited
        made = calls.step(called, problem, (query, *of.keys), sink, limits, key)
        return jnp.maximum(top, made[2]), made[:2]

    lowest = jnp.full(heads[0].shape[2], -jnp.inf, jnp.float32)
    top, made = of.map(one, lowest, key, heads[0])
    return *made, top


def _gather_backward(
    problem: Problem,
    spread: Spread,
    called: bool,
    grad: Array,
    heads: Heads,
    made: tuple[Array, Array],
    sink: Array | None,
    tokens: Any,
    key: Array | None,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of queries, keys, values and sink."""
    of = _Gathered(problem, spread, called, heads, tokens)

    def one(sums: tuple, limited: tuple, key: Array | None, grad: Array, *own: Array) -> tuple:
        problem, limits = limited
        given = (own[0], *of.keys)
        found = calls.step_backward(called, problem, grad, given, own[1:], sink, limits, key)
        return jax.tree.map(jnp.add, sums, found[1:]), found[0]

    sums = [jnp.zeros(one.shape, wide(one)) for one in of.keys]
    sums = (*sums, None if sink is None else jnp.zeros_like(sink))
    (*of_keys, of_sink), of_query = of.map(one, sums, key, grad, heads[0], *made)
    return of_query, *map(of.scatter, of_keys, heads[1:]), of_sink


# ---- ring ----------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What a device attends to in a step of the ring."""

    keys: tuple[Array, Array]  # with their values
    problem: Problem
    limits: Limits
    key: Array | None


class _Ring:
    """Steps of the ring, and the order of the queries in them."""

    def __init__(self, problem: Problem, spread: Spread, called: bool) -> None:
        self._problem, self._spread, self._called = problem, spread, called
        self._whole = called and problem.causal and not spread.segments
        self._turns = self._whole and spread.order is not None

    def turned(self, array: Array) -> Array:
        """The second chunk of the tokens in front; again the order that was."""
        return jnp.roll(array, array.shape[1] // 2, axis=1) if self._turns else array

    def hop(self, arrays: Any) -> Any:
        """What the device before this one has."""
        size = self._spread.devices
        to_next = [(number, (number + 1) % size) for number in range(size)]
        return jax.tree.map(lambda each: lax.ppermute(each, self._spread.axis, to_next), arrays)

    def steps(self, heads: Heads, tokens: Any, key: Array | None) -> Iterator[_Step]:
        """Go around; queries of the first step stand as they do, those of others are turned."""
        of_queries, moving = tokens[0], (heads[1:], tokens[1])
        for number in range(self._spread.devices):
            if number > 0:
                moving = self.hop(moving)
            problem, limits = self._limits(number, of_queries, moving[1], heads[0].shape)
            drawn = None if key is None else jax.random.fold_in(key, number)
            yield _Step(moving[0], problem, limits, drawn)

    def _limits(
        self, number: int, of_queries: Tokens, of_keys: Tokens, shape: tuple[int, ...]
    ) -> tuple[Problem, Limits]:
        problem, spread = self._problem, self._spread
        if not self._called:
            return problem, Limits((of_queries, of_keys), None)
        if spread.segments:
            # Of the parts before its own a device sees all, of striped ones a part each time.
            aligned = problem.causal and (number == 0 or spread.order is not None)
            step = spread.advance() if problem.causal else 0
            packed = packed_rows(of_queries, of_keys, spread.segments, step, problem.causal)
            problem = problem._replace(causal=aligned, bottom_right=aligned)
            return problem, Limits((of_queries, of_keys), None, None, packed)
        if not problem.causal or number == 0:
            return problem, Limits(None, None)
        batch, tokens = shape[:2]
        before = of_keys[1][0, 0] < of_queries[1][0, 0]
        # Of queries and of keys: of a device before this one, and of one behind it.
        lengths = (tokens, tokens), (tokens, 0)
        if self._turns:
            lengths = (tokens, tokens // 2), (tokens // 2, tokens)
        lengths = (jnp.where(before, *map(jnp.int32, each)) for each in lengths)
        limits = Limits(None, None, tuple(jnp.broadcast_to(each, batch) for each in lengths))
        return problem._replace(causal=False), limits


def _ring_forward(
    problem: Problem,
    spread: Spread,
    called: bool,
    heads: Heads,
    sink: Array | None,
    tokens: Any,
    key: Array | None,
) -> tuple[Array, Array, Array]:
    """As `_gather_forward`; the term of no key is in the first step."""
    ring, query = _Ring(problem, spread, called), heads[0]
    for number, step in enumerate(ring.steps(heads, tokens, key)):
        own = query if number == 0 else ring.turned(query)
        first = sink if number == 0 else None
        given = (own, *step.keys)
        *made, largest = calls.step(called, step.problem, given, first, step.limits, step.key)
        if number == 0:
            total, top = tuple(map(ring.turned, made)), largest
            continue
        last = number == spread.devices - 1
        total = calls.merge(called, total, made, query.dtype if last else wide(query))
        top = jnp.maximum(top, largest)
    return *map(ring.turned, total), top


def _ring_backward(
    problem: Problem,
    spread: Spread,
    called: bool,
    grad: Array,
    heads: Heads,
    made: tuple[Array, Array],
    sink: Array | None,
    tokens: Any,
    key: Array | None,
) -> tuple[Array, Array, Array, Array | None]:
    """As `_gather_backward`; sums of gradients follow the keys that they are of to their device."""
    ring = _Ring(problem, spread, called)
    turned = jax.tree.map(ring.turned, (grad, heads[0], made))
    for number, step in enumerate(ring.steps(heads, tokens, key)):
        grad, query, made = (grad, heads[0], made) if number == 0 else turned
        first = sink if number == 0 else None
        given = (query, *step.keys)
        of_query, *of_keys, added = calls.step_backward(
            called, step.problem, grad, given, made, first, step.limits, step.key
        )
        of_query, *of_keys = (one.astype(wide(one)) for one in (of_query, *of_keys))
        if number == 0:
            queries, keys, of_sink = ring.turned(of_query), of_keys, added
        else:
            queries = queries + of_query
            keys = [one + other for one, other in zip(keys, of_keys, strict=True)]
        keys = ring.hop(keys)
    found = (ring.turned(queries), *keys)
    return *(one.astype(like.dtype) for one, like in zip(found, heads, strict=True)), of_sink


# ---- over the mesh -------------------------------------------------------------------------------


def _cut(spread: Spread, body: Callable, given: tuple, specs: tuple, results: Any) -> Any:
    """Call `body` on each device with its parts of what is given; in `jax.shard_map` at once."""
    if not spread.enters:
        return body(*given)
    cut = jax.shard_map(
        body,
        in_specs=specs,
        out_specs=results,
        axis_names=set(spread.enters),
        check_vma=False,
    )
    return jax.jit(cut)(*given)


def _placed(spread: Spread, given: tuple) -> tuple:
    """What is given, where explicit axes of the mesh, types of arrays, have to be as it is cut."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind is AxisType.Explicit}
    if not explicit.intersection(spread.enters):
        return given

    def place(spec: PartitionSpec, array: Array) -> Array:
        kept = (axis if axis in explicit else None for axis in spec[: array.ndim])
        return jax.reshard(array, PartitionSpec(*kept))

    pairs = zip(_specs(spread), given, strict=True)
    return tuple(jax.tree.map(partial(place, spec), one) for spec, one in pairs)


def _drawn(spread: Spread, key: Array | None) -> Array | None:
    """The random key of this device, for its part of the scores."""
    if key is None:
        return None
    axes = (spread.axis, *(axis for axis in (spread.batch, spread.heads) if axis))
    for axis in axes:
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return key


def _specs(spread: Spread) -> tuple:
    """Partitions of queries, keys, values, sink, tokens and random key."""
    tokens = PartitionSpec(spread.batch if spread.segments else None, spread.axis)
    by_head = PartitionSpec(spread.heads)
    return *(spread.rows(),) * 3, by_head, tokens, PartitionSpec()


def attend_over(
    problem: Problem,
    spread: Spread,
    q: Array,
    k: Array,
    v: Array,
    sink: Array | None,
    tokens: tuple[Tokens, Tokens],
    key: Array | None,
) -> tuple[Array, Array]:
    """Attention of queries to keys of all devices of an axis.

    Parameters
    ----------
    problem : Problem
        Scale, mask, window, dropout.
    spread : Spread
        How tokens are spread, and what goes from device to device.
    q, k, v, sink, key : Array
        As of `attention_calls.attend`: of all devices or, within `jax.shard_map`, of this one.
        Dropout draws from the key, another one for each device and step.
    tokens : tuple
        Segment ids and positions, int32 [batch or 1, length], of queries and of keys.

    Returns
    -------
    tuple of Array
        Output, largest score of each head, as of `attention_calls.attend`.
    """
    given = _placed(spread, (q, k, v, sink, tokens, key))
    return _attend(problem, spread, *given)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, spread: Spread, *given: Any) -> tuple[Array, Array]:
    """Attend, with the gradient of the same schedule."""
    return _forward(problem, spread, *given)[0]


def _forward(problem: Problem, spread: Spread, *given: Any) -> tuple:
    run = _ring_forward if spread.ring else _gather_forward
    others = tuple(axis for axis in (spread.batch, spread.axis) if axis)

    def body(*own: Any) -> tuple:
        *heads, sink, tokens, key = own
        called = spread.has_operators(problem) and calls.runs(
            problem, tuple(heads), None, Limits(None, None)
        )
        drawn = _drawn(spread, key)
        output, sums, top = run(problem, spread, called, tuple(heads), sink, tokens, drawn)
        top = lax.pmax(top, others) if problem.max_logit else top
        return output, top, Kept((sums,), called)

    specs = _specs(spread)
    results = (spread.rows(), PartitionSpec(spread.heads), spread.rows())
    output, top, kept = _cut(spread, body, given, specs, results)
    return (output, top), (given, output, kept)


def _backward(problem: Problem, spread: Spread, saved: tuple, grads: tuple[Array, Array]) -> tuple:
    given, output, kept = saved
    run = _ring_backward if spread.ring else _gather_backward
    others = tuple(axis for axis in (spread.batch, spread.axis) if axis)

    def body(grad: Array, output: Array, kept: Kept, *own: Any) -> tuple:
        *heads, sink, tokens, key = own
        made, drawn = (output, *kept.arrays), _drawn(spread, key)
        common = (problem, spread, kept.called, grad, tuple(heads), made, sink, tokens, drawn)
        *found, of_sink = run(*common)
        if of_sink is not None and spread.enters:
            of_sink = lax.psum(of_sink, others)
        return *found, of_sink

    specs = (*(spread.rows(),) * 3, *_specs(spread))
    results = (*(spread.rows(),) * 3, PartitionSpec(spread.heads))
    found = _cut(spread, body, (grads[0], output, kept, *given), specs, results)
    return *found, None, None


_attend.defvjp(_forward, _backward)
