# SPDX-License-Identifier: Apache-2.0
"""Products of lines: both tensors are summed over along their last dims.

That is the one form that Hopper's FP8 GEMMs take. Sums are fp32.
"""

import jax.numpy as jnp
from jax import Array, lax

from transformer_engine.jax.definitions.casts import Quantized, dequantize
from transformer_engine.jax.definitions.scaling_modes import ScalingMode

_WIDE = ScalingMode.NO_SCALING


def gemm(
    a: Array | Quantized,
    b: Array | Quantized,
    modes: tuple[ScalingMode, ScalingMode] = (_WIDE, _WIDE),
    depth: int = 1,
) -> Array:
    """Multiply [.., sums] and [.., sums], which have `depth` dims of sums; fp32.

    FP8 of one scale is multiplied as it is, and the product by both inverse scales. Where a scale
    belongs to fewer elements both are multiplied out first, to fp32.
    """
    if all(mode.is_tensor_scaling() for mode in modes):
        return _product(a.data, b.data, depth) * (a.scale_inv * b.scale_inv)
    wide = [
        x if mode is _WIDE else dequantize(x, mode, depth=depth)
        for x, mode in zip((a, b), modes, strict=True)
    ]
    if modes == (_WIDE, _WIDE):
        return _product(*wide, depth)
    return _product(*(x.astype(jnp.float32) for x in wide), depth, lax.Precision.HIGHEST)


def _product(a: Array, b: Array, depth: int, precision: lax.Precision | None = None) -> Array:
    dims = tuple(tuple(range(x.ndim - depth, x.ndim)) for x in (a, b))
    return lax.dot_general(
        a, b, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
