/* SPDX-License-Identifier: Apache-2.0
 *
 * fp8.h - conversions between fp32 and the narrow floats, bit for bit as the hardware's.
 *
 * Every conversion is straight-line integer arithmetic without a branch or a table, so that the
 * compiler turns a loop around it into vector code of whatever instruction set the caller is
 * compiled for; all instruction sets thus share one definition. No conversion depends on the
 * denormals-are-zero mode of the processor: subnormals are made from integers.
 */
#ifndef TE_CORE_FP8_H
#define TE_CORE_FP8_H

#include <stdint.h>
#include <string.h>

#include "transformer_engine.h"

#if defined(__GNUC__)
#define TE_INLINE static inline __attribute__((always_inline))
#else
#define TE_INLINE static inline
#endif

#define TE_F32_INF_BITS 0x7f800000
#define TE_F32_NAN_BITS 0x7f800001 /* magnitudes from here on are NaN */

/* Signed, because a signed maximum exists in more instruction sets and magnitudes never reach the
 * sign bit. */
TE_INLINE int32_t te_bits_of(float value)
{
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TE_INLINE float te_float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* low where value < limit, else high; both compared numbers are magnitudes. By masks, because with
 * a ternary the compiler moves the computation of one side into a branch and the loop around it is
 * not vectorized. */
TE_INLINE int32_t te_select_below(int32_t value, int32_t limit, int32_t low, int32_t high)
{
    int32_t mask = (value - limit) >> 31;
    return (low & mask) | (high & ~mask);
}

/* Bits of |value|; 0 for NaN. Ordered as the magnitudes are. */
TE_INLINE int32_t te_magnitude_bits(float value)
{
    int32_t bits = te_bits_of(value) & 0x7fffffff;
    return bits > TE_F32_INF_BITS ? 0 : bits;
}

/* Round to nearest even; beyond 448, Inf included, saturates; NaN gives 0x7f without a sign. */
TE_INLINE uint8_t te_f32_to_e4m3(float value)
{
    int32_t bits = te_bits_of(value), magnitude = bits & 0x7fffffff;
    int32_t sign = (int32_t)((uint32_t)bits >> 24) & 0x80;
    int32_t clamped = magnitude > 0x43e00000 ? 0x43e00000 : magnitude; /* 448 */
    /* Below 2^-6 codes are multiples of 2^-9, which is the last place of numbers near 2^14. */
    int32_t small = te_bits_of(te_float_of(clamped) + 16384.0F) - 0x46800000;
    int32_t normal = ((clamped + 0x7ffff + ((clamped >> 20) & 1)) >> 20) - (120 << 3);
    int32_t code = te_select_below(clamped, 0x3c800000, small, normal) | sign;
    return (uint8_t)te_select_below(magnitude, TE_F32_NAN_BITS, code, 0x7f);
}

/* The same with 57344 as the largest value. */
TE_INLINE uint8_t te_f32_to_e5m2(float value)
{
    int32_t bits = te_bits_of(value), magnitude = bits & 0x7fffffff;
    int32_t sign = (int32_t)((uint32_t)bits >> 24) & 0x80;
    int32_t clamped = magnitude > 0x47600000 ? 0x47600000 : magnitude; /* 57344 */
    /* Below 2^-14 codes are multiples of 2^-16. */
    int32_t small = te_bits_of(te_float_of(clamped) + 128.0F) - 0x43000000;
    int32_t normal = ((clamped + 0xfffff + ((clamped >> 21) & 1)) >> 21) - (112 << 2);
    int32_t code = te_select_below(clamped, 0x38800000, small, normal) | sign;
    return (uint8_t)te_select_below(magnitude, TE_F32_NAN_BITS, code, 0x7f);
}

/* Round to nearest even; NaN stays a quiet NaN with the upper part of its payload. */
TE_INLINE uint16_t te_f32_to_f16(float value)
{
    int32_t bits = te_bits_of(value), magnitude = bits & 0x7fffffff;
    int32_t sign = (int32_t)((uint32_t)bits >> 16) & 0x8000;
    int32_t clamped = magnitude > 0x47800000 ? 0x47800000 : magnitude; /* 65536 becomes Inf */
    /* Below 2^-14 codes are multiples of 2^-24. */
    int32_t small = te_bits_of(te_float_of(clamped) + 0.5F) - 0x3f000000;
    int32_t normal = ((clamped + 0xfff + ((clamped >> 13) & 1)) >> 13) - (112 << 10);
    int32_t code = te_select_below(clamped, 0x38800000, small, normal);
    int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    return (uint16_t)(te_select_below(magnitude, TE_F32_NAN_BITS, code, nan) | sign);
}

TE_INLINE uint16_t te_f32_to_bf16(float value)
{
    uint32_t bits = (uint32_t)te_bits_of(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40;
    return (uint16_t)((int32_t)(bits & 0x7fffffff) > TE_F32_INF_BITS ? nan : rounded);
}

TE_INLINE float te_f16_to_f32(uint16_t code)
{
    int32_t magnitude = code & 0x7fff, sign = (int32_t)((uint32_t)(code & 0x8000) << 16);
    int32_t normal = (magnitude << 13) + (112 << 23);
    int32_t small = te_bits_of((float)(magnitude & 0x3ff) * 0x1p-24F);
    int32_t special = (magnitude << 13) | TE_F32_INF_BITS | (magnitude > 0x7c00 ? 0x400000 : 0);
    int32_t bits = te_select_below(magnitude, 0x400, small, normal);
    return te_float_of(te_select_below(magnitude, 0x7c00, bits, special) | sign);
}

TE_INLINE float te_bf16_to_f32(uint16_t code)
{
    return te_float_of((int32_t)((uint32_t)code << 16));
}

TE_INLINE float te_e4m3_to_f32(uint8_t code)
{
    int32_t magnitude = code & 0x7f, sign = (int32_t)((uint32_t)(code & 0x80) << 24);
    int32_t normal = (magnitude << 20) + (120 << 23);
    int32_t small = te_bits_of((float)(magnitude & 7) * 0x1p-9F);
    int32_t bits = te_select_below(magnitude, 8, small, normal);
    return te_float_of(te_select_below(magnitude, 0x7f, bits, 0x7fc00000) | sign);
}

TE_INLINE float te_e5m2_to_f32(uint8_t code)
{
    return te_f16_to_f32((uint16_t)(code << 8));
}

/* One fp64 number rounded once to a dtype, as the element's bytes (at most 8, native order). FP8
 * saturates; integers round to nearest and saturate, NaN becoming 0. Returns the element's size. */
size_t te_encode(te_dtype dtype, double value, unsigned char *bytes);
/* Dense elements of a float dtype to fp32 and back; INVALID for the others. */
te_status te_to_f32(te_dtype dtype, const void *elements, float *numbers, int64_t count);
te_status te_from_f32(te_dtype dtype, const float *numbers, void *elements, int64_t count);

#endif
