/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_cases.h - products against float64 under the bound that rounding allows: eps * sqrt(k) *
 * sum |a||b|, a wide one for random signs, plus half a unit of the output.
 */
#ifndef TE_TESTS_GEMM_CASES_H
#define TE_TESTS_GEMM_CASES_H

#include "cast_checks.h"
#include "testing.h"

typedef struct gemm_case {
    te_dtype a, b, d;
    int64_t m, n, k, gap;
    int a_transposed, b_transposed; /* as the data lies */
    int by_columns;                 /* FP8: bit 0, of a; bit 1, of b: which form the data is */
    int bias, bias_grad, gelu, accumulate;
} gemm_case;

typedef struct gemm_tensors {
    test_matrix a, b, d, old, bias, bias_grad, aux;
    test_buffer *rows, *columns; /* doubles on the host: a as [m, k], b as [n, k] */
    double alpha, d_scale;
} gemm_tensors;

/* An operand's numbers, k contiguous. */
static test_buffer *decode_operand(test_device *t, const test_matrix *matrix, int outer_is_rows)
{
    int64_t outer = outer_is_rows ? matrix->rows : matrix->columns;
    int64_t depth = outer_is_rows ? matrix->columns : matrix->rows;
    test_buffer *numbers = test_allocate(t, (size_t)(outer * depth) * sizeof(double));
    for (int64_t i = 0; i < outer; i++) {
        for (int64_t k = 0; k < depth; k++) {
            double value = outer_is_rows ? test_get(matrix, i, k) : test_get(matrix, k, i);
            memcpy(numbers->host + (size_t)(i * depth + k) * sizeof value, &value, sizeof value);
        }
    }
    return numbers;
}

/* Compares one element of the output; returns |value| before FP8 rounding. */
static double check_product(test_device *t, const gemm_case *c, const gemm_tensors *g, int64_t row,
                            int64_t column)
{
    const double *a = (const double *)(const void *)g->rows->host + row * c->k;
    const double *b = (const double *)(const void *)g->columns->host + column * c->k;
    double sum = 0, size = 0;
    for (int64_t k = 0; k < c->k; k++) {
        double product = a[k] * b[k];
        sum += product;
        size += fabs(product);
    }
    double eps = te_dtype_is_fp8(c->a) ? t->accumulation_eps : 0x1p-23;
    double value = sum * g->alpha, error = eps * sqrt((double)c->k) * size * g->alpha;
    if (c->bias) value += test_get(&g->bias, 0, column);
    if (c->gelu) {
        double aux = test_get(&g->aux, row, column);
        double aux_error = error + (fabs(value) + 1) * test_dtype_eps(c->d);
        TEST_CHECK(t, fabs(aux - value) <= aux_error, "aux %g, not %g", aux, value);
        value = test_gelu(value);
        error = 1.13 * error + 0x1p-20 * (fabs(value) + 1); /* its largest derivative is 1.13 */
    }
    if (c->accumulate) value += test_get(&g->old, row, column);
    double got = test_get(&g->d, row, column) / g->d_scale;
    double eps_d = te_dtype_is_fp8(c->d) ? test_dtype_eps(c->d) : 2 * test_dtype_eps(c->d);
    double bound =
        error + (fabs(value) + error) * eps_d + 0x1p-15 / g->d_scale * (g->d_scale != 1.0);
    if (c->d == TE_DTYPE_E4M3) bound += 0x1p-10 / g->d_scale;
    TEST_CHECK(t, fabs(got - value) <= bound + 0x1p-40,
               "%s x %s -> %s [%lld, %lld, %lld] at (%lld, %lld): %.9g, not %.9g within %g",
               te_dtype_name(c->a), te_dtype_name(c->b), te_dtype_name(c->d), (long long)c->m,
               (long long)c->n, (long long)c->k, (long long)row, (long long)column, got, value,
               bound);
    return fabs(value);
}

static void check_bias_grad(test_device *t, const gemm_case *c, gemm_tensors *g)
{
    test_fetch(t, &g->bias_grad);
    for (int64_t row = 0; row < c->m; row++) {
        double sum = 0, size = 0;
        const double *a = (const double *)(const void *)g->rows->host + row * c->k;
        for (int64_t k = 0; k < c->k; k++) {
            sum += a[k];
            size += fabs(a[k]);
        }
        double bound = size * 0x1p-23 * sqrt((double)c->k) + fabs(sum) * 2 * test_dtype_eps(c->a);
        TEST_CHECK(t, fabs(test_get(&g->bias_grad, 0, row) - sum) <= bound,
                   "bias gradient %lld: %g, not %g", (long long)row,
                   test_get(&g->bias_grad, 0, row), sum);
    }
}

static test_matrix operand(test_device *t, te_dtype dtype, int64_t rows, int64_t columns,
                           int transposed, int64_t gap)
{
    test_matrix matrix = transposed ? test_matrix_new(t, dtype, columns, rows, gap)
                                    : test_matrix_new(t, dtype, rows, columns, gap);
    test_fill_random(t, &matrix, 1.0, 0);
    return matrix;
}

/* Runs twice (a product must repeat its bits) and checks. */
static void finish_gemm(test_device *t, const gemm_case *c, te_gemm_args *args, gemm_tensors *g)
{
    test_buffer *amax = test_float(t, 0.0F);
    double largest_value = 0;
    if (te_dtype_is_fp8(c->d)) args->d_amax = (float *)(void *)amax->device;
    args->workspace = test_workspace(t, TE_OP_GEMM, args, &args->workspace_size);
    TEST_OK(t, te_gemm(t->context, args, t->stream));
    test_fetch(t, &g->d);
    test_buffer *first = test_allocate(t, g->d.buffer->bytes);
    memcpy(first->host, g->d.buffer->host, first->bytes);
    memcpy(g->d.buffer->host, g->old.buffer->host, first->bytes);
    test_upload(t, g->d.buffer);
    TEST_OK(t, te_gemm(t->context, args, t->stream));
    test_fetch(t, &g->d);
    TEST_CHECK(t, memcmp(first->host, g->d.buffer->host, first->bytes) == 0,
               "a second run gives other bits");
    if (c->gelu) test_fetch(t, &g->aux);
    for (int64_t row = 0; row < c->m; row++) {
        for (int64_t column = 0; column < c->n; column++) {
            largest_value = fmax(largest_value, check_product(t, c, g, row, column));
        }
    }
    if (c->bias_grad && c->m > 0 && c->n > 0) check_bias_grad(t, c, g);
    if (te_dtype_is_fp8(c->d)) {
        double got = (double)test_read_float(t, amax);
        TEST_CHECK(t, fabs(got - largest_value) <= 0x1p-7 * largest_value, "amax %g, not %g", got,
                   largest_value);
    }
}

static void run_gemm(test_device *t, const gemm_case *c)
{
    const float scales[2][TE_TENSOR_SCALES] = {{0.5F, 2.0F}, {3.0F, 1.0F / 3.0F}};
    gemm_tensors g = {.alpha = 1.0, .d_scale = 1.0};
    te_gemm_args args = {.size = sizeof args};
    g.a = operand(t, c->a, c->m, c->k, c->a_transposed, c->gap);
    g.b = operand(t, c->b, c->k, c->n, c->b_transposed, c->gap);
    g.rows = decode_operand(t, &g.a, !c->a_transposed);
    g.columns = decode_operand(t, &g.b, c->b_transposed);
    g.d = operand(t, c->d, c->m, c->n, 0, c->gap);
    g.old = g.d;
    g.old.buffer = test_allocate(t, g.d.buffer->bytes);
    memcpy(g.old.buffer->host, g.d.buffer->host, g.d.buffer->bytes);
    args.a_transposed = te_dtype_is_fp8(c->a) ? c->by_columns & 1 : c->a_transposed;
    args.b_transposed = te_dtype_is_fp8(c->b) ? !(c->by_columns & 2) : c->b_transposed;
    args.a = test_operand(g.a.tensor, (float *)(void *)test_floats(t, scales[0], 2)->device,
                          c->by_columns & 1);
    args.b = test_operand(g.b.tensor, (float *)(void *)test_floats(t, scales[1], 2)->device,
                          c->by_columns & 2);
    args.d = g.d.tensor;
    if (te_dtype_is_fp8(c->a)) g.alpha = 1.5;
    if (te_dtype_is_fp8(c->d)) {
        args.d_scale = (float *)(void *)test_float(t, 4.0F)->device;
        g.d_scale = 4.0;
    }
    if (c->bias) {
        te_dtype dtype = c->d;
        if (te_dtype_is_fp8(c->a)) dtype = c->d == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
        g.bias = test_vector_new(t, dtype, c->n);
        test_fill_random(t, &g.bias, 2.0, 0);
        args.bias = g.bias.tensor;
    }
    if (c->bias_grad) {
        g.bias_grad = test_vector_new(t, c->a, c->m);
        args.bias_grad = g.bias_grad.tensor;
    }
    if (c->gelu) {
        g.aux =
            test_matrix_new(t, te_dtype_is_fp8(c->d) ? TE_DTYPE_BF16 : c->d, c->m, c->n, c->gap);
        args.aux = g.aux.tensor;
        args.epilogue = TE_EPILOGUE_GELU;
    }
    if (c->accumulate) args.flags = TE_GEMM_ACCUMULATE;
    finish_gemm(t, c, &args, &g);
    test_release(t);
}

/* High precision in all four layouts; each shape with bias, bias gradient, GELU or accumulation. */
static void gemm_high_precision(test_device *t, te_dtype dtype, int64_t m, int64_t n, int64_t k)
{
    for (int layout = 0; layout < 4; layout++) {
        gemm_case c = {.a = dtype, .b = dtype, .d = dtype, .m = m, .n = n, .k = k};
        c.a_transposed = layout & 1;
        c.b_transposed = layout >> 1;
        c.gap = layout;
        c.bias = layout == 0 || layout == 3;
        c.gelu = layout == 3 && dtype != TE_DTYPE_F32;
        c.bias_grad = layout == 1;
        run_gemm(t, &c);
        c.bias = c.gelu = 0;
        c.d = TE_DTYPE_F32;
        c.accumulate = 1;
        run_gemm(t, &c);
    }
}

static void gemm_fp8(test_device *t, te_dtype a, te_dtype b, int64_t m, int64_t n, int64_t k)
{
    const te_dtype outputs[] = {TE_DTYPE_F32, TE_DTYPE_F16, TE_DTYPE_BF16, TE_DTYPE_E4M3,
                                TE_DTYPE_E5M2};
    for (int i = 0; i < 5; i++) {
        gemm_case c = {.a = a, .b = b, .d = outputs[i], .m = m, .n = n, .k = k, .b_transposed = 1};
        c.gap = i % 2 * 16;
        c.bias = i % 2 == 0;
        c.by_columns = i % 4;
        run_gemm(t, &c);
        c.bias = 0;
        c.accumulate = outputs[i] == TE_DTYPE_F32 || outputs[i] == TE_DTYPE_BF16;
        c.gelu = outputs[i] == TE_DTYPE_BF16 && !c.accumulate;
        run_gemm(t, &c);
    }
}

static void test_gemm(test_device *t)
{
    const int64_t sizes[][3] = {{1, 1, 1},   {0, 4, 4},    {4, 0, 4},       {4, 4, 0},
                                {13, 33, 7}, {64, 64, 32}, {101, 131, 300}, {200, 20, 530}};
    for (int i = 0; i < 8; i++) {
        int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
        for (int dtype = 0; dtype < 3; dtype++) {
            gemm_high_precision(t, high_precision[dtype], m, n, k);
        }
        for (int pair = 0; pair < 3; pair++) {
            gemm_fp8(t, fp8[pair & 1], fp8[pair >> 1], m, n, (k + 15) / 16 * 16);
        }
    }
}

#endif
