/* SPDX-License-Identifier: Apache-2.0
 *
 * merge.h - parameters of the kernel that joins two attentions. Device pointers are borrowed for
 * the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_MERGE_H
#define TE_CUDA_KERNELS_MERGE_H

#include "cuda/device/types.h"

enum {
    TE_MERGE_THREADS = 256,
    TE_MERGE_VECTOR = 8,    /* channels of a lane at once */
    TE_MERGE_LANES_LOG2 = 5 /* of one head, at most: a warp */
};

/* [batch, tokens, heads, channels] */
typedef struct te_merge_operand {
    te_view4 view;
    int dtype; /* TE_STORE_* */
} te_merge_operand;

/* Grid: any number of blocks, which stride over the rows: heads of tokens. */
typedef struct te_merge_params {
    te_merge_operand total, step, output;
    te_view4 total_statistics, step_statistics, statistics; /* of one channel; data NULL: a sum */
    te_index rows, tokens, heads, channels;
    int lanes_log2; /* lanes of a row */
    int aligned;    /* every row begins at 16 bytes */
} te_merge_params;

#endif
