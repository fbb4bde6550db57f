/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm.h - parameters of norms over lists of tensors. Device pointers are borrowed for the
 * launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_L2NORM_H
#define TE_CUDA_KERNELS_L2NORM_H

#include "core/l2norm_order.h"
#include "cuda/device/types.h"

enum {
    TE_L2NORM_ENTRIES = 160, /* tensors of a launch: parameters have 4 KiB */
    TE_L2NORM_RANGES = 500
};

typedef struct te_l2norm_entry {
    const unsigned char *data;
    te_index count;
    unsigned first;       /* its first block */
    short dtype, aligned; /* TE_STORE_*; whether every group is aligned */
} te_l2norm_entry;

/* Grid: the chunks of all entries; TE_L2NORM_THREADS threads. */
typedef struct te_l2norm_params {
    te_l2norm_entry entries[TE_L2NORM_ENTRIES];
    const float *factor; /* NULL: 1 */
    float *sums;         /* of chunks, from that of the first block on */
    int count;           /* entries */
} te_l2norm_params;

/* Grid: the ranges; TE_L2NORM_ADDERS threads. */
typedef struct te_l2norm_root_params {
    te_index begin[TE_L2NORM_RANGES + 1]; /* of each range in the sums, then the end of the last */
    const float *sums;
    float *norms; /* of each range */
    int *flag;    /* set to 1 where a norm is Inf or NaN; NULL: nobody asks */
} te_l2norm_root_params;

#endif
