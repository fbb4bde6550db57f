/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.c - softmax over the keys with scale, bias, mask, window and dropout, and its gradient.
 *
 * One row at a time, in three steps: the largest score, the sum of the exponentials, the output. A
 * row of up to PIECE keys keeps its scores on the stack between them; a longer one makes them
 * again, piece by piece, which costs time but no memory. Keys outside of the window are not looked
 * at.
 */
#include <math.h>
#include <string.h>

#include "core/status.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"
#include "cpu/random.h"
#include "cpu/scores.h"

enum { PIECE = TE_CPU_SCORES };

typedef struct softmax_job {
    te_cpu_scores scores;
    te_cpu_tensor4 input, output, probabilities; /* of the gradient: grad_output, grad_input */
    float *log_sum;                              /* of each row, or NULL */
    float *grad_sinks;                           /* likewise */
} softmax_job;

/* scale * input + bias; -Inf where the mask forbids. */
static void make_scores(const softmax_job *job, const te_cpu_row *row, int64_t key, int64_t n,
                        float *scores)
{
    job->scores.kernels->to_f32[job->input.dtype](te_cpu_score_at(&job->input, row, key), scores,
                                                  n);
    te_cpu_finish_scores(&job->scores, row, key, n, scores, NULL);
}

/* Writes n numbers from a key on. */
static void store(const softmax_job *job, const te_cpu_tensor4 *y, const te_cpu_row *row,
                  int64_t key, const float *values, int64_t n)
{
    job->scores.kernels->from_f32[y->dtype](values, te_cpu_score_at(y, row, key), n);
}

static void zero(const te_cpu_tensor4 *y, const te_cpu_row *row, int64_t first, int64_t end)
{
    if (y->data == NULL || first >= end) return;
    memset(te_cpu_score_at(y, row, first), 0, (size_t)((end - first) * y->bytes));
}

/* The largest score of a row; `scores` holds the last piece. */
static float largest_score(const softmax_job *job, const te_cpu_row *row, float *scores)
{
    float top = -INFINITY;
    for (int64_t key = row->begin; key < row->end; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, row->end - key);
        make_scores(job, row, key, n, scores);
        float largest = job->scores.kernels->largest(scores, n);
        if (!(largest <= top)) top = largest; /* NaN stays, for nothing is more or less */
        if (isnan(top)) break;
    }
    return top;
}

static void softmax_one(const softmax_job *job, const te_cpu_row *row)
{
    const te_cpu_kernels *kernels = job->scores.kernels;
    float scores[PIECE], sum;
    int32_t decisions[TE_CPU_DECISIONS(PIECE)];
    int whole = row->end - row->begin <= PIECE; /* the scores of one step serve the next */
    float top = largest_score(job, row, scores), sink = te_cpu_sink_of(&job->scores, row->index[1]);
    te_cpu_row seen = *row;
    if (top == -INFINITY) seen.end = seen.begin;
    if (!(sink <= top) && !isnan(top)) top = sink;
    if (top == INFINITY) top = NAN; /* Inf - Inf, in every key and not only in this one */
    sum = kernels->exponentials(&sink, top, 1);
    for (int64_t key = seen.begin; key < seen.end; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, seen.end - key);
        if (!whole) make_scores(job, row, key, n, scores);
        sum += kernels->exponentials(scores, top, n);
    }
    if (job->log_sum != NULL) job->log_sum[row->number] = sum == 0.0F ? INFINITY : top + logf(sum);
    for (int64_t key = seen.begin; key < seen.end; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, seen.end - key);
        if (!whole) {
            make_scores(job, row, key, n, scores);
            (void)kernels->exponentials(scores, top, n);
        }
        kernels->normalize(scores, 1.0F / sum, n);
        if (job->probabilities.data != NULL) store(job, &job->probabilities, row, key, scores, n);
        if (job->scores.dropout.active) {
            te_cpu_drop(kernels, &job->scores.dropout, row->number * job->scores.shape[3] + key,
                        scores, n, decisions);
        }
        store(job, &job->output, row, key, scores, n);
    }
    zero(&job->output, row, 0, seen.begin);
    zero(&job->output, row, seen.end, job->scores.shape[3]);
    zero(&job->probabilities, row, 0, seen.begin);
    zero(&job->probabilities, row, seen.end, job->scores.shape[3]);
}

te_status te_cpu_softmax(const te_softmax_args *args)
{
    softmax_job job = {.scores = {.kernels = te_cpu_kernels_get(),
                                  .mask = te_cpu_tensor4_of(&args->mask),
                                  .bias = te_cpu_tensor4_of(&args->bias),
                                  .sink = args->sink.data,
                                  .scale = args->scale,
                                  .dropout = te_cpu_dropout_of(args->rng, args->dropout)},
                       .input = te_cpu_tensor4_of(&args->input),
                       .output = te_cpu_tensor4_of(&args->output),
                       .probabilities = te_cpu_tensor4_of(&args->probabilities),
                       .log_sum = args->log_sum.data};
    int64_t *shape = job.scores.shape;
    memcpy(shape, args->input.shape, sizeof job.scores.shape);
    te_cpu_set_window(&job.scores, args->window_left, args->window_right, args->diagonal);
    /* Rows of a causal window differ in length: they are distributed in small chunks. */
    int64_t rows = shape[0] * shape[1] * shape[2];
    if (shape[3] == 0 && job.log_sum == NULL) return TE_OK;
#pragma omp parallel for num_threads(te_cpu_threads(rows, shape[3])) schedule(dynamic, 16)
    for (int64_t number = 0; number < rows; number++) {
        te_cpu_row row = te_cpu_row_of(&job.scores, number, shape[3], 0);
        softmax_one(&job, &row);
    }
    return TE_OK;
}

/* ---- backward ----------------------------------------------------------------------------- */

/* dp and p of n keys. */
static void load_pair(const softmax_job *job, const te_cpu_row *row, int64_t key, int64_t n,
                      float *dp, float *p)
{
    const te_cpu_kernels *kernels = job->scores.kernels;
    int32_t decisions[TE_CPU_DECISIONS(PIECE)];
    kernels->to_f32[job->input.dtype](te_cpu_score_at(&job->input, row, key), dp, n);
    kernels->to_f32[job->probabilities.dtype](te_cpu_score_at(&job->probabilities, row, key), p, n);
    if (job->scores.dropout.active) {
        te_cpu_drop(kernels, &job->scores.dropout, row->number * job->scores.shape[3] + key, dp, n,
                    decisions);
    }
}

static void backward_one(const softmax_job *job, const te_cpu_row *row)
{
    const te_cpu_kernels *kernels = job->scores.kernels;
    float dp[PIECE], p[PIECE], mean = 0.0F;
    int64_t keys = job->scores.shape[3];
    for (int64_t key = 0; key < keys; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, keys - key);
        load_pair(job, row, key, n, dp, p);
        mean += kernels->dot(dp, p, n);
    }
    if (job->grad_sinks != NULL) {
        float own = expf(job->scores.sink[row->index[1]] - job->log_sum[row->number]);
        job->grad_sinks[row->number] = -own * mean;
    }
    for (int64_t key = 0; key < keys; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, keys - key);
        if (keys > PIECE) load_pair(job, row, key, n, dp, p);
        kernels->softmax_backward(dp, p, mean, job->scores.scale, n);
        store(job, &job->output, row, key, dp, n);
    }
}

te_status te_cpu_softmax_backward(const te_softmax_backward_args *args)
{
    softmax_job job = {.scores = {.kernels = te_cpu_kernels_get(),
                                  .sink = args->sink.data,
                                  .scale = args->scale,
                                  .dropout = te_cpu_dropout_of(args->rng, args->dropout)},
                       .input = te_cpu_tensor4_of(&args->grad_output),
                       .output = te_cpu_tensor4_of(&args->grad_input),
                       .probabilities = te_cpu_tensor4_of(&args->probabilities),
                       .log_sum = args->log_sum.data,
                       .grad_sinks = args->grad_sinks.data};
    const int64_t *shape = job.scores.shape;
    memcpy(job.scores.shape, args->grad_output.shape, sizeof job.scores.shape);
    int64_t rows = shape[0] * shape[1] * shape[2];
#pragma omp parallel for num_threads(te_cpu_threads(rows, shape[3]))
    for (int64_t number = 0; number < rows; number++) {
        te_cpu_row row = te_cpu_row_of(&job.scores, number, shape[3], 0);
        backward_one(&job, &row);
    }
    return TE_OK;
}
