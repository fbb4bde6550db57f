/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_norm.h - the inner loops of the norms, as a template like rows.h and included after it.
 *
 * A sum has 32 partial sums whatever the instruction set, so that its bits are the same everywhere.
 * Fewer, and gcc would unroll the loop over them before it is turned into vector code.
 */
#ifndef TE_CPU_ROWS_NORM_H
#define TE_CPU_ROWS_NORM_H

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

static void norm_gradient_sums(const te_cpu_norm_row *row, const float *restrict dz,
                               const float *restrict x, int64_t n, float sums[2])
{
    float plain[TE_CPU_PARTIAL_SUMS] = {0}, scaled[TE_CPU_PARTIAL_SUMS] = {0};
    const float *restrict weight = row->weight;
    float *restrict gamma_sums = row->gamma_sums, *restrict beta_sums = row->beta_sums;
    float mean = row->mean, rsigma = row->rsigma;
    for (int64_t first = 0; first < n; first += TE_CPU_PARTIAL_SUMS) {
        int64_t rest = n - first;
        if (rest >= TE_CPU_PARTIAL_SUMS) {
            for (int64_t j = 0; j < TE_CPU_PARTIAL_SUMS; j++) {
                float normal = (x[first + j] - mean) * rsigma, grad = dz[first + j];
                float weighted = grad * weight[first + j];
                gamma_sums[first + j] += grad * normal;
                beta_sums[first + j] += grad;
                plain[j] += weighted;
                scaled[j] += weighted * normal;
            }
            continue;
        }
        for (int64_t j = 0; j < rest; j++) {
            float normal = (x[first + j] - mean) * rsigma, grad = dz[first + j];
            float weighted = grad * weight[first + j];
            gamma_sums[first + j] += grad * normal;
            beta_sums[first + j] += grad;
            plain[j] += weighted;
            scaled[j] += weighted * normal;
        }
    }
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

#endif
