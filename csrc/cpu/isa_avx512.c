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

enum { ROWS = 12, VECTORS = 2, LANES = 16 };
#define VECTOR __m512
#define SIMD(name) _mm512_##name
#include "cpu/rows_gemm.h"
#define TABLE te_cpu_kernels_avx512
#include "cpu/isa_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
