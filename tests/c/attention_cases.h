/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_cases.h - the cases of softmax, dropout and rotary embedding, for any device.
 *
 * Values are compared with float64 within what fp32 arithmetic and one rounding of the output
 * allow; random decisions are exact: a dropped element is 0.
 */
#ifndef TE_TESTS_ATTENTION_CASES_H
#define TE_TESTS_ATTENTION_CASES_H

#include "philox_reference.h"
#include "testing.h"

static const te_dtype attention_dtypes[] = {TE_DTYPE_F32, TE_DTYPE_F16, TE_DTYPE_BF16};

/* A number as the output's dtype holds it: fp32 errors relative to `size`, and one rounding. */
static void check_value(test_device *t, te_dtype dtype, double got, double expected, double size)
{
    double bound = 0x1p-18 * size + fabs(expected) * 1.01 * test_dtype_eps(dtype) + 0x1p-25;
    TEST_CHECK(t, fabs(got - expected) <= bound, "%s %.9g, not %.9g within %g",
               te_dtype_name(dtype), got, expected, bound);
}

static const int64_t *device_rng(test_device *t, const int64_t rng[2])
{
    test_buffer *buffer = test_allocate(t, 2 * sizeof *rng);
    memcpy(buffer->host, rng, buffer->bytes);
    test_upload(t, buffer);
    return (const int64_t *)(const void *)buffer->device;
}

/* ---- softmax ------------------------------------------------------------------------------ */

typedef struct softmax_case {
    te_dtype dtype, bias_dtype;
    int64_t shape[4], gap;
    unsigned mask, bias; /* bit i: dim i is that of the input, else 1; 0: none */
    float scale, dropout;
    int64_t left, right, diagonal;
    int probabilities, special;
} softmax_case;

/* [d0, d1, d2, d3] as a matrix of d3 columns. */
static test_matrix dense4(test_device *t, te_dtype dtype, const int64_t shape[4], int64_t gap)
{
    test_matrix x = test_matrix_new(t, dtype, shape[0] * shape[1] * shape[2], shape[3], gap);
    x.tensor.ndim = 4;
    memcpy(x.tensor.shape, shape, 4 * sizeof *shape);
    x.tensor.strides[3] = 1;
    x.tensor.strides[2] = x.stride;
    for (int i = 1; i >= 0; i--) x.tensor.strides[i] = x.tensor.strides[i + 1] * shape[i + 1];
    return x;
}

/* The element that stands for (row, key) of the input. */
static double get_broadcast(const test_matrix *x, const int64_t shape[4], int64_t row, int64_t key)
{
    const int64_t *own = x->tensor.shape;
    int64_t query = row % shape[2], head = row / shape[2] % shape[1];
    int64_t batch = row / shape[2] / shape[1];
    if (own[2] == 1) query = 0;
    if (own[1] == 1) head = 0;
    if (own[0] == 1) batch = 0;
    return test_get(x, (batch * own[1] + head) * own[2] + query, own[3] == 1 ? 0 : key);
}

static void some_dims(const int64_t shape[4], unsigned which, int64_t dims[4])
{
    for (int i = 0; i < 4; i++) dims[i] = which >> i & 1 ? shape[i] : 1;
}

/* Score of a key; -Inf where it is forbidden. */
static double score_of(const softmax_case *c, const test_matrix *x, const test_matrix *mask,
                       const test_matrix *bias, const int64_t at[2])
{
    int64_t row = at[0], key = at[1], query = row % c->shape[2];
    double score = (double)c->scale * test_get(x, row, key);
    if (c->left >= 0 && key < query + c->diagonal - c->left) return -(double)INFINITY;
    if (c->right >= 0 && key > query + c->diagonal + c->right) return -(double)INFINITY;
    if (c->mask && get_broadcast(mask, c->shape, row, key) != 0.0) return -(double)INFINITY;
    if (c->bias) score += get_broadcast(bias, c->shape, row, key);
    return score;
}

/* One row against the definition; y with dropout, p without. */
static void check_row(test_device *t, const softmax_case *c, const double *scores, int64_t row,
                      const test_matrix *y, const test_matrix *p, const int64_t rng[2])
{
    double top = -(double)INFINITY, sum = 0;
    int nan = 0;
    for (int64_t k = 0; k < c->shape[3]; k++) {
        top = fmax(top, scores[k]);
        nan |= isnan(scores[k]) || scores[k] == (double)INFINITY;
    }
    for (int64_t k = 0; k < c->shape[3]; k++) {
        if (scores[k] != -(double)INFINITY) sum += exp(scores[k] - top);
    }
    for (int64_t k = 0; k < c->shape[3]; k++) {
        int forbidden = scores[k] == -(double)INFINITY;
        double expected = forbidden ? 0.0 : exp(scores[k] - top) / sum, got = test_get(y, row, k);
        double factor = philox_factor(rng, row * c->shape[3] + k, c->dropout);
        if (forbidden || factor == 0.0) {
            TEST_CHECK(t, got == 0.0, "row %lld key %lld: %g, not 0", (long long)row, (long long)k,
                       got);
        } else if (nan) {
            TEST_CHECK(t, isnan(got), "row %lld key %lld: %g, not NaN", (long long)row,
                       (long long)k, got);
        } else {
            check_value(t, c->dtype, got, expected * factor, expected * factor);
        }
        if (!c->probabilities) continue;
        got = test_get(p, row, k);
        TEST_CHECK(t, nan && !forbidden ? isnan(got) : got == 0.0 || !forbidden,
                   "row %lld key %lld: probability %g", (long long)row, (long long)k, got);
        if (!nan) check_value(t, c->dtype, got, expected, expected);
    }
}

static void run_softmax(test_device *t, const softmax_case *c)
{
    const int64_t rng[2] = {(int64_t)((uint64_t)test_random() << 32 | test_random()),
                            test_random()};
    int64_t mask_dims[4], bias_dims[4];
    some_dims(c->shape, c->mask, mask_dims);
    some_dims(c->shape, c->bias, bias_dims);
    test_matrix x = dense4(t, c->dtype, c->shape, c->gap);
    test_matrix y = dense4(t, c->dtype, c->shape, c->gap + 1), p = dense4(t, c->dtype, c->shape, 0);
    test_matrix mask = dense4(t, TE_DTYPE_U8, mask_dims, 0);
    test_matrix bias = dense4(t, c->bias_dtype, bias_dims, 0);
    test_fill_random(t, &x, 6.0, 0);
    test_fill_random(t, &bias, 3.0, 0);
    for (int64_t i = 0; i < x.rows * x.columns; i++) {
        if (!c->special || test_random() % 64 != 0) continue;
        const double specials[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
        test_set(&x, i / x.columns, i % x.columns, specials[test_random() % 3]);
    }
    test_upload(t, x.buffer);
    for (int64_t i = 0; i < mask.rows * mask.columns; i++) {
        test_set(&mask, i / mask.columns, i % mask.columns, test_random() % 3 == 0 ? 1.0 : 0.0);
    }
    test_upload(t, mask.buffer);
    te_softmax_args args = {.size = sizeof args,
                            .input = x.tensor,
                            .output = y.tensor,
                            .scale = c->scale,
                            .dropout = c->dropout,
                            .window_left = c->left,
                            .window_right = c->right,
                            .diagonal = c->diagonal};
    if (c->mask) args.mask = mask.tensor;
    if (c->bias) args.bias = bias.tensor;
    if (c->probabilities) args.probabilities = p.tensor;
    if (c->dropout > 0.0F) args.rng = device_rng(t, rng);
    TEST_OK(t, te_softmax(t->context, &args, t->stream));
    test_fetch(t, &y);
    test_fetch(t, &p);
    test_buffer *scores = test_allocate(t, (size_t)c->shape[3] * sizeof(double));
    for (int64_t row = 0; row < x.rows; row++) {
        for (int64_t k = 0; k < x.columns; k++) {
            double score = score_of(c, &x, &mask, &bias, (int64_t[2]){row, k});
            memcpy(scores->host + (size_t)k * sizeof score, &score, sizeof score);
        }
        check_row(t, c, (const double *)(const void *)scores->host, row, &y, &p, rng);
    }
    test_release(t);
}

static void test_softmax(test_device *t)
{
    const int64_t sizes[][4] = {{1, 1, 1, 1},   {2, 3, 5, 7},    {1, 2, 17, 33},
                                {2, 2, 3, 130}, {0, 2, 4, 4},    {2, 1, 4, 0},
                                {1, 1, 40, 40}, {1, 2, 3, 1500}, {1, 1, 2, 5003}};
    const int64_t windows[][3] = {{-1, -1, 0}, {-1, 0, 0}, {-1, 0, 3}, {2, 1, -1}, {0, 0, 0}};
    const unsigned dims[] = {0, 15, 9, 8, 12, 4, 3};
    const float scales[] = {1.0F, 0.125F, -0.7F, 0.0F};
    for (int i = 0; i < 180; i++) {
        softmax_case c = {.dtype = attention_dtypes[i % 3],
                          .bias_dtype = attention_dtypes[i / 3 % 3],
                          .gap = i % 4,
                          .mask = dims[i % 7],
                          .bias = dims[i / 2 % 7],
                          .scale = scales[i / 5 % 4],
                          .dropout = i % 4 == 3   ? 0.1F
                                     : i % 8 == 1 ? 1.0F
                                                  : 0.0F,
                          .left = windows[i % 5][0],
                          .right = windows[i % 5][1],
                          .diagonal = windows[i % 5][2],
                          .probabilities = i % 2,
                          .special = i % 11 == 0};
        memcpy(c.shape, sizes[i / 4 % 9], sizeof c.shape);
        run_softmax(t, &c);
    }
}

static void run_softmax_backward(test_device *t, te_dtype dtype, const int64_t shape[4],
                                 float dropout)
{
    const int64_t rng[2] = {test_random(), test_random()};
    const float scale = -0.4F;
    test_matrix dy = dense4(t, dtype, shape, 2), p = dense4(t, dtype, shape, 0), dx = dy;
    test_fill_random(t, &dy, 1.0, 0);
    for (int64_t i = 0; i < p.rows * p.columns; i++) {
        test_set(&p, i / p.columns, i % p.columns, fabs(test_uniform()) / (double)shape[3]);
    }
    test_upload(t, p.buffer);
    int in_place = dropout > 0.0F;
    if (!in_place) dx = dense4(t, dtype, shape, 1);
    test_buffer *given = test_allocate(t, dy.buffer->bytes);
    memcpy(given->host, dy.buffer->host, dy.buffer->bytes);
    te_softmax_backward_args args = {.size = sizeof args,
                                     .grad_output = dy.tensor,
                                     .probabilities = p.tensor,
                                     .grad_input = dx.tensor,
                                     .scale = scale,
                                     .dropout = dropout};
    if (dropout > 0.0F) args.rng = device_rng(t, rng);
    TEST_OK(t, te_softmax_backward(t->context, &args, t->stream));
    test_fetch(t, &dx);
    dy.buffer = given;
    for (int64_t row = 0; row < p.rows; row++) {
        double sum = 0, size = 0;
        for (int64_t pass = 0; pass < 2; pass++) {
            for (int64_t k = 0; k < shape[3]; k++) {
                double factor = philox_factor(rng, row * shape[3] + k, dropout);
                double dp = test_get(&dy, row, k) * factor, weight = test_get(&p, row, k);
                if (pass == 0) {
                    sum += dp * weight;
                    size += fabs(dp * weight);
                } else {
                    double expected = (double)scale * weight * (dp - sum);
                    check_value(t, dtype, test_get(&dx, row, k), expected, weight * (1 + size));
                }
            }
        }
    }
    test_release(t);
}

static void test_softmax_backward(test_device *t)
{
    const int64_t sizes[][4] = {{1, 1, 1, 1}, {2, 3, 5, 7}, {1, 2, 3, 130},
                                {0, 1, 2, 3}, {2, 1, 4, 0}, {1, 1, 2, 5003}};
    for (int i = 0; i < 18; i++) {
        run_softmax_backward(t, attention_dtypes[i % 3], sizes[i / 3], 0.0F);
        run_softmax_backward(t, attention_dtypes[i % 3], sizes[i / 3], 0.3F);
    }
}

/* ---- dropout ------------------------------------------------------------------------------ */

typedef struct dropout_case {
    te_dtype dtype, bias_dtype;
    int64_t rows, columns, samples, gap;
    float dropout, drop_path;
    int bias, residual, in_place;
} dropout_case;

/* What both dropouts multiply an element by. */
static double drop_factor(const dropout_case *c, const int64_t rng[2], int64_t row, int64_t column)
{
    const int64_t path[2] = {rng[0], rng[1] + (c->rows * c->columns + 3) / 4};
    return philox_factor(rng, row * c->columns + column, c->dropout) *
           philox_factor(path, row / (c->rows / c->samples), c->drop_path);
}

static void run_dropout_add(test_device *t, const dropout_case *c)
{
    const int64_t rng[2] = {test_random(), (int64_t)test_random() << 30};
    test_matrix x = test_matrix_new(t, c->dtype, c->rows, c->columns, c->gap), y = x;
    test_matrix residual = test_matrix_new(t, c->dtype, c->rows, c->columns, 1);
    test_matrix bias = test_vector_new(t, c->bias_dtype, c->columns);
    test_fill_random(t, &x, 2.0, 0);
    test_fill_random(t, &residual, 2.0, 0);
    test_fill_random(t, &bias, 2.0, 0);
    if (!c->in_place) y = test_matrix_new(t, c->dtype, c->rows, c->columns, 3);
    test_buffer *given = test_allocate(t, x.buffer->bytes);
    memcpy(given->host, x.buffer->host, x.buffer->bytes);
    te_dropout_add_args args = {.size = sizeof args,
                                .input = x.tensor,
                                .output = y.tensor,
                                .dropout = c->dropout,
                                .drop_path = c->drop_path,
                                .samples = c->samples};
    if (c->bias) args.bias = bias.tensor;
    if (c->residual) args.residual = residual.tensor;
    if (c->dropout > 0.0F || c->drop_path > 0.0F) args.rng = device_rng(t, rng);
    TEST_OK(t, te_dropout_add(t->context, &args, t->stream));
    test_fetch(t, &y);
    x.buffer = given;
    for (int64_t r = 0; r < c->rows; r++) {
        for (int64_t k = 0; k < c->columns; k++) {
            double factor = drop_factor(c, rng, r, k), value = test_get(&x, r, k);
            double rest = c->residual ? test_get(&residual, r, k) : 0.0;
            if (c->bias) value += test_get(&bias, 0, k);
            if (factor == 0.0) {
                TEST_CHECK(t, test_get(&y, r, k) == rest, "(%lld, %lld): %g, not %g", (long long)r,
                           (long long)k, test_get(&y, r, k), rest);
            } else {
                check_value(t, c->dtype, test_get(&y, r, k), rest + value * factor, factor);
            }
        }
    }
    test_release(t);
}

static void run_dropout_backward(test_device *t, const dropout_case *c)
{
    const int64_t rng[2] = {test_random(), test_random()};
    test_matrix dy = test_matrix_new(t, c->dtype, c->rows, c->columns, c->gap);
    test_matrix dx = test_matrix_new(t, c->dtype, c->rows, c->columns, 2);
    test_matrix sums = test_vector_new(t, c->bias_dtype, c->columns);
    test_fill_random(t, &dy, 2.0, 0);
    te_dropout_backward_args args = {.size = sizeof args,
                                     .grad_output = dy.tensor,
                                     .dropout = c->dropout,
                                     .drop_path = c->drop_path,
                                     .samples = c->samples};
    if (c->bias) args.bias_grad = sums.tensor;
    if (!c->in_place) args.grad_input = dx.tensor;
    if (c->dropout > 0.0F || c->drop_path > 0.0F) args.rng = device_rng(t, rng);
    args.workspace = test_workspace(t, TE_OP_DROPOUT_BACKWARD, &args, &args.workspace_size);
    TEST_OK(t, te_dropout_backward(t->context, &args, t->stream));
    test_fetch(t, &dx);
    test_fetch(t, &sums);
    for (int64_t k = 0; k < c->columns; k++) {
        double sum = 0, size = 0;
        for (int64_t r = 0; r < c->rows; r++) {
            double value = test_get(&dy, r, k) * drop_factor(c, rng, r, k);
            sum += value;
            size += fabs(value);
            if (!c->in_place) {
                check_value(t, c->dtype, test_get(&dx, r, k), value, fabs(value));
            }
        }
        if (c->bias) check_value(t, c->bias_dtype, test_get(&sums, 0, k), sum, size);
    }
    test_release(t);
}

static dropout_case dropout_variant(int i)
{
    const int64_t sizes[][3] = {{1, 1, 1},    {6, 7, 3},    {0, 5, 1},   {5, 0, 5},
                                {65, 257, 5}, {130, 33, 2}, {4, 2050, 4}};
    const float probabilities[] = {0.0F, 0.1F, 0.5F, 1.0F};
    return (dropout_case){.dtype = attention_dtypes[i % 3],
                          .bias_dtype = attention_dtypes[i / 3 % 3],
                          .rows = sizes[i / 2 % 7][0],
                          .columns = sizes[i / 2 % 7][1],
                          .samples = sizes[i / 2 % 7][2],
                          .gap = i % 5,
                          .dropout = probabilities[i % 4],
                          .drop_path = probabilities[i / 4 % 4],
                          .bias = i % 2 == 0,
                          .residual = i / 2 % 2,
                          .in_place = i % 6 == 0};
}

static void test_dropout_add(test_device *t)
{
    for (int i = 0; i < 112; i++) {
        dropout_case c = dropout_variant(i);
        run_dropout_add(t, &c);
    }
}

static void test_dropout_backward(test_device *t)
{
    for (int i = 0; i < 112; i++) {
        dropout_case c = dropout_variant(i);
        run_dropout_backward(t, &c);
    }
}

/* ---- rope --------------------------------------------------------------------------------- */

typedef struct rope_case {
    te_dtype dtype;
    int64_t batch, sequence, heads, dim, rotary, gap;
    int packed, starts, interleaved, backward, in_place;
} rope_case;

enum { ROPE_POSITIONS = 40, ROPE_MAX_BATCH = 8 };

static te_tensor int32_vector(test_device *t, const int32_t *values, int64_t count)
{
    test_buffer *buffer = test_allocate(t, (size_t)count * sizeof *values);
    memcpy(buffer->host, values, buffer->bytes);
    test_upload(t, buffer);
    return (te_tensor){.data = buffer->device,
                       .dtype = TE_DTYPE_I32,
                       .device = t->device,
                       .ndim = 1,
                       .shape = {count},
                       .strides = {1}};
}

/* One head of one token (a row): y from x, turned by the angles of a row of freqs; position < 0:
 * copied. */
static void check_head(test_device *t, const rope_case *c, const test_matrix *const matrices[3],
                       int64_t row, int64_t position)
{
    const test_matrix *x = matrices[0], *y = matrices[1], *freqs = matrices[2];
    int64_t half = c->rotary / 2;
    for (int64_t k = 0; k < c->dim; k++) {
        double value = test_get(x, row, k), expected = value, size = 0;
        if (position >= 0 && k < c->rotary) {
            int second = c->interleaved ? (int)(k % 2) : k >= half;
            int64_t partner = k + (second ? -1 : 1) * (c->interleaved ? 1 : half);
            double other = test_get(x, row, partner), angle = test_get(freqs, position, k);
            double turned = other * sin(c->backward ? test_get(freqs, position, partner) : angle);
            expected = value * cos(angle) + (second != c->backward ? turned : -turned);
            size = (fabs(value) + fabs(other)) / 8;
        }
        check_value(t, c->dtype, test_get(y, row, k), expected, size);
    }
}

/* Tokens of a packed tensor: one before the first sequence, sequences of growing length, two after
 * the last. */
static int64_t pack_sequences(const rope_case *c, int32_t limits[ROPE_MAX_BATCH + 1])
{
    limits[0] = 1;
    for (int64_t b = 0; b < c->batch; b++) {
        limits[b + 1] = limits[b] + (int32_t)(b % 2 == 1 ? 0 : c->sequence - b);
    }
    return limits[c->batch] + 2;
}

/* Where a token of the packed tensor, or of all batch entries in a row, takes its angles from. */
static int64_t rope_position(const rope_case *c, const int32_t *limits, const int32_t *starts,
                             int64_t token)
{
    if (!c->packed) {
        int64_t b = token / c->sequence;
        return token % c->sequence + (c->starts ? starts[b] : 0);
    }
    for (int64_t b = 0; b < c->batch; b++) {
        if (token >= limits[b] && token < limits[b + 1]) {
            return token - limits[b] + (c->starts ? starts[b] : 0);
        }
    }
    return -1;
}

static void run_rope(test_device *t, const rope_case *c)
{
    const int32_t starts[ROPE_MAX_BATCH] = {3, 0, 17, 1, 0, 0, 2, 5};
    int32_t limits[ROPE_MAX_BATCH + 1];
    int64_t tokens = c->packed ? pack_sequences(c, limits) : c->batch * c->sequence;
    int64_t shape[4] = {c->batch, c->sequence, c->heads, c->dim};
    if (c->packed) memcpy(shape, (int64_t[4]){1, tokens, c->heads, c->dim}, sizeof shape);
    test_matrix freqs = test_matrix_new(t, TE_DTYPE_F32, ROPE_POSITIONS, c->rotary, 0);
    test_matrix x = dense4(t, c->dtype, shape, c->gap), y = x;
    test_fill_random(t, &freqs, 30.0, 0);
    test_fill_random(t, &x, 2.0, 0);
    if (!c->in_place) y = dense4(t, c->dtype, shape, 1);
    test_buffer *given = test_allocate(t, x.buffer->bytes);
    memcpy(given->host, x.buffer->host, x.buffer->bytes);
    te_rope_args args = {.size = sizeof args,
                         .parts = {{x.tensor, y.tensor, freqs.tensor}},
                         .interleaved = c->interleaved,
                         .backward = c->backward};
    for (int i = 0; c->packed && i < 2; i++) { /* without the dim of batches */
        te_tensor *tensor = i == 0 ? &args.parts[0].input : &args.parts[0].output;
        tensor->ndim = 3;
        memmove(tensor->shape, tensor->shape + 1, 3 * sizeof *tensor->shape);
        memmove(tensor->strides, tensor->strides + 1, 3 * sizeof *tensor->strides);
    }
    if (c->packed) args.cu_seqlens = int32_vector(t, limits, c->batch + 1);
    if (c->starts) args.start_positions = int32_vector(t, starts, c->batch);
    TEST_OK(t, te_rope(t->context, &args, t->stream));
    test_fetch(t, &y);
    x.buffer = given;
    for (int64_t row = 0; row < tokens * c->heads; row++) {
        check_head(t, c, (const test_matrix *const[3]){&x, &y, &freqs}, row,
                   rope_position(c, limits, starts, row / c->heads));
    }
    test_release(t);
}

static void test_rope(test_device *t)
{
    /* batch, sequence, heads, dim, rotary */
    const int64_t sizes[][5] = {{1, 1, 1, 2, 2},    {2, 9, 3, 16, 16}, {3, 5, 2, 24, 10},
                                {0, 4, 2, 8, 8},    {2, 0, 2, 8, 8},   {1, 3, 0, 8, 8},
                                {4, 20, 2, 64, 32}, {2, 6, 1, 7, 0},   {1, 4, 2, 1100, 1060}};
    for (int i = 0; i < 144; i++) {
        const int64_t *size = sizes[i % 9];
        rope_case c = {.dtype = attention_dtypes[i % 3],
                       .batch = size[0],
                       .sequence = size[1],
                       .heads = size[2],
                       .dim = size[3],
                       .rotary = size[4],
                       .gap = i % 4,
                       .packed = i / 9 % 2 && size[0] > 0 && size[1] >= size[0],
                       .starts = i / 18 % 2,
                       .interleaved = i / 36 % 2,
                       .backward = i / 72 % 2,
                       .in_place = i % 5 == 0};
        run_rope(t, &c);
    }
}

#endif
