/* SPDX-License-Identifier: Apache-2.0
 *
 * update.h - parameters of updates over lists of tensors. Device pointers are borrowed for the
 * launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_UPDATE_H
#define TE_CUDA_KERNELS_UPDATE_H

#include "core/update_math.h"
#include "cuda/device/types.h"

enum {
    TE_UPDATE_THREADS = 256,
    TE_UPDATE_GROUP = 4, /* neighbouring elements of a thread: 16 bytes of fp32 */
    TE_UPDATE_UNROLL = 2,
    TE_UPDATE_CHUNK = 16384, /* elements of a block */
    TE_UPDATE_ENTRIES = 60,  /* tensors of a launch: parameters have 4 KiB */
    TE_UPDATE_CAST_ENTRIES = 14
};

/* One tensor of each list; NULL where there is no list. */
typedef struct te_update_entry {
    unsigned char *grad, *value, *mean, *square, *rounded, *remainder;
    te_index count;
    unsigned first; /* its first block */
    int aligned;    /* every group of every list is aligned */
} te_update_entry;

/* What is the same for all tensors. */
typedef struct te_update_common {
    te_update_numbers numbers;
    double beta1, beta2;                /* for step_at */
    const float *lr_at, *grad_scale_at; /* in place of numbers; NULL: those */
    const int *step_at;
    int *flag;       /* NULL: nobody asks */
    unsigned dtypes; /* TE_STORE_*, 4 bits each, from the lowest: see update.cu */
} te_update_common;

typedef struct te_update_params {
    te_update_entry entries[TE_UPDATE_ENTRIES];
    te_update_common common;
    int count; /* entries */
} te_update_params;

/* A matrix whose new values are cast with one scale. */
typedef struct te_update_cast_entry {
    te_update_entry lists; /* aligned: groups of every row of every list */
    te_cast_target to;
    te_index rows, columns;
    int across; /* tiles beside each other */
} te_update_cast_entry;

/* Grid: the tiles of 64 x 64 of all entries; TE_UPDATE_THREADS threads. */
typedef struct te_update_cast_params {
    te_update_cast_entry entries[TE_UPDATE_CAST_ENTRIES];
    te_update_common common;
    int count; /* entries */
} te_update_cast_params;

#endif
