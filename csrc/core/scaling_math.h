/* SPDX-License-Identifier: Apache-2.0
 *
 * scaling_math.h - from amax to scale, once for both backends. Read by gcc, nvcc and NVRTC.
 *
 * IEEE fp32 throughout (division rounds to nearest), so every backend makes the same bits.
 */
#ifndef TE_CORE_SCALING_MATH_H
#define TE_CORE_SCALING_MATH_H

#if defined(__CUDACC__)
#define TE_SHARED static __host__ __device__ __forceinline__
#else
#include <stdint.h>
#include <string.h>
#define TE_SHARED static inline
#endif

#define TE_FLT_MAX 3.402823466e+38F

TE_SHARED unsigned te_float_bits(float value)
{
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

TE_SHARED float te_bits_float(unsigned bits)
{
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

/* Finite: the exponent is not all ones. */
TE_SHARED int te_is_finite(float value)
{
    return (te_float_bits(value) & 0x7f800000U) != 0x7f800000U;
}

/* What a code stands for with an inverse scale: no Inf where these are none, for a code may have
 * been rounded up beyond the largest number of the dtype that is read, `limit`. */
TE_SHARED float te_scaled_value(float code, float scale_inv, float limit)
{
    const float value = code * scale_inv;
    if (!te_is_finite(code) || !te_is_finite(scale_inv)) return value;
    return value > limit ? limit : value < -limit ? -limit : value;
}

/* The larger one; a NaN loses to a number (as fmaxf, without the library). */
TE_SHARED float te_max_ignoring_nan(float a, float b)
{
    if (a != a) return b;
    return b > a ? b : a;
}

/* Whether a step of delayed scaling cast nothing, or zeros alone, by the amax that it has recorded:
 * then neither the history nor the scale of the slot changes. The window that the scale was made of
 * is one entry longer than the history that is kept, so a scale made again could be another one. */
TE_SHARED int te_is_idle(float live)
{
    return live == 0.0F;
}

/* Scale of delayed scaling: fp8_max / amax where amax is finite and positive, else the old scale;
 * an overflowing quotient becomes FLT_MAX. fp8_max already holds the factor 2^-margin. */
TE_SHARED float te_delayed_scale(float amax, float old_scale, float fp8_max)
{
    float scale;
    if (!te_is_finite(amax) || !(amax > 0.0F)) return old_scale;
    scale = fp8_max / amax;
    return te_is_finite(scale) ? scale : TE_FLT_MAX;
}

/* Scale made of what it is for: amax raised to epsilon; 1 for 0, Inf and NaN; else fp8_max / amax,
 * an overflow becoming `top`, rounded down to a power of two if asked. */
TE_SHARED float te_tile_scale(float amax, float fp8_max, float epsilon, int power_2, float top)
{
    float scale;
    if (amax < epsilon) amax = epsilon;
    if (!te_is_finite(amax) || amax == 0.0F) return 1.0F;
    scale = fp8_max / amax;
    if (!te_is_finite(scale)) scale = top;
    if (power_2) scale = te_bits_float(te_float_bits(scale) & 0xff800000U);
    return scale;
}

/* Of current scaling: of a whole tensor. */
TE_SHARED float te_current_scale(float amax, float fp8_max, float epsilon, int power_2)
{
    return te_tile_scale(amax, fp8_max, epsilon, power_2, TE_FLT_MAX);
}

#endif
