/* SPDX-License-Identifier: Apache-2.0
 *
 * scores.c - scale, cap, bias, mask and window of a row of scores.
 */
#include "cpu/scores.h"

#include <math.h>
#include <string.h>

unsigned char *te_cpu_score_at(const te_cpu_tensor4 *x, const te_cpu_row *row, int64_t key)
{
    return te_cpu_at4(x, row->index[0], row->index[1], row->index[2]) +
           key * x->strides[3] * x->bytes;
}

/* n elements from a key on: where they lie, or in `buffer` copies of one that stands for all. */
static const void *spread(const te_cpu_tensor4 *x, const te_cpu_row *row, int64_t key, int64_t n,
                          void *buffer)
{
    const unsigned char *source = te_cpu_score_at(x, row, key);
    if (x->strides[3] != 0) return source;
    for (int64_t i = 0; i < n; i++) {
        memcpy((unsigned char *)buffer + i * x->bytes, source, (size_t)x->bytes);
    }
    return buffer;
}

void te_cpu_set_window(te_cpu_scores *scores, int64_t left, int64_t right, int64_t diagonal)
{
    scores->diagonal = diagonal;
    scores->first_key = left >= 0 ? diagonal - left : -INT64_MAX / 2;
    scores->end_key = right >= 0 ? diagonal + right + 1 : INT64_MAX / 2;
}

te_cpu_row te_cpu_row_of(const te_cpu_scores *scores, int64_t number, int64_t keys, int64_t shift)
{
    int64_t heads = scores->shape[1], queries = scores->shape[2];
    te_cpu_row row = {
        .index = {number / queries / heads, number / queries % heads, number % queries},
        .number = number};
    row.begin = te_cpu_min(keys, row.index[2] + scores->first_key + shift);
    row.end = te_cpu_min(keys, row.index[2] + scores->end_key + shift);
    row.middle = row.index[2] + scores->diagonal + shift;
    if (row.begin < 0) row.begin = 0;
    if (row.end < row.begin) row.end = row.begin;
    return row;
}

static void slope_down(const te_cpu_scores *scores, const te_cpu_row *row, int64_t key, int64_t n,
                       float *values)
{
    const float slope = scores->slopes[row->index[0] * scores->slopes_stride + row->index[1]];
    for (int64_t i = 0; i < n; i++) {
        const int64_t distance = key + i - row->middle;
        values[i] += -slope * (float)(distance < 0 ? -distance : distance);
    }
}

float te_cpu_sink_of(const te_cpu_scores *scores, int64_t head)
{
    return scores->sink == NULL ? -INFINITY : scores->sink[head];
}

void te_cpu_finish_scores(const te_cpu_scores *scores, const te_cpu_row *row, int64_t key,
                          int64_t n, float *values, float *of_cap)
{
    const te_cpu_kernels *kernels = scores->kernels;
    uint32_t copies[TE_CPU_SCORES];
    if (scores->scale != 1.0F) kernels->multiply(values, scores->scale, n);
    if (scores->cap > 0.0F) kernels->cap(values, scores->cap, of_cap, n);
    if (scores->bias.data != NULL) {
        float bias[TE_CPU_SCORES];
        kernels->to_f32[scores->bias.dtype](spread(&scores->bias, row, key, n, copies), bias, n);
        kernels->add(values, bias, n);
    }
    if (scores->slopes != NULL) slope_down(scores, row, key, n, values);
    if (scores->mask.data != NULL) {
        kernels->forbid(values, spread(&scores->mask, row, key, n, copies), n);
    }
}
