/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.h - parameters of what attention needs beside cuDNN's kernels. Device pointers are
 * borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_ATTENTION_H
#define TE_CUDA_KERNELS_ATTENTION_H

#include "cuda/device/types.h"

enum { TE_ATTENTION_THREADS = 128 };

/* te_attention_bias_<dtype>: -Inf where the mask is not 0, else the bias, or 0. Grid: any number of
 * blocks, which stride over the lines of the output. */
typedef struct te_attention_bias_params {
    te_view4 mask; /* bytes; data NULL: none */
    te_view4 bias; /* bias_dtype; data NULL: none. The key stride of both may be 0 */
    void *output;  /* [batch, heads, queries, keys], dense; each dim 1 or that of the scores */
    te_index shape[4];
    int bias_dtype; /* TE_STORE_* */
} te_attention_bias_params;

/* [batch, tokens, heads, channels] of 2-byte elements, whose lines begin at 16 bytes and are
 * `vectors` of as many; data NULL: nothing. */
typedef struct te_attention_heads {
    te_view4 view;
    te_index tokens, heads, vectors;
} te_attention_heads;

/* te_attention_clear: 0 in heads, -Inf in statistics; with lengths, in the batch entries of which
 * one is 0 alone. Grid: (any number of blocks, which stride over an entry; entries; 4). */
typedef struct te_attention_clear_params {
    te_attention_heads heads[3];
    float *statistics; /* [batch, rows], or NULL */
    te_index rows;
    const int *query_lengths, *key_lengths; /* [batch], both or NULL */
    te_index batch;
} te_attention_clear_params;

#endif
