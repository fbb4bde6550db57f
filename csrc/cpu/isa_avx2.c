/* SPDX-License-Identifier: Apache-2.0
 *
 * isa_avx2.c - the inner loops for AVX2 with FMA. Nothing here runs before isa.c has asked the
 * processor. A GEMM tile of 4 x 24 takes 12 of the 16 registers for sums, 3 for b and 1 for a.
 */
#include "cpu/isa.h"

#if defined(TE_CPU_X86)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>

#include "cpu/rows.h"
#include "cpu/rows_activation.h"
#include "cpu/rows_layer.h"
#include "cpu/rows_norm.h"

enum { ROWS = 4, VECTORS = 3, LANES = 8, COLUMNS = VECTORS * LANES };

static void gemm_tile(int64_t k, const float *restrict a, const float *restrict b,
                      float *restrict c, int64_t ldc, int accumulate)
{
    __m256 sum[ROWS][VECTORS]; /* in registers only if every loop over it is unrolled */
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int j = 0; j < VECTORS; j++) sum[i][j] = _mm256_setzero_ps();
    }
    for (int64_t p = 0; p < k; p++) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + LANES);
        __m256 b2 = _mm256_loadu_ps(b + 2 * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
            __m256 value = _mm256_broadcast_ss(a + i);
            sum[i][0] = _mm256_fmadd_ps(value, b0, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(value, b1, sum[i][1]);
            sum[i][2] = _mm256_fmadd_ps(value, b2, sum[i][2]);
        }
        a += ROWS;
        b += COLUMNS;
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int j = 0; j < VECTORS; j++) {
            float *target = c + i * ldc + (int64_t)j * LANES;
            __m256 result = sum[i][j];
            if (accumulate) result = _mm256_add_ps(_mm256_loadu_ps(target), result);
            _mm256_storeu_ps(target, result);
        }
    }
}

const te_cpu_kernels te_cpu_kernels_avx2 = {
    TE_CPU_ROW_KERNELS,        TE_CPU_LAYER_KERNELS,   TE_CPU_NORM_KERNELS,
    TE_CPU_ACTIVATION_KERNELS, .gemm_tile = gemm_tile, .tile_rows = ROWS,
    .tile_columns = COLUMNS,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
