/* SPDX-License-Identifier: Apache-2.0
 *
 * dequantize.h - parameters of FP8 per tensor to high precision. Device pointers are borrowed for
 * the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_DEQUANTIZE_H
#define TE_CUDA_KERNELS_DEQUANTIZE_H

#include "cuda/device/types.h"

/* X(OUTPUT, output, INPUT, input) */
#define TE_DEQUANTIZE_INSTANCES(X)                                                                 \
    TE_NUMBERS(X, E4M3, e4m3)                                                                      \
    TE_NUMBERS(X, E5M2, e5m2)

/* te_dequantize_*: row-wise input, a matrix walk of 256 threads. te_dequantize_transposed_*: input
 * [columns, >= rows]; grid (row tiles, column tiles) of 64 x 64, 128 threads. */
typedef struct te_dequantize_params {
    te_view input;                    /* bytes */
    te_view output;                   /* [rows, columns] */
    const float *scale_inv;           /* of the element at (0, 0) */
    te_index across_step, along_step; /* from the scale of 2^across_log2 rows, or of 2^along_log2 */
    float limit;                      /* largest number of the output's dtype */
    int across_log2, along_log2;      /* elements of a row, of `input` to that of the next */
    te_walk walk;                     /* row-wise: see matrix.cuh */
    int input_aligned, output_aligned; /* every vector access is aligned */
} te_dequantize_params;

#endif
