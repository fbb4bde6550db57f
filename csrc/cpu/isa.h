/* SPDX-License-Identifier: Apache-2.0
 *
 * isa.h - the inner loops of the CPU backend, one table per instruction set.
 *
 * rows.h defines the loops once; isa_*.c compile it for one instruction set each and add a GEMM
 * tile. Operators fetch the table of the running processor and stay free of intrinsics. All tables
 * give the same bits, except that the portable GEMM tile rounds products (it has no fused
 * multiply-add).
 */
#ifndef TE_CPU_ISA_H
#define TE_CPU_ISA_H

#include "transformer_engine.h"

typedef enum te_cpu_isa {
    TE_CPU_ISA_PORTABLE = 0,
    TE_CPU_ISA_AVX2 = 1,
    TE_CPU_ISA_AVX512 = 2,
    TE_CPU_ISA_COUNT
} te_cpu_isa;

enum {
    TE_CPU_FLOATS = TE_DTYPE_E5M2 + 1, /* dtypes with to_f32 and from_f32: all floats */
    TE_CPU_INPUTS = TE_DTYPE_BF16 + 1, /* dtypes that quantize reads: f32, f16, bf16 */
    TE_CPU_TARGETS = 3,                /* what quantize makes: nothing, e4m3, e5m2 */
    TE_CPU_MAX_TILE_ROWS = 12,         /* divides BLOCK_ROWS of gemm.c */
    TE_CPU_MAX_TILE_COLUMNS = 32
};

/* q[i] = saturate(x[i] * scale); *amax (bits of a float) max-accumulates |x|; sums[i] += x[i] in
 * the variant that has it. */
typedef void (*te_cpu_quantize_row)(const void *x, uint8_t *q, int64_t n, float scale,
                                    int32_t *amax, float *sums);
/* c[i][j] (+)= sum over k of a[p][i] b[p][j]; a: [k][tile_rows], b: [k][tile_columns], packed. */
typedef void (*te_cpu_gemm_tile)(int64_t k, const float *a, const float *b, float *c, int64_t ldc,
                                 int accumulate);

typedef struct te_cpu_kernels {
    te_cpu_quantize_row quantize[TE_CPU_INPUTS][TE_CPU_TARGETS][2]; /* last: with sums */
    void (*to_f32[TE_CPU_FLOATS])(const void *x, float *y, int64_t n);
    void (*from_f32[TE_CPU_FLOATS])(const float *x, void *y, int64_t n); /* FP8 saturates */
    void (*multiply)(float *x, float factor, int64_t n);
    void (*add)(float *x, const float *y, int64_t n);
    void (*gelu)(float *x, int64_t n); /* tanh approximation */
    te_cpu_gemm_tile gemm_tile;
    int tile_rows, tile_columns; /* multiples of 4 */
} te_cpu_kernels;

extern const te_cpu_kernels te_cpu_kernels_portable;
#if defined(__x86_64__) && defined(__GNUC__)
#define TE_CPU_X86 1
extern const te_cpu_kernels te_cpu_kernels_avx2, te_cpu_kernels_avx512;
#endif

/* The best table for this processor, found at the first call. */
const te_cpu_kernels *te_cpu_kernels_get(void);
/* For tests: makes te_cpu_kernels_get answer with this instruction set; UNSUPPORTED where the
 * processor lacks it. A negative one restores the best. No operator may be running. */
te_status te_cpu_force_isa(int isa);

/* Index of an FP8 dtype among the targets of quantize; 0 for other dtypes. */
static inline int te_cpu_target(te_dtype dtype)
{
    return dtype == TE_DTYPE_E4M3 ? 1 : dtype == TE_DTYPE_E5M2 ? 2 : 0;
}

#endif
