/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward.c - gradients of attention without a matrix of scores.
 *
 * The weights of a block of queries and a block of keys are made again from the statistics, and
 * from them their gradients. Sums for keys and values run over the heads of a group and their
 * blocks of queries, sums for queries over the blocks of keys, sums for the bias over what it
 * stands for, each in order and in one task, so no result depends on the number of threads. Where
 * there are heads of keys for all threads, a task is such a head and makes every gradient but the
 * bias's from weights made once; else queries and keys have tasks of their own. Both ways give the
 * same bits.
 */
#include <math.h>
#include <string.h>

#include "core/counters.h"
#include "core/operand.h"
#include "core/status.h"
#include "cpu/attention.h"
#include "cpu/ops.h"

enum {
    BLOCK = 96,          /* queries: a block's matrices stay in the second-level cache */
    PIECE = 1024,        /* elements of a row at a time */
    WHOLE_HEAD = 4 << 20 /* floats of query gradients that one task keeps at most */
};

typedef struct backward_job {
    te_cpu_attention_job common;
    te_cpu_tensor4 grad_output, output, grad_query, grad_key, grad_value, grad_bias;
    int64_t bias_shape[4];
    const float *statistics; /* as te_cpu_statistic says */
    float *means;            /* the same: sums of grad_output * output */
    int whole;               /* a task is a head of keys with all its queries */
    int64_t head_stride;     /* floats of the query gradients of one head, if whole */
    float scale;             /* of the scores */
    /* Of FP8, else 1: what is multiplied with grad_output, output and the gradients of the scores
     * as they are read, and with these and the results before they are cast. */
    float read_grad, read_output, scores_scale, grads_scale;
    float *scores_amax, *grads_amax;
} backward_job;

/* A thread's buffer: a block of queries and one of keys. */
typedef struct backward_block {
    te_cpu_queries queries;
    te_cpu_meeting meeting;
    te_cpu_panels query, grad, key, value; /* of the products that give scores */
    te_cpu_panels key_values;              /* of the product that gives query gradients */
    float *query_buffer, *grad_buffer, *key_buffer, *value_buffer, *key_values_buffer;
    float *left, *right;                      /* packed operands of the other products */
    float *weights, *grads;                   /* [BLOCK][TE_CPU_KEYS] */
    float *grad_query;                        /* [BLOCK + a tile][d_k_tiled], or of a whole group */
    float *grad_key, *grad_value, *grad_bias; /* [TE_CPU_KEYS][d_*_tiled]; [BLOCK][TE_CPU_KEYS] */
    float scores_amax, grads_amax;
} backward_block;

/* ---- sizes -------------------------------------------------------------------------------- */

static int64_t lay_out(const backward_job *job, float *start, backward_block *block)
{
    const te_cpu_attention_job *c = &job->common;
    int64_t widest = c->d_k_tiled > c->d_v_tiled ? c->d_k_tiled : c->d_v_tiled;
    const te_cpu_part parts[] = {
        {&block->query_buffer, BLOCK * c->d_k},
        {&block->grad_buffer, BLOCK * c->d_v},
        {&block->key_buffer, TE_CPU_KEYS * c->d_k},
        {&block->value_buffer, TE_CPU_KEYS * c->d_v},
        {&block->key_values_buffer, TE_CPU_KEYS * c->d_k_tiled},
        {&block->left, BLOCK * TE_CPU_KEYS},
        {&block->right, BLOCK * widest},
        {&block->weights, BLOCK * TE_CPU_KEYS},
        {&block->grads, BLOCK * TE_CPU_KEYS},
        {&block->grad_query,
         job->whole ? c->group * job->head_stride : (BLOCK + TE_CPU_MAX_TILE_ROWS) * c->d_k_tiled},
        {&block->grad_key, TE_CPU_KEYS * c->d_k_tiled},
        {&block->grad_value, TE_CPU_KEYS * c->d_v_tiled},
        {&block->grad_bias, job->grad_bias.data == NULL ? 0 : BLOCK * TE_CPU_KEYS}};
    return te_cpu_lay_out(parts, sizeof parts / sizeof *parts, start);
}

/* Returns the floats that all threads share. */
static int64_t describe(const te_attention_backward_args *args, backward_job *job)
{
    te_cpu_attention_job *c = &job->common;
    backward_block block;
    te_cpu_attention_describe(&args->problem, c);
    c->scores.cap = args->softcap;
    c->block = BLOCK;
    job->grad_output = te_cpu_heads_of(&c->queries, &args->grad_output);
    job->output = te_cpu_heads_of(&c->queries, &args->output);
    job->grad_query = te_cpu_heads_of(&c->queries, &args->grad_query);
    job->grad_key = te_cpu_heads_of(&c->keys, &args->grad_key);
    job->grad_value = te_cpu_heads_of(&c->keys, &args->grad_value);
    job->grad_bias = te_cpu_tensor4_of(&args->grad_bias);
    memcpy(job->bias_shape, args->grad_bias.shape, sizeof job->bias_shape);
    job->statistics = args->statistics.data;
    job->head_stride =
        (te_round_up(c->scores.shape[2], BLOCK) + TE_CPU_MAX_TILE_ROWS) * c->d_k_tiled;
    job->whole =
        c->scores.shape[0] * c->kv_heads >= c->threads && c->group * job->head_stride <= WHOLE_HEAD;
    c->thread_floats = lay_out(job, NULL, &block);
    int64_t fixed = te_round_up(te_cpu_statistics(c), 16);
    /* There may be fewer threads than at the query, and so heads of keys for all of them now. */
    if (job->whole && args->workspace != NULL &&
        args->workspace_size < te_cpu_attention_bytes(c, fixed)) {
        job->whole = 0;
        c->thread_floats = lay_out(job, NULL, &block);
    }
    return fixed;
}

size_t te_cpu_attention_backward_workspace(const te_attention_backward_args *args)
{
    backward_job job;
    int64_t fixed = describe(args, &job);
    return te_cpu_attention_bytes(&job.common, fixed);
}

/* ---- one block of queries and one of keys ---------------------------------------------------- */

static void pack_queries(const backward_job *job, backward_block *block)
{
    const te_cpu_attention_job *c = &job->common;
    const te_cpu_queries *q = &block->queries;
    block->query = te_cpu_pack_left(
        c->scores.kernels, te_cpu_tokens(&c->query, q->batch, q->head, q->first, q->count, c->d_k),
        1, block->query_buffer);
    block->grad = te_cpu_pack_left(
        c->scores.kernels,
        te_cpu_tokens(&job->grad_output, q->batch, q->head, q->first, q->count, c->d_v), 1,
        block->grad_buffer);
}

static void pack_keys(const backward_job *job, backward_block *block, int64_t batch,
                      int64_t kv_head, int64_t first)
{
    const te_cpu_attention_job *c = &job->common;
    const te_cpu_kernels *kernels = c->scores.kernels;
    int64_t count = te_cpu_min(TE_CPU_KEYS, te_cpu_length(&c->keys, batch) - first);
    te_cpu_matrix key = te_cpu_tokens(&c->key, batch, kv_head, first, count, c->d_k);
    te_cpu_matrix value = te_cpu_tokens(&c->value, batch, kv_head, first, count, c->d_v);
    block->key = te_cpu_pack_right(kernels, key, 1, block->key_buffer);
    block->value = te_cpu_pack_right(kernels, value, 1, block->value_buffer);
    block->key_values = te_cpu_pack_right(kernels, key, 0, block->key_values_buffer);
}

/* What the gradients of scores are to: the products of queries and keys, or the bias, which is
 * added to these when they are scaled and capped. */
typedef enum differentiated { PRODUCTS, BIASED } differentiated;

/* Weights and the gradients of the scores of one query. */
static void differentiate_row(const backward_job *job, backward_block *block, int64_t r,
                              differentiated of)
{
    const te_cpu_attention_job *c = &job->common;
    const te_cpu_kernels *kernels = c->scores.kernels;
    const te_cpu_row *row = &block->queries.rows[r];
    const te_cpu_meeting *meeting = &block->meeting;
    const float scale = of == BIASED ? 1.0F : job->scale;
    int32_t decisions[TE_CPU_DECISIONS(TE_CPU_KEYS)];
    const int32_t *keep = NULL;
    float of_cap[TE_CPU_KEYS];
    float *weights = block->weights + r * TE_CPU_KEYS, *grads = block->grads + r * TE_CPU_KEYS;
    const int64_t at = te_cpu_statistic(c, row);
    int64_t begin = row->begin < meeting->key ? meeting->key : row->begin;
    int64_t skipped = begin - meeting->key;
    int64_t n = te_cpu_min(row->end, meeting->key + meeting->keys) - begin;
    if (n < 0) n = skipped = 0;
    if (c->scales.fp8) kernels->multiply(grads + skipped, job->read_grad * c->scales.value, n);
    te_cpu_finish_scores(&c->scores, row, begin, n, weights + skipped, of_cap);
    (void)kernels->exponentials(weights + skipped, job->statistics[at], n);
    if (c->scores.dropout.active && n > 0) {
        keep = te_cpu_decide_run(kernels, &c->scores.dropout,
                                 row->number * c->scores.shape[3] + begin, n, decisions);
        kernels->keep(grads + skipped, keep, c->scores.dropout.factor, n);
    }
    kernels->attention_backward(grads + skipped, weights + skipped, job->means[at], scale, n);
    if (keep != NULL) kernels->keep(weights + skipped, keep, c->scores.dropout.factor, n);
    if (c->scores.cap > 0.0F && of == PRODUCTS) kernels->follow(grads + skipped, of_cap, n);
    if (c->scales.fp8) {
        float unused = 0.0F;
        te_cpu_fp8_round(kernels, TE_DTYPE_E4M3, c->scales.weights, weights + skipped, n, &unused);
        te_cpu_fp8_round(kernels, job->grad_output.dtype, job->scores_scale, grads + skipped, n,
                         &block->scores_amax);
    }
    te_cpu_clear_around(weights, meeting->keys, skipped, n);
    te_cpu_clear_around(grads, meeting->keys, skipped, n);
}

static void differentiate(const backward_job *job, backward_block *block, differentiated of)
{
    const te_cpu_kernels *kernels = job->common.scores.kernels;
    const te_cpu_meeting *m = &block->meeting;
    te_cpu_product(kernels, &block->query, m->from, m->to, &block->key, block->weights, TE_CPU_KEYS,
                   0);
    te_cpu_product(kernels, &block->grad, m->from, m->to, &block->value, block->grads, TE_CPU_KEYS,
                   0);
    for (int64_t r = m->from; r < m->to; r++) differentiate_row(job, block, r, of);
}

/* Rows [from, to) of weights or their gradients. */
static te_cpu_matrix met_rows(const backward_block *block, float *matrix)
{
    const te_cpu_meeting *m = &block->meeting;
    return te_cpu_floats(matrix + m->from * TE_CPU_KEYS, m->to - m->from, m->keys, TE_CPU_KEYS);
}

/* sums[key] += sum over queries of matrix[query][key] * x[query]. */
static void add_for_keys(const backward_job *job, backward_block *block, float *matrix,
                         const te_cpu_tensor4 *x, int64_t dim, float *sums)
{
    const te_cpu_kernels *kernels = job->common.scores.kernels;
    const te_cpu_queries *q = &block->queries;
    const te_cpu_meeting *m = &block->meeting;
    te_cpu_panels left = te_cpu_pack_left(kernels, met_rows(block, matrix), 0, block->left);
    te_cpu_panels right = te_cpu_pack_right(
        kernels, te_cpu_tokens(x, q->batch, q->head, q->first + m->from, m->to - m->from, dim), 0,
        block->right);
    te_cpu_product(kernels, &left, 0, m->keys, &right, sums, te_round_up(dim, right.width), 1);
}

/* sums[query] += sum over keys of the gradients of the scores times the keys; query 0 is the
 * block's first. */
static void add_for_queries(const backward_job *job, backward_block *block, float *sums)
{
    const te_cpu_kernels *kernels = job->common.scores.kernels;
    const te_cpu_meeting *m = &block->meeting;
    int64_t stride = job->common.d_k_tiled;
    te_cpu_panels left = te_cpu_pack_left(kernels, met_rows(block, block->grads), 1, block->left);
    te_cpu_product(kernels, &left, 0, m->to - m->from, &block->key_values, sums + m->from * stride,
                   stride, 1);
}

/* ---- tasks -------------------------------------------------------------------------------- */

/* What the sums of a gradient are multiplied with: the scales of what was multiplied. */
static float factor_of(const backward_job *job, const te_cpu_tensor4 *y)
{
    const te_cpu_attention_scales *scales = &job->common.scales;
    if (y == &job->grad_value) return job->read_grad / scales->weights;
    return (y == &job->grad_query ? scales->key : scales->query) / job->scores_scale;
}

/* Writes the sums of `count` tokens of one head; `at` is batch, head and first token. */
static void store(const backward_job *job, backward_block *block, const te_cpu_tensor4 *y,
                  const int64_t at[3], int64_t count, int64_t dim, float *sums)
{
    const te_cpu_kernels *kernels = job->common.scores.kernels;
    if (y->data == NULL) return;
    te_cpu_matrix rows = te_cpu_tokens(y, at[0], at[1], at[2], count, dim);
    int64_t stride = te_round_up(dim, kernels->tile_columns);
    for (int64_t r = 0; r < count; r++) {
        float *values = sums + r * stride;
        if (job->common.scales.fp8) {
            kernels->multiply(values, factor_of(job, y), dim);
            te_cpu_fp8_measure(values, dim, &block->grads_amax);
            kernels->multiply(values, job->grads_scale, dim);
        }
        kernels->from_f32[y->dtype](values, te_cpu_at(&rows, r, 0), dim);
    }
}

static void clear(float *values, int64_t n)
{
    memset(values, 0, (size_t)n * sizeof *values);
}

/* Gradients of a block of keys and values; those of the queries are added to where `whole`. */
static void do_keys(backward_job *job, backward_block *block, int64_t batch, int64_t kv_head,
                    int64_t first)
{
    te_cpu_attention_job *c = &job->common;
    int64_t queries = te_cpu_rows_of(&c->queries, batch);
    int64_t count = te_cpu_min(TE_CPU_KEYS, te_cpu_rows_of(&c->keys, batch) - first);
    int met = 0;
    if (count <= 0) return; /* of a shorter packed sequence */
    clear(block->grad_key, TE_CPU_KEYS * c->d_k_tiled);
    clear(block->grad_value, TE_CPU_KEYS * c->d_v_tiled);
    for (int64_t at = 0; at < c->group * queries && !te_cpu_stopped(&c->interruptible);) {
        int64_t member = at / queries, q = at % queries;
        at = q + BLOCK < queries ? at + BLOCK : (member + 1) * queries;
        te_cpu_set_queries(c, batch, kv_head * c->group + member, q, &block->queries);
        if (!te_cpu_meet(c, &block->queries, first, &block->meeting)) continue;
        if (!met) pack_keys(job, block, batch, kv_head, first);
        met = 1;
        pack_queries(job, block);
        differentiate(job, block, PRODUCTS);
        if (job->grad_value.data != NULL) {
            add_for_keys(job, block, block->weights, &job->grad_output, c->d_v, block->grad_value);
        }
        if (job->grad_key.data != NULL) {
            add_for_keys(job, block, block->grads, &c->query, c->d_k, block->grad_key);
        }
        if (job->whole && job->grad_query.data != NULL) {
            add_for_queries(job, block,
                            block->grad_query + member * job->head_stride + q * c->d_k_tiled);
        }
    }
    store(job, block, &job->grad_key, (const int64_t[]){batch, kv_head, first}, count, c->d_k,
          block->grad_key);
    store(job, block, &job->grad_value, (const int64_t[]){batch, kv_head, first}, count, c->d_v,
          block->grad_value);
}

/* Gradients of a block of queries. */
static void do_queries(backward_job *job, backward_block *block, int64_t batch, int64_t head,
                       int64_t first)
{
    te_cpu_attention_job *c = &job->common;
    int64_t keys = te_cpu_length(&c->keys, batch), rows = te_cpu_rows_of(&c->queries, batch);
    if (first >= rows) return; /* of a shorter packed sequence */
    te_cpu_set_queries(c, batch, head, first, &block->queries);
    pack_queries(job, block);
    clear(block->grad_query, BLOCK * c->d_k_tiled);
    for (int64_t key = 0; key < keys && !te_cpu_stopped(&c->interruptible); key += TE_CPU_KEYS) {
        if (!te_cpu_meet(c, &block->queries, key, &block->meeting)) continue;
        pack_keys(job, block, batch, head / c->group, key);
        differentiate(job, block, PRODUCTS);
        add_for_queries(job, block, block->grad_query);
    }
    store(job, block, &job->grad_query, (const int64_t[]){batch, head, first},
          te_cpu_min(BLOCK, rows - first), c->d_k, block->grad_query);
}

/* Every gradient of a head of keys and its queries. */
static void do_head(backward_job *job, backward_block *block, int64_t batch, int64_t kv_head)
{
    te_cpu_attention_job *c = &job->common;
    clear(block->grad_query, c->group * job->head_stride);
    for (int64_t key = 0; key < te_cpu_rows_of(&c->keys, batch); key += TE_CPU_KEYS) {
        do_keys(job, block, batch, kv_head, key);
    }
    for (int64_t member = 0; member < c->group; member++) {
        store(job, block, &job->grad_query,
              (const int64_t[]){batch, kv_head * c->group + member, 0},
              te_cpu_rows_of(&c->queries, batch), c->d_k,
              block->grad_query + member * job->head_stride);
    }
}

/* Adds the gradients of the scores of a head and a block of queries to those of the bias. */
static void add_for_bias(backward_job *job, backward_block *block, const int64_t at[3],
                         int64_t first_key, int64_t end_key)
{
    te_cpu_attention_job *c = &job->common;
    int packed = 0;
    end_key = te_cpu_min(end_key, te_cpu_length(&c->keys, at[0]));
    te_cpu_set_queries(c, at[0], at[1], at[2], &block->queries);
    for (int64_t key = first_key; key < end_key && !te_cpu_stopped(&c->interruptible);
         key += TE_CPU_KEYS) {
        if (!te_cpu_meet(c, &block->queries, key, &block->meeting)) continue;
        if (!packed) pack_queries(job, block);
        packed = 1;
        pack_keys(job, block, at[0], at[1] / c->group, key);
        differentiate(job, block, BIASED);
        for (int64_t r = block->meeting.from; r < block->meeting.to; r++) {
            int64_t target = job->bias_shape[2] == 1 ? 0 : r;
            c->scores.kernels->add(block->grad_bias + target * TE_CPU_KEYS,
                                   block->grads + r * TE_CPU_KEYS, block->meeting.keys);
        }
    }
}

/* Indices [*first, *end) of a dim that part `index` of a gradient of the bias stands for: all where
 * the dim is 1. */
static void span(const backward_job *job, int dim, int64_t index, int64_t step, int64_t *first,
                 int64_t *end)
{
    int64_t size = job->common.scores.shape[dim];
    int all = job->bias_shape[dim] == 1;
    *first = all ? 0 : index * step;
    *end = all ? size : te_cpu_min(size, *first + step);
}

/* A block of the gradient of the bias. */
static void do_bias(backward_job *job, backward_block *block, const int64_t part[4])
{
    const te_cpu_kernels *kernels = job->common.scores.kernels;
    const te_cpu_tensor4 *y = &job->grad_bias;
    int64_t first[4], end[4], *shape = job->bias_shape;
    for (int dim = 0; dim < 4; dim++) {
        span(job, dim, part[dim],
             dim < 2    ? 1
             : dim == 2 ? BLOCK
                        : TE_CPU_KEYS,
             &first[dim], &end[dim]);
    }
    clear(block->grad_bias, BLOCK * TE_CPU_KEYS);
    for (int64_t b = first[0]; b < end[0]; b++) {
        for (int64_t h = first[1]; h < end[1]; h++) {
            for (int64_t q = first[2]; q < end[2]; q += BLOCK) {
                add_for_bias(job, block, (const int64_t[]){b, h, q}, first[3], end[3]);
            }
        }
    }
    for (int64_t r = 0; r < (shape[2] == 1 ? 1 : end[2] - first[2]); r++) {
        te_cpu_row row = {.index = {part[0], part[1], first[2] + r}};
        float *values = block->grad_bias + r * TE_CPU_KEYS;
        if (shape[3] == 1) *values = kernels->row_sum(values, TE_CPU_KEYS);
        kernels->from_f32[y->dtype](values, te_cpu_score_at(y, &row, first[3]),
                                    shape[3] == 1 ? 1 : end[3] - first[3]);
    }
}

/* ---- the call ----------------------------------------------------------------------------- */

/* The sum of grad_output * output of a query: the mean of the gradients of its weights. */
static void find_mean(const backward_job *job, int64_t number)
{
    const te_cpu_attention_job *c = &job->common;
    const te_cpu_kernels *kernels = c->scores.kernels;
    te_cpu_row row = te_cpu_row_of(&c->scores, number, 0, 0);
    float grad[PIECE], output[PIECE], sum = 0.0F;
    int64_t batch = row.index[0], query = row.index[2];
    if (query >= te_cpu_length(&c->queries, batch)) return; /* it is read of no such query */
    te_cpu_matrix x = te_cpu_tokens(&job->grad_output, batch, row.index[1], query, 1, c->d_v);
    te_cpu_matrix y = te_cpu_tokens(&job->output, batch, row.index[1], query, 1, c->d_v);
    for (int64_t i = 0; i < c->d_v; i += PIECE) {
        int64_t n = te_cpu_min(PIECE, c->d_v - i);
        kernels->to_f32[x.dtype](te_cpu_at(&x, 0, i), grad, n);
        kernels->to_f32[y.dtype](te_cpu_at(&y, 0, i), output, n);
        sum += kernels->dot(grad, output, n);
    }
    job->means[te_cpu_statistic(c, &row)] = sum * job->read_grad * job->read_output;
}

static void run_bias(backward_job *job)
{
    const int64_t *shape = job->bias_shape;
    int64_t blocks = te_ceil_div(shape[2], BLOCK), pieces = te_ceil_div(shape[3], TE_CPU_KEYS);
    int64_t tasks = shape[0] * shape[1] * blocks * pieces;
#pragma omp parallel for num_threads(job->common.threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t rest = task / pieces / blocks;
        const int64_t part[4] = {rest / shape[1], rest % shape[1], task / pieces % blocks,
                                 task % pieces};
        backward_block block;
        (void)lay_out(job, te_cpu_attention_buffer(&job->common), &block);
        do_bias(job, &block, part);
    }
}

static void run_keys_and_queries(backward_job *job)
{
    const int64_t *shape = job->common.scores.shape;
    int64_t heads = shape[1], kv_heads = job->common.kv_heads;
    int64_t key_blocks = job->whole ? 1 : te_ceil_div(shape[3], TE_CPU_KEYS);
    int64_t query_blocks = te_ceil_div(shape[2], BLOCK);
    int64_t of_keys = shape[0] * kv_heads * key_blocks,
            of_queries = shape[0] * heads * query_blocks;
    if (!job->whole && job->grad_key.data == NULL && job->grad_value.data == NULL) of_keys = 0;
    if (job->whole || job->grad_query.data == NULL) of_queries = 0;
#pragma omp parallel for num_threads(job->common.threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < of_keys + of_queries; task++) {
        backward_block block = {.scores_amax = 0.0F};
        (void)lay_out(job, te_cpu_attention_buffer(&job->common), &block);
        if (task >= of_keys) {
            int64_t at = task - of_keys, rest = at / query_blocks;
            do_queries(job, &block, rest / heads, rest % heads, at % query_blocks * BLOCK);
        } else if (job->whole) {
            do_head(job, &block, task / kv_heads, task % kv_heads);
        } else {
            int64_t rest = task / key_blocks;
            do_keys(job, &block, rest / kv_heads, rest % kv_heads, task % key_blocks * TE_CPU_KEYS);
        }
        te_cpu_record_amax(job->scores_amax, block.scores_amax);
        te_cpu_record_amax(job->grads_amax, block.grads_amax);
    }
}

/* What a sink takes from the other weights of its rows. */
static void write_sink_gradient(const backward_job *job, float *grad)
{
    const te_cpu_attention_job *c = &job->common;
    const int64_t *shape = c->scores.shape;
#pragma omp parallel for num_threads(c->threads)
    for (int64_t head = 0; head < shape[1]; head++) {
        double sum = 0.0;
        for (int64_t batch = 0; batch < shape[0]; batch++) {
            int64_t length = te_cpu_length(&c->queries, batch);
            for (int64_t query = 0; query < length; query++) {
                const te_cpu_row row = {.index = {batch, head, query},
                                        .number = (batch * shape[1] + head) * shape[2] + query};
                int64_t at = te_cpu_statistic(c, &row);
                float weight = c->scores.sink[head];
                if (job->statistics[at] == -INFINITY) continue;
                (void)c->scores.kernels->exponentials(&weight, job->statistics[at], 1);
                sum -= (double)(weight * job->means[at]);
            }
        }
        grad[head] = (float)sum;
    }
}

/* What FP8 is read and cast with. */
static void begin_scales(const te_attention_backward_args *args, backward_job *job)
{
    job->scale = args->problem.scale;
    job->read_grad = job->read_output = job->scores_scale = job->grads_scale = 1.0F;
    job->scores_amax = args->grad_scores_amax;
    job->grads_amax = args->grads_amax;
    if (!job->common.scales.fp8) return;
    job->read_grad = *te_inverse_scale(&args->grad_output_scales);
    job->read_output = *te_inverse_scale(&args->output_scales);
    job->scores_scale = *args->grad_scores_scale;
    job->grads_scale = *args->grads_scale;
    te_cpu_write_scales(&args->grads_scales, job->grads_scale);
}

te_status te_cpu_attention_backward(const te_attention_backward_args *args)
{
    backward_job job;
    int64_t fixed = describe(args, &job), batch = job.common.scores.shape[0];
    int64_t rows = batch * job.common.scores.shape[1] * job.common.scores.shape[2];
    te_count_attention(TE_DEVICE_CPU, args->problem.query.dtype, 1);
    TE_TRY(te_cpu_attention_begin("attention_backward", &args->problem, &job.common, fixed,
                                  args->workspace, args->workspace_size));
    begin_scales(args, &job);
    job.means = job.common.fixed;
#pragma omp parallel for num_threads(job.common.threads)
    for (int64_t row = 0; row < rows; row++) find_mean(&job, row);
    te_cpu_clear_gaps(&job.common.queries, batch, &args->grad_query);
    te_cpu_clear_gaps(&job.common.keys, batch, &args->grad_key);
    te_cpu_clear_gaps(&job.common.keys, batch, &args->grad_value);
    run_keys_and_queries(&job);
    if (job.grad_bias.data != NULL) run_bias(&job);
    if (args->grad_sink.data != NULL) write_sink_gradient(&job, args->grad_sink.data);
    TE_FAIL_IF(te_interruptible_stopped(&job.common.interruptible), TE_ERROR_INTERRUPTED,
               "attention_backward: interrupted: the gradients are not complete");
    return TE_OK;
}
