/* SPDX-License-Identifier: Apache-2.0
 *
 * scaling.h - parameters of the delayed-scaling update. Device pointers are borrowed for the
 * launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_SCALING_H
#define TE_CUDA_KERNELS_SCALING_H

#include "cuda/device/types.h"

enum {
    TE_SCALING_SLOTS = 32, /* slots of one block, neighbouring words of a history row */
    TE_SCALING_LINES = 16, /* rows that a block reads at once */
    TE_SCALING_UNROLL = 4  /* rows of one thread between two barriers */
};

/* Grid: slots / TE_SCALING_SLOTS, rounded up; TE_SCALING_SLOTS x TE_SCALING_LINES threads. */
typedef struct te_scaling_params {
    float *scale;                   /* [slots] */
    float *history;                 /* [length, slots] */
    te_index slots, length, stride; /* stride: of a history row */
    float fp8_max;
    int most_recent; /* the newest amax alone, instead of the largest of the window */
} te_scaling_params;

#endif
