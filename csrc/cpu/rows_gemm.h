/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_gemm.h - the GEMM's inner tile on fused multiply-adds, as a template.
 *
 * Included once by an isa_*.c that says how many ROWS and VECTORS of LANES floats a tile has, and
 * defines VECTOR and SIMD(name), an intrinsic of it.
 */
#ifndef TE_CPU_ROWS_GEMM_H
#define TE_CPU_ROWS_GEMM_H

#include <stdint.h>

enum { COLUMNS = VECTORS * LANES };

static void gemm_tile(int64_t k, const float *restrict a, const float *restrict b,
                      float *restrict c, int64_t ldc, int accumulate)
{
    VECTOR sum[ROWS][VECTORS], factors[VECTORS]; /* registers only if every loop is unrolled */
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int j = 0; j < VECTORS; j++) sum[i][j] = SIMD(setzero_ps)();
    }
    for (int64_t p = 0; p < k; p++) {
#pragma GCC unroll 3
        for (int j = 0; j < VECTORS; j++) factors[j] = SIMD(loadu_ps)(b + j * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
            VECTOR value = SIMD(set1_ps)(a[i]);
#pragma GCC unroll 3
            for (int j = 0; j < VECTORS; j++) {
                sum[i][j] = SIMD(fmadd_ps)(value, factors[j], sum[i][j]);
            }
        }
        a += ROWS;
        b += COLUMNS;
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 3
        for (int j = 0; j < VECTORS; j++) {
            float *target = c + i * ldc + (int64_t)j * LANES;
            VECTOR result = sum[i][j];
            if (accumulate) result = SIMD(add_ps)(SIMD(loadu_ps)(target), result);
            SIMD(storeu_ps)(target, result);
        }
    }
}

#endif
