# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention in plain JAX, with the gradient written out.

Scores, probabilities and sums are fp32 (float64, where inputs are). The forward saves its output
and one number a query (the logarithm of the sum of exponentials, -inf where no key is seen); the
backward computes probabilities, mask and dropped elements again, so nothing of the size queries x
keys lives between the two.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def wide(*arrays: jax.Array) -> jnp.dtype:
    """The dtype of sums over arrays: fp32, or float64 where they are."""
    return jnp.result_type(*arrays, jnp.float32)


def _einsum(subscripts, *operands):
    """A product whose fp32 operands are multiplied as fp32 numbers, not as TF32 ones."""
    return jnp.einsum(
        subscripts,
        *operands,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=wide(*operands),
    )


class Limits(NamedTuple):
    """What limits the keys of a query: arrays, or None."""

    segments: tuple | None  # ((ids, positions) of queries, the same of keys), each [batch, length]
    mask: jax.Array | None  # [batch or 1, heads or 1, queries or 1, keys], True hides a key
    lengths: tuple | None = None
    """Of queries and keys, int32 [batch], where a row begins with its one sequence."""
    packed: tuple | None = None
    """What `sequences.packed_rows` makes of the segments: how operators read rows of several."""


class Problem(NamedTuple):
    """What of a call is no array."""

    scale: float
    causal: bool
    bottom_right: bool  # the last query of a segment stands beside its last key
    window: tuple[int, int]  # keys before and after a query's own; -1: all
    bias_before_scale: bool
    dropout: float
    max_logit: bool = False  # the largest scores are wanted


def hidden_keys(problem: Problem, limits: Limits, queries: int, keys: int) -> jax.Array:
    """Bool [batch or 1, heads or 1, queries, keys]: the keys that a query does not see."""
    if limits.segments is None:
        apart = jnp.zeros((1, 1, 1), bool)
        place_q, place_k = jnp.arange(queries)[None], jnp.arange(keys)[None]
        if problem.bottom_right:
            place_q = place_q + keys - queries
    else:
        (ids_q, place_q), (ids_k, place_k) = limits.segments
        apart = (ids_q[:, :, None] != ids_k[:, None, :]) | (ids_q == 0)[:, :, None]
        if problem.bottom_right:
            own = ids_q[:, :, None] == ids_q[:, None, :]
            place_q = place_q + jnp.sum(~apart, axis=-1) - jnp.sum(own, axis=-1)
    distance = place_k[:, None, :] - place_q[:, :, None]
    left, right = problem.window
    hidden = jnp.broadcast_to(apart, distance.shape)
    if problem.causal:
        hidden |= distance > 0
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    hidden = hidden[:, None]
    return hidden if limits.mask is None else hidden | limits.mask


def _scores(problem, q, k, bias, limits):
    """Scores [batch, heads, queries, keys]; -inf of hidden keys."""
    batch, queries, heads, _ = q.shape
    keys, groups = k.shape[1:3]
    grouped = q.reshape(batch, queries, groups, heads // groups, -1)
    scores = _einsum("bqgrd,bkgd->bgrqk", grouped, k).reshape(batch, heads, queries, keys)
    if bias is not None and problem.bias_before_scale:
        scores = (scores + bias.astype(scores.dtype)) * problem.scale
    else:
        scores = scores * problem.scale
        scores = scores if bias is None else scores + bias.astype(scores.dtype)
    return jnp.where(hidden_keys(problem, limits, queries, keys), -jnp.inf, scores)


def finite(log_sum: jax.Array) -> jax.Array:
    """Logarithms to subtract: 0 in place of -inf, from which -inf has no distance."""
    return jnp.where(jnp.isneginf(log_sum), 0.0, log_sum)


def _kept_factors(problem, key, shape):
    """What dropout multiplies probabilities by: 0, or 1 / (1 - rate)."""
    if problem.dropout == 1.0:
        return jnp.zeros(shape, jnp.float32)
    kept = jax.random.bernoulli(key, 1.0 - problem.dropout, shape)
    return kept / jnp.float32(1.0 - problem.dropout)


def forward(
    problem: Problem,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    sink: jax.Array | None,
    limits: Limits,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, logarithms of sums [batch, heads, queries], largest scores fp32 [heads]."""
    q, k, v = heads
    batch, queries, heads, _ = q.shape
    scores = _scores(problem, q, k, bias, limits)
    top = jnp.max(scores, axis=-1, initial=-jnp.inf)
    max_logit = jnp.max(top, axis=(0, 2), initial=-jnp.inf).astype(jnp.float32)
    if sink is not None:
        top = jnp.maximum(top, sink[:, None])
    top = finite(top)
    total = jnp.sum(jnp.exp(scores - top[..., None]), axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink[:, None] - top)
    log_sum = top + jnp.log(total)
    weights = jnp.exp(scores - finite(log_sum)[..., None])
    if problem.dropout:
        weights = weights * _kept_factors(problem, key, weights.shape)
    groups = v.shape[2]
    weights = weights.reshape(batch, groups, heads // groups, queries, -1).astype(v.dtype)
    output = _einsum("bgrqk,bkgd->bqgrd", weights, v).astype(q.dtype)
    return output.reshape(batch, queries, heads, -1), log_sum, max_logit


def merge(
    total: tuple[jax.Array, jax.Array], step: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Output and logarithms of sums of one attention to the keys of two.

    Outputs are [batch, queries, heads, channels], logarithms [batch, queries, heads, 1].
    """
    top = finite(jnp.maximum(total[1], step[1]))
    log_sum = top + jnp.log(jnp.exp(total[1] - top) + jnp.exp(step[1] - top))
    parts = (part * jnp.exp(own - finite(log_sum)) for part, own in (total, step))
    return sum(parts), log_sum


def _sum_to(grad, like):
    """The gradient of what was broadcast."""
    dims = [dim for dim, size in enumerate(like.shape) if size != grad.shape[dim]]
    return jnp.sum(grad, axis=dims, keepdims=True).astype(like.dtype)


def backward(
    problem: Problem,
    grad: jax.Array,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    made: tuple[jax.Array, jax.Array],
    bias: jax.Array | None,
    sink: jax.Array | None,
    limits: Limits,
    key: jax.Array | None,
) -> tuple:
    """Gradients of queries, keys, values, bias and sink; `made` are output and logarithms."""
    (q, k, v), (output, log_sum) = heads, made
    batch, queries, heads, _ = q.shape
    keys, groups = k.shape[1:3]
    scores = _scores(problem, q, k, bias, limits)
    log_sum = finite(log_sum)
    weights = jnp.exp(scores - log_sum[..., None])
    by_group = (batch, queries, groups, heads // groups, -1)
    split = (batch, groups, heads // groups, queries, keys)
    grad_q, grad_out = q.reshape(by_group), grad.reshape(by_group)
    grad_weights = _einsum("bqgrd,bkgd->bgrqk", grad_out, v).reshape(weights.shape)
    dropped = weights
    if problem.dropout:
        factors = _kept_factors(problem, key, weights.shape)
        dropped, grad_weights = weights * factors, grad_weights * factors
    grad_v = _einsum("bgrqk,bqgrd->bkgd", dropped.reshape(split).astype(v.dtype), grad_out)
    along = jnp.sum(grad.astype(scores.dtype) * output.astype(scores.dtype), axis=-1)
    along = jnp.swapaxes(along, 1, 2)  # [batch, heads, queries]
    grad_scores = weights * (grad_weights - along[..., None])
    before_scale = grad_scores * problem.scale
    grad_bias = grad_sink = None
    if bias is not None:
        grad_bias = _sum_to(before_scale if problem.bias_before_scale else grad_scores, bias)
    if sink is not None:
        grad_sink = -jnp.sum(jnp.exp(sink[:, None] - log_sum) * along, axis=(0, 2))
        grad_sink = grad_sink.astype(sink.dtype)
    before_scale = before_scale.reshape(split).astype(q.dtype)
    grad_k = _einsum("bgrqk,bqgrd->bkgd", before_scale, grad_q)
    grad_q = _einsum("bgrqk,bkgd->bqgrd", before_scale, k).reshape(q.shape)
    pairs = zip((grad_q, grad_k, grad_v), (q, k, v), strict=True)
    return *(one.astype(like.dtype) for one, like in pairs), grad_bias, grad_sink
