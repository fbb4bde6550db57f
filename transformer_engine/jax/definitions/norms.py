# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm of rows, and their gradients, in fp32."""

import jax.numpy as jnp
from jax import Array, lax

KINDS = ("layernorm", "rmsnorm")


def _weight(gamma: Array, zero_centered: bool) -> Array:
    weight = gamma.astype(jnp.float32)
    return weight + 1.0 if zero_centered else weight


def norm(
    kind: str, x: Array, gamma: Array, beta: Array | None, zero_centered: bool, epsilon: float
) -> tuple[Array, Array | None, Array]:
    """(values [.., columns], mean of rows or None, rsigma of rows [..]), all fp32."""
    x = x.astype(jnp.float32)
    mean = None
    if kind == "layernorm":
        mean = jnp.mean(x, -1, keepdims=True)
        mean = mean + jnp.mean(x - mean, -1, keepdims=True)  # a large mean costs no digits
        x = x - mean
    rsigma = lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)
    values = x * rsigma * _weight(gamma, zero_centered)
    if beta is not None:
        values = values + beta.astype(jnp.float32)
    return values, None if mean is None else mean[..., 0], rsigma[..., 0]


def norm_gradient(
    kind: str,
    grad: Array,
    x: Array,
    gamma: Array,
    zero_centered: bool,
    statistics: tuple[Array | None, Array],
) -> tuple[Array, Array, Array]:
    """Gradients of x [.., columns], gamma and beta [columns], fp32, by that of the values."""
    grad, x = grad.astype(jnp.float32), x.astype(jnp.float32)
    mean, rsigma = statistics
    rsigma = rsigma[..., None]
    normal = (x if mean is None else x - mean[..., None]) * rsigma
    through = grad * _weight(gamma, zero_centered)
    along = jnp.mean(through * normal, -1, keepdims=True)
    across = jnp.mean(through, -1, keepdims=True) if kind == "layernorm" else 0.0
    rows = tuple(range(x.ndim - 1))
    of_x = rsigma * (through - across - normal * along)
    return of_x, jnp.sum(grad * normal, rows), jnp.sum(grad, rows)
