/* SPDX-License-Identifier: Apache-2.0
 *
 * scores.h - what softmax and attention do to a row of scores before its exponentials: scale, bias,
 * mask and window.
 */
#ifndef TE_CPU_SCORES_H
#define TE_CPU_SCORES_H

#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/random.h"

enum { TE_CPU_SCORES = 2048 }; /* of a row at a time */

/* A row of a call: its index, the keys [begin, end) of its window, and that on its diagonal. */
typedef struct te_cpu_row {
    int64_t index[3]; /* batch, head, query */
    int64_t number, begin, end, middle;
} te_cpu_row;

typedef struct te_cpu_scores {
    const te_cpu_kernels *kernels;
    te_cpu_tensor4 mask, bias;
    int64_t shape[4]; /* batch, heads, queries, keys */
    float scale;
    float cap;                  /* of the scaled scores; 0: none */
    const float *slopes;        /* NULL: none */
    int64_t slopes_stride;      /* from one batch entry to the next */
    const float *sink;          /* [heads], or NULL */
    int64_t diagonal;           /* the key on it, relative to the query */
    int64_t first_key, end_key; /* of the window, likewise */
    te_cpu_dropout dropout;
} te_cpu_scores;

/* The element (row, key). */
unsigned char *te_cpu_score_at(const te_cpu_tensor4 *x, const te_cpu_row *row, int64_t key);
void te_cpu_set_window(te_cpu_scores *scores, int64_t left, int64_t right, int64_t diagonal);
/* A row by its number, over the first `keys` keys and with a diagonal further right by `shift`. */
te_cpu_row te_cpu_row_of(const te_cpu_scores *scores, int64_t number, int64_t keys, int64_t shift);
/* values = scale * values + bias - slope * distance of n keys of a row, -Inf where the mask
 * forbids; n is at most TE_CPU_SCORES. With a cap it bounds scale * values, and the gradients of
 * these are those of the capped ones times `of_cap` (NULL: nobody wants it; written with a cap
 * alone). */
void te_cpu_finish_scores(const te_cpu_scores *scores, const te_cpu_row *row, int64_t key,
                          int64_t n, float *values, float *of_cap);
/* The score of a row that belongs to no key; -Inf without a sink. */
float te_cpu_sink_of(const te_cpu_scores *scores, int64_t head);

#endif
