# SPDX-License-Identifier: Apache-2.0
"""What the JAX front end computes, in plain jax.numpy: one table of functions.

What does not run as custom calls (`are_custom_calls_on`) takes its functions from `chosen`.
"""

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax

from transformer_engine.common import config
from transformer_engine.jax.definitions import activations, casts, norms, products, softmaxes

FUNCTIONS: Mapping[str, Callable] = MappingProxyType(
    {
        "quantize": casts.quantize,
        "dequantize": casts.dequantize,
        "gemm": products.gemm,
        "norm": norms.norm,
        "norm_gradient": norms.norm_gradient,
        "activate": activations.activate,
        "activation_gradient": activations.activation_gradient,
        "softmax": softmaxes.softmax,
        "softmax_gradient": softmaxes.softmax_gradient,
    }
)
"""By name: what runs where custom calls are off."""


_ALWAYS = ContextVar("definitions in force", default=False)


def chosen(name: str) -> Callable:
    """The implementation of a function of the table."""
    return FUNCTIONS[name]


def is_spread() -> bool:
    """Return whether XLA spreads the program that is traced along axes of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def are_custom_calls_on(cut: bool = False) -> bool:
    """Return whether something runs as custom calls; asked for while a call is traced.

    Over axes that XLA spreads a program along those alone do for which it knows a partition
    (`cut`), and where all axes are such; definitions run in place of others.
    """
    if not config.TE_JAX_CUSTOM_CALLS.get() or _ALWAYS.get():
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return not is_spread() or (cut and len(mesh.auto_axes) == len(mesh.axis_names))


def by_definition(function: Callable) -> Callable:
    """The same function with the functions of the table, whatever is in force.

    JAX keeps what it has traced, of `jit` and `checkpoint` too: give it functions that it has not
    seen, or clear its caches.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _ALWAYS.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _ALWAYS.reset(token)

    return run
