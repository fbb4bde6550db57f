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

enum { ROWS = 4, VECTORS = 3, LANES = 8 };
#define VECTOR __m256
#define SIMD(name) _mm256_##name
#include "cpu/rows_gemm.h"
#define TABLE te_cpu_kernels_avx2
#include "cpu/isa_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
