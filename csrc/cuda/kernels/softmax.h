/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.h - parameters of softmax over the keys, with scale, bias, mask, window and dropout, and
 * of its gradient. Device pointers are borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_SOFTMAX_H
#define TE_CUDA_KERNELS_SOFTMAX_H

#include "cuda/device/types.h"

/* X(DTYPE, dtype, keys a lane holds): a warp per row of up to 32 times as many keys. Everything is
 * aligned: each row of each operand begins at 16 bytes of the input's dtype (of the mask, at as
 * many bytes as 16 bytes of it hold), the keys are a multiple of what 16 bytes hold, and a bias has
 * the dtype of the input. */
#define TE_SOFTMAX_INSTANCES(X)                                                                    \
    X(F32, f32, 16)                                                                                \
    X(F16, f16, 16)                                                                                \
    X(BF16, bf16, 16)                                                                              \
    X(F32, f32, 32)                                                                                \
    X(F16, f16, 32)                                                                                \
    X(BF16, bf16, 32)                                                                              \
    X(F32, f32, 64)                                                                                \
    X(F16, f16, 64)                                                                                \
    X(BF16, bf16, 64)

/* X(DTYPE, dtype): a block per row of any length and alignment. */
#define TE_SOFTMAX_ANY_INSTANCES(X)                                                                \
    X(F32, f32)                                                                                    \
    X(F16, f16)                                                                                    \
    X(BF16, bf16)

enum {
    TE_SOFTMAX_WARPS = 4,        /* rows of a block where a warp has a row */
    TE_SOFTMAX_ANY_THREADS = 256 /* at most, where a block has a row; whole warps */
};

/* Grid: any number of blocks, which stride over the rows. The views are [batch, heads, queries,
 * keys]; the key stride of mask and bias may also be 0. */
typedef struct te_softmax_params {
    te_view4 input, output, probabilities; /* probabilities: data NULL: not wanted */
    te_view4 mask;                         /* bytes; data NULL: none */
    te_view4 bias;                         /* bias_dtype; data NULL: none */
    const te_index *rng;                   /* {seed, offset}; NULL: no dropout */
    te_index rows, heads, queries, keys;
    te_index first_key, end_key; /* of the window, relative to the query */
    float scale, keep_factor;
    unsigned drop_limit;                                      /* see random.cuh */
    int bias_dtype;                                           /* TE_STORE_* */
    int input_aligned, output_aligned, probabilities_aligned; /* every row begins at 16 bytes */
    int mask_aligned, bias_aligned; /* at as many elements (bias: or 16 bytes) as these hold */
} te_softmax_params;

typedef struct te_softmax_backward_params {
    te_view4 grad_output, probabilities, grad_input;
    const te_index *rng; /* {seed, offset}; NULL: no dropout */
    te_index rows, heads, queries, keys;
    float scale, keep_factor;
    unsigned drop_limit;
    int grad_output_aligned, probabilities_aligned, grad_input_aligned;
} te_softmax_backward_params;

#endif
