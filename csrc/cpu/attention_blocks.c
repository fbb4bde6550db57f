/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_blocks.c - blocks of queries and keys, and products of them.
 */
#include "cpu/attention.h"

#include <math.h>
#include <string.h>

#include "core/attention.h"
#include "core/status.h"
#include "cpu/pack.h"

enum { ALIGNMENT = 64, SERIAL_WORK = 64 * 64 * 64 };

/* ---- a call ------------------------------------------------------------------------------- */

/* Lengths that fit, and packed sequences that lie one behind the other; `name` is of the queries or
 * the keys, and messages have their name in Python, too. */
static te_status check_side(const char *op, const char *name, const te_cpu_side *side,
                            int64_t batch)
{
    const int32_t *offsets = side->offsets;
    const char *sums = name[0] == 'q' ? "cu_seqlens_q" : "cu_seqlens_kv";
    for (int64_t b = 0; b < batch; b++) {
        const int64_t length = te_cpu_length(side, b);
        TE_FAIL_IF(length < 0 || length > side->longest, TE_ERROR_INVALID,
                   "%s: %s_%s: %lld of sequence %lld, expected 0 to %lld (%s)", op, name,
                   side->lengths == NULL ? "offsets" : "lengths", (long long)length, (long long)b,
                   (long long)side->longest, sums);
        if (offsets == NULL) continue;
        TE_FAIL_IF(offsets[b] < 0 || offsets[b] + length > offsets[b + 1] ||
                       offsets[b + 1] > side->tokens,
                   TE_ERROR_INVALID,
                   "%s: %s_offsets: sequence %lld of %lld tokens from %d on, the next from "
                   "%d on, of %lld (%s)",
                   op, name, (long long)b, (long long)length, (int)offsets[b], (int)offsets[b + 1],
                   (long long)side->tokens, sums);
    }
    return TE_OK;
}

static te_cpu_side side_of(const te_tensor *heads, const te_tensor *lengths,
                           const te_tensor *offsets, int64_t longest)
{
    return (te_cpu_side){.lengths = lengths->data,
                         .offsets = offsets->data,
                         .longest = longest,
                         .tokens = heads->shape[1]};
}

void te_cpu_attention_describe(const te_attention_problem *problem, te_cpu_attention_job *attention)
{
    const te_cpu_kernels *kernels = te_cpu_kernels_get();
    const int64_t *query = problem->query.shape, *key = problem->key.shape;
    int64_t batch = te_attention_batch(problem), queries = te_attention_queries(problem);
    int64_t heads = query[2], keys = te_attention_keys(problem);
    const te_cpu_side of_queries =
        side_of(&problem->query, &problem->query_lengths, &problem->query_offsets, queries);
    const te_cpu_side of_keys =
        side_of(&problem->key, &problem->key_lengths, &problem->key_offsets, keys);
    *attention = (te_cpu_attention_job){
        .scores = {.kernels = kernels,
                   .mask = te_cpu_tensor4_of(&problem->mask),
                   .bias = te_cpu_tensor4_of(&problem->bias),
                   .sink = problem->sink.data,
                   .slopes = problem->slopes.data,
                   .shape = {batch, heads, queries, keys},
                   .scale = problem->scale}, /* of FP8, times those of its operands later */
        .query = te_cpu_heads_of(&of_queries, &problem->query),
        .key = te_cpu_heads_of(&of_keys, &problem->key),
        .value = te_cpu_heads_of(&of_keys, &problem->value),
        .kv_heads = key[2],
        .group = key[2] == 0 ? 1 : heads / key[2],
        .d_k = query[3],
        .d_v = problem->value.shape[3],
        .d_k_tiled = te_round_up(query[3], kernels->tile_columns),
        .d_v_tiled = te_round_up(problem->value.shape[3], kernels->tile_columns),
        .queries = of_queries,
        .keys = of_keys,
        .bottom_right = problem->bottom_right != 0,
        .block = TE_CPU_QUERIES};
    if (problem->slopes.ndim == 2 && problem->slopes.shape[0] > 1) {
        attention->scores.slopes_stride = problem->slopes.strides[0];
    }
    te_cpu_set_window(&attention->scores, problem->window_left, problem->window_right,
                      problem->diagonal);
    int64_t rows = te_attention_is_packed(problem) ? query[1] : batch * queries;
    int64_t work = rows * heads * keys * (attention->d_k + attention->d_v + 1);
    attention->threads = work < SERIAL_WORK ? 1 : te_cpu_max_threads();
}

size_t te_cpu_attention_bytes(const te_cpu_attention_job *attention, int64_t fixed)
{
    return (size_t)(fixed + attention->threads * attention->thread_floats) * sizeof(float) +
           ALIGNMENT;
}

/* Puts the buffers of as many threads as fit behind the fixed floats: there may be more threads
 * than at the query. */
static te_status place(const char *name, te_cpu_attention_job *attention, int64_t fixed,
                       void *workspace, size_t size)
{
    size_t skipped = (ALIGNMENT - (uintptr_t)workspace % ALIGNMENT) % ALIGNMENT;
    int64_t given = 0;
    if (workspace != NULL && size > skipped) {
        given = (int64_t)((size - skipped) / sizeof(float)) - fixed;
    }
    if (given < attention->thread_floats) {
        attention->threads = 1;
        return TE_FAIL(TE_ERROR_INVALID, "%s: workspace of %zu bytes, needs at least %zu", name,
                       workspace == NULL ? 0 : size, te_cpu_attention_bytes(attention, fixed));
    }
    attention->threads = (int)te_cpu_min(attention->threads, given / attention->thread_floats);
    attention->fixed = (float *)(void *)((unsigned char *)workspace + skipped);
    attention->buffers = attention->fixed + fixed;
    return TE_OK;
}

te_status te_cpu_attention_begin(const char *name, const te_attention_problem *problem,
                                 te_cpu_attention_job *attention, int64_t fixed, void *workspace,
                                 size_t size)
{
    const int64_t batch = attention->scores.shape[0];
    attention->scores.dropout = te_cpu_dropout_of(problem->rng, problem->dropout);
    te_cpu_fp8_begin(problem, attention);
    te_interruptible_begin(&attention->interruptible);
    TE_TRY(check_side(name, "query", &attention->queries, batch));
    TE_TRY(check_side(name, "key", &attention->keys, batch));
    return place(name, attention, fixed, workspace, size);
}

int64_t te_cpu_lay_out(const te_cpu_part *parts, int count, float *start)
{
    int64_t total = 0;
    for (int i = 0; i < count; i++) {
        *parts[i].data = start == NULL ? NULL : start + total;
        total += te_round_up(parts[i].floats, ALIGNMENT / (int64_t)sizeof(float));
    }
    return total;
}

float *te_cpu_attention_buffer(const te_cpu_attention_job *attention)
{
    return attention->buffers + te_cpu_thread() * attention->thread_floats;
}

/* ---- blocks ------------------------------------------------------------------------------- */

int64_t te_cpu_length(const te_cpu_side *side, int64_t batch)
{
    if (side->lengths != NULL) return side->lengths[batch];
    if (side->offsets != NULL) return (int64_t)side->offsets[batch + 1] - side->offsets[batch];
    return side->longest;
}

int64_t te_cpu_rows_of(const te_cpu_side *side, int64_t batch)
{
    return side->offsets != NULL ? te_cpu_length(side, batch) : side->longest;
}

te_cpu_tensor4 te_cpu_heads_of(const te_cpu_side *side, const te_tensor *tensor)
{
    te_cpu_tensor4 heads = te_cpu_tensor4_of(tensor);
    heads.offsets = side->offsets;
    return heads;
}

int64_t te_cpu_statistics(const te_cpu_attention_job *attention)
{
    const int64_t *shape = attention->scores.shape;
    if (attention->queries.offsets != NULL) return attention->queries.tokens * shape[1];
    return shape[0] * shape[1] * shape[2];
}

int64_t te_cpu_statistic(const te_cpu_attention_job *attention, const te_cpu_row *row)
{
    const int32_t *offsets = attention->queries.offsets;
    if (offsets == NULL) return row->number;
    return (offsets[row->index[0]] + row->index[2]) * attention->scores.shape[1] + row->index[1];
}

void te_cpu_clear_gaps(const te_cpu_side *side, int64_t batch, const te_tensor *heads)
{
    const te_cpu_tensor4 x = te_cpu_tensor4_of(heads);
    int64_t token = 0;
    if (side->offsets == NULL || heads->data == NULL) return;
    for (int64_t b = 0; b <= batch; b++) {
        const int64_t end = b < batch ? side->offsets[b] : side->tokens;
        for (; token < end; token++) {
            for (int64_t head = 0; head < heads->shape[2]; head++) {
                memset(te_cpu_at4(&x, 0, token, head), 0, (size_t)(heads->shape[3] * x.bytes));
            }
        }
        if (b < batch) token += te_cpu_length(side, b);
    }
}

void te_cpu_set_queries(const te_cpu_attention_job *attention, int64_t batch, int64_t head,
                        int64_t first, te_cpu_queries *queries)
{
    const int64_t *shape = attention->scores.shape;
    int64_t keys = te_cpu_length(&attention->keys, batch);
    int64_t length = te_cpu_length(&attention->queries, batch);
    int64_t shift = attention->bottom_right ? keys - length : 0;
    int64_t number = (batch * shape[1] + head) * shape[2] + first;
    queries->batch = batch;
    queries->head = head;
    queries->first = first;
    queries->count = te_cpu_min(attention->block, length - first);
    if (queries->count < 0) queries->count = 0;
    for (int64_t r = 0; r < queries->count; r++) {
        queries->rows[r] = te_cpu_row_of(&attention->scores, number + r, keys, shift);
    }
}

int te_cpu_meet(const te_cpu_attention_job *attention, const te_cpu_queries *queries, int64_t key,
                te_cpu_meeting *meeting)
{
    const te_cpu_row *rows = queries->rows;
    int64_t keys = te_cpu_min(TE_CPU_KEYS, te_cpu_length(&attention->keys, queries->batch) - key);
    int64_t from = 0, to = queries->count; /* windows move to the right from row to row */
    while (from < to && rows[from].end <= key) from++;
    while (to > from && rows[to - 1].begin >= key + keys) to--;
    *meeting = (te_cpu_meeting){.key = key, .keys = keys, .from = from, .to = to};
    return from < to;
}

te_cpu_matrix te_cpu_tokens(const te_cpu_tensor4 *x, int64_t batch, int64_t head, int64_t first,
                            int64_t count, int64_t dim)
{
    if (x->offsets != NULL) first += x->offsets[batch]; /* and there is one batch entry */
    return (te_cpu_matrix){.data = te_cpu_at4(x, batch, first, head),
                           .rows = count,
                           .columns = dim,
                           .row_stride = x->strides[1],
                           .column_stride = 1,
                           .bytes = (size_t)x->bytes,
                           .dtype = x->dtype};
}

void te_cpu_clear_around(float *line, int64_t keys, int64_t first, int64_t n)
{
    memset(line, 0, (size_t)first * sizeof *line);
    memset(line + first + n, 0, (size_t)(keys - first - n) * sizeof *line);
}

te_cpu_matrix te_cpu_floats(float *data, int64_t rows, int64_t columns, int64_t stride)
{
    return (te_cpu_matrix){.data = (unsigned char *)data,
                           .rows = rows,
                           .columns = columns,
                           .row_stride = stride,
                           .column_stride = 1,
                           .bytes = sizeof(float),
                           .dtype = TE_DTYPE_F32};
}

/* ---- products ----------------------------------------------------------------------------- */

static te_cpu_panels pack(const te_cpu_kernels *kernels, te_cpu_matrix matrix, int outer_is_rows,
                          int width, float *buffer)
{
    te_cpu_operand operand = {.kernels = kernels,
                              .data = matrix,
                              .outer = outer_is_rows ? matrix.rows : matrix.columns,
                              .depth = outer_is_rows ? matrix.columns : matrix.rows,
                              .depth_contiguous = outer_is_rows,
                              .width = width};
    int64_t panels = te_ceil_div(operand.outer, width);
    te_cpu_pack(&operand, 0, panels, buffer);
    return (te_cpu_panels){
        .data = buffer, .outer = operand.outer, .depth = operand.depth, .width = width};
}

te_cpu_panels te_cpu_pack_left(const te_cpu_kernels *kernels, te_cpu_matrix matrix,
                               int outer_is_rows, float *buffer)
{
    return pack(kernels, matrix, outer_is_rows, kernels->tile_rows, buffer);
}

te_cpu_panels te_cpu_pack_right(const te_cpu_kernels *kernels, te_cpu_matrix matrix,
                                int outer_is_rows, float *buffer)
{
    te_cpu_panels panels = pack(kernels, matrix, outer_is_rows, kernels->tile_columns, buffer);
    int64_t count = te_round_up(panels.outer, panels.width) * panels.depth;
    panels.special = !isfinite(kernels->dot(buffer, buffer, count));
    return panels;
}

/* Row by row and term by term. */
static void add_without_zeros(const te_cpu_panels *a, int64_t from, int64_t to,
                              const te_cpu_panels *b, float *c, int64_t ldc)
{
    for (int64_t r = from; r < to; r++) {
        const float *row = a->data + r / a->width * a->width * a->depth + r % a->width;
        for (int64_t k = 0; k < a->depth; k++) {
            float factor = row[k * a->width];
            if (factor == 0.0F) continue;
            for (int64_t j = 0; j < b->outer; j++) {
                int64_t panel = j / b->width * b->width;
                c[r * ldc + j] += factor * b->data[panel * b->depth + k * b->width + j - panel];
            }
        }
    }
}

void te_cpu_product(const te_cpu_kernels *kernels, const te_cpu_panels *a, int64_t from, int64_t to,
                    const te_cpu_panels *b, float *c, int64_t ldc, int add)
{
    if (add && b->special) {
        add_without_zeros(a, from, to, b, c, ldc);
        return;
    }
    for (int64_t j = 0; j < b->outer; j += b->width) {
        for (int64_t r = from / a->width * a->width; r < to; r += a->width) {
            kernels->gemm_tile(a->depth, a->data + r * a->depth, b->data + j * b->depth,
                               c + r * ldc + j, ldc, add);
        }
    }
}
