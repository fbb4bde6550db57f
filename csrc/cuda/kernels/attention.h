/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.h - parameters of what attention needs beside cuDNN's kernels. Device pointers are
 * borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_ATTENTION_H
#define TE_CUDA_KERNELS_ATTENTION_H

#include "cuda/device/types.h"

enum { TE_ATTENTION_THREADS = 128, TE_ATTENTION_HEAD_THREADS = 512 };

/* te_attention_bias_<dtype>: -Inf where the mask is not 0, else the bias, or 0. Grid: any number of
 * blocks, which stride over the lines of the output. */
typedef struct te_attention_bias_params {
    te_view4 mask; /* bytes; data NULL: none */
    te_view4 bias; /* bias_dtype; data NULL: none. The key stride of both may be 0 */
    void *output;  /* [batch, heads, queries, keys], dense; each dim 1 or that of the scores */
    te_index shape[4];
    int bias_dtype; /* TE_STORE_* */
} te_attention_bias_params;

/* [batch, tokens, heads, channels] of 2-byte elements (two of FP8 are one), whose lines begin at 16
 * bytes and are `vectors` of as many; data NULL: nothing. */
typedef struct te_attention_heads {
    te_view4 view;
    te_index tokens, heads, vectors;
} te_attention_heads;

/* The queries, or the keys, of sequences: the token with which each packed one begins (NULL: they
 * are a batch), how many it has (NULL: up to the next one, or all), and what these must not exceed.
 * A sequence of which one side does is wrong: nothing is computed of it. */
typedef struct te_attention_side {
    const int *offsets, *lengths; /* [batch + 1] or NULL; [batch] or NULL */
    te_index tokens, longest;
} te_attention_side;

/* te_attention_clear: 0 in heads, -Inf in statistics: all of them, or of those batch entries of
 * which one side is empty; NaN in those that are wrong. Grid: (any number of blocks, which stride
 * over an entry; entries; 4). */
typedef struct te_attention_clear_params {
    te_attention_side sides[2];
    te_attention_heads heads[3];
    float *statistics; /* [batch, rows], or NULL */
    te_index rows, batch;
    int all;
} te_attention_clear_params;

enum { TE_ATTENTION_STARTS = 10 };

/* Where sequences begin in a tensor, in elements. */
typedef struct te_attention_starts {
    te_index *starts; /* [entries + 1] */
    te_index stride;  /* of a token */
    int side;
} te_attention_starts;

/* te_attention_begin: lengths of sequences, and starts of packed ones, as cuDNN reads them, 0 and
 * the last one's end for entries beyond the batch. Grid: any number of blocks. */
typedef struct te_attention_begin_params {
    te_attention_side sides[2]; /* queries, keys */
    te_index batch, entries;
    int *lengths[2]; /* [entries] each */
    te_attention_starts starts[TE_ATTENTION_STARTS];
    int count; /* of them */
} te_attention_begin_params;

/* te_attention_gaps: 0 in heads and -Inf in statistics of tokens of no sequence, and of sequences
 * of which one side is empty; NaN in those that are wrong. Grid: (any number of blocks, which
 * stride over a range; batch + 1, which stride too; 4). */
typedef struct te_attention_gaps_params {
    te_attention_side sides[2];
    te_index batch;
    te_attention_heads heads[3]; /* with one batch entry */
    int side_of[3];
    float *statistics; /* [tokens, rows], or NULL */
    te_index rows;
} te_attention_gaps_params;

/* A number of each query of each head. */
typedef struct te_attention_rows {
    float *data;
    te_index batch, head, query; /* strides */
    const te_index *starts;      /* [batch]: the element with which each sequence begins, in place
                                    of the stride; or NULL */
} te_attention_rows;

/* te_attention_sink_<dtype>: a sink joins what attention made without one; `output` is of 2-byte
 * elements. Grid: any number of blocks, which stride over the output. */
typedef struct te_attention_sink_params {
    te_attention_heads output;    /* scaled down in place */
    te_attention_rows statistics; /* without the sink; packed sequences are one */
    float *joined;                /* the same with it, or NULL */
    const float *sink;            /* [heads] */
    te_index batch;
} te_attention_sink_params;

/* te_attention_sink_grad: the sum over a head's rows of -factor * row * e^(sink - statistic). Rows
 * behind the end of a sequence do not count. Grid: heads. */
typedef struct te_attention_sink_grad_params {
    te_attention_rows rows, statistics;
    const float *sink;                      /* [heads] */
    float *output;                          /* [heads] */
    const int *query_lengths, *key_lengths; /* [batch], both or NULL */
    te_index batch, queries;
    float factor;
} te_attention_sink_grad_params;

/* te_attention_raise: the statistics of rows, a large number in place of -Inf: weights by it are 0,
 * where those by -Inf are NaN. Grid: any number of blocks. */
typedef struct te_attention_raise_params {
    const float *statistics; /* [rows] */
    float *output;           /* [rows] */
    te_index rows;
} te_attention_raise_params;

/* {1 / s, s} of s = factor times *source (NULL: 1). */
typedef struct te_attention_fp8_scale {
    const float *source;
    float factor;
    float *pair; /* 2 floats, or NULL */
} te_attention_fp8_scale;

enum { TE_ATTENTION_FP8_SCALES = 3, TE_ATTENTION_FP8_AMAXES = 4 };

/* te_attention_fp8_begin: scales. Grid: 1 block. */
typedef struct te_attention_fp8_begin_params {
    te_attention_fp8_scale scales[TE_ATTENTION_FP8_SCALES];
    int count;
} te_attention_fp8_begin_params;

typedef struct te_attention_fp8_amax {
    const float *found;
    float *amax;
} te_attention_fp8_amax;

/* te_attention_fp8_end: raises each amax to what was found, unless that is NaN. Grid: 1 block. */
typedef struct te_attention_fp8_end_params {
    te_attention_fp8_amax amaxes[TE_ATTENTION_FP8_AMAXES];
    int count;
} te_attention_fp8_end_params;

#endif
