# SPDX-License-Identifier: Apache-2.0
"""Parameters of modules, and what their sizes and additions are made of."""

import string
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax, random


def _canonicalize_tuple(x: Any) -> tuple:
    """One number, or several, as a tuple."""
    return tuple(x) if isinstance(x, Sequence) else (x,)


def _normalize_axes(axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dims counted from the front."""
    return tuple(axis if axis >= 0 else ndim + axis for axis in axes)


def _apply_low_rank_adaptation(
    x: Array,
    axis: Sequence[int],
    features: Sequence[int],
    lora_a_kernel: Array,
    lora_b_kernel: Array,
    alpha: float | None,
) -> Array:
    """Return x A B alpha / rank, or x A B without alpha.

    A is [in.., features[:-1].., rank], B [features[:-1].., rank, features[-1]].
    """
    axis = _normalize_axes(axis, x.ndim)
    within = lax.dot_general(x, lora_a_kernel, ((axis, tuple(range(len(axis)))), ((), ())))
    outer = string.ascii_lowercase[: len(features) - 1]
    made = jnp.einsum(f"...{outer}y,{outer}yz->...{outer}z", within, lora_b_kernel)
    return made if alpha is None else made * (alpha / lora_a_kernel.shape[-1])


def adapted(
    module: nn.Module, y: Array, x: Array, axis: Sequence[int], features: tuple[int, ...],
    init: Any, prefix: str = "",
) -> Array:  # fmt: skip
    """Add the low-rank adaptation of a linear layer of x to y, if the module has one."""
    if not module.enable_low_rank_adaptation:
        return y
    axis, outer, rank = _normalize_axes(axis, x.ndim), features[:-1], module.low_rank_adaptation_dim
    a_shape = (*(x.shape[dim] for dim in axis), *outer, rank)
    a, b = (
        parameter(module, f"{prefix}lora_{name}_kernel", own, (None,) * len(shape), shape)
        for name, own, shape in (
            ("a", init, a_shape),
            ("b", nn.initializers.zeros, (*outer, rank, features[-1])),
        )
    )
    a, b, alpha = a.astype(x.dtype), b.astype(x.dtype), module.low_rank_adaptation_alpha
    return y + _apply_low_rank_adaptation(x, axis, features, a, b, alpha)


def parameter(module: nn.Module, name: str, init: Any, axes: tuple, shape: tuple) -> Array:
    """A parameter of the module's dtype with names of its axes."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, module.dtype)


def default_kernel_init() -> Any:
    """How kernels are drawn by default."""
    return nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def stacked_init(inits: Sequence[Any]) -> Any:
    """Make an initializer of [in, n, out]: each of the n kernels is drawn for itself."""

    def draw(key, shape, dtype):
        keys = random.split(key, len(inits))
        own = (shape[0], shape[2])
        return jnp.stack([f(k, own, dtype) for f, k in zip(inits, keys, strict=True)], axis=1)

    return draw


def norm_parameters(module: nn.Module, features: int, dtype: Any, bias_init: Any, bias_axes: tuple):
    """Gamma and beta [features] of a norm, in the input's dtype; no beta for an RMSNorm."""
    init = module.scale_init
    if init is None:
        zero = module.zero_centered_gamma
        init = nn.initializers.zeros if zero else nn.initializers.ones
    scale = parameter(module, "scale", init, module.scale_axes, (features,)).astype(dtype)
    if module.layernorm_type == "rmsnorm":
        return scale, None
    beta = parameter(module, "ln_bias", bias_init, bias_axes, (features,))
    return scale, beta.astype(dtype)
