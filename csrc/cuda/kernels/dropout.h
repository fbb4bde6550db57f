/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.h - parameters of residual + drop_path(dropout(input + bias)) and of its gradient, which
 * is the same without bias and residual but with column sums. Device pointers are borrowed for the
 * launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_DROPOUT_H
#define TE_CUDA_KERNELS_DROPOUT_H

#include "cuda/device/types.h"

/* Of TE_NUMBERS: te_dropout_<dtype> and te_dropout_sums_<dtype>, the gradient with column sums;
 * both for rows that all begin at 16 bytes and are a multiple of them, and as
 * te_dropout_any_<dtype> and te_dropout_sums_any_<dtype> for the others. */

enum {
    TE_DROPOUT_THREADS_LOG2 = 8,
    TE_DROPOUT_THREADS = 1 << TE_DROPOUT_THREADS_LOG2,
    TE_DROPOUT_ROWS = 4,      /* that a thread has in flight */
    TE_DROPOUT_LANES_LOG2 = 5 /* at most; a block has THREADS >> lanes_log2 rows of lanes */
};

/* Grid: (columns of blocks, groups of rows). Block (x, y) does the columns of its 2^lanes_log2
 * lanes of 16 bytes, in the `depth` rows from y * depth on. */
typedef struct te_dropout_params {
    te_view input, residual, output; /* residual, output: data NULL: none */
    const void *bias;                /* [columns] bias_dtype, or NULL */
    const te_index *rng;             /* {seed, offset}; NULL: nothing is dropped */
    void *bias_grad;      /* [columns] bias_dtype; with one group, where sums is NULL; or NULL */
    float *sums;          /* [groups, columns] column sums of each group, or NULL */
    te_index path_first;  /* first element of drop path's stream, as an index from rng's offset */
    te_index sample_rows; /* rows that drop path keeps or drops together */
    float keep_factor, path_factor;
    unsigned drop_limit, path_limit; /* see random.cuh */
    int drops, drops_path;
    int lanes_log2, depth;
    int bias_dtype; /* TE_STORE_* */
    int bias_alike; /* the bias has the dtype of the input and begins at 16 bytes */
} te_dropout_params;

#endif
