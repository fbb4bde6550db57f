# SPDX-License-Identifier: Apache-2.0
"""Scaled and masked softmax of rows, and its gradient, in fp32."""

import jax.numpy as jnp
from jax import Array


def softmax(logits: Array, hidden: Array | None, scale: float) -> Array:
    """Softmax of logits [.., keys] times scale, fp32; 0 where `hidden`, and in rows all hidden."""
    scores = logits.astype(jnp.float32) * scale
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    top = jnp.max(scores, -1, keepdims=True)
    powers = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0.0, top))
    total = jnp.sum(powers, -1, keepdims=True)
    return jnp.where(total > 0.0, powers / jnp.where(total > 0.0, total, 1.0), 0.0 * total)


def softmax_gradient(grad: Array, probabilities: Array, scale: float) -> Array:
    """Gradient of logits, fp32, by that of the probabilities."""
    grad, p = grad.astype(jnp.float32), probabilities.astype(jnp.float32)
    return scale * p * (grad - jnp.sum(grad * p, -1, keepdims=True))
