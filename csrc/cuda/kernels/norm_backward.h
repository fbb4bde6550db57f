/* SPDX-License-Identifier: Apache-2.0
 *
 * norm_backward.h - parameters of the gradients of the norms. Device pointers are borrowed for the
 * launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_NORM_BACKWARD_H
#define TE_CUDA_KERNELS_NORM_BACKWARD_H

#include "cuda/kernels/norm.h"

enum {
    TE_NORM_BACKWARD_THREADS = 384, /* at most */
    TE_NORM_BACKWARD_BYTES = 64,    /* of a wide row of whole vectors of each matrix, of a thread */
    TE_NORM_BACKWARD_STAGES = 3     /* such rows that a team loads ahead, at most */
};

/* What all of them read. */
typedef struct te_norm_gradients {
    te_view grad;               /* [rows, columns] gradient of the result */
    te_view add;                /* [rows, columns] added to it; data NULL: nothing */
    te_view input;              /* [rows, columns]; of te_norm_backward_heads_<dtype> the rows of */
    te_norm_heads heads;        /* this and of `output` lie as the heads say */
    te_norm_factors factors;    /* gamma alone */
    const float *mean, *rsigma; /* [rows]; mean NULL: 0 */
    int aligned;                /* every row of the matrices begins at 16 bytes */
    int input_dtype, grad_dtype; /* TE_STORE_*, of te_norm_backward_*_mixed: of `add`, too, the
                                    second one */
} te_norm_gradients;

/* The gradient of the input, and column sums for those of gamma and beta. Teams of `lanes` threads
 * (a power of two up to 32, or whole warps) share rows; blocks of any number of teams stride over
 * the rows. Dynamic shared memory: see norm_backward.cu. */
typedef struct te_norm_backward_params {
    te_norm_gradients of;
    te_view output;   /* [rows, columns] gradient of the input; data NULL: not requested */
    te_view residual; /* likewise, in its dtype, is added to it as rounded; data NULL: none */
    te_norm_heads output_heads;
    float *sums; /* [blocks, lines * columns]: gamma, with 2 lines also beta; NULL: not requested */
    float inverse;
    int centered;
    int lines;
    int lanes, stages;
    int output_aligned, output_dtype; /* TE_STORE_* */
    int residual_aligned;
} te_norm_backward_params;

/* A kernel on tiles, see te_tile_params, that has nothing but the column sums: of gamma's gradient,
 * beside them of beta's. */
typedef struct te_norm_sums_params {
    te_tile_params tile;
    te_norm_gradients of;
} te_norm_sums_params;

#endif
