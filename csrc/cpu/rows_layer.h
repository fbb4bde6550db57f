/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_layer.h - the inner loops of softmax, dropout and rope, as a template like rows.h and
 * included after it.
 */
#ifndef TE_CPU_ROWS_LAYER_H
#define TE_CPU_ROWS_LAYER_H

#include <math.h>

#include "core/philox.h"
#include "cpu/rows.h"
#include "cpu/rows_norm.h"

static float dot(const float *x, const float *y, int64_t n)
{
    float sums[TE_CPU_PARTIAL_SUMS] = {0};
    int64_t whole = n / TE_CPU_PARTIAL_SUMS * TE_CPU_PARTIAL_SUMS;
    for (int64_t i = 0; i < whole; i += TE_CPU_PARTIAL_SUMS) {
        for (int j = 0; j < TE_CPU_PARTIAL_SUMS; j++) sums[j] += x[i + j] * y[i + j];
    }
    for (int64_t i = whole; i < n; i++) sums[i - whole] += x[i] * y[i];
    return join_partial_sums(sums);
}

/* Bits of a float as an integer of the same order, and back (it is its own inverse). */
TE_INLINE int32_t ordered(int32_t bits)
{
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* By integers, which the compiler may reorder. */
static float largest(const float *x, int64_t n)
{
    int32_t top = ordered(te_bits_of(-INFINITY));
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = te_bits_of(x[i]), magnitude = bits & 0x7fffffff;
        int32_t value = te_select_below(magnitude, TE_F32_NAN_BITS, ordered(bits), 0x7fffffff);
        top = value > top ? value : top;
    }
    return te_float_of(ordered(top));
}

static float exponentials(float *x, float shift, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t allowed = -(int32_t)(te_bits_of(x[i]) != te_bits_of(-INFINITY));
        x[i] = te_float_of(te_bits_of(exponential(x[i] - shift)) & allowed);
    }
    return row_sum(x, n);
}

static void normalize(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t present = -(int32_t)(te_bits_of(x[i]) != 0);
        x[i] = te_float_of(te_bits_of(x[i] * factor) & present);
    }
}

static void forbid(float *x, const uint8_t *mask, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t allowed = -(int32_t)(mask[i] == 0);
        x[i] = te_float_of((te_bits_of(x[i]) & allowed) | (te_bits_of(-INFINITY) & ~allowed));
    }
}

/* Behind 0.6 by e^-2|u|, whose sum with 1 rounds off what a smaller u has; 1 - tanh^2 has few
 * digits where tanh is close to 1. */
static void soft_cap(float *restrict x, float cap, float *restrict slopes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float u = x[i] / cap, square = u * u;
        float small = exponential(-2.0F * te_float_of(te_bits_of(u) & 0x7fffffff));
        float inverse = 1.0F / (1.0F + small);
        int32_t far = te_bits_of((1.0F - small) * inverse) | (te_bits_of(u) & INT32_MIN);
        float p = -0x1.825856p-8F; /* (tanh(u) / u - 1) / u^2 to 3e-9 */
        p = p * square + 0x1.54b8a0p-6F;
        p = p * square - 0x1.b898dep-5F;
        p = p * square + 0x1.1109aep-3F;
        p = p * square - 0x1.55553ep-2F;
        x[i] = cap * choose(square < 0.36F, u + u * square * p, te_float_of(far));
        if (slopes != NULL) slopes[i] = 4.0F * small * inverse * inverse;
    }
}

static void follow(float *restrict x, const float *restrict slopes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t present = -(int32_t)(x[i] != 0.0F);
        x[i] = te_float_of(te_bits_of(x[i] * slopes[i]) & present);
    }
}

static void softmax_backward(float *restrict x, const float *restrict p, float mean, float scale,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = scale * (p[i] * (x[i] - mean));
}

static void attention_backward(float *restrict x, const float *restrict p, float mean, float scale,
                               int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t present = -(int32_t)(te_bits_of(p[i]) != 0);
        x[i] = te_float_of(te_bits_of(scale * (p[i] * (x[i] - mean))) & present);
    }
}

static void decide(uint64_t seed, uint64_t counter, int64_t count, float probability,
                   int32_t *restrict keep)
{
    for (int64_t i = 0; i < count; i++) {
        te_philox_words words = te_philox(seed, counter + (uint64_t)i);
        for (int j = 0; j < 4; j++) {
            keep[4 * i + j] = -(int32_t)(te_philox_uniform(words.word[j]) >= probability);
        }
    }
}

static void keep_some(float *restrict x, const int32_t *restrict keep, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = te_float_of(te_bits_of(x[i] * factor) & keep[i]);
}

static void rotate_halves(float *x, const te_cpu_angles *angles, int64_t n)
{
    float *restrict first = x, *restrict second = x + n;
    const float *restrict cos_a = angles->cos_a, *restrict sin_a = angles->sin_a;
    const float *restrict cos_b = angles->cos_b, *restrict sin_b = angles->sin_b;
    for (int64_t i = 0; i < n; i++) {
        float a = first[i], b = second[i];
        first[i] = a * cos_a[i] - b * sin_a[i];
        second[i] = b * cos_b[i] + a * sin_b[i];
    }
}

static void rotate_pairs(float *restrict x, const te_cpu_angles *angles, int64_t n)
{
    const float *restrict cos_a = angles->cos_a, *restrict sin_a = angles->sin_a;
    const float *restrict cos_b = angles->cos_b, *restrict sin_b = angles->sin_b;
    for (int64_t i = 0; i < n; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos_a[i] - b * sin_a[i];
        x[2 * i + 1] = b * cos_b[i] + a * sin_b[i];
    }
}

#endif
