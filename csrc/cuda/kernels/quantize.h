/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.h - parameters of the per-tensor FP8 cast, of the sums that finish it, and of amax.
 * Device pointers are borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_QUANTIZE_H
#define TE_CUDA_KERNELS_QUANTIZE_H

#include "cuda/device/types.h"

/* X(INPUT, input, OUTPUT, output); output none: amax and column sums alone. */
#define TE_QUANTIZE_INSTANCES(X)                                                                   \
    X(F32, f32, E4M3, e4m3)                                                                        \
    X(F16, f16, E4M3, e4m3)                                                                        \
    X(BF16, bf16, E4M3, e4m3)                                                                      \
    X(F32, f32, E5M2, e5m2)                                                                        \
    X(F16, f16, E5M2, e5m2)                                                                        \
    X(BF16, bf16, E5M2, e5m2)                                                                      \
    X(F32, f32, COUNT, none)                                                                       \
    X(F16, f16, COUNT, none)                                                                       \
    X(BF16, bf16, COUNT, none)

#define TE_AMAX_INSTANCES(X)                                                                       \
    X(F32, f32)                                                                                    \
    X(F16, f16)                                                                                    \
    X(BF16, bf16)

enum {
    TE_QUANTIZE_PARTIALS =
        1024, /* floats of partial maxima; TE_AMAX_PARTIALS of the public header */
    TE_AMAX_THREADS = 256,
    TE_SUMS_THREADS = 256,
    TE_SUMS_COLUMNS = 32 /* columns that one block of the finishing sums serves */
};

/* Grid: (column tiles, row groups) of 64 x 64 tiles; 128 threads. Block (x, y) does the `depth`
 * tiles below each other that begin at row tile y * depth. */
typedef struct te_quantize_params {
    te_view input;          /* [rows, columns] */
    te_view rowwise;        /* [rows, >= columns] bytes; data NULL: not wanted */
    te_view columnwise;     /* [columns, >= rows] bytes; data NULL: not wanted */
    const float *scale;     /* 1 float; NULL: from partials; both NULL: 1 */
    const float *partials;  /* TE_QUANTIZE_PARTIALS floats, 16-byte aligned if partials_aligned */
    const float *noop;      /* 1 float or NULL */
    float *scale_pair;      /* 2 floats or NULL */
    float *amax;            /* 1 float or NULL */
    float *sums;            /* [row groups, columns] column sums of each group, or NULL */
    void *bias_grad;        /* [columns]; with one row group, where sums is NULL; or NULL */
    float fp8_max, epsilon; /* for partials */
    int power_2;
    int depth;
    int bias_dtype; /* TE_STORE_* */
    int input_aligned, rowwise_aligned,
        columnwise_aligned; /* every row begins at 16 bytes (rowwise: 8) */
    int partials_aligned;
} te_quantize_params;

/* Grid: columns / TE_SUMS_COLUMNS, rounded up; TE_SUMS_THREADS threads. */
typedef struct te_quantize_sums_params {
    const float *sums; /* [groups, columns] */
    void *bias_grad;   /* [columns] */
    const float *noop; /* 1 float or NULL */
    te_index groups, columns;
    int bias_dtype; /* TE_STORE_* */
} te_quantize_sums_params;

/* Grid: 1 .. TE_QUANTIZE_PARTIALS blocks of TE_AMAX_THREADS threads. */
typedef struct te_amax_params {
    te_view input;
    float *partials; /* TE_QUANTIZE_PARTIALS floats */
    te_walk walk;    /* see matrix.cuh */
    int aligned;
} te_amax_params;

#endif
