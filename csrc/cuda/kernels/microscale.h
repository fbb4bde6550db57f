/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.h - parameters of the casts to MXFP8 and NVFP4 and of their inverse. Device pointers
 * are borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_MICROSCALE_H
#define TE_CUDA_KERNELS_MICROSCALE_H

#include "cuda/device/types.h"

/* X(INPUT, input, OUTPUT, output) */
#define TE_MXFP8_INSTANCES(X)                                                                      \
    TE_NUMBERS(X, E4M3, e4m3)                                                                      \
    TE_NUMBERS(X, E5M2, e5m2)

/* te_mxfp8_*, te_nvfp4_*: te_quantize_params (quantize.h). */

/* te_nvfp4_rows_*: the amax of each row; grid of up to 65535 blocks of 128 threads, a row each. */
typedef struct te_nvfp4_rows_params {
    te_view input;
    float *amax;       /* of each row */
    const float *noop; /* 1 float or NULL */
    int input_aligned;
} te_nvfp4_rows_params;

/* te_hadamard_amax_*: grid of up to TE_CAST_PARTIALS blocks of 128 threads. */
typedef struct te_hadamard_amax_params {
    te_view input;
    float *partials; /* TE_CAST_PARTIALS floats */
    te_index row_tiles, column_tiles;
    unsigned signs;
    int input_aligned;
} te_hadamard_amax_params;

/* te_mxfp8_wide_*, te_nvfp4_wide_*, te_nvfp4_wide_transposed_*: data to high precision; grid
 * (column tiles, up to 65535 row tiles) of 64 x 64, 128 threads. */
typedef struct te_micro_wide_params {
    te_micro_form form;
    te_view output;
    float limit;    /* largest number of the output's dtype */
    float range;    /* NVFP4: te_nvfp4_range */
    int by_columns; /* MXFP8: scales of columns */
    int output_aligned;
} te_micro_wide_params;

/* te_nvfp4_alpha: {alpha, beta} of a GEMM of two NVFP4 operands. 1 thread. */
typedef struct te_nvfp4_alpha_params {
    const float *a, *b; /* largest magnitudes */
    float *out;
    float a_range, b_range; /* te_nvfp4_range */
    float beta;
} te_nvfp4_alpha_params;

#endif
