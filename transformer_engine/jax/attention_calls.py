# SPDX-License-Identifier: Apache-2.0
"""Attention as the operators of the C library: one custom call forward, one backward."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from transformer_engine.jax.custom_calls import call_operator
from transformer_engine.jax.definitions import are_custom_calls_on, attention as definition
from transformer_engine.jax.definitions.attention import Limits, Problem
from transformer_engine.jax.operator_cuts import Cut, Labels, Result, over_devices

_DTYPES = (jnp.float16, jnp.bfloat16)
_VECTOR, _MOST_CHANNELS = 8, 256


def runs(problem: Problem, heads: tuple[Array, ...], bias: Array | None, limits: Limits) -> bool:
    """Return whether the operators compute a call; asked while it is traced.

    They do on all devices what cuDNN's kernels do: 16-bit heads of multiples of 8 channels up to
    256. A bias is added behind the scale, and its gradient is of all queries and keys; rows are
    whole, have a length, or are packed, without a bias then. Over a mesh batches and heads are cut,
    of rows that are not packed, without dropout: what forward and backward draw would be of a cut
    that XLA chooses for each. What they do not compute is by definition (docs/jax.md).
    """
    q, k, v = heads
    known = limits.segments is None or limits.lengths is not None
    known |= limits.packed is not None and bias is None
    cut = not _is_packed(limits) and problem.dropout == 0.0
    if not are_custom_calls_on(cut=cut) or problem.max_logit or not known:
        return False
    channels = (q.shape[-1], v.shape[-1])
    fits = q.dtype in _DTYPES and len({each.dtype for each in heads}) == 1
    fits &= all(n % _VECTOR == 0 and 0 < n <= _MOST_CHANNELS for n in channels)
    if bias is not None:
        whole = bias.shape[2:] == (q.shape[1], k.shape[1])
        fits &= whole and bias.dtype == q.dtype and not problem.bias_before_scale
    return fits and (k.shape[1] > 1 or (bias is None and limits.mask is None))


def _fields(
    problem: Problem, bias: Array | None, sink: Array | None, limits: Limits, pair: Array | None
) -> dict[str, Any]:
    """Fields that forward and backward have in common."""
    left, right = problem.window
    if problem.causal:
        right = 0 if right < 0 else min(right, 0)
    fields = {"scale": problem.scale, "window_left": left, "window_right": right}
    fields |= {"bottom_right": int(problem.bottom_right), "dropout": problem.dropout}
    fields |= {"bias": bias, "sink": sink, "rng": pair}
    if limits.mask is not None:
        fields["mask"] = limits.mask
    if limits.lengths is not None:
        lengths = [jnp.maximum(each, 0) for each in limits.lengths]  # below 0: no sequence
        fields |= dict(zip(("query_lengths", "key_lengths"), lengths, strict=True))
    elif limits.packed is not None:
        names = ("query_lengths", "key_lengths", "query_offsets", "key_offsets")
        fields |= dict(zip(names, limits.packed, strict=True))
    return fields


def _is_packed(limits: Limits) -> bool:
    """Return whether operators see rows as one, in which many sequences lie."""
    return limits.lengths is None and limits.packed is not None


def _seen(heads: tuple[Array, ...], packed: bool) -> dict[str, Any]:
    """Queries, keys and values as operators see them, and bounds of sequences in packed rows."""
    names = ("query", "key", "value")
    if not packed:
        return dict(zip(names, heads, strict=True))
    bounds = {"max_queries": heads[0].shape[1], "max_keys": heads[1].shape[1]}
    return dict(zip(names, map(_joined, heads), strict=True)) | bounds


def _joined(array: Array) -> Array:
    """Rows as one: [1, batch length, ..]."""
    return array.reshape(1, -1, *array.shape[2:])


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def pair_of(key: Array) -> Array:
    """The random pair (seed, 0), uint32 [4], of a key of JAX."""
    return jnp.concatenate((jax.random.bits(key, (2,), jnp.uint32), jnp.zeros(2, jnp.uint32)))


def _call(
    problem: Problem,
    heads: tuple[Array, Array, Array],
    bias: Array | None,
    sink: Array | None,
    limits: Limits,
    pair: Array | None,
) -> tuple[Array, Array]:
    """Output [batch, queries, heads, channels] and statistics.

    These are fp32 [batch, heads, queries], of packed rows [1, batch queries, heads].
    """
    given = heads, bias, sink, limits._replace(segments=None), pair
    arrays, tree = jax.tree.flatten(given)

    def run(*arrays: Array) -> tuple[Array, Array]:
        return _call_alone(problem, *tree.unflatten(arrays))

    cut = Cut(_labels(*given), (Result(_ROWS), Result(("batch", "heads"))))
    return over_devices(run, cut, *arrays)


_ROWS = ("batch", None, "heads")
"""Labels of [batch, tokens, heads, channels]."""


def _labels(
    heads: tuple[Array, ...],
    bias: Array | None,
    sink: Array | None,
    limits: Limits,
    pair: Array | None,
) -> tuple[Labels, ...]:
    """Labels of all arrays of a call. A dim of size 1 is repeated."""

    def of(array: Array, *labels: str) -> Labels:
        pairs = zip(labels, array.shape, strict=False)
        return tuple(label if size > 1 else None for label, size in pairs)

    given = [_ROWS] * len(heads)
    given += [of(bias, "batch", "heads")] if bias is not None else []
    given += [("heads",)] if sink is not None else []
    given += [of(limits.mask, "batch", "heads")] if limits.mask is not None else []
    given += [("batch",)] * len(limits.lengths or ())
    rest = [*(limits.packed or ()), *([] if pair is None else [pair])]  # never cut
    return (*given, *[()] * len(rest))


def _call_alone(
    problem: Problem,
    heads: tuple[Array, Array, Array],
    bias: Array | None,
    sink: Array | None,
    limits: Limits,
    pair: Array | None,
) -> tuple[Array, Array]:
    packed = _is_packed(limits)
    seen = _seen(heads, packed)
    batch, tokens, count, _ = seen["query"].shape
    sums = (batch, tokens, count) if packed else (batch, count, tokens)
    results = {
        "output": jax.ShapeDtypeStruct((batch, tokens, count, heads[2].shape[3]), heads[0].dtype),
        "statistics": jax.ShapeDtypeStruct(sums, jnp.float32),
    }
    made = call_operator("attention", results, **seen, **_fields(problem, bias, sink, limits, pair))
    output = made["output"].reshape(*heads[0].shape[:3], -1)
    return output, made["statistics"]


def _call_backward(
    problem: Problem,
    grad: Array,
    heads: tuple[Array, Array, Array],
    made: tuple[Array, Array],
    bias: Array | None,
    sink: Array | None,
    limits: Limits,
    pair: Array | None,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of queries, keys, values, bias and sink."""
    given = heads, bias, sink, limits._replace(segments=None), pair
    arrays, tree = jax.tree.flatten(given)

    def run(grad: Array, output: Array, sums: Array, *arrays: Array) -> tuple:
        return _call_backward_alone(problem, grad, (output, sums), *tree.unflatten(arrays))

    labels = _labels(*given)
    of_bias = labels[len(heads)] if bias is not None else ()
    results = [*[Result(_ROWS)] * 3, Result(of_bias, "sum"), Result(("heads",), "sum")]
    cut = Cut((_ROWS, _ROWS, ("batch", "heads"), *labels), tuple(results))
    return over_devices(run, cut, grad, *made, *arrays)


def _call_backward_alone(
    problem: Problem,
    grad: Array,
    made: tuple[Array, Array],
    heads: tuple[Array, Array, Array],
    bias: Array | None,
    sink: Array | None,
    limits: Limits,
    pair: Array | None,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    packed = _is_packed(limits)
    seen = _seen(heads, packed)
    of = {"query": seen["query"], "key": seen["key"], "value": seen["value"]}
    of |= {"bias": bias, "sink": sink}
    results = {f"grad_{name}": _like(one) for name, one in of.items() if one is not None}
    grad, output = (_joined(one) if packed else one for one in (grad, made[0]))
    read = {"grad_output": grad, "output": output, "statistics": made[1], **seen}
    fields = _fields(problem, bias, sink, limits, pair)
    found = call_operator("attention_backward", results, **read, **fields)
    grads = (found[f"grad_{name}"] for name in ("query", "key", "value"))
    pairs = zip(grads, heads, strict=True)
    shaped = (one.reshape(like.shape) for one, like in pairs)
    return *shaped, found.get("grad_bias"), found.get("grad_sink")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    sink: Array | None,
    limits: Limits,
    key: Array | None,
) -> tuple[Array, Array]:
    """Attention of queries to keys.

    Parameters
    ----------
    problem : Problem
        Scale, mask, window, dropout.
    q : Array
        [batch, queries, heads, channels].
    k, v : Array
        [batch, keys, groups, channels (of values)]; `groups` divides `heads`.
    bias : Array, optional
        Added to the scores: [batch or 1, heads or 1, queries or 1, keys].
    sink : Array, optional
        fp32 [heads]: one score more in each softmax, of no key.
    limits : Limits
        Segments and mask.
    key : Array, optional
        Random key of dropout.

    Returns
    -------
    tuple of Array
        Output [batch, queries, heads, channels of values] in the dtype of `q`, 0 for queries
        without keys; largest score of each head, fp32 [heads], which has no gradient.
    """
    return _forward(problem, q, k, v, bias, sink, limits, key)[0]


@partial(jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("called",))
@dataclass
class Kept:
    """What a backward needs; `called`: the operators ran, whose backward it then is."""

    arrays: tuple
    called: bool


def _forward(problem: Problem, *args: Any) -> tuple:
    *heads, bias, sink, limits, key = args
    given = tuple(heads), bias, sink, limits
    if runs(problem, tuple(heads), bias, limits):
        pair = None if key is None else pair_of(key)
        made = _call(problem, *given, pair)
        top = jnp.zeros(made[0].shape[2], jnp.float32)  # which nobody wants
        return (made[0], top), Kept((*given, pair, made), True)
    *made, top = definition.forward(problem, *given, key)
    return (made[0], top), Kept((*given, key, tuple(made)), False)


def _backward(problem: Problem, kept: Kept, grads: tuple[Array, Array]) -> tuple:
    heads, bias, sink, limits, drawn, made = kept.arrays
    gradients = _call_backward if kept.called else definition.backward
    found = gradients(problem, grads[0], heads, made, bias, sink, limits, drawn)
    return *found, None, None


attend.defvjp(_forward, _backward)


# ---- steps of an attention over several devices --------------------------------------------------


def step(
    called: bool,
    problem: Problem,
    heads: tuple[Array, Array, Array],
    sink: Array | None,
    limits: Limits,
    key: Array | None,
) -> tuple[Array, Array, Array]:
    """Attend to some of the keys, by the operators or by definition, without a gradient.

    Returns the output, the logarithms of sums [batch, queries, heads, 1], as the operator
    `attention_merge` reads them, and the largest scores fp32 [heads].
    """
    if called:
        pair = None if key is None else pair_of(key)
        output, sums = _call(problem, heads, None, sink, limits, pair)
        top = jnp.zeros(output.shape[2], jnp.float32)  # which nobody wants
    else:
        output, sums, top = definition.forward(problem, heads, None, sink, limits, key)
    shape = (*output.shape[:3], 1)
    by_row = sums if _is_packed(limits) and called else sums.swapaxes(1, 2)
    return output, by_row.reshape(shape), top


def step_backward(
    called: bool,
    problem: Problem,
    grad: Array,
    heads: tuple[Array, Array, Array],
    made: tuple[Array, Array],
    sink: Array | None,
    limits: Limits,
    key: Array | None,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of queries, keys, values and sink; `made`: output and logarithms of all steps."""
    output, sums = made[0], made[1][..., 0]
    sums = _joined(sums) if called and _is_packed(limits) else sums.swapaxes(1, 2)
    if called:
        pair = None if key is None else pair_of(key)
        found = _call_backward(problem, grad, heads, (output, sums), None, sink, limits, pair)
    else:
        found = definition.backward(problem, grad, heads, (output, sums), None, sink, limits, key)
    return *found[:3], found[4]


def merge(
    called: bool, total: tuple[Array, Array], step: tuple[Array, Array], dtype: Any
) -> tuple[Array, Array]:
    """Join output and logarithms of what attended to some of the keys, and to others."""
    if not called:
        output, sums = definition.merge(total, step)
        return output.astype(dtype), sums
    results = {"output": jax.ShapeDtypeStruct(total[0].shape, dtype), "statistics": _like(total[1])}
    fields = {"total": total[0], "total_statistics": total[1]}
    fields |= {"step": step[0], "step_statistics": step[1]}
    made = call_operator("attention_merge", results, **fields)
    return made["output"], made["statistics"]
