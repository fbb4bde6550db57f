# SPDX-License-Identifier: Apache-2.0
"""What the JAX front end computes, in plain jax.numpy: one table of functions.

The functional layer takes its functions from `chosen`, the one place that decides who computes.
"""

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

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
    """The implementation in force of a function of the table; asked for while a call is traced."""
    if config.TE_JAX_CUSTOM_CALLS.get() and not _ALWAYS.get():
        raise NotImplementedError(
            "TE_JAX_CUSTOM_CALLS=1: custom calls of XLA are not built yet; unset it"
        )
    return FUNCTIONS[name]


def by_definition(function: Callable) -> Callable:
    """The same function with the functions of the table, whatever is in force."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _ALWAYS.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _ALWAYS.reset(token)

    return run
