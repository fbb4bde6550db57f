# SPDX-License-Identifier: Apache-2.0
"""Activations of x [.., functions, columns], products of one function of each, and gradients; fp32.

Slopes are written out: powers and exponentials of large numbers overflow in fp32, where a slope has
a limit.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid


class Limits(NamedTuple):
    """Numbers of ``("clamped_silu", "clamped_linear")``."""

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0


class _Function(NamedTuple):
    value: Callable[[Array, Limits], Array]
    slope: Callable[[Array, Limits], Array]


_FAR = 1e4  # here the logistic function and its slope are 0 or 1
_TWICE = 2.0 * math.sqrt(2.0 / math.pi)


def _logistic_slope(z: Array) -> Array:
    return sigmoid(z) * sigmoid(-z)  # 1 - s would lose its digits


def _above_minus_inf(x: Array) -> Array:
    """The lowest finite number for -Inf, which a factor of 0 would turn into NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def _swish(x: Array, alpha: float) -> Array:
    x = _above_minus_inf(x)
    return x * sigmoid(alpha * x)


def _swish_slope(x: Array, alpha: float) -> Array:
    z = jnp.clip(alpha * x, -_FAR, _FAR)
    return sigmoid(z) + z * _logistic_slope(z)


def _gelu(x: Array, _: Limits) -> Array:
    """Compute x s(2u), which is x (1 + tanh(u)) / 2 and exact where tanh(u) is close to -1."""
    x = _above_minus_inf(x)
    return x * sigmoid(_TWICE * (x * (1.0 + 0.044715 * x * x)))


def _gelu_slope(x: Array, _: Limits) -> Array:
    x = jnp.clip(x, -16.0, 16.0)  # the slope is 0 or 1 in fp32 long before
    z = _TWICE * x * (1.0 + 0.044715 * x * x)
    return sigmoid(z) + _logistic_slope(z) * _TWICE * x * (1.0 + 0.134145 * x * x)


def _relu(x: Array, _: Limits) -> Array:
    return jnp.where(x <= 0.0, 0.0, x)  # NaN stays, and there is no -0


def _clamped_linear_slope(x: Array, numbers: Limits) -> Array:
    inside = jnp.abs(x) <= numbers.limit
    return jnp.where(inside, 1.0, jnp.where(jnp.isnan(x), x, 0.0))


_FUNCTIONS: dict[str, _Function] = {
    "gelu": _Function(_gelu, _gelu_slope),
    "quick_gelu": _Function(lambda x, _: _swish(x, 1.702), lambda x, _: _swish_slope(x, 1.702)),
    "relu": _Function(_relu, lambda x, _: (x > 0.0).astype(x.dtype)),
    "squared_relu": _Function(lambda x, n: jnp.square(_relu(x, n)), lambda x, n: 2.0 * _relu(x, n)),
    "silu": _Function(lambda x, _: _swish(x, 1.0), lambda x, _: _swish_slope(x, 1.0)),
    "sigmoid": _Function(lambda x, _: sigmoid(x), lambda x, _: _logistic_slope(x)),
    "linear": _Function(lambda x, _: x, lambda x, _: jnp.ones_like(x)),
    "clamped_silu": _Function(
        lambda x, n: _swish(jnp.minimum(x, n.limit), n.alpha),
        lambda x, n: jnp.where(x > n.limit, 0.0, _swish_slope(jnp.minimum(x, n.limit), n.alpha)),
    ),
    "clamped_linear": _Function(
        lambda x, n: jnp.clip(x, -n.limit, n.limit) + n.glu_linear_offset, _clamped_linear_slope
    ),
}
_PLAIN = ("gelu", "silu", "relu", "quick_gelu", "squared_relu")
ACTIVATIONS = frozenset(
    (
        *((name,) for name in _PLAIN),
        *((name, "linear") for name in (*_PLAIN, "sigmoid")),
        ("clamped_silu", "clamped_linear"),
    )
)
"""What may be asked for."""


def activate(x: Array, kinds: tuple[str, ...], numbers: Limits) -> Array:
    """The activation of x [.., functions, columns]: fp32 [.., columns]."""
    x = x.astype(jnp.float32)
    values = _FUNCTIONS[kinds[0]].value(x[..., 0, :], numbers)
    for i, kind in enumerate(kinds[1:], 1):
        values = values * _FUNCTIONS[kind].value(x[..., i, :], numbers)
    return values


def activation_gradient(grad: Array, x: Array, kinds: tuple[str, ...], numbers: Limits) -> Array:
    """Gradient of x [.., functions, columns], fp32, by that of the values [.., columns]."""
    x, grad = x.astype(jnp.float32), grad.astype(jnp.float32)
    functions = [_FUNCTIONS[kind] for kind in kinds]
    parts = []
    for i, function in enumerate(functions):
        part = grad
        for j, other in enumerate(functions):
            if j != i:
                part = part * other.value(x[..., j, :], numbers)
        parts.append(part * function.slope(x[..., i, :], numbers))
    return jnp.stack(parts, -2)
