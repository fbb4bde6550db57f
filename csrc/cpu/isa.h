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
/* keep[i] = all ones where element i of the Philox stream at `counter` (core/philox.h) is at least
 * probability, else 0; for `count` counters, four elements each. */
typedef void (*te_cpu_decide)(uint64_t seed, uint64_t counter, int64_t count, float probability,
                              int32_t *keep);
/* Angles of n pairs of channels (a, b): a' = a cos_a - b sin_a, b' = b cos_b + a sin_b. */
typedef struct te_cpu_angles {
    const float *cos_a, *sin_a, *cos_b, *sin_b;
} te_cpu_angles;
/* Rotates n pairs in place: x[i] with x[n + i] (halves), or x[2 i] with x[2 i + 1] (pairs). */
typedef void (*te_cpu_rotate)(float *x, const te_cpu_angles *angles, int64_t n);
/* A row of a norm: its statistics, and per column the factor, the summand, and for gradients the
 * column sums to add to. */
typedef struct te_cpu_norm_row {
    float mean, rsigma;
    float plain, scaled; /* row means of dz weight, and of that times the normalized input */
    const float *weight, *bias;
    float *gamma_sums, *beta_sums;
} te_cpu_norm_row;
/* A row of an activation; b of a gated one, grad of a gradient. */
typedef struct te_cpu_activation_row {
    const float *a, *b, *grad;
    te_activation_params params;
} te_cpu_activation_row;
typedef void (*te_cpu_activate)(const te_cpu_activation_row *row, float *y, int64_t n);

typedef struct te_cpu_kernels {
    te_cpu_quantize_row quantize[TE_CPU_INPUTS][TE_CPU_TARGETS][2]; /* last: with sums */
    void (*to_f32[TE_CPU_FLOATS])(const void *x, float *y, int64_t n);
    void (*from_f32[TE_CPU_FLOATS])(const float *x, void *y, int64_t n); /* FP8 saturates */
    void (*multiply)(float *x, float factor, int64_t n);
    void (*add)(float *x, const float *y, int64_t n);
    /* sums += (x * factor)^2 */
    void (*add_squares)(float *sums, const float *x, float factor, int64_t n);
    void (*gelu)(float *x, int64_t n); /* tanh approximation */
    /* Of rows_layer.h; sums are made in one order on every instruction set. */
    float (*largest)(const float *x, int64_t n);              /* NaN if any is; -Inf for none */
    float (*exponentials)(float *x, float shift, int64_t n);  /* e^(x - shift), 0 for -Inf; sum */
    void (*normalize)(float *x, float factor, int64_t n);     /* x *= factor; 0 stays 0 */
    void (*forbid)(float *x, const uint8_t *mask, int64_t n); /* x = -Inf where mask is not 0 */
    float (*dot)(const float *x, const float *y, int64_t n);
    /* x = cap tanh(x / cap), and the slopes of that, unless NULL. */
    void (*cap)(float *x, float cap, float *slopes, int64_t n);
    void (*follow)(float *x, const float *slopes, int64_t n); /* x *= slopes; 0 stays 0 */
    /* x = scale * p * (x - mean) */
    void (*softmax_backward)(float *x, const float *p, float mean, float scale, int64_t n);
    /* The same, but 0 where p is 0, whatever x. */
    void (*attention_backward)(float *x, const float *p, float mean, float scale, int64_t n);
    te_cpu_decide decide;
    /* x *= factor where keep is all ones, 0 where it is 0 */
    void (*keep)(float *x, const int32_t *keep, float factor, int64_t n);
    te_cpu_rotate rotate[2]; /* of halves; of pairs */
    float (*row_sum)(const float *x, int64_t n);
    /* Sums of x - shift and of its square. */
    void (*row_moments)(const float *x, float shift, int64_t n, float moments[2]);
    /* y = (x - mean) * rsigma * weight + bias */
    void (*norm[TE_CPU_INPUTS])(const void *x, const te_cpu_norm_row *row, float *y, int64_t n);
    /* Sums of dz weight, and of that times the normalized x; adds to the column sums. */
    void (*norm_gradient_sums)(const te_cpu_norm_row *row, const float *dz, const float *x,
                               int64_t n, float sums[2]);
    void (*norm_gradient)(const te_cpu_norm_row *row, const float *dz, const float *x, float *y,
                          int64_t n);
    /* Of rows_activation.h: the value; the gradient; of gated ones that of the second half. */
    te_cpu_activate activation[TE_ACTIVATION_COUNT][3];
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
