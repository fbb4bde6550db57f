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

enum { PIECE = 2048 };

/* A tensor of four dims; a dim of 1 that stands for all has stride 0. */
typedef struct tensor4 {
    unsigned char *data; /* NULL: absent */
    int64_t strides[4];
    int64_t bytes; /* of an element */
    te_dtype dtype;
} tensor4;

typedef struct softmax_job {
    const te_cpu_kernels *kernels;
    tensor4 input, mask, bias, output, probabilities;
    int64_t shape[4]; /* batch, heads, queries, keys */
    float scale;
    int64_t first_key, end_key; /* of the window, relative to the query */
    te_cpu_dropout dropout;
} softmax_job;

/* A row of a call: its index, and the keys [begin, end) of its window. */
typedef struct softmax_row {
    int64_t index[3], number, begin, end;
} softmax_row;

static tensor4 view(const te_tensor *tensor)
{
    tensor4 x = {.data = tensor->data,
                 .bytes = (int64_t)te_dtype_bytes(tensor->dtype),
                 .dtype = tensor->dtype};
    for (int dim = 0; x.data != NULL && dim < 4; dim++) {
        x.strides[dim] = tensor->shape[dim] == 1 ? 0 : tensor->strides[dim];
    }
    return x;
}

/* The element (row, key). */
static unsigned char *element(const tensor4 *x, const softmax_row *row, int64_t key)
{
    int64_t offset = row->index[0] * x->strides[0] + row->index[1] * x->strides[1] +
                     row->index[2] * x->strides[2] + key * x->strides[3];
    return x->data + offset * x->bytes;
}

/* n elements from a key on: where they lie, or in `buffer` copies of one that stands for all. */
static const void *spread(const tensor4 *x, const softmax_row *row, int64_t key, int64_t n,
                          void *buffer)
{
    const unsigned char *source = element(x, row, key);
    if (x->strides[3] != 0) return source;
    for (int64_t i = 0; i < n; i++) {
        memcpy((unsigned char *)buffer + i * x->bytes, source, (size_t)x->bytes);
    }
    return buffer;
}

static softmax_row locate(const softmax_job *job, int64_t number)
{
    int64_t queries = job->shape[2], keys = job->shape[3];
    softmax_row row = {.number = number};
    row.index[2] = number % queries;
    row.index[1] = number / queries % job->shape[1];
    row.index[0] = number / queries / job->shape[1];
    row.begin = te_cpu_min(keys, row.index[2] + job->first_key);
    row.end = te_cpu_min(keys, row.index[2] + job->end_key);
    if (row.begin < 0) row.begin = 0;
    if (row.end < row.begin) row.end = row.begin;
    return row;
}

/* scores = scale * input + bias; -Inf where the mask forbids. */
static void make_scores(const softmax_job *job, const softmax_row *row, int64_t key, int64_t n,
                        float *scores)
{
    const te_cpu_kernels *kernels = job->kernels;
    uint32_t copies[PIECE];
    kernels->to_f32[job->input.dtype](element(&job->input, row, key), scores, n);
    if (job->scale != 1.0F) kernels->multiply(scores, job->scale, n);
    if (job->bias.data != NULL) {
        float bias[PIECE];
        kernels->to_f32[job->bias.dtype](spread(&job->bias, row, key, n, copies), bias, n);
        kernels->add(scores, bias, n);
    }
    if (job->mask.data != NULL) {
        kernels->forbid(scores, spread(&job->mask, row, key, n, copies), n);
    }
}

/* Writes n numbers from a key on. */
static void store(const softmax_job *job, const tensor4 *y, const softmax_row *row, int64_t key,
                  const float *values, int64_t n)
{
    job->kernels->from_f32[y->dtype](values, element(y, row, key), n);
}

static void zero(const tensor4 *y, const softmax_row *row, int64_t first, int64_t end)
{
    if (y->data == NULL || first >= end) return;
    memset(element(y, row, first), 0, (size_t)((end - first) * y->bytes));
}

/* The largest score of a row; `scores` holds the last piece. */
static float largest_score(const softmax_job *job, const softmax_row *row, float *scores)
{
    float top = -INFINITY;
    for (int64_t key = row->begin; key < row->end; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, row->end - key);
        make_scores(job, row, key, n, scores);
        float largest = job->kernels->largest(scores, n);
        if (!(largest <= top)) top = largest; /* NaN stays, for nothing is more or less */
        if (isnan(top)) break;
    }
    return top;
}

static void softmax_one(const softmax_job *job, const softmax_row *row)
{
    const te_cpu_kernels *kernels = job->kernels;
    float scores[PIECE], sum = 0.0F;
    int32_t decisions[TE_CPU_DECISIONS(PIECE)];
    int whole = row->end - row->begin <= PIECE; /* the scores of one step serve the next */
    float top = largest_score(job, row, scores);
    softmax_row seen = *row;
    if (top == -INFINITY) seen.end = seen.begin;
    if (top == INFINITY) top = NAN; /* Inf - Inf, in every key and not only in this one */
    for (int64_t key = seen.begin; key < seen.end; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, seen.end - key);
        if (!whole) make_scores(job, row, key, n, scores);
        sum += kernels->exponentials(scores, top, n);
    }
    for (int64_t key = seen.begin; key < seen.end; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, seen.end - key);
        if (!whole) {
            make_scores(job, row, key, n, scores);
            (void)kernels->exponentials(scores, top, n);
        }
        kernels->normalize(scores, 1.0F / sum, n);
        if (job->probabilities.data != NULL) store(job, &job->probabilities, row, key, scores, n);
        if (job->dropout.active) {
            te_cpu_drop(kernels, &job->dropout, row->number * job->shape[3] + key, scores, n,
                        decisions);
        }
        store(job, &job->output, row, key, scores, n);
    }
    zero(&job->output, row, 0, seen.begin);
    zero(&job->output, row, seen.end, job->shape[3]);
    zero(&job->probabilities, row, 0, seen.begin);
    zero(&job->probabilities, row, seen.end, job->shape[3]);
}

te_status te_cpu_softmax(void *self, te_context *context, const void *opaque, void *stream)
{
    const te_softmax_args *args = opaque;
    softmax_job job = {.kernels = te_cpu_kernels_get(),
                       .input = view(&args->input),
                       .mask = view(&args->mask),
                       .bias = view(&args->bias),
                       .output = view(&args->output),
                       .probabilities = view(&args->probabilities),
                       .scale = args->scale,
                       .first_key = -INT64_MAX / 2,
                       .end_key = INT64_MAX / 2,
                       .dropout = te_cpu_dropout_of(args->rng, args->dropout)};
    memcpy(job.shape, args->input.shape, sizeof job.shape);
    if (args->window_left >= 0) {
        job.first_key = args->diagonal - args->window_left;
    }
    if (args->window_right >= 0) {
        job.end_key = args->diagonal + args->window_right + 1;
    }
    /* Rows of a causal window differ in length: they are distributed in small chunks. */
    int64_t rows = job.shape[0] * job.shape[1] * job.shape[2];
    int threads = te_cpu_threads(rows * job.shape[3]);
    (void)self, (void)context, (void)stream, (void)threads;
    if (job.shape[3] == 0) return TE_OK;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16)
    for (int64_t number = 0; number < rows; number++) {
        softmax_row row = locate(&job, number);
        softmax_one(&job, &row);
    }
    return TE_OK;
}

/* ---- backward ----------------------------------------------------------------------------- */

typedef struct backward_job {
    const te_cpu_kernels *kernels;
    tensor4 grad_output, probabilities, grad_input;
    int64_t shape[4];
    float scale;
    te_cpu_dropout dropout;
} backward_job;

/* dp and p of n keys. */
static void load_pair(const backward_job *job, const softmax_row *row, int64_t key, int64_t n,
                      float *dp, float *p)
{
    int32_t decisions[TE_CPU_DECISIONS(PIECE)];
    job->kernels->to_f32[job->grad_output.dtype](element(&job->grad_output, row, key), dp, n);
    job->kernels->to_f32[job->probabilities.dtype](element(&job->probabilities, row, key), p, n);
    if (job->dropout.active) {
        te_cpu_drop(job->kernels, &job->dropout, row->number * job->shape[3] + key, dp, n,
                    decisions);
    }
}

static void backward_one(const backward_job *job, const softmax_row *row)
{
    const te_cpu_kernels *kernels = job->kernels;
    float dp[PIECE], p[PIECE], mean = 0.0F;
    int64_t keys = job->shape[3];
    for (int64_t key = 0; key < keys; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, keys - key);
        load_pair(job, row, key, n, dp, p);
        mean += kernels->dot(dp, p, n);
    }
    for (int64_t key = 0; key < keys; key += PIECE) {
        int64_t n = te_cpu_min(PIECE, keys - key);
        if (keys > PIECE) load_pair(job, row, key, n, dp, p);
        kernels->softmax_backward(dp, p, mean, job->scale, n);
        kernels->from_f32[job->grad_input.dtype](dp, element(&job->grad_input, row, key), n);
    }
}

te_status te_cpu_softmax_backward(void *self, te_context *context, const void *opaque, void *stream)
{
    const te_softmax_backward_args *args = opaque;
    backward_job job = {.kernels = te_cpu_kernels_get(),
                        .grad_output = view(&args->grad_output),
                        .probabilities = view(&args->probabilities),
                        .grad_input = view(&args->grad_input),
                        .scale = args->scale,
                        .dropout = te_cpu_dropout_of(args->rng, args->dropout)};
    memcpy(job.shape, args->grad_output.shape, sizeof job.shape);
    int64_t heads = job.shape[1], queries = job.shape[2];
    int64_t rows = job.shape[0] * heads * queries;
    int threads = te_cpu_threads(rows * job.shape[3]);
    (void)self, (void)context, (void)stream, (void)threads;
#pragma omp parallel for num_threads(threads)
    for (int64_t number = 0; number < rows; number++) {
        softmax_row row = {
            .index = {number / queries / heads, number / queries % heads, number % queries},
            .number = number};
        backward_one(&job, &row);
    }
    return TE_OK;
}
