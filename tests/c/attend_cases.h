/* SPDX-License-Identifier: Apache-2.0
 *
 * attend_cases.h - the cases of attention and of its gradient, for any device.
 *
 * Each call is compared with the sums of the definition in float64, as a whole: its error is at
 * most a few roundings of the sums of the magnitudes of its terms.
 */
#ifndef TE_TESTS_ATTEND_CASES_H
#define TE_TESTS_ATTEND_CASES_H

#include "attention_cases.h"

typedef struct attend_case {
    te_dtype dtype;
    int64_t batch, queries, keys, heads, kv_heads, d_k, d_v, gap;
    int mask, bias, lengths, bottom_right;
    float scale, dropout, softcap;
    int64_t left, right, diagonal;
} attend_case;

/* The tensors of one case, and what the definition makes of them. */
typedef struct attend_data {
    attend_case c;
    int64_t rng[2];
    int32_t query_lengths[4], key_lengths[4];
    te_attention_problem problem;
    test_matrix query, key, value, mask, bias, output, statistics, grad_output;
    test_matrix grads[4];           /* of query, key, value, bias */
    double *expected[5], *terms[5]; /* of the output, then of these */
} attend_data;

static test_matrix tokens(test_device *t, const attend_case *c, int64_t count, int64_t heads,
                          int64_t dim)
{
    return dense4(t, c->dtype, (int64_t[4]){c->batch, count, heads, dim}, c->gap);
}

static double *zeros(test_device *t, const test_matrix *x)
{
    test_buffer *buffer = test_allocate(t, (size_t)(x->rows * x->columns + 1) * sizeof(double));
    memset(buffer->host, 0, buffer->bytes);
    return (double *)(void *)buffer->host;
}

static te_tensor lengths_of(test_device *t, int32_t *lengths, int64_t batch, int64_t limit)
{
    test_matrix vector = test_vector_new(t, TE_DTYPE_I32, batch);
    for (int64_t b = 0; b < batch; b++) lengths[b] = (int32_t)((limit * (b + 1)) / (batch + 1));
    memcpy(vector.buffer->host, lengths, (size_t)batch * sizeof *lengths);
    test_upload(t, vector.buffer);
    return vector.tensor;
}

static attend_data *new_attention(test_device *t, const attend_case *c)
{
    attend_data *d = (attend_data *)(void *)test_allocate(t, sizeof *d)->host;
    int64_t scores[4] = {c->batch, c->heads, c->queries, c->keys};
    *d = (attend_data){.c = *c, .rng = {test_random(), test_random()}};
    d->query = tokens(t, c, c->queries, c->heads, c->d_k);
    d->key = tokens(t, c, c->keys, c->kv_heads, c->d_k);
    d->value = tokens(t, c, c->keys, c->kv_heads, c->d_v);
    d->output = tokens(t, c, c->queries, c->heads, c->d_v);
    d->grad_output = tokens(t, c, c->queries, c->heads, c->d_v);
    d->grads[0] = tokens(t, c, c->queries, c->heads, c->d_k);
    d->grads[1] = tokens(t, c, c->keys, c->kv_heads, c->d_k);
    d->grads[2] = tokens(t, c, c->keys, c->kv_heads, c->d_v);
    d->statistics = test_matrix_new(t, TE_DTYPE_F32, c->batch * c->heads, c->queries, 0);
    d->statistics.tensor.ndim = 3;
    memcpy(d->statistics.tensor.shape, scores, 3 * sizeof *scores);
    memcpy(d->statistics.tensor.strides, (int64_t[]){c->heads * c->queries, c->queries, 1},
           3 * sizeof *scores);
    test_fill_random(t, &d->query, 1.0, 0);
    test_fill_random(t, &d->key, 1.0, 0);
    test_fill_random(t, &d->value, 1.0, 0);
    test_fill_random(t, &d->grad_output, 1.0, 0);
    d->problem = (te_attention_problem){.query = d->query.tensor,
                                        .key = d->key.tensor,
                                        .value = d->value.tensor,
                                        .scale = c->scale,
                                        .dropout = c->dropout,
                                        .window_left = c->left,
                                        .window_right = c->right,
                                        .diagonal = c->diagonal,
                                        .bottom_right = c->bottom_right};
    int64_t dims[4];
    some_dims(scores, c->bias ? 10 : 0, dims); /* heads and keys */
    d->bias = dense4(t, TE_DTYPE_F32, dims, 0);
    d->grads[3] = dense4(t, TE_DTYPE_F32, dims, 0);
    test_fill_random(t, &d->bias, 1.0, 0);
    some_dims(scores, c->mask ? 13 : 0, dims); /* all but the heads */
    d->mask = dense4(t, TE_DTYPE_U8, dims, 0);
    for (int64_t i = 0; i < d->mask.rows * d->mask.columns; i++) {
        test_set(&d->mask, i / d->mask.columns, i % d->mask.columns,
                 test_random() % 3 == 0 ? 1.0 : 0.0);
    }
    test_upload(t, d->mask.buffer);
    if (c->mask) d->problem.mask = d->mask.tensor;
    if (c->bias) d->problem.bias = d->bias.tensor;
    if (c->dropout > 0.0F) d->problem.rng = device_rng(t, d->rng);
    if (c->lengths) {
        d->problem.query_lengths = lengths_of(t, d->query_lengths, c->batch, c->queries);
        d->problem.key_lengths = lengths_of(t, d->key_lengths, c->batch, c->keys);
    }
    for (int i = 0; i < 5; i++) {
        const test_matrix *like = i == 0 ? &d->output : &d->grads[i - 1];
        d->expected[i] = zeros(t, like);
        d->terms[i] = zeros(t, like);
    }
    return d;
}

/* Row of token `at` and head `h` of [batch, tokens, heads, dim]. */
static int64_t row_of(const test_matrix *x, int64_t b, int64_t at, int64_t h)
{
    return (b * x->tensor.shape[1] + at) * x->tensor.shape[2] + h;
}

static double dot_rows(const test_matrix *x, int64_t i, const test_matrix *y, int64_t j)
{
    double sum = 0.0;
    for (int64_t k = 0; k < x->columns; k++) sum += test_get(x, i, k) * test_get(y, j, k);
    return sum;
}

/* Adds factor * row j of x to row i of a result. */
static void add_row(attend_data *d, int result, int64_t i, double factor, double term,
                    const test_matrix *x, int64_t j)
{
    for (int64_t k = 0; k < x->columns; k++) {
        d->expected[result][i * x->columns + k] += factor * test_get(x, j, k);
        d->terms[result][i * x->columns + k] += fabs(term * test_get(x, j, k));
    }
}

/* A score, and by which its gradient is that of the scaled product. */
static double attend_score(const attend_data *d, const int64_t at[3], int64_t key, double *slope)
{
    double score;
    const attend_case *c = &d->c;
    const int64_t shape[4] = {c->batch, c->heads, c->queries, c->keys};
    int64_t queries = c->lengths ? d->query_lengths[at[0]] : c->queries;
    int64_t keys = c->lengths ? d->key_lengths[at[0]] : c->keys,
            head = at[1] * c->kv_heads / c->heads;
    int64_t middle = at[2] + c->diagonal + (c->bottom_right ? keys - queries : 0);
    int64_t row = (at[0] * c->heads + at[1]) * c->queries + at[2];
    if (at[2] >= queries || key >= keys || (c->left >= 0 && key < middle - c->left) ||
        (c->right >= 0 && key > middle + c->right) ||
        (c->mask && get_broadcast(&d->mask, shape, row, key) != 0.0)) {
        return -(double)INFINITY;
    }
    score = (double)c->scale * dot_rows(&d->query, row_of(&d->query, at[0], at[2], at[1]), &d->key,
                                        row_of(&d->key, at[0], key, head));
    *slope = 1.0;
    if (c->softcap > 0.0F) {
        const double share = tanh(score / (double)c->softcap);
        score = (double)c->softcap * share;
        *slope = 1.0 - share * share;
    }
    return score + (c->bias ? get_broadcast(&d->bias, shape, row, key) : 0.0);
}

/* One query: its output and statistic, and what it adds to the gradients. */
static void define_query(test_device *t, attend_data *d, const int64_t at[3], double *p, double *dp)
{
    const attend_case *c = &d->c;
    int64_t q = row_of(&d->query, at[0], at[2], at[1]), head = at[1] * c->kv_heads / c->heads;
    int64_t row = (at[0] * c->heads + at[1]) * c->queries + at[2];
    double top = -(double)INFINITY, sum = 0.0, mean = 0.0, size = 0.0, slope = 1.0;
    for (int64_t k = 0; k < c->keys; k++) {
        p[k] = attend_score(d, at, k, &slope);
        top = fmax(top, p[k]);
    }
    for (int64_t k = 0; k < c->keys; k++)
        sum += p[k] = top == -(double)INFINITY ? 0 : exp(p[k] - top);
    double statistic = test_get(&d->statistics, at[0] * c->heads + at[1], at[2]);
    if (sum == 0.0) {
        TEST_CHECK(t, statistic == -(double)INFINITY, "statistic %g of no key", statistic);
        return;
    }
    check_value(t, TE_DTYPE_F32, statistic, top + log(sum), 1.0 + fabs(top));
    for (int64_t k = 0; k < c->keys; k++) {
        double factor = philox_factor(d->rng, row * c->keys + k, c->dropout);
        int64_t v = row_of(&d->value, at[0], k, head);
        p[k] /= sum;
        dp[k] = factor * dot_rows(&d->grad_output, q, &d->value, v);
        mean += p[k] * dp[k];
        size += fabs(p[k] * dp[k]);
        add_row(d, 0, q, p[k] * factor, p[k] * factor, &d->value, v);
        add_row(d, 3, v, p[k] * factor, p[k] * factor, &d->grad_output, q);
    }
    for (int64_t k = 0; k < c->keys; k++) {
        double ds = p[k] * (dp[k] - mean), term = p[k] * (fabs(dp[k]) + size);
        double scale;
        int64_t j = row_of(&d->key, at[0], k, head);
        if (p[k] > 0.0) (void)attend_score(d, at, k, &slope);
        scale = (double)c->scale * slope;
        add_row(d, 1, q, scale * ds, scale * term, &d->key, j);
        add_row(d, 2, j, scale * ds, scale * term, &d->query, q);
        if (!c->bias) continue;
        d->expected[4][at[1] * c->keys + k] += ds;
        d->terms[4][at[1] * c->keys + k] += term;
    }
}

static void define(test_device *t, attend_data *d)
{
    const attend_case *c = &d->c;
    double *p = zeros(t, &(test_matrix){.rows = 1, .columns = c->keys});
    double *dp = zeros(t, &(test_matrix){.rows = 1, .columns = c->keys});
    for (int64_t i = 0; i < c->batch * c->heads * c->queries; i++) {
        define_query(
            t, d,
            (int64_t[3]){i / c->queries / c->heads, i / c->queries % c->heads, i % c->queries}, p,
            dp);
    }
}

/* Result `which` as a whole: its error is at most six units of rounding of its terms. */
static void check_result_of(test_device *t, const attend_data *d, int which)
{
    const test_matrix *x = which == 0 ? &d->output : &d->grads[which - 1];
    double error = 0.0, size = 0.0, bound = 6 * fmax(2 * test_dtype_eps(d->c.dtype), 0x1p-23);
    for (int64_t i = 0; i < x->rows * x->columns; i++) {
        double got = test_get(x, i / x->columns, i % x->columns);
        error += (got - d->expected[which][i]) * (got - d->expected[which][i]);
        size += d->terms[which][i] * d->terms[which][i];
    }
    TEST_CHECK(t, sqrt(error) <= bound * sqrt(size), "result %d: error %g of %g", which,
               sqrt(error), sqrt(size));
}

static void run_attention(test_device *t, const attend_case *c, int gradients)
{
    attend_data *d = new_attention(t, c);
    te_attention_args args = {.size = sizeof args,
                              .problem = d->problem,
                              .output = d->output.tensor,
                              .statistics = d->statistics.tensor,
                              .softcap = c->softcap};
    args.workspace = test_workspace(t, TE_OP_ATTENTION, &args, &args.workspace_size);
    TEST_OK(t, te_attention(t->context, &args, t->stream));
    test_fetch(t, &d->output);
    test_fetch(t, &d->statistics);
    define(t, d);
    check_result_of(t, d, 0);
    if (gradients) {
        te_attention_backward_args back = {.size = sizeof back,
                                           .problem = d->problem,
                                           .grad_output = d->grad_output.tensor,
                                           .output = d->output.tensor,
                                           .statistics = d->statistics.tensor,
                                           .grad_query = d->grads[0].tensor,
                                           .grad_key = d->grads[1].tensor,
                                           .grad_value = d->grads[2].tensor,
                                           .softcap = c->softcap};
        if (c->bias) back.grad_bias = d->grads[3].tensor;
        back.workspace = test_workspace(t, TE_OP_ATTENTION_BACKWARD, &back, &back.workspace_size);
        TEST_OK(t, te_attention_backward(t->context, &back, t->stream));
        for (int i = 0; i < (c->bias ? 4 : 3); i++) {
            test_fetch(t, &d->grads[i]);
            check_result_of(t, d, i + 1);
        }
    }
    test_release(t);
}

static void run_attentions(test_device *t, int gradients)
{
    const int64_t sizes[][7] = {{1, 1, 1, 1, 1, 1, 1},    {2, 5, 7, 3, 1, 6, 9},
                                {1, 50, 193, 2, 2, 8, 4}, {2, 13, 200, 4, 2, 9, 12},
                                {0, 3, 4, 2, 2, 8, 8},    {2, 0, 4, 2, 1, 8, 8},
                                {2, 3, 0, 2, 1, 8, 8},    {1, 100, 30, 1, 1, 33, 3}};
    const int64_t windows[][3] = {{-1, -1, 0}, {-1, 0, 0}, {-1, 3, 4}, {20, 11, -1}, {0, 0, 0}};
    for (int i = 0; i < 40; i++) {
        const int64_t *size = sizes[i % 8], *window = windows[i % 5];
        run_attention(t,
                      &(attend_case){.dtype = attention_dtypes[i % 3],
                                     .batch = size[0],
                                     .queries = size[1],
                                     .keys = size[2],
                                     .heads = size[3],
                                     .kv_heads = size[4],
                                     .d_k = size[5],
                                     .d_v = size[6],
                                     .gap = i % 4,
                                     .mask = i / 2 % 2,
                                     .bias = i / 3 % 2,
                                     .lengths = i / 4 % 3 == 1,
                                     .bottom_right = i / 5 % 2,
                                     .scale = i % 7 == 0 ? -0.4F : 0.3F,
                                     .dropout = i % 4 == 3 ? 0.2F : 0.0F,
                                     .softcap = i % 3 == 1 ? 0.7F : 0.0F,
                                     .left = window[0],
                                     .right = window[1],
                                     .diagonal = window[2]},
                      gradients);
    }
}

/* A million queries and keys: a matrix of their scores would take four terabytes. */
static void check_workspace(test_device *t, te_op op)
{
    enum { LENGTH = 1 << 20 };
    float element = 0.0F;
    size_t bytes = 0;
    te_tensor x = {.data = &element,
                   .dtype = TE_DTYPE_F32,
                   .device = t->device,
                   .ndim = 4,
                   .shape = {1, LENGTH, 1, 64},
                   .strides = {LENGTH * 64, 64, 64, 1}};
    te_tensor statistics = {.data = &element,
                            .dtype = TE_DTYPE_F32,
                            .device = t->device,
                            .ndim = 3,
                            .shape = {1, 1, LENGTH},
                            .strides = {LENGTH, LENGTH, 1}};
    te_attention_problem problem = {.query = x, .key = x, .value = x, .scale = 1.0F};
    te_attention_args args = {.size = sizeof args, .problem = problem, .output = x};
    te_attention_backward_args back = {.size = sizeof back,
                                       .problem = problem,
                                       .grad_output = x,
                                       .output = x,
                                       .statistics = statistics,
                                       .grad_query = x,
                                       .grad_key = x};
    const void *call = op == TE_OP_ATTENTION ? (const void *)&args : (const void *)&back;
    TEST_OK(t, te_op_workspace(t->context, op, call, &bytes));
    TEST_CHECK(t, bytes > 0 && bytes < (size_t)1 << 30, "a workspace of %zu bytes", bytes);
    if (op == TE_OP_ATTENTION) {
        TEST_CHECK(t, te_attention(t->context, &args, t->stream) == TE_ERROR_INVALID,
                   "ran without a workspace");
    } else {
        TEST_CHECK(t, te_attention_backward(t->context, &back, t->stream) == TE_ERROR_INVALID,
                   "ran without a workspace");
    }
}

static void test_attention(test_device *t)
{
    run_attentions(t, 0);
    check_workspace(t, TE_OP_ATTENTION);
}

static void test_attention_backward(test_device *t)
{
    run_attentions(t, 1);
    check_workspace(t, TE_OP_ATTENTION_BACKWARD);
}

#endif
