/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_layer.h - the inner loops of norms, softmax, dropout and rope, as a template like rows.h and
 * included after it.
 *
 * A sum has 32 partial sums whatever the instruction set, so that its bits are the same everywhere.
 * Fewer, and gcc would unroll the loop over them before it is turned into vector code.
 */
#ifndef TE_CPU_ROWS_LAYER_H
#define TE_CPU_ROWS_LAYER_H

#include <math.h>

#include "core/philox.h"
#include "cpu/rows.h"

enum { TE_CPU_PARTIAL_SUMS = 32 };

/* The sum of the partial sums, halves first. */
TE_INLINE float join_partial_sums(float *sums)
{
    for (int width = TE_CPU_PARTIAL_SUMS / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    }
    return sums[0];
}

static float row_sum(const float *x, int64_t n)
{
    float sums[TE_CPU_PARTIAL_SUMS] = {0};
    int64_t whole = n / TE_CPU_PARTIAL_SUMS * TE_CPU_PARTIAL_SUMS;
    for (int64_t i = 0; i < whole; i += TE_CPU_PARTIAL_SUMS) {
        for (int j = 0; j < TE_CPU_PARTIAL_SUMS; j++) sums[j] += x[i + j];
    }
    for (int64_t i = whole; i < n; i++) sums[i - whole] += x[i];
    return join_partial_sums(sums);
}

TE_INLINE void add_moment(float x, float shift, float *sum, float *square_sum)
{
    float distance = x - shift;
    *sum += distance;
    *square_sum += distance * distance;
}

static void row_moments(const float *x, float shift, int64_t n, float moments[2])
{
    float sums[TE_CPU_PARTIAL_SUMS] = {0}, squares[TE_CPU_PARTIAL_SUMS] = {0};
    int64_t whole = n / TE_CPU_PARTIAL_SUMS * TE_CPU_PARTIAL_SUMS;
    for (int64_t i = 0; i < whole; i += TE_CPU_PARTIAL_SUMS) {
        for (int j = 0; j < TE_CPU_PARTIAL_SUMS; j++) {
            add_moment(x[i + j], shift, &sums[j], &squares[j]);
        }
    }
    for (int64_t i = whole; i < n; i++) {
        add_moment(x[i], shift, &sums[i - whole], &squares[i - whole]);
    }
    moments[0] = join_partial_sums(sums);
    moments[1] = join_partial_sums(squares);
}

#define X(NAME, name, storage, load, store)                                                        \
    static void norm_##name(const void *x, const te_cpu_norm_row *row, float *restrict y,          \
                            int64_t n)                                                             \
    {                                                                                              \
        const storage *restrict source = x;                                                        \
        const float *restrict weight = row->weight, *restrict bias = row->bias;                    \
        float mean = row->mean, rsigma = row->rsigma;                                              \
        for (int64_t i = 0; i < n; i++) {                                                          \
            y[i] = (load(source[i]) - mean) * rsigma * weight[i] + bias[i];                        \
        }                                                                                          \
    }
TE_CPU_INPUT_TYPES(X)
#undef X

/* The sums of norm_gradient_sums over n elements from `first` on, at most as many as there are
 * partial sums. */
TE_INLINE void add_gradient_sums(const te_cpu_norm_row *row, const float *restrict dz,
                                 const float *restrict x, int64_t first, int64_t n,
                                 float *restrict plain, float *restrict scaled)
{
    const float *restrict weight = row->weight;
    float *restrict gamma_sums = row->gamma_sums, *restrict beta_sums = row->beta_sums;
    float mean = row->mean, rsigma = row->rsigma;
    for (int64_t j = 0; j < n; j++) {
        float normal = (x[first + j] - mean) * rsigma, grad = dz[first + j];
        float weighted = grad * weight[first + j];
        gamma_sums[first + j] += grad * normal;
        beta_sums[first + j] += grad;
        plain[j] += weighted;
        scaled[j] += weighted * normal;
    }
}

static void norm_gradient_sums(const te_cpu_norm_row *row, const float *restrict dz,
                               const float *restrict x, int64_t n, float sums[2])
{
    float plain[TE_CPU_PARTIAL_SUMS] = {0}, scaled[TE_CPU_PARTIAL_SUMS] = {0};
    int64_t whole = n / TE_CPU_PARTIAL_SUMS * TE_CPU_PARTIAL_SUMS;
    for (int64_t i = 0; i < whole; i += TE_CPU_PARTIAL_SUMS) {
        add_gradient_sums(row, dz, x, i, TE_CPU_PARTIAL_SUMS, plain, scaled);
    }
    add_gradient_sums(row, dz, x, whole, n - whole, plain, scaled);
    sums[0] = join_partial_sums(plain);
    sums[1] = join_partial_sums(scaled);
}

static void norm_gradient(const te_cpu_norm_row *row, const float *restrict dz,
                          const float *restrict x, float *restrict y, int64_t n)
{
    const float *restrict weight = row->weight;
    float mean = row->mean, rsigma = row->rsigma, plain = row->plain, scaled = row->scaled;
    for (int64_t i = 0; i < n; i++) {
        float normal = (x[i] - mean) * rsigma;
        y[i] = rsigma * (dz[i] * weight[i] - plain - normal * scaled);
    }
}

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
