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

enum { ROWS = 4, VECTORS = 3, LANES = 8 };
#define VECTOR __m256
#define SIMD(name) _mm256_##name
#include "cpu/rows_gemm.h"

const te_cpu_kernels te_cpu_kernels_avx2 = {
    TE_CPU_ROW_KERNELS,        TE_CPU_LAYER_KERNELS,   TE_CPU_NORM_KERNELS,
    TE_CPU_ACTIVATION_KERNELS, .gemm_tile = gemm_tile, .tile_rows = ROWS,
    .tile_columns = COLUMNS,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
