# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 with the bits of the C library, and back.

A tensor here is *lines*: its last `depth` dims are those that a GEMM sums over, so what two GEMMs
read in both directions is two tensors, one with its dims the other way round. Tiles are those of
the matrix [lines, sums]. The arithmetic is that of `csrc/core/scaling_math.h`, `fp8.h` and
`microscale.h`. XLA's CPU backend takes subnormal fp32 numbers for 0, which C does not: amaxes are
found among bits, and `product` multiplies them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from transformer_engine.jax.definitions.scaling_modes import TILES, Cast, ScalingMode

LARGEST_F32 = float(jnp.finfo(jnp.float32).max)
_MAGNITUDE, _INF_BITS, _SMALLEST_NORMAL = 0x7FFFFFFF, 0x7F800000, 0x00800000
_EXPONENT = -0x00800000  # mask of the sign and the exponent


class Quantized(NamedTuple):
    """Lines in low precision."""

    data: Array  # FP8
    scale_inv: Array
    """[1], or [lines / high, sums / wide] of tiles, rounded up: fp32, of MXFP8 E8M0."""


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _magnitude_bits(values: Array) -> Array:
    """Bits of |values| as integers, which are in the order of the numbers; 0 for NaN."""
    bits = _bits(values.astype(jnp.float32)) & _MAGNITUDE
    return jnp.where(bits > _INF_BITS, 0, bits)


def amax(values: Array) -> Array:
    """The largest magnitude of a tensor, fp32 [1]: NaN is none, 0 of nothing."""
    if not values.size:
        return jnp.zeros(1, jnp.float32)
    return _number(jnp.max(_magnitude_bits(values)).reshape(1))


def product(a: Array, b: Array) -> Array:
    """The fp32 product of two tensors, of which `a` may be subnormal."""
    bits = _bits(a) & _MAGNITUDE
    # 2^-149 in two parts; the first among bits, for XLA would join two constants.
    small = _number(_bits(bits.astype(jnp.float32)) - (74 << 23)) * (b * 2.0**-75)
    small = jnp.where(_bits(a) < 0, -small, small)
    return jnp.where((bits > 0) & (bits < _SMALLEST_NORMAL), small, a * b)


def quotient(a: Array | float, b: Array) -> Array:
    """Divide: a / b in fp32, rounded to nearest even.

    XLA divides fp32 so on CPUs; on GPUs the last bit may be wrong, but not that of float64.
    """
    with jax.enable_x64(True):
        return (jnp.asarray(a, jnp.float64) / b.astype(jnp.float64)).astype(jnp.float32)


def reciprocal(scale: Array) -> Array:
    """1 / scale, rounded to nearest even; it is subnormal above 2^126."""
    mantissa = _bits(scale) & 0x7FFFFF | 0x800000
    near = jnp.round(quotient(2.0**126, scale) * 2.0**23).astype(jnp.int32)
    # 2^45 or 2^46 divided by the mantissa leaves so little that it fits 32 bits, which wrap.
    twice = -2 * near * mantissa
    odd = near & 1
    up = (twice > mantissa) | ((twice == mantissa) & (odd == 1))
    down = (-twice > mantissa) | ((-twice == mantissa) & (odd == 1))
    small = _number(near + up.astype(jnp.int32) - down.astype(jnp.int32))
    return jnp.where(scale > 2.0**126, small, quotient(1.0, scale))


def encode(values: Array, dtype: Any) -> Array:
    """FP8 of fp32 numbers: to nearest even; what is too large saturates, Inf included."""
    largest = float(jnp.finfo(dtype).max)
    codes = jnp.clip(values, -largest, largest).astype(dtype)
    nan = lax.bitcast_convert_type(jnp.uint8(0x7F), dtype)
    return jnp.where(jnp.isnan(values), nan, codes)


def scale_of_amax(amax: Array, cast: Cast, top: float = LARGEST_F32) -> Array:
    """The largest of a dtype / amax, raised to the epsilon; 1 where that is 0 or Inf.

    An infinite quotient becomes `top`.
    """
    amax = jnp.where(amax < cast.epsilon, jnp.float32(cast.epsilon), amax)
    bits = _bits(amax)
    scale = quotient(cast.largest, amax)
    scale = jnp.where(jnp.isfinite(scale), scale, top)
    scale = jnp.where((bits == 0) | (bits >= _INF_BITS), 1.0, scale)
    return _number(_bits(scale) & _EXPONENT) if cast.power_2 else scale


def _tiled(lines: Array, high: int, wide: int) -> Array:
    """[down, high, across, wide] of lines, with zeros behind them."""
    rows, depth = lines.shape
    down, across = -(-rows // high), -(-depth // wide)
    padding = ((0, down * high - rows), (0, across * wide - depth))
    return jnp.pad(lines, padding).reshape(down, high, across, wide)


def _tile_of(mode: ScalingMode, shape: tuple[int, ...]) -> tuple[int, int]:
    high, wide = TILES[mode]
    return high or max(shape[0], 1), wide or max(shape[1], 1)


def matrix_shape(shape: tuple[int, ...], depth: int) -> tuple[int, int]:
    """(lines, numbers that are summed) of a shape whose last `depth` dims are summed over."""
    first = len(shape) - depth
    return math.prod(shape[:first]), math.prod(shape[first:])


def quantize(x: Array, cast: Cast, scale: Array | None = None, depth: int = 1) -> Quantized:
    """Cast lines in high precision.

    Parameters
    ----------
    x : Array
        In a float dtype.
    cast : Cast
        How.
    scale : Array, optional
        fp32 [1], the scale of a tensor: of delayed scaling; else it is that of the tensor itself.
    depth : int
        Dims at the end that are summed over.
    """
    if cast.mode not in TILES:
        raise NotImplementedError(
            f"{cast.mode.name}: casts are those within custom calls of dense layers (docs/jax.md)"
        )
    values = x.astype(jnp.float32)
    if cast.mode.is_tensor_scaling():
        if scale is None:
            scale = scale_of_amax(amax(values), cast)
        return Quantized(encode(product(values, scale), cast.dtype), reciprocal(scale))
    shape = matrix_shape(x.shape, depth)
    tiles = _tiled(values.reshape(shape), *_tile_of(cast.mode, shape))
    bits = jnp.max(_magnitude_bits(tiles), (1, 3), initial=0)
    if cast.mode.is_mxfp8_scaling:
        codes, scale_inv = _mxfp8(tiles, bits, cast)
    else:
        scale = scale_of_amax(_number(bits), cast, float(jnp.finfo(x.dtype).max))
        codes = encode(product(tiles, scale[:, None, :, None]), cast.dtype)
        scale_inv = reciprocal(scale)
    return Quantized(_untiled(codes, shape).reshape(x.shape), scale_inv)


def _untiled(tiles: Array, shape: tuple[int, ...]) -> Array:
    down, high, across, wide = tiles.shape
    return tiles.reshape(down * high, across * wide)[: shape[0], : shape[1]]


def _mxfp8(tiles: Array, amax: Array, cast: Cast) -> tuple[Array, Array]:
    """Codes and scales of tiles of 1 x 32: powers of two, exponents biased by 127.

    `amax` has the bits of their largest magnitudes.
    """
    if cast.square:
        lines, groups = amax.shape
        shared = jnp.max(_tiled(amax, 32, 1), (1, 3), initial=0)
        amax = jnp.repeat(shared, 32, 0)[:lines, :groups]
    inverse = jnp.float32(1.0 / cast.largest)
    bits = _bits(product(_number(amax), inverse))
    # Any subnormal number will do in place of one that XLA has flushed.
    flushed = (bits == 0) & (amax.astype(jnp.float32) * inverse > 0.5)
    bits = jnp.where(flushed, 1, bits)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0) + cast.margin
    exponents = jnp.where(bits >= 0x7F000000, 0xFE, jnp.clip(exponents, 0, 0xFE))
    exponents = jnp.where(bits == 0, 0, exponents)
    left = (254 - exponents)[:, None, :, None]
    scaled = product(tiles, _power_of_two(jnp.maximum(left, 1)))
    codes = encode(jnp.where(left == 0, scaled * 0.5, scaled), cast.dtype)  # 2^-127 is subnormal
    return codes, lax.bitcast_convert_type(exponents.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _power_of_two(exponents: Array) -> Array:
    """2^(e - 127) in fp32; NaN for 0xff."""
    bits = jnp.where(exponents == 0, 0x00400000, exponents << 23)
    return _number(jnp.where(exponents == 0xFF, 0x7FC00000, bits))


def dequantize(
    quantized: Quantized, mode: ScalingMode, dtype: Any = jnp.float32, depth: int = 1
) -> Array:
    """The numbers that lines of a mode stand for; what is finite stays so in `dtype`."""
    data, scale_inv = quantized
    codes = data.astype(jnp.float32)
    if mode.is_mxfp8_scaling:
        exponents = lax.bitcast_convert_type(scale_inv, jnp.uint8).astype(jnp.int32)
        scale_inv = _power_of_two(exponents)
    if not mode.is_tensor_scaling():
        shape = matrix_shape(data.shape, depth)
        high, wide = _tile_of(mode, shape)
        scale_inv = jnp.repeat(jnp.repeat(scale_inv, high, 0), wide, 1)
        scale_inv = scale_inv[: shape[0], : shape[1]].reshape(data.shape)
    values = product(scale_inv, codes)
    most = float(jnp.finfo(dtype).max)
    finite = jnp.isfinite(codes) & jnp.isfinite(scale_inv)
    return jnp.where(finite, jnp.clip(values, -most, most), values).astype(dtype)


def next_scale(amax: Array, old_scale: Array, largest: float, margin: int) -> Array:
    """Scale of delayed scaling: (largest / amax) / 2^margin; the old one for an amax of 0 or Inf.

    An infinite quotient becomes the largest number.
    """
    scale = quotient(largest, amax) * jnp.float32(2.0**-margin)
    scale = jnp.minimum(scale, LARGEST_F32)
    return jnp.where(jnp.isfinite(amax) & (amax > 0.0), scale, old_scale)


def next_state(
    amax: Array, scale: Array, history: Array, cast: Cast, algorithm: str
) -> tuple[Array, Array]:
    """Scale [1] and history [length] of delayed scaling after a step that recorded `amax` [1].

    The amax goes to slot 0, the scale is made of the largest of all slots, or of that one
    ("most_recent"); then the history rolls by -1 and its slot 0, the oldest one, becomes 0: -0
    where an Inf has kept the scale, which what is left of the history does not explain.
    """
    history = history.at[0].set(amax[0])
    window = history[:1] if algorithm == "most_recent" else jnp.max(history).reshape(1)
    scale = next_scale(window, scale, cast.largest, cast.margin)
    zero = jnp.where(jnp.isfinite(window[0]), 0.0, -0.0)
    return scale, jnp.roll(history, -1).at[0].set(zero)
