/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.h - the inner loops over contiguous elements, as a template.
 *
 * Included once by each isa_*.c, after the pragma that selects the instruction set: the same plain
 * loops become vector code of 4, 8 or 16 lanes, with the same bits. Loops have one body without
 * branches for that reason.
 */
#ifndef TE_CPU_ROWS_H
#define TE_CPU_ROWS_H

#include "core/fp8.h"
#include "cpu/isa.h"

/* X(ENUM, name, storage, load, store) */
#define TE_CPU_INPUT_TYPES(X)                                                                      \
    X(F32, f32, float, te_cpu_same, te_cpu_same)                                                   \
    X(F16, f16, uint16_t, te_f16_to_f32, te_f32_to_f16)                                            \
    X(BF16, bf16, uint16_t, te_bf16_to_f32, te_f32_to_bf16)
#define TE_CPU_FLOAT_TYPES(X)                                                                      \
    TE_CPU_INPUT_TYPES(X)                                                                          \
    X(E4M3, e4m3, uint8_t, te_e4m3_to_f32, te_f32_to_e4m3)                                         \
    X(E5M2, e5m2, uint8_t, te_e5m2_to_f32, te_f32_to_e5m2)

TE_INLINE float te_cpu_same(float value)
{
    return value;
}

#define X(NAME, name, storage, load, store)                                                        \
    static void to_f32_##name(const void *x, float *restrict y, int64_t n)                         \
    {                                                                                              \
        const storage *restrict source = x;                                                        \
        for (int64_t i = 0; i < n; i++) y[i] = load(source[i]);                                    \
    }                                                                                              \
    static void from_f32_##name(const float *restrict x, void *y, int64_t n)                       \
    {                                                                                              \
        storage *restrict target = y;                                                              \
        for (int64_t i = 0; i < n; i++) target[i] = store(x[i]);                                   \
    }
TE_CPU_FLOAT_TYPES(X)
#undef X

#define TE_CPU_CAST_NOTHING(value) ((void)0)
#define TE_CPU_CAST_E4M3(value) (q[i] = te_f32_to_e4m3((value)*scale))
#define TE_CPU_CAST_E5M2(value) (q[i] = te_f32_to_e5m2((value)*scale))
#define TE_CPU_SUM_NOTHING(value) ((void)0)
#define TE_CPU_SUM(value) (sums[i] += (value))

#define TE_CPU_QUANTIZE_ROW(function, storage, load, cast, sum)                                    \
    static void function(const void *x, uint8_t *restrict q, int64_t n, float scale,               \
                         int32_t *amax, float *restrict sums)                                      \
    {                                                                                              \
        const storage *restrict source = x;                                                        \
        int32_t top = *amax;                                                                       \
        for (int64_t i = 0; i < n; i++) {                                                          \
            float value = load(source[i]);                                                         \
            int32_t magnitude = te_magnitude_bits(value);                                          \
            top = magnitude > top ? magnitude : top;                                               \
            sum(value);                                                                            \
            cast(value);                                                                           \
        }                                                                                          \
        *amax = top;                                                                               \
        (void)q, (void)scale, (void)sums;                                                          \
    }
#define X(NAME, name, storage, load, store)                                                        \
    TE_CPU_QUANTIZE_ROW(amax_##name, storage, load, TE_CPU_CAST_NOTHING, TE_CPU_SUM_NOTHING)       \
    TE_CPU_QUANTIZE_ROW(amax_sum_##name, storage, load, TE_CPU_CAST_NOTHING, TE_CPU_SUM)           \
    TE_CPU_QUANTIZE_ROW(e4m3_##name, storage, load, TE_CPU_CAST_E4M3, TE_CPU_SUM_NOTHING)          \
    TE_CPU_QUANTIZE_ROW(e4m3_sum_##name, storage, load, TE_CPU_CAST_E4M3, TE_CPU_SUM)              \
    TE_CPU_QUANTIZE_ROW(e5m2_##name, storage, load, TE_CPU_CAST_E5M2, TE_CPU_SUM_NOTHING)          \
    TE_CPU_QUANTIZE_ROW(e5m2_sum_##name, storage, load, TE_CPU_CAST_E5M2, TE_CPU_SUM)
TE_CPU_INPUT_TYPES(X)
#undef X

static void multiply(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

static void add(float *restrict x, const float *restrict y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

static void add_squares(float *restrict sums, const float *restrict x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float value = x[i] * factor;
        sums[i] += value * value;
    }
}

/* e^x within 3 units in the last place; 0 below -87.6 (no subnormals), Inf above 88.3. */
TE_INLINE float exponential(float x)
{
    const float shift = 0x1.8p23F; /* adding it rounds to an integer, kept in the low bits */
    int32_t magnitude = te_bits_of(x) & 0x7fffffff;
    int32_t limit = te_bits_of(90.0F);
    float limited =
        te_float_of((magnitude > limit ? limit : magnitude) | (te_bits_of(x) & ~0x7fffffff));
    float shifted = limited * 0x1.715476p0F + shift;
    float whole = shifted - shift;
    float r = limited - whole * 0x1.62e4p-1F; /* ln 2 in two parts, the first of few bits */
    r = r - whole * 0x1.7f7d1cp-20F;
    float p = 0x1.6c16c2p-10F;
    p = p * r + 0x1.111112p-7F;
    p = p * r + 0x1.555556p-5F;
    p = p * r + 0x1.555556p-3F;
    p = p * r + 0.5F;
    p = p * r * r + r;
    p = p + 1.0F;
    int32_t exponent = te_bits_of(shifted) - te_bits_of(shift);
    int32_t bits = (int32_t)((uint32_t)te_bits_of(p) + ((uint32_t)exponent << 23));
    bits = te_select_below(exponent, 128, bits, TE_F32_INF_BITS);
    bits = te_select_below(exponent, -126, 0, bits);
    return te_float_of(te_select_below(magnitude, TE_F32_NAN_BITS, bits, 0x7fc00000));
}

#define TE_CPU_LARGE 3.402823466e+38F

/* condition ? yes : no, by masks for the reason given at te_select_below. */
TE_INLINE float choose(int condition, float yes, float no)
{
    int32_t mask = -(int32_t)condition;
    return te_float_of((te_bits_of(yes) & mask) | (te_bits_of(no) & ~mask));
}

/* x, but the lowest finite number for -Inf, which a factor of 0 would turn into NaN. */
TE_INLINE float above_minus_infinity(float x)
{
    return choose(x < -TE_CPU_LARGE, -TE_CPU_LARGE, x);
}

/* 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) is x / (1 + e^(-2u)), which keeps its
 * precision where tanh(u) is close to -1; 0 for -Inf. */
TE_INLINE float gelu_value(float x)
{
    float value = above_minus_infinity(x);
    float u = value * (1.0F + 0.044715F * value * value);
    return value / (1.0F + exponential(-1.5957691216F * u));
}

static void gelu(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = gelu_value(x[i]);
}

#endif
