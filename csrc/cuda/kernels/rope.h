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
    TE_ROPE_BLOCKS = 8,    /* of them on a multiprocessor: loads in flight are what counts */
    TE_ROPE_UNITS = 64,    /* whose cosines and sines are held at a time */
    TE_ROPE_HEADS = 2,     /* that a thread has in flight */
    TE_ROPE_COPIES = 2,    /* vectors that a thread has in flight besides */
    TE_ROPE_PART_COUNT = 3
};

/* Heads of a token: head h begins at line h / per_line, at its channel h % per_line * dim. */
typedef struct te_rope_heads {
    te_view4 view; /* [batch, sequence, lines, ..]; packed tokens are one batch entry */
    int per_line;
} te_rope_heads;

/* A token has less than 2^31 elements. */
typedef struct te_rope_part_params {
    te_rope_heads input, output;
    int heads, dim;
    int in_place;
} te_rope_part_params;

/* Parts that turn by the same angles share a round. The rotary channels of a head are [0, split)
 * and [split, rotary); a unit is the vectors of 16 bytes at the same place of both, and holds whole
 * pairs: split is half of rotary, or where pairs are neighbours half of it rounded up to a whole
 * vector. */
typedef struct te_rope_round {
    const float *freqs; /* [positions, rotary] */
    te_index positions;
    int rotary, split, units;
    int heads;       /* of all its parts */
    int first, last; /* of its parts: [first, last) */
} te_rope_round;

/* The channels of a part that do not turn, in all its heads: [first, dim). */
typedef struct te_rope_copy {
    int part, first;
} te_rope_copy;

/* Grid: any number of blocks, which stride over the tokens. A part of no round is copied whole. */
typedef struct te_rope_params {
    te_rope_part_params parts[TE_ROPE_PART_COUNT];
    te_rope_round rounds[TE_ROPE_PART_COUNT];
    const int *cu_seqlens;     /* [sequences + 1], or NULL */
    const int *starts;         /* of each batch entry or packed sequence, or NULL */
    te_index tokens, sequence; /* tokens: of all batch entries */
    te_index sequences;        /* packed ones */
    te_rope_copy copies[TE_ROPE_PART_COUNT];
    int count, round_count, copy_count;
    int ranks, rank; /* of context parallelism */
    int interleaved, backward;
} te_rope_params;

#endif
