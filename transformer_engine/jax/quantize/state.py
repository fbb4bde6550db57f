# SPDX-License-Identifier: Apache-2.0
"""State of delayed scaling: how it is read, and how its next value becomes its gradient.

Scale and history are arguments that a program differentiates with respect to; their "gradient" is
their next value. One *reading* of them, `read`, is a node of its own: calls take the scale from it
and give it, as the gradient of a *tap*, the amaxes that they have seen, each call in a row of its
own; the node's backward makes the next state of the largest of them. So a state that several calls
of one reading share is right. What is left are sums of next states: a program that adds the
gradients of several passes, or a loop of JAX around calls that read the state inside, or that runs
one call of a reading several times. A tap counts, and shows the last of them; the others show in
the state itself, whose scale is too large for its history. The scale is NaN then.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap

from transformer_engine.jax.definitions import casts
from transformer_engine.jax.definitions.scaling_modes import Cast

USES = 32
"""Calls that may share a reading."""
_SUM = (
    "a scaling state is a sum of several, or of another recipe: the scale is {scale:.6g}, and its "
    "history asks for {expected:.6g}. The gradient of a state is its next value: overwrite the old "
    "one with it, and never add those of several passes or of a loop of JAX (docs/jax.md)"
)


class Rule(NamedTuple):
    """What an update depends on."""

    cast: Cast
    algorithm: str  # "max" or "most_recent"


def _expected_scale(history: Array, rule: Rule) -> Array:
    """Scale [1] that the history asks for, Inf where it says nothing."""
    # A history of one step is empty between steps.
    known = history[-1:] if rule.algorithm == "most_recent" else jnp.max(history).reshape(1)
    infinite = jnp.full(1, jnp.inf, jnp.float32)
    return casts.next_scale(known, infinite, rule.cast.largest, rule.cast.margin)


def usable_scale(scale: Array, history: Array, rule: Rule) -> Array:
    """The scale [1] to cast with: 1 in place of 0, which a module has that no gradient reached.

    NaN where the state is a sum of several; ValueError where that is known at once.
    """
    expected = _expected_scale(history, rule)
    # The scale may be smaller: the history has lost the oldest of the amaxes that made it. Sums of
    # n have at least n^2 / 2 of it, for their history is the sum too. -0 tells of an Inf, after
    # which the scale may be larger.
    is_sum = (scale > 1.5 * expected) & ~jnp.signbit(history[0])
    if not isinstance(is_sum, jax.core.Tracer) and np.any(is_sum):
        found, wanted = float(np.ravel(scale)[0]), float(np.ravel(expected)[0])
        raise ValueError(_SUM.format(scale=found, expected=wanted))
    return jnp.where(is_sum, jnp.nan, jnp.where(scale == 0.0, 1.0, scale))


class Use(NamedTuple):
    """What one call has of a reading."""

    scale: Array  # fp32 [1], to cast with
    tap: Array  # fp32 [USES, 2]: of each call an amax and 1, in its gradient


def look(scale: Array, history: Array, rule: Rule) -> Use:
    """Read a state without ever updating it."""
    return Use(usable_scale(scale, history, rule), jnp.zeros((USES, 2), jnp.float32))


class Drawn(NamedTuple):
    """What one call has of random numbers."""

    pair: Array  # uint32 [4]: a seed and an offset


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def read(scale: Array, history: Array, rule: Rule) -> Use:
    """Read a state; differentiating gives the next one."""
    return look(scale, history, rule)


def _read_forward(scale: Array, history: Array, rule: Rule) -> tuple[Use, tuple[Array, Array]]:
    made = look(scale, history, rule)
    return made, (made.scale, history)


def _read_backward(rule: Rule, saved: tuple[Array, Array], grads: Use) -> tuple[Array, Array]:
    scale, history = saved
    amaxes, counts = grads.tap[:, 0], grads.tap[:, 1]
    made = casts.next_state(jnp.max(amaxes).reshape(1), scale, history, *rule)
    used = jnp.any(counts > 0.0)
    made = [jnp.where(used, new, old) for new, old in zip(made, saved, strict=True)]
    is_sum = jnp.any(counts > 1.0) | jnp.isnan(scale)
    return jnp.where(is_sum, jnp.nan, made[0]), made[1]


read.defvjp(_read_forward, _read_backward)


@custom_vmap
def recorded(values: Array, scale: Array) -> Array:
    """The amax [1] of a tensor that is cast with a scale.

    Under `jax.vmap` that of the whole batch, unless each element of the batch has a scale.
    """
    del scale
    return casts.amax(values)


@recorded.def_vmap
def _recorded_in_batch(
    axis_size: int, in_batched: list[bool], values: Array, scale: Array
) -> tuple[Array, bool]:
    of_values, of_scale = in_batched
    if of_scale:
        values = values if of_values else jnp.broadcast_to(values, (axis_size, *values.shape))
        return jax.vmap(casts.amax)(values), True
    return recorded(values, scale), False


@custom_vmap
def joined(amax: Array, scale: Array) -> Array:
    """An amax [1] that a call has seen; under `jax.vmap` as of `recorded`."""
    del scale
    return amax


@joined.def_vmap
def _joined_in_batch(
    axis_size: int, in_batched: list[bool], amax: Array, scale: Array
) -> tuple[Array, bool]:
    of_amax, of_scale = in_batched
    if of_scale:
        return (amax if of_amax else jnp.broadcast_to(amax, (axis_size, *amax.shape))), True
    return joined(jnp.max(amax, 0) if of_amax else amax, scale), False


def tapped(amax: Array, slot: int) -> Use:
    """The gradient of a `Use`, by which the reading learns of an amax [1]."""
    tap = jnp.zeros((USES, 2), jnp.float32)
    return Use(jnp.zeros(1, jnp.float32), tap.at[slot].set(jnp.stack((amax[0], 1.0))))
