/* SPDX-License-Identifier: Apache-2.0
 *
 * isa_avx512.c - the inner loops for AVX-512. Nothing here runs before isa.c has asked the
 * processor. A GEMM tile of 12 x 32 takes 24 of the 32 registers for sums, enough to hide the
 * latency of two fused multiply-adds per cycle.
 */
#include "cpu/isa.h"

#if defined(TE_CPU_X86)
#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#include <immintrin.h>

#include "cpu/rows.h"
#include "cpu/rows_activation.h"
#include "cpu/rows_layer.h"
#include "cpu/rows_norm.h"

enum { ROWS = 12, LANES = 16, COLUMNS = 2 * LANES };

static void gemm_tile(int64_t k, const float *restrict a, const float *restrict b,
                      float *restrict c, int64_t ldc, int accumulate)
{
    __m512 sum[ROWS][2]; /* in registers only if every loop over it is unrolled */
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p++) {
        __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
            __m512 value = _mm512_set1_ps(a[i]);
            sum[i][0] = _mm512_fmadd_ps(value, b0, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(value, b1, sum[i][1]);
        }
        a += ROWS;
        b += COLUMNS;
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            float *target = c + i * ldc + (int64_t)j * LANES;
            __m512 result = sum[i][j];
            if (accumulate) result = _mm512_add_ps(_mm512_loadu_ps(target), result);
            _mm512_storeu_ps(target, result);
        }
    }
}

const te_cpu_kernels te_cpu_kernels_avx512 = {
    TE_CPU_ROW_KERNELS,        TE_CPU_LAYER_KERNELS,   TE_CPU_NORM_KERNELS,
    TE_CPU_ACTIVATION_KERNELS, .gemm_tile = gemm_tile, .tile_rows = ROWS,
    .tile_columns = COLUMNS,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
