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

_DTYPES = (jnp.float16, jnp.bfloat16)
_VECTOR, _MOST_CHANNELS = 8, 256


def _runs(
    problem: Problem, heads: tuple[Array, ...], bias: Array | None, _: Any, limits: Limits
) -> bool:
    """Return whether the operators compute a call; asked while it is traced.

    They do on all devices what cuDNN's kernels do: 16-bit heads of multiples of 8 channels up to
    256. A bias is added behind the scale, and its gradient is of all queries and keys; sequences of
    a batch are whole or have lengths. What they do not compute is by definition (docs/jax.md).
    """
    q, k, v = heads
    known = limits.segments is None or limits.lengths is not None
    if not are_custom_calls_on() or problem.max_logit or not known:
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
    return fields


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
    """Output [batch, queries, heads, channels] and statistics fp32 [batch, heads, queries]."""
    q, k, v = heads
    results = {
        "output": jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        "statistics": jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32),
    }
    fields = _fields(problem, bias, sink, limits, pair)
    made = call_operator("attention", results, query=q, key=k, value=v, **fields)
    return made["output"], made["statistics"]


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
    (q, k, v), (output, statistics) = heads, made
    results = {"grad_query": _like(q), "grad_key": _like(k), "grad_value": _like(v)}
    wanted = {"grad_bias": bias, "grad_sink": sink}
    results |= {name: _like(of) for name, of in wanted.items() if of is not None}
    fields = _fields(problem, bias, sink, limits, pair)
    read = {"grad_output": grad, "query": q, "key": k, "value": v}
    read |= {"output": output, "statistics": statistics}
    found = call_operator("attention_backward", results, **read, **fields)
    return tuple(found.get(f"grad_{of}") for of in ("query", "key", "value", "bias", "sink"))


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
class _Kept:
    """What the backward needs; `called`: the operators ran, whose backward it then is."""

    arrays: tuple
    called: bool


def _forward(problem: Problem, *args: Any) -> tuple:
    *heads, bias, sink, limits, key = args
    given = tuple(heads), bias, sink, limits
    if _runs(problem, *given):
        pair = None if key is None else pair_of(key)
        made = _call(problem, *given, pair)
        top = jnp.zeros(made[0].shape[2], jnp.float32)  # which nobody wants
        return (made[0], top), _Kept((*given, pair, made), True)
    *made, top = definition.forward(problem, *given, key)
    return (made[0], top), _Kept((*given, key, tuple(made)), False)


def _backward(problem: Problem, kept: _Kept, grads: tuple[Array, Array]) -> tuple:
    heads, bias, sink, limits, drawn, made = kept.arrays
    gradients = _call_backward if kept.called else definition.backward
    found = gradients(problem, grads[0], heads, made, bias, sink, limits, drawn)
    return *found, None, None


attend.defvjp(_forward, _backward)
