/* SPDX-License-Identifier: Apache-2.0
 *
 * elementwise.h - parameters of fill, cast, copy and byte transpose. Device pointers are borrowed
 * for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_ELEMENTWISE_H
#define TE_CUDA_KERNELS_ELEMENTWISE_H

#include "cuda/device/types.h"

/* X(INPUT, input, OUTPUT, output): conversions. */
#define TE_CAST_INSTANCES(X)                                                                       \
    X(F32, f32, F16, f16)                                                                          \
    X(F32, f32, BF16, bf16)                                                                        \
    X(F16, f16, F32, f32)                                                                          \
    X(F16, f16, BF16, bf16)                                                                        \
    X(BF16, bf16, F32, f32)                                                                        \
    X(BF16, bf16, F16, f16)

/* X(bytes of an element): copies and fills, whatever the dtype. 8-byte elements are two of 4. */
#define TE_COPY_INSTANCES(X)                                                                       \
    X(1)                                                                                           \
    X(2)                                                                                           \
    X(4)

/* A matrix walk of 256 threads over the output; what the input lacks is 0. */
typedef struct te_cast_params {
    te_view input, output;
    te_walk walk;                      /* see matrix.cuh */
    int input_aligned, output_aligned; /* every vector access is aligned */
} te_cast_params;

/* A matrix walk of 256 threads. `pattern` is 4 bytes of neighbouring elements; `pattern_high` the
 * 4 bytes of odd words where an element has 8 bytes, else the same. */
typedef struct te_fill_params {
    te_view output;
    unsigned pattern, pattern_high;
    te_walk walk;
    int output_aligned;
} te_fill_params;

/* output[c, r] = input[r, c] of bytes, 0 beyond the input's rows. Grid: (column tiles, row tiles)
 * of 64 x 64 over the input's columns and the output's columns; 128 threads. */
typedef struct te_transpose_params {
    te_view input, output;
    int input_aligned, output_aligned; /* rows begin at 8 (input) and 16 (output) bytes */
} te_transpose_params;

#endif
