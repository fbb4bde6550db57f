/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.h - what attention and its gradient share: blocks of queries and of keys, and products
 * of them.
 *
 * Scores exist for one block of queries and one of keys at a time, in the second-level cache. The
 * products are those of the GEMM's inner tile over operands packed to fp32 panels (pack.h). Rows of
 * a block to which a window leaves no key of the other block are left out.
 */
#ifndef TE_CPU_ATTENTION_H
#define TE_CPU_ATTENTION_H

#include "core/interrupt.h"
#include "cpu/matrix.h"
#include "cpu/record.h"
#include "cpu/scores.h"

/* One part of a buffer: where it goes, and its floats. */
typedef struct te_cpu_part {
    float **data;
    int64_t floats;
} te_cpu_part;

enum {
    TE_CPU_QUERIES = 192, /* of a block at most; divided by the rows of every tile */
    TE_CPU_KEYS = 192     /* of a block; divided by the rows and columns of every tile */
};

/* The tokens of queries, or those of keys. */
typedef struct te_cpu_side {
    const int32_t *lengths; /* [batch]; NULL: all */
    const int32_t *offsets; /* [batch + 1]: where packed sequences begin; else NULL */
    int64_t longest;        /* what the scores have of them */
    int64_t tokens;         /* of all packed sequences, and between them */
} te_cpu_side;

/* What FP8 operands are multiplied with, 1 where they are none, and what weights are cast with. */
typedef struct te_cpu_attention_scales {
    int fp8;
    float query, key, value, weights;
} te_cpu_attention_scales;

/* One call. */
typedef struct te_cpu_attention_job {
    te_cpu_scores scores;
    te_cpu_tensor4 query, key, value;
    int64_t kv_heads, group;                /* heads to one head of keys */
    int64_t d_k, d_v, d_k_tiled, d_v_tiled; /* tiled: up to whole tiles */
    te_cpu_side queries, keys;
    int bottom_right;
    te_cpu_attention_scales scales;
    int64_t block; /* queries of a block */
    int threads;
    te_interruptible interruptible;
    float *fixed;   /* for all threads */
    float *buffers; /* of the threads, thread_floats each */
    int64_t thread_floats;
} te_cpu_attention_job;

/* The queries of one head that meet blocks of keys. */
typedef struct te_cpu_queries {
    int64_t batch, head, first, count; /* less those beyond the sequence's length */
    te_cpu_row rows[TE_CPU_QUERIES];
} te_cpu_queries;

/* A block of keys, and the rows [from, to) of a block of queries that may attend any of them. */
typedef struct te_cpu_meeting {
    int64_t key, keys, from, to;
} te_cpu_meeting;

/* A packed operand of a product. */
typedef struct te_cpu_panels {
    float *data;
    int64_t outer, depth;
    int width;
    int special; /* it holds NaN or Inf (or large numbers) */
} te_cpu_panels;

/* Shapes, sizes and threads; pointers are not followed. */
void te_cpu_attention_describe(const te_attention_problem *problem,
                               te_cpu_attention_job *attention);
/* Bytes of a workspace: `fixed` floats (a multiple of 16), and those of the threads. */
size_t te_cpu_attention_bytes(const te_cpu_attention_job *attention, int64_t fixed);
/* Divides the workspace and reads what a call depends on. INVALID for a length that can not be. */
te_status te_cpu_attention_begin(const char *name, const te_attention_problem *problem,
                                 te_cpu_attention_job *attention, int64_t fixed, void *workspace,
                                 size_t size);
/* Places parts one after the other from `start` on (NULL: nowhere); returns their floats. */
int64_t te_cpu_lay_out(const te_cpu_part *parts, int count, float *start);
/* The buffer of this thread. */
float *te_cpu_attention_buffer(const te_cpu_attention_job *attention);

/* Tokens of a sequence that are there. */
int64_t te_cpu_length(const te_cpu_side *side, int64_t batch);
/* Those that have memory: what is behind a length too, unless sequences are packed. */
int64_t te_cpu_rows_of(const te_cpu_side *side, int64_t batch);
/* A tensor of queries, or of keys. */
te_cpu_tensor4 te_cpu_heads_of(const te_cpu_side *side, const te_tensor *tensor);
/* How many statistics a call has, and the position of a query's among them. */
int64_t te_cpu_statistics(const te_cpu_attention_job *attention);
int64_t te_cpu_statistic(const te_cpu_attention_job *attention, const te_cpu_row *row);
/* Writes 0 to the tokens of no packed sequence; an absent tensor has none. */
void te_cpu_clear_gaps(const te_cpu_side *side, int64_t batch, const te_tensor *heads);
/* The queries of a head from `first` on. */
void te_cpu_set_queries(const te_cpu_attention_job *attention, int64_t batch, int64_t head,
                        int64_t first, te_cpu_queries *queries);
/* The block of keys from `key` on; whether any of the queries attends any of it. */
int te_cpu_meet(const te_cpu_attention_job *attention, const te_cpu_queries *queries, int64_t key,
                te_cpu_meeting *meeting);
/* Tokens [first, first + count) of one head of [batch, tokens, heads, dim], as a matrix. */
te_cpu_matrix te_cpu_tokens(const te_cpu_tensor4 *x, int64_t batch, int64_t head, int64_t first,
                            int64_t count, int64_t dim);
/* Sets all of a line of `keys` elements to 0 but n from `first` on. */
void te_cpu_clear_around(float *line, int64_t keys, int64_t first, int64_t n);
/* A dense fp32 matrix. */
te_cpu_matrix te_cpu_floats(float *data, int64_t rows, int64_t columns, int64_t stride);

/* Packs a matrix to panels of the inner tile's rows (the left side of a product) or columns (the
 * right side). outer_is_rows: the sums run along the rows of the matrix. */
te_cpu_panels te_cpu_pack_left(const te_cpu_kernels *kernels, te_cpu_matrix matrix,
                               int outer_is_rows, float *buffer);
te_cpu_panels te_cpu_pack_right(const te_cpu_kernels *kernels, te_cpu_matrix matrix,
                                int outer_is_rows, float *buffer);
/* c[i][j] = sum of a[i][k] b[k][j] over rows [from, to) of a and all columns of b, written up to
 * whole tiles; c is the place of row 0. add: added to c, and nothing where a is 0, whatever b holds
 * there. */
void te_cpu_product(const te_cpu_kernels *kernels, const te_cpu_panels *a, int64_t from, int64_t to,
                    const te_cpu_panels *b, float *c, int64_t ldc, int add);

/* ---- FP8 (attention_fp8.c) ---- */

/* Reads the scales of the operands; the scores are scaled by those of queries and keys. */
void te_cpu_fp8_begin(const te_attention_problem *problem, te_cpu_attention_job *attention);
/* Raises *amax to the largest magnitude; NaN is ignored. */
void te_cpu_fp8_measure(const float *values, int64_t n, float *amax);
/* Measures values, and replaces them by what is read after a cast of values * scale. */
void te_cpu_fp8_round(const te_cpu_kernels *kernels, te_dtype dtype, float scale, float *values,
                      int64_t n, float *amax);

#endif
