/* SPDX-License-Identifier: Apache-2.0
 *
 * isa_portable.c - the inner loops for any processor.
 */
#include "cpu/isa.h"

enum { ROWS = 4, COLUMNS = 8 };

static void gemm_tile(int64_t k, const float *restrict a, const float *restrict b,
                      float *restrict c, int64_t ldc, int accumulate)
{
    float sum[ROWS][COLUMNS] = {{0}};
    for (int64_t p = 0; p < k; p++) {
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < COLUMNS; j++) sum[i][j] += a[i] * b[j];
        }
        a += ROWS;
        b += COLUMNS;
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; j++) {
            float *target = c + i * ldc + j;
            *target = accumulate ? *target + sum[i][j] : sum[i][j];
        }
    }
}

#define TABLE te_cpu_kernels_portable
#include "cpu/isa_table.h"
