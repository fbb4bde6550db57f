/* SPDX-License-Identifier: Apache-2.0
 *
 * activation_cases.h - the cases of the activations and their gradients, for any device.
 */
#ifndef TE_TESTS_ACTIVATION_CASES_H
#define TE_TESTS_ACTIVATION_CASES_H

#include "cast_checks.h"
#include "norm_cases.h"
#include "testing.h"

static const te_activation_params activation_params = {1.5F, 1.25F, 0.5F};

typedef struct activation_case {
    te_activation_kind kind;
    te_dtype input, grad, sums;
    int64_t rows, columns, gap;
} activation_case;

static double logistic_of(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

/* The activation of the first half and its slope, from the formulas. */
static double first_half(te_activation_kind kind, double x, double *slope)
{
    double s, inner, alpha = (double)activation_params.alpha, limit;
    switch (kind) {
    case TE_ACTIVATION_GELU:
    case TE_ACTIVATION_GEGLU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x);
        s = logistic_of(2.0 * inner);
        *slope = s + x * s * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 0.134145 * x * x);
        return x * s;
    case TE_ACTIVATION_QGELU:
    case TE_ACTIVATION_QGEGLU:
        s = logistic_of(1.702 * x);
        *slope = s + 1.702 * x * s * (1.0 - s);
        return x * s;
    case TE_ACTIVATION_RELU:
    case TE_ACTIVATION_REGLU:
        *slope = x > 0.0;
        return fmax(x, 0.0);
    case TE_ACTIVATION_SRELU:
    case TE_ACTIVATION_SREGLU:
        *slope = 2.0 * fmax(x, 0.0);
        return fmax(x, 0.0) * fmax(x, 0.0);
    case TE_ACTIVATION_SILU:
    case TE_ACTIVATION_SWIGLU:
        s = logistic_of(x);
        *slope = s + x * s * (1.0 - s);
        return x * s;
    case TE_ACTIVATION_GLU:
        s = logistic_of(x);
        *slope = s * (1.0 - s);
        return s;
    default: /* clamped_swiglu */
        limit = (double)activation_params.limit;
        s = logistic_of(alpha * fmin(x, limit));
        *slope = x <= limit ? s + alpha * x * s * (1.0 - s) : 0.0;
        return fmin(x, limit) * s;
    }
}

/* What multiplies it, and the slope of that. */
static double second_half(te_activation_kind kind, double x, double *slope)
{
    double limit = (double)activation_params.limit;
    *slope = 1.0;
    if (kind != TE_ACTIVATION_CLAMPED_SWIGLU) return x;
    *slope = fabs(x) <= limit;
    return fmin(fmax(x, -limit), limit) + (double)activation_params.linear_offset;
}

/* fp32 gradients [rows, columns or 2 columns], or values where grad is NULL, against float64. */
static void check_activation(test_device *t, const activation_case *c, const test_matrix *x,
                             const test_matrix *grad, const test_matrix *made)
{
    int gated = te_activation_is_gated(c->kind);
    for (int64_t i = 0; i < made->rows * made->columns; i++) {
        int64_t row = i / made->columns, column = i % made->columns, first = column % c->columns;
        double slope, gate_slope = 0.0, gate = 1.0, a = test_get(x, row, first), expected;
        double value = first_half(c->kind, a, &slope), size;
        if (gated) {
            gate = second_half(c->kind, test_get(x, row, c->columns + first), &gate_slope);
        }
        if (grad == NULL) {
            expected = value * gate;
            size = fabs(expected);
        } else if (column < c->columns) {
            expected = test_get(grad, row, first) * gate * slope;
            size = fabs(test_get(grad, row, first) * gate) * (1.0 + fabs(slope));
        } else {
            expected = test_get(grad, row, first) * value * gate_slope;
            size = fabs(expected);
        }
        check_near(t, made, row, column, expected, 0x1p-18 * size);
    }
}

static void run_activation(test_device *t, const activation_case *c, const cast_case *cast)
{
    int64_t wide = te_activation_is_gated(c->kind) ? 2 * c->columns : c->columns;
    test_matrix x = test_matrix_new(t, c->input, c->rows, wide, c->gap);
    test_matrix made = test_matrix_new(t, TE_DTYPE_F32, c->rows, c->columns, c->gap);
    test_fill_random(t, &x, 5.0, 0);
    te_activation_args args = {.size = sizeof args,
                               .kind = c->kind,
                               .params = activation_params,
                               .input = x.tensor,
                               .cast.result.wide = made.tensor};
    TEST_OK(t, te_activation(t->context, &args, t->stream));
    test_fetch(t, &made);
    check_activation(t, c, &x, NULL, &made);

    cast_outputs outputs = new_cast_outputs(t, cast, &made);
    args.cast = outputs.cast;
    args.workspace = test_workspace(t, TE_OP_ACTIVATION, &args, &args.workspace_size);
    TEST_OK(t, te_activation(t->context, &args, t->stream));
    check_cast_outputs(t, cast, &outputs, &made);
    test_release(t);
}

static void run_activation_backward(test_device *t, const activation_case *c, const cast_case *cast)
{
    int64_t wide = te_activation_is_gated(c->kind) ? 2 * c->columns : c->columns;
    test_matrix x = test_matrix_new(t, c->input, c->rows, wide, c->gap);
    test_matrix grad = test_matrix_new(t, c->grad, c->rows, c->columns, 1);
    test_matrix made = test_matrix_new(t, TE_DTYPE_F32, c->rows, wide, c->gap);
    test_matrix sums = test_vector_new(t, c->sums, wide);
    test_fill_random(t, &x, 5.0, 0);
    test_fill_random(t, &grad, 2.0, 0);
    te_activation_backward_args args = {.size = sizeof args,
                                        .kind = c->kind,
                                        .params = activation_params,
                                        .grad_output = grad.tensor,
                                        .input = x.tensor,
                                        .cast.result.wide = made.tensor};
    TEST_OK(t, te_activation_backward(t->context, &args, t->stream));
    test_fetch(t, &made);
    check_activation(t, c, &x, &grad, &made);

    cast_outputs outputs = new_cast_outputs(t, cast, &made);
    args.bias_grad = sums.tensor;
    args.cast = outputs.cast;
    args.workspace = test_workspace(t, TE_OP_ACTIVATION_BACKWARD, &args, &args.workspace_size);
    TEST_OK(t, te_activation_backward(t->context, &args, t->stream));
    check_cast_outputs(t, cast, &outputs, &made);
    check_sums(t, &made, &sums);
    test_release(t);
}

static activation_case any_activation(int kind, int shape, int variant)
{
    return (activation_case){.kind = (te_activation_kind)kind,
                             .input = high_precision[variant % 3],
                             .grad = high_precision[variant / 3 % 3],
                             .sums = high_precision[variant / 2 % 3],
                             .rows = layer_shapes[shape][0],
                             .columns = layer_shapes[shape][1],
                             .gap = variant % 4};
}

/* Values and slopes at -Inf, Inf and NaN, where a product in the formula is 0 * Inf. */
static void run_activation_limits(test_device *t, te_activation_kind kind)
{
    const double points[3] = {-(double)INFINITY, (double)INFINITY, (double)NAN};
    test_matrix x = test_matrix_new(t, TE_DTYPE_F32, 1, 3, 0), y = x, dx = x, ones = x;
    y = test_matrix_new(t, TE_DTYPE_F32, 1, 3, 0);
    dx = test_matrix_new(t, TE_DTYPE_F32, 1, 3, 0);
    ones = test_matrix_new(t, TE_DTYPE_F32, 1, 3, 0);
    for (int i = 0; i < 3; i++) {
        test_set(&x, 0, i, points[i]);
        test_set(&ones, 0, i, 1.0);
    }
    test_upload(t, x.buffer);
    test_upload(t, ones.buffer);
    te_activation_args args = {
        .size = sizeof args, .kind = kind, .input = x.tensor, .cast.result.wide = y.tensor};
    te_activation_backward_args back = {.size = sizeof back,
                                        .kind = kind,
                                        .grad_output = ones.tensor,
                                        .input = x.tensor,
                                        .cast.result.wide = dx.tensor};
    TEST_OK(t, te_activation(t->context, &args, t->stream));
    TEST_OK(t, te_activation_backward(t->context, &back, t->stream));
    test_fetch(t, &y);
    test_fetch(t, &dx);
    TEST_CHECK(t,
               test_get(&y, 0, 0) == 0.0 && isinf(test_get(&y, 0, 1)) && isnan(test_get(&y, 0, 2)),
               "%s: %g %g %g", te_activation_name(kind), test_get(&y, 0, 0), test_get(&y, 0, 1),
               test_get(&y, 0, 2));
    TEST_CHECK(t, test_get(&dx, 0, 0) == 0.0 && test_get(&dx, 0, 1) >= 1.0, "%s: slopes %g %g",
               te_activation_name(kind), test_get(&dx, 0, 0), test_get(&dx, 0, 1));
    test_release(t);
}

static void test_activation(test_device *t)
{
    int variant = 0;
    for (int kind = 0; kind < TE_ACTIVATION_COUNT; kind++) {
        for (int shape = 0; shape < LAYER_SHAPES - 1; shape++, variant += 7) {
            const activation_case c = any_activation(kind, shape, variant);
            for (int i = 0; i < 2; i++) {
                const cast_case cast = any_cast(variant + i);
                run_activation(t, &c, &cast);
            }
        }
        if (!te_activation_is_gated((te_activation_kind)kind)) {
            run_activation_limits(t, (te_activation_kind)kind);
        }
    }
}

static void test_activation_backward(test_device *t)
{
    int variant = 3;
    for (int kind = 0; kind < TE_ACTIVATION_COUNT; kind++) {
        for (int shape = 0; shape < LAYER_SHAPES - 1; shape++, variant += 7) {
            const activation_case c = any_activation(kind, shape, variant);
            for (int i = 0; i < 2; i++) {
                const cast_case cast = any_cast(variant + i);
                run_activation_backward(t, &c, &cast);
            }
        }
    }
}

/* ---- softcap ---- */

static void run_softcap(test_device *t, const activation_case *c, const cast_case *cast,
                        int backward)
{
    const double cap = 3.0;
    test_matrix x = test_matrix_new(t, c->input, c->rows, c->columns, c->gap);
    test_matrix grad = test_matrix_new(t, c->input, c->rows, c->columns, 0);
    test_matrix made = test_matrix_new(t, TE_DTYPE_F32, c->rows, c->columns, c->gap);
    te_softcap_args args = {
        .size = sizeof args, .input = x.tensor, .cast.result.wide = made.tensor, .cap = (float)cap};
    test_fill_random(t, &x, 5.0, 0);
    test_fill_random(t, &grad, 1.0, 0);
    args.input = x.tensor;
    if (backward) args.grad_output = grad.tensor;
    TEST_OK(t, te_softcap(t->context, &args, t->stream));
    test_fetch(t, &made);
    for (int64_t i = 0; i < made.rows * made.columns; i++) {
        int64_t row = i / made.columns, column = i % made.columns;
        double value = tanh(test_get(&x, row, column) / cap), expected = cap * value;
        if (backward) expected = test_get(&grad, row, column) * (1.0 - value * value);
        check_near(t, &made, row, column, expected, 0x1p-18 * fabs(expected));
    }
    cast_outputs outputs = new_cast_outputs(t, cast, &made);
    args.cast = outputs.cast;
    TEST_OK(t, te_softcap(t->context, &args, t->stream));
    check_cast_outputs(t, cast, &outputs, &made);
    test_release(t);
}

static void test_softcap(test_device *t)
{
    for (int shape = 0; shape < LAYER_SHAPES - 1; shape++) {
        const activation_case c = any_activation(TE_ACTIVATION_GELU, shape, shape);
        for (int i = 0; i < 4; i++) {
            const cast_case cast = any_cast(4 * shape + i);
            run_softcap(t, &c, &cast, i % 2);
        }
    }
}

#endif
