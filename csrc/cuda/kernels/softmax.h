/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.h - parameters of softmax over the keys, with scale, bias, mask, window and dropout, and
 * of its gradient. Device pointers are borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_SOFTMAX_H
#define TE_CUDA_KERNELS_SOFTMAX_H

#include "cuda/device/types.h"

/* X(..., lanes, keys): the registers of a team of threads, `lanes` of a warp or several warps, hold
 * a row, `keys` of it in each thread. te_softmax_<dtype>_<lanes>_<keys> where everything is
 * aligned: each row of each operand begins at 16 bytes of the input's dtype (of the mask, at as
 * many bytes as 16 bytes of it hold), the keys are a multiple of what 16 bytes hold, and a bias has
 * the dtype of the input. Longer ones come last. */
#define TE_SOFTMAX_TEAMS(X, ...)                                                                   \
    X(__VA_ARGS__, 16, 32)                                                                         \
    X(__VA_ARGS__, 16, 64)                                                                         \
    X(__VA_ARGS__, 32, 64)

/* te_softmax_any_<dtype>_<lanes>_<keys> for the others, and te_softmax_long_<dtype>, whose rows
 * may have any length. */
#define TE_SOFTMAX_ANY_TEAMS(X, ...)                                                               \
    X(__VA_ARGS__, 16, 32)                                                                         \
    X(__VA_ARGS__, 32, 32)

enum {
    TE_SOFTMAX_THREADS = 128,      /* of a block: one team of whole warps, or many of less */
    TE_SOFTMAX_LONG_THREADS = 256, /* where a row is too long for the registers */
    TE_SOFTMAX_WARPS = TE_SOFTMAX_LONG_THREADS / 32 /* of a team, at most */
};

/* How rows are distributed: a team of threads, a row of its block, does one. Grid: (groups of the
 * inner dim, middle, outer) of [batch, heads, queries] in the order that suits. */
typedef struct te_softmax_walk {
    te_index inner;            /* size */
    te_index middle, outer;    /* what the grid begins with */
    te_index row_strides[3];   /* from a place in outer, middle, inner to the number of the row */
    te_index query_strides[3]; /* and to that of the query, */
    te_index head_strides[3];  /* and to that of the head */
} te_softmax_walk;

/* The views are [outer, middle, inner, keys]; the key stride of mask and bias may also be 0. The
 * ends are those of the tensors' memory. */
typedef struct te_softmax_params {
    te_view4 input, output, probabilities; /* probabilities: data NULL: not requested */
    te_view4 mask;                         /* bytes; data NULL: none */
    te_view4 bias;                         /* bias_dtype; data NULL: none */
    const unsigned char *input_end, *mask_end, *bias_end;
    const float *sink;   /* [heads], or NULL */
    float *log_sum;      /* of each row, or NULL */
    const te_index *rng; /* {seed, offset}; NULL: no dropout */
    te_index keys;
    te_index first_key, end_key; /* of the window, relative to the query */
    int windowed;                /* 0: of any query, all keys */
    te_softmax_walk walk;
    float scale, keep_factor;
    unsigned drop_limit;     /* see random.cuh */
    int bias_dtype;          /* TE_STORE_* */
    int probabilities_alike; /* they begin within 16 bytes where the output does */
} te_softmax_params;

typedef struct te_softmax_backward_params {
    te_view4 grad_output, probabilities, grad_input;
    const unsigned char *grad_output_end, *probabilities_end;
    const float *sink, *log_sum; /* [heads]; of each row */
    float *grad_sinks;           /* of each row, or NULL */
    const te_index *rng;         /* {seed, offset}; NULL: no dropout */
    te_index keys;
    te_softmax_walk walk;
    float scale, keep_factor;
    unsigned drop_limit;
} te_softmax_backward_params;

#endif
