/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/sdpa_mask.h"

#include <math.h>

typedef te_cudnn_tensor tensor;

static tensor *kept_where(te_cudnn_graph *graph, tensor *scores, cudnnPointwiseMode_t mode,
                          tensor *x, tensor *b)
{
    tensor *keep = te_cudnn_pointwise(graph, mode, x, b, CUDNN_DATA_BOOLEAN);
    return te_cudnn_select(graph, scores, te_cudnn_float(graph, -INFINITY), keep);
}

static tensor *integers(te_cudnn_graph *graph, cudnnPointwiseMode_t mode, tensor *x, tensor *b)
{
    return te_cudnn_pointwise(graph, mode, x, b, CUDNN_DATA_INT32);
}

static tensor *plus(te_cudnn_graph *graph, tensor *x, int64_t number)
{
    if (number == 0) return x;
    return integers(graph, CUDNN_POINTWISE_ADD, x, te_cudnn_int(graph, (int32_t)number));
}

/* How far the diagonal is to the right of that which begins in the top left corner; of sequences
 * with lengths, without what depends on these. */
static int64_t shift_of(const te_sdpa_key *key)
{
    const int64_t corner = key->has_lengths ? 0 : key->keys - key->queries;
    return key->bottom_right ? key->diagonal + corner : key->diagonal;
}

/* Keys up to query + shift + right. */
static tensor *without_later(te_cudnn_graph *graph, const te_sdpa_key *key,
                             const te_sdpa_lengths *lengths, tensor *scores)
{
    tensor *row, *column;
    if (key->window_right < 0) return scores;
    row = te_cudnn_index(graph, scores, 2);
    column = te_cudnn_index(graph, scores, 3);
    if (key->bottom_right && key->has_lengths) {
        row = integers(graph, CUDNN_POINTWISE_ADD, row, lengths->keys);
        row = integers(graph, CUDNN_POINTWISE_SUB, row, lengths->queries);
    }
    row = plus(graph, row, shift_of(key) + key->window_right);
    return kept_where(graph, scores, CUDNN_POINTWISE_CMP_GE, row, column);
}

/* Keys from query + shift - left on. The engine takes the sum on the side of the keys alone: on
 * that of the queries it makes another mask. */
static tensor *without_earlier(te_cudnn_graph *graph, const te_sdpa_key *key,
                               const te_sdpa_lengths *lengths, tensor *scores)
{
    const int64_t more = key->window_left + 1 - shift_of(key);
    tensor *row, *column;
    if (key->window_left < 0) return scores;
    row = te_cudnn_index(graph, scores, 2);
    column = te_cudnn_index(graph, scores, 3);
    if (key->bottom_right && key->has_lengths) {
        column = integers(graph, CUDNN_POINTWISE_ADD, column, te_cudnn_int(graph, (int32_t)more));
        column = integers(graph, CUDNN_POINTWISE_SUB, column, lengths->keys);
        column = integers(graph, CUDNN_POINTWISE_ADD, column, lengths->queries);
    } else {
        column = te_cudnn_pointwise(graph, CUDNN_POINTWISE_ADD, column,
                                    te_cudnn_float(graph, (float)more), CUDNN_DATA_FLOAT);
    }
    return kept_where(graph, scores, CUDNN_POINTWISE_CMP_GT, column, row);
}

tensor *te_sdpa_within_window(te_cudnn_graph *graph, const te_sdpa_key *key,
                              const te_sdpa_lengths *lengths, tensor *scores)
{
    scores = without_later(graph, key, lengths, scores);
    return without_earlier(graph, key, lengths, scores);
}

tensor *te_sdpa_within_lengths(te_cudnn_graph *graph, const te_sdpa_lengths *lengths,
                               tensor *scores)
{
    tensor *row, *column, *both;
    if (lengths->queries == NULL) return scores;
    row = te_cudnn_index(graph, scores, 2);
    column = te_cudnn_index(graph, scores, 3);
    row = te_cudnn_pointwise(graph, CUDNN_POINTWISE_CMP_LT, row, lengths->queries,
                             CUDNN_DATA_BOOLEAN);
    column = te_cudnn_pointwise(graph, CUDNN_POINTWISE_CMP_LT, column, lengths->keys,
                                CUDNN_DATA_BOOLEAN);
    both = te_cudnn_pointwise(graph, CUDNN_POINTWISE_LOGICAL_AND, row, column, CUDNN_DATA_BOOLEAN);
    return te_cudnn_select(graph, scores, te_cudnn_float(graph, -INFINITY), both);
}
