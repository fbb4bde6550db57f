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
    TE_NUMBERS(X, E4M3, e4m3)                                                                      \
    TE_NUMBERS(X, E5M2, e5m2)                                                                      \
    TE_NUMBERS(X, COUNT, none)

/* With scales of rows or tiles. */
#define TE_QUANTIZE_SCALED_INSTANCES(X)                                                            \
    TE_NUMBERS(X, E4M3, e4m3)                                                                      \
    TE_NUMBERS(X, E5M2, e5m2)

enum {
    TE_CLEAR_THREADS = 256,
    TE_AMAX_THREADS = 256,
    TE_SUMS_THREADS = 256,
    TE_SUMS_COLUMNS = 32 /* columns that one block of the finishing sums serves */
};

/* A kernel on tiles: see te_tile_params. */
typedef struct te_quantize_params {
    te_tile_params tile;
    te_view input;     /* [rows, columns] */
    int input_aligned; /* every row begins at 16 bytes */
} te_quantize_params;

/* Sets floats to 0. Any grid of TE_CLEAR_THREADS threads. */
typedef struct te_quantize_clear_params {
    float *scales[2];
    te_index count[2];
    const float *noop; /* 1 float or NULL */
} te_quantize_clear_params;

/* Adds up lines of column sums into at most two vectors that lie side by side in a line. Grid:
 * columns / TE_SUMS_COLUMNS, rounded up; TE_SUMS_THREADS threads. */
typedef struct te_quantize_sums_params {
    const float *sums; /* [groups, columns] */
    const float *noop; /* 1 float or NULL */
    te_index groups, columns;
    te_index split;                /* columns from here on go to `second` */
    void *first, *second;          /* [split], [columns - split]; NULL: not requested */
    int first_dtype, second_dtype; /* TE_STORE_* */
} te_quantize_sums_params;

/* Grid: 1 .. TE_CAST_PARTIALS blocks of TE_AMAX_THREADS threads. */
typedef struct te_amax_params {
    te_view input;
    float *partials; /* TE_CAST_PARTIALS floats */
    te_walk walk;    /* see matrix.cuh */
    int aligned;
} te_amax_params;

#endif
