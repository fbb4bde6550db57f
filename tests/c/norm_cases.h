/* SPDX-License-Identifier: Apache-2.0
 *
 * norm_cases.h - the cases of the norms, for any device.
 *
 * The fp32 values are compared with the definition in float64 within some units in the last place
 * of their terms; whatever is cast from them in the same call must be these values rounded once.
 */
#ifndef TE_TESTS_NORM_CASES_H
#define TE_TESTS_NORM_CASES_H

#include "cast_checks.h"
#include "testing.h"

enum { LAYER_SHAPES = 8 };
static const int64_t layer_shapes[LAYER_SHAPES][2] = {{0, 16},  {1, 1},    {3, 7},    {64, 64},
                                                      {65, 33}, {40, 300}, {9, 1100}, {2, 9000}};

/* ---- norm --------------------------------------------------------------------------------- */

typedef struct norm_case {
    te_norm_kind kind;
    te_dtype input, gamma;
    int64_t rows, columns, gap;
    int with_gamma, with_beta, zero_centered, given;
} norm_case;

typedef struct norm_data {
    test_matrix x, gamma, beta, mean, rsigma;
} norm_data;

static double weight_of(const norm_case *c, const norm_data *d, int64_t column)
{
    if (!c->with_gamma) return 1.0;
    return test_get(&d->gamma, 0, column) + (c->zero_centered ? 1.0 : 0.0);
}

/* Statistics from their definition, as the norm would have written them. */
static void make_statistics(test_device *t, const norm_case *c, norm_data *d, double eps)
{
    for (int64_t r = 0; r < c->rows; r++) {
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < c->columns && c->kind == TE_NORM_LAYERNORM; i++) {
            mean += test_get(&d->x, r, i) / (double)c->columns;
        }
        for (int64_t i = 0; i < c->columns; i++) squares += pow(test_get(&d->x, r, i) - mean, 2.0);
        if (c->kind != TE_NORM_L2) squares /= (double)c->columns;
        test_set(&d->mean, 0, r, mean);
        test_set(&d->rsigma, 0, r, 1.0 / sqrt(squares + eps));
    }
    test_upload(t, d->mean.buffer);
    test_upload(t, d->rsigma.buffer);
}

static norm_data new_norm_data(test_device *t, const norm_case *c)
{
    norm_data d;
    d.x = test_matrix_new(t, c->input, c->rows, c->columns, c->gap);
    d.gamma = test_vector_new(t, c->gamma, c->columns);
    d.beta = test_vector_new(t, c->gamma, c->columns);
    d.mean = test_vector_new(t, TE_DTYPE_F32, c->rows);
    d.rsigma = test_vector_new(t, TE_DTYPE_F32, c->rows);
    for (int64_t i = 0; i < c->rows * c->columns; i++) {
        test_set(&d.x, i / c->columns, i % c->columns, 3.0 * test_uniform() + 2.0);
    }
    test_upload(t, d.x.buffer);
    test_fill_random(t, &d.gamma, 2.0, 0);
    test_fill_random(t, &d.beta, 2.0, 0);
    return d;
}

/* fp32 values, and the statistics that were written, against float64. */
static void check_normalized(test_device *t, const norm_case *c, const norm_data *d,
                             const norm_data *exact, const test_matrix *made)
{
    for (int64_t r = 0; r < c->rows; r++) {
        double mean = test_get(&exact->mean, 0, r), rsigma = test_get(&exact->rsigma, 0, r);
        TEST_CHECK(t, fabs(test_get(&d->rsigma, 0, r) - rsigma) <= 0x1p-21 * rsigma,
                   "row %lld: rsigma %.9g, not %.9g", (long long)r, test_get(&d->rsigma, 0, r),
                   rsigma);
        if (c->kind == TE_NORM_LAYERNORM) {
            TEST_CHECK(t, fabs(test_get(&d->mean, 0, r) - mean) <= 0x1p-21 * (fabs(mean) + 3.0),
                       "row %lld: mean %.9g, not %.9g", (long long)r, test_get(&d->mean, 0, r),
                       mean);
        }
        for (int64_t i = 0; i < c->columns; i++) {
            double weight = weight_of(c, d, i), beta = c->with_beta ? test_get(&d->beta, 0, i) : 0;
            double expected = (test_get(&d->x, r, i) - mean) * rsigma * weight + beta;
            double terms = (fabs(test_get(&d->x, r, i)) + fabs(mean)) * rsigma * fabs(weight);
            double got = test_get(made, r, i);
            TEST_CHECK(t, fabs(got - expected) <= 0x1p-20 * (terms + fabs(beta)),
                       "(%lld, %lld): %.9g, not %.9g", (long long)r, (long long)i, got, expected);
        }
    }
}

static void run_norm(test_device *t, const norm_case *c, const cast_case *cast)
{
    const float eps = 1e-5F;
    norm_data d = new_norm_data(t, c), exact = d;
    test_matrix made = test_matrix_new(t, TE_DTYPE_F32, c->rows, c->columns, c->gap);
    te_norm_args args = {.size = sizeof args,
                         .kind = c->kind,
                         .input = d.x.tensor,
                         .cast.result.wide = made.tensor,
                         .rsigma = d.rsigma.tensor,
                         .eps = eps};
    exact.mean = test_vector_new(t, TE_DTYPE_F32, c->rows);
    exact.rsigma = test_vector_new(t, TE_DTYPE_F32, c->rows);
    make_statistics(t, c, &exact, (double)eps);
    if (c->with_gamma) args.gamma = d.gamma.tensor;
    if (c->with_beta) args.beta = d.beta.tensor;
    if (c->kind == TE_NORM_LAYERNORM) args.mean = d.mean.tensor;
    if (c->zero_centered) args.flags = TE_NORM_ZERO_CENTERED;
    TEST_OK(t, te_norm(t->context, &args, t->stream));
    test_fetch(t, &made);
    test_fetch(t, &d.mean);
    test_fetch(t, &d.rsigma);
    check_normalized(t, c, &d, &exact, &made);

    cast_outputs outputs = new_cast_outputs(t, cast, &made);
    args.cast = outputs.cast;
    if (c->given) args.flags |= TE_NORM_STATISTICS_GIVEN;
    args.workspace = test_workspace(t, TE_OP_NORM, &args, &args.workspace_size);
    TEST_OK(t, te_norm(t->context, &args, t->stream));
    check_cast_outputs(t, cast, &outputs, &made);
    test_release(t);
}

static cast_case any_cast(int variant)
{
    return (cast_case){.output = high_precision[variant % 3],
                       .codes = fp8[variant / 3 % 2],
                       .gap = variant % 4,
                       .row = variant & 1,
                       .column = variant >> 1 & 1,
                       .power_2 = variant >> 2 & 1,
                       .current = variant % 5 < 2};
}

static norm_case any_norm(int variant, int shape)
{
    te_norm_kind kind = (te_norm_kind)(variant % 3);
    return (norm_case){.kind = kind,
                       .input = high_precision[variant / 3 % 3],
                       .gamma = high_precision[variant / 9 % 3],
                       .rows = layer_shapes[shape][0],
                       .columns = layer_shapes[shape][1],
                       .gap = variant % 4,
                       .with_gamma = variant % 5 != 0,
                       .with_beta = kind == TE_NORM_LAYERNORM && variant % 4 != 0,
                       .zero_centered = variant & 1,
                       .given = variant >> 2 & 1};
}

static void test_norm(test_device *t)
{
    int variant = 0;
    for (int shape = 0; shape < LAYER_SHAPES; shape++) {
        for (int i = 0; i < 18; i++, variant++) {
            const norm_case c = any_norm(i, shape);
            const cast_case cast = any_cast(variant);
            run_norm(t, &c, &cast);
        }
    }
}

/* ---- norm_backward ------------------------------------------------------------------------ */

typedef struct norm_grads {
    test_matrix grad, add, grad_input, gamma_grad, beta_grad;
} norm_grads;

static void check_near(test_device *t, const test_matrix *got, int64_t row, int64_t column,
                       double expected, double bound)
{
    double value = test_get(got, row, column);
    bound += fabs(expected) * 1.01 * test_dtype_eps(got->tensor.dtype) + 0x1p-24;
    TEST_CHECK(t, fabs(value - expected) <= bound, "(%lld, %lld): %.9g, not %.9g within %g",
               (long long)row, (long long)column, value, expected, bound);
}

static double dz_of(const norm_grads *g, int64_t row, int64_t column)
{
    return test_get(&g->grad, row, column) + test_get(&g->add, row, column);
}

static double normal_of(const norm_case *c, const norm_data *d, int64_t row, int64_t column)
{
    double mean = c->kind == TE_NORM_LAYERNORM ? test_get(&d->mean, 0, row) : 0.0;
    return (test_get(&d->x, row, column) - mean) * test_get(&d->rsigma, 0, row);
}

static void check_norm_grad_input(test_device *t, const norm_case *c, const norm_data *d,
                                  const norm_grads *g)
{
    for (int64_t r = 0; r < c->rows; r++) {
        double plain = 0, scaled = 0, size = 0, rsigma = test_get(&d->rsigma, 0, r);
        for (int64_t i = 0; i < c->columns; i++) {
            double weighted = dz_of(g, r, i) * weight_of(c, d, i), normal = normal_of(c, d, r, i);
            plain += weighted;
            scaled += weighted * normal;
            size += fabs(weighted) * (1.0 + fabs(normal));
        }
        double count = c->kind == TE_NORM_L2 ? 1.0 : (double)c->columns;
        plain = c->kind == TE_NORM_LAYERNORM ? plain / count : 0.0;
        for (int64_t i = 0; i < c->columns; i++) {
            double weighted = dz_of(g, r, i) * weight_of(c, d, i), normal = normal_of(c, d, r, i);
            double terms = fabs(weighted) + size / count * (1.0 + fabs(normal));
            check_near(t, &g->grad_input, r, i,
                       rsigma * (weighted - plain - normal * scaled / count),
                       0x1p-20 * rsigma * terms * (1.0 + rsigma * 5.0));
        }
    }
}

static void check_norm_sums(test_device *t, const norm_case *c, const norm_data *d,
                            const norm_grads *g)
{
    for (int64_t i = 0; i < c->columns; i++) {
        double gamma_sum = 0, beta_sum = 0, gamma_size = 0, beta_size = 0;
        for (int64_t r = 0; r < c->rows; r++) {
            double dz = dz_of(g, r, i), normal = normal_of(c, d, r, i);
            double rsigma = test_get(&d->rsigma, 0, r);
            gamma_sum += dz * normal;
            gamma_size += fabs(dz) * (fabs(normal) + 5.0 * rsigma);
            beta_sum += dz;
            beta_size += fabs(dz);
        }
        check_near(t, &g->gamma_grad, 0, i, gamma_sum, 0x1p-20 * gamma_size);
        if (c->kind != TE_NORM_LAYERNORM) continue;
        check_near(t, &g->beta_grad, 0, i, beta_sum, 0x1p-20 * beta_size);
    }
}

static void run_norm_backward(test_device *t, const norm_case *c, te_dtype grad, te_dtype output,
                              int with_add)
{
    norm_data d = new_norm_data(t, c);
    norm_grads g;
    make_statistics(t, c, &d, 1e-5);
    g.grad = test_matrix_new(t, grad, c->rows, c->columns, c->gap);
    g.add = test_matrix_new(t, grad, c->rows, c->columns, 1);
    g.grad_input = test_matrix_new(t, output, c->rows, c->columns, c->gap);
    g.gamma_grad = test_vector_new(t, c->gamma, c->columns);
    g.beta_grad = test_vector_new(t, c->gamma, c->columns);
    test_fill_random(t, &g.grad, 1.0, 0);
    test_fill_random(t, &g.add, with_add ? 1.0 : 0.0, 0);
    te_norm_backward_args args = {.size = sizeof args,
                                  .kind = c->kind,
                                  .flags = c->zero_centered ? TE_NORM_ZERO_CENTERED : 0,
                                  .grad_output = g.grad.tensor,
                                  .input = d.x.tensor,
                                  .rsigma = d.rsigma.tensor,
                                  .grad_input = g.grad_input.tensor,
                                  .gamma_grad = g.gamma_grad.tensor};
    if (with_add) args.grad_add = g.add.tensor;
    if (c->with_gamma) args.gamma = d.gamma.tensor;
    if (c->kind == TE_NORM_LAYERNORM) {
        args.mean = d.mean.tensor;
        args.beta_grad = g.beta_grad.tensor;
    }
    args.workspace = test_workspace(t, TE_OP_NORM_BACKWARD, &args, &args.workspace_size);
    TEST_OK(t, te_norm_backward(t->context, &args, t->stream));
    test_fetch(t, &g.grad_input);
    test_fetch(t, &g.gamma_grad);
    test_fetch(t, &g.beta_grad);
    check_norm_grad_input(t, c, &d, &g);
    check_norm_sums(t, c, &d, &g);
    test_release(t);
}

static void test_norm_backward(test_device *t)
{
    for (int shape = 0; shape < LAYER_SHAPES; shape++) {
        for (int i = 0; i < 18; i++) {
            const norm_case c = any_norm(i, shape);
            run_norm_backward(t, &c, high_precision[i / 2 % 3], high_precision[i % 3], i & 1);
        }
    }
}

#endif
