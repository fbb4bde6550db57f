/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.c - softmax(query key^T) value without a matrix of scores.
 *
 * A task is one head and a block of its queries. It goes over the blocks of keys from the first to
 * the last and keeps, for each query, the largest score so far, the sum of the exponentials, and
 * the sum of the values that they weight; where a block brings a larger score, both sums are scaled
 * down. What becomes of a query depends on nothing but itself and the blocks of keys, so no result
 * depends on the number of threads or the size of a block of queries.
 *
 * With FP8 operands it goes over the keys twice: the weights that are cast are those that the
 * statistics of all keys give.
 */
#include <math.h>
#include <string.h>

#include "core/attention.h"
#include "core/counters.h"
#include "core/status.h"
#include "cpu/attention.h"
#include "cpu/ops.h"

enum { MIN_QUERIES = 48 }; /* of a block; divided by the rows of every tile */

typedef struct forward_job {
    te_cpu_attention_job common;
    te_cpu_tensor4 output;
    float *statistics; /* as te_cpu_statistic says, or NULL */
    float *top;        /* [heads], or NULL */
    int64_t tasks;     /* each leaves its largest score with the fixed floats */
    float output_scale, *output_amax, *weights_amax; /* of FP8 */
} forward_job;

/* What becomes of scores: weights of a running sum; in FP8 first statistics alone, then weights
 * that are cast. */
typedef enum forward_pass { RUNNING, STATISTICS, CAST } forward_pass;

/* A thread's buffer: one block of queries. */
typedef struct forward_block {
    te_cpu_queries queries;
    float top[TE_CPU_QUERIES], sum[TE_CPU_QUERIES];
    float largest; /* score of the whole block */
    float weights_amax, output_amax;
    float *query, *key, *value; /* packed */
    float *scores;              /* [block][TE_CPU_KEYS] */
    float *weights;             /* these, packed */
    float *output;              /* [block + a tile][d_v_tiled] */
} forward_block;

/* Lays out a thread's buffer; returns its floats. */
static int64_t lay_out(const te_cpu_attention_job *c, float *start, forward_block *block)
{
    const te_cpu_part parts[] = {
        {&block->query, c->block * c->d_k},
        {&block->key, TE_CPU_KEYS * c->d_k},
        {&block->value, TE_CPU_KEYS * c->d_v_tiled},
        {&block->scores, c->block * TE_CPU_KEYS},
        {&block->weights, c->block * TE_CPU_KEYS},
        {&block->output, (c->block + TE_CPU_MAX_TILE_ROWS) * c->d_v_tiled}};
    return te_cpu_lay_out(parts, sizeof parts / sizeof *parts, start);
}

/* Returns the floats that all threads share. */
static int64_t describe(const te_attention_args *args, forward_job *job)
{
    te_cpu_attention_job *c = &job->common;
    forward_block block;
    te_cpu_attention_describe(&args->problem, c);
    c->scores.cap = args->softcap;
    job->output = te_cpu_heads_of(&c->queries, &args->output);
    job->statistics = args->statistics.data;
    job->top = args->top.data;
    int64_t heads = c->scores.shape[0] * c->scores.shape[1], queries = c->scores.shape[2];
    while (c->block > MIN_QUERIES &&
           (c->block / 2 >= queries || heads * te_ceil_div(queries, c->block) < 2 * c->threads)) {
        c->block /= 2;
    }
    c->thread_floats = lay_out(c, NULL, &block);
    job->tasks = heads * te_ceil_div(queries, c->block);
    return te_tensor_requested(&args->top) ? te_round_up(job->tasks, 16) : 0;
}

size_t te_cpu_attention_workspace(const te_attention_args *args)
{
    forward_job job;
    int64_t fixed = describe(args, &job);
    return te_cpu_attention_bytes(&job.common, fixed);
}

/* NaN stays. */
static float larger(float a, float b)
{
    return b > a || isnan(b) ? b : a;
}

/* Raises the largest score of a query to that of n more, and scales down what was summed before;
 * 0 while no score is above -Inf. */
static int raise_top(const te_cpu_attention_job *c, forward_block *block, int64_t r,
                     const float *values, int64_t n)
{
    const te_cpu_kernels *kernels = c->scores.kernels;
    float old = block->top[r], top = kernels->largest(values, n);
    block->largest = larger(block->largest, top);
    if (top == INFINITY) top = NAN; /* Inf - Inf, in every key and not only in this one */
    if (top <= old || isnan(old)) top = old;
    if (top == -INFINITY) return 0;
    if (!(top == old)) {
        (void)kernels->exponentials(&old, top, 1);
        block->sum[r] *= old;
        kernels->multiply(block->output + r * c->d_v_tiled, old, c->d_v);
        block->top[r] = top;
    }
    return 1;
}

/* Turns the scores of a query and a block of keys into weights; those that are cast go by the
 * statistics of all keys. */
static void weigh(const te_cpu_attention_job *c, forward_block *block,
                  const te_cpu_meeting *meeting, int64_t r, forward_pass pass)
{
    const te_cpu_kernels *kernels = c->scores.kernels;
    const te_cpu_row *row = &block->queries.rows[r];
    int32_t decisions[TE_CPU_DECISIONS(TE_CPU_KEYS)];
    float *scores = block->scores + r * TE_CPU_KEYS;
    int64_t begin = row->begin < meeting->key ? meeting->key : row->begin;
    int64_t n = te_cpu_min(row->end, meeting->key + meeting->keys) - begin;
    float *values = scores + (begin - meeting->key);
    int attends = n > 0;
    if (attends) {
        te_cpu_finish_scores(&c->scores, row, begin, n, values, NULL);
        attends = pass == CAST ? block->sum[r] != 0.0F : raise_top(c, block, r, values, n);
    }
    if (!attends) {
        te_cpu_clear_around(scores, meeting->keys, 0, 0);
        return;
    }
    if (pass == CAST) {
        (void)kernels->exponentials(values, block->top[r] + logf(block->sum[r]), n);
    } else {
        block->sum[r] += kernels->exponentials(values, block->top[r], n);
    }
    if (c->scores.dropout.active) {
        te_cpu_drop(kernels, &c->scores.dropout, row->number * c->scores.shape[3] + begin, values,
                    n, decisions);
    }
    if (pass == CAST) {
        te_cpu_fp8_round(kernels, TE_DTYPE_E4M3, c->scales.weights, values, n,
                         &block->weights_amax);
    }
    te_cpu_clear_around(scores, meeting->keys, begin - meeting->key, n);
}

static void attend_keys(const te_cpu_attention_job *c, forward_block *block,
                        const te_cpu_panels *query, const te_cpu_meeting *meeting,
                        forward_pass pass)
{
    const te_cpu_kernels *kernels = c->scores.kernels;
    const te_cpu_queries *q = &block->queries;
    int64_t kv_head = q->head / c->group, count = meeting->to - meeting->from;
    te_cpu_panels key = te_cpu_pack_right(
        kernels, te_cpu_tokens(&c->key, q->batch, kv_head, meeting->key, meeting->keys, c->d_k), 1,
        block->key);
    te_cpu_panels value = te_cpu_pack_right(
        kernels, te_cpu_tokens(&c->value, q->batch, kv_head, meeting->key, meeting->keys, c->d_v),
        0, block->value);
    te_cpu_product(kernels, query, meeting->from, meeting->to, &key, block->scores, TE_CPU_KEYS, 0);
    for (int64_t r = meeting->from; r < meeting->to; r++) weigh(c, block, meeting, r, pass);
    if (pass == STATISTICS) return;
    te_cpu_panels weights =
        te_cpu_pack_left(kernels,
                         te_cpu_floats(block->scores + meeting->from * TE_CPU_KEYS, count,
                                       meeting->keys, TE_CPU_KEYS),
                         1, block->weights);
    te_cpu_product(kernels, &weights, 0, count, &value,
                   block->output + meeting->from * c->d_v_tiled, c->d_v_tiled, 1);
}

/* What a row of the output is multiplied with; of FP8, it is measured too. */
static void scale_output(const forward_job *job, forward_block *block, float *values, float sum)
{
    const te_cpu_attention_scales *scales = &job->common.scales;
    const te_cpu_kernels *kernels = job->common.scores.kernels;
    const int64_t n = job->common.d_v;
    if (!scales->fp8) {
        if (sum != 0.0F) kernels->multiply(values, 1.0F / sum, n);
        return;
    }
    kernels->multiply(values, scales->value / scales->weights, n);
    te_cpu_fp8_measure(values, n, &block->output_amax);
    kernels->multiply(values, job->output_scale, n);
}

/* Output and statistics of the queries, and 0 for those beyond the sequence's length. */
static void finish(const forward_job *job, forward_block *block)
{
    const te_cpu_attention_job *c = &job->common;
    const te_cpu_kernels *kernels = c->scores.kernels;
    const te_cpu_queries *q = &block->queries;
    int64_t count = te_cpu_min(c->block, te_cpu_rows_of(&c->queries, q->batch) - q->first);
    te_cpu_matrix output = te_cpu_tokens(&job->output, q->batch, q->head, q->first, count, c->d_v);
    int64_t number = (q->batch * c->scores.shape[1] + q->head) * c->scores.shape[2] + q->first;
    for (int64_t r = 0; r < count; r++) {
        float *values = block->output + r * c->d_v_tiled, sum = block->sum[r];
        scale_output(job, block, values, sum);
        kernels->from_f32[output.dtype](values, te_cpu_at(&output, r, 0), c->d_v);
        if (job->statistics != NULL) {
            const te_cpu_row row = {.index = {q->batch, q->head, q->first + r},
                                    .number = number + r};
            job->statistics[te_cpu_statistic(c, &row)] =
                sum == 0.0F ? -INFINITY : block->top[r] + logf(sum);
        }
    }
}

/* Goes over the blocks of keys. */
static void pass_over(te_cpu_attention_job *c, forward_block *block, const te_cpu_panels *query,
                      forward_pass pass)
{
    const int64_t keys = te_cpu_length(&c->keys, block->queries.batch);
    te_cpu_meeting meeting;
    for (int64_t key = 0; key < keys && !te_cpu_stopped(&c->interruptible); key += TE_CPU_KEYS) {
        if (!te_cpu_meet(c, &block->queries, key, &meeting)) continue;
        attend_keys(c, block, query, &meeting, pass);
    }
}

/* Returns the largest score. */
static float attend(forward_job *job, int64_t batch, int64_t head, int64_t first)
{
    te_cpu_attention_job *c = &job->common;
    forward_block block;
    float sink = te_cpu_sink_of(&c->scores, head);
    if (first >= te_cpu_rows_of(&c->queries, batch)) return -INFINITY; /* a shorter sequence */
    (void)lay_out(c, te_cpu_attention_buffer(c), &block);
    te_cpu_set_queries(c, batch, head, first, &block.queries);
    te_cpu_panels query = te_cpu_pack_left(
        c->scores.kernels,
        te_cpu_tokens(&c->query, batch, head, first, block.queries.count, c->d_k), 1, block.query);
    memset(block.output, 0, (size_t)(c->block * c->d_v_tiled) * sizeof *block.output);
    for (int64_t r = 0; r < c->block; r++) {
        int has_sink = r < block.queries.count && sink != -INFINITY;
        block.top[r] = !has_sink ? -INFINITY : sink == INFINITY ? NAN : sink;
        block.sum[r] = has_sink ? 1.0F : 0.0F;
    }
    block.largest = -INFINITY;
    block.weights_amax = block.output_amax = 0.0F;
    pass_over(c, &block, &query, c->scales.fp8 ? STATISTICS : RUNNING);
    if (c->scales.fp8) pass_over(c, &block, &query, CAST);
    finish(job, &block);
    te_cpu_record_amax(job->weights_amax, block.weights_amax);
    te_cpu_record_amax(job->output_amax, block.output_amax);
    return block.largest;
}

static void find_top(const forward_job *job)
{
    int64_t heads = job->common.scores.shape[1], batch = job->common.scores.shape[0];
    int64_t blocks = batch * heads == 0 ? 0 : job->tasks / batch / heads;
    for (int64_t h = 0; h < heads; h++) {
        job->top[h] = -INFINITY;
        for (int64_t b = 0; b < batch; b++) {
            const float *found = job->common.fixed + (b * heads + h) * blocks;
            for (int64_t i = 0; i < blocks; i++) job->top[h] = larger(job->top[h], found[i]);
        }
    }
}

/* What there is of tokens of no packed sequence. */
static void clear_gaps(const forward_job *job, const te_attention_args *args)
{
    const te_cpu_attention_job *c = &job->common;
    te_cpu_clear_gaps(&c->queries, c->scores.shape[0], &args->output);
    if (c->queries.offsets == NULL || job->statistics == NULL) return;
    for (int64_t i = 0; i < te_cpu_statistics(c); i++) job->statistics[i] = -INFINITY;
}

/* What an FP8 output is cast with. */
static void begin_output(const te_attention_args *args, forward_job *job)
{
    const te_tensor *scales = &args->problem.value_scales;
    job->output_amax = args->output_amax;
    job->weights_amax = args->weights_amax;
    if (!job->common.scales.fp8) return;
    job->output_scale = args->output_scale != NULL
                            ? *args->output_scale
                            : ((const float *)scales->data)[TE_SCALES_SCALE] *
                                  te_attention_kept(args->problem.dropout);
    te_cpu_write_scales(&args->output_scales, job->output_scale);
}

te_status te_cpu_attention(const te_attention_args *args)
{
    forward_job job;
    int64_t fixed = describe(args, &job);
    te_count_attention(TE_DEVICE_CPU, args->problem.query.dtype, 0);
    TE_TRY(te_cpu_attention_begin("attention", &args->problem, &job.common, fixed, args->workspace,
                                  args->workspace_size));
    clear_gaps(&job, args);
    begin_output(args, &job);
    int64_t heads = job.common.scores.shape[1];
    int64_t blocks = te_ceil_div(job.common.scores.shape[2], job.common.block);
#pragma omp parallel for num_threads(job.common.threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < job.tasks; task++) {
        float largest = attend(&job, task / blocks / heads, task / blocks % heads,
                               (blocks - 1 - task % blocks) *
                                   job.common.block); /* the long causal ones first */
        if (job.top != NULL) job.common.fixed[task] = largest;
    }
    if (job.top != NULL) find_top(&job);
    TE_FAIL_IF(te_interruptible_stopped(&job.common.interruptible), TE_ERROR_INTERRUPTED,
               "attention: interrupted: output is not complete");
    return TE_OK;
}
