/* SPDX-License-Identifier: Apache-2.0
 *
 * rope.h - parameters of the rotary position embedding of strided or packed sequences. Device
 * pointers are borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_ROPE_H
#define TE_CUDA_KERNELS_ROPE_H

#include "cuda/device/types.h"

/* te_rope_<dtype> of TE_NUMBERS, where each head begins at 16 bytes and split and rotary are
 * multiples of them (the rest of the channels need not be), and te_rope_any_<dtype>. */

enum {
    TE_ROPE_THREADS = 128, /* at most; whole warps */
    TE_ROPE_UNITS = 64     /* whose cosines and sines are held at a time */
};

/* Grid: any number of blocks, which stride over the tokens. The rotary channels of a head are
 * [0, split) and [split, rotary); a unit is the vectors of 16 bytes at the same place of both, and
 * holds whole pairs: split is half of rotary, or where pairs are neighbours half of it rounded up
 * to a whole vector. */
typedef struct te_rope_params {
    te_view4 input, output; /* [batch, sequence, heads, dim]; packed tokens are one batch entry */
    const float *freqs;     /* [positions, rotary] */
    const int *cu_seqlens;  /* [sequences + 1], or NULL */
    const int *starts;      /* of each batch entry or packed sequence, or NULL */
    te_index tokens, sequence; /* tokens: of all batch entries */
    te_index sequences;        /* packed ones */
    te_index positions, heads, dim, rotary, split, units;
    int interleaved, backward, in_place;
} te_rope_params;

#endif
