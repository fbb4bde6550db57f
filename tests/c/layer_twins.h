/* SPDX-License-Identifier: Apache-2.0
 *
 * layer_twins.h - cases of ops_gpu.c for the operators of a Transformer layer around attention:
 * norms, activations, dropout. Exponentials and the order of sums differ between the backends, so
 * their results are close and not the same; that each is right is for tests/backend to say.
 */
#ifndef TE_TESTS_LAYER_TWINS_H
#define TE_TESTS_LAYER_TWINS_H

#include "twin.h"

/* Rounding of a result, and for FP8 a code here and there on the other side of a boundary. */
static double result_bound(te_dtype dtype)
{
    return dtype == TE_DTYPE_F32 ? 1e-5 : te_dtype_is_fp8(dtype) ? 2e-2 : 1e-2;
}

/* The newest buffer is a result: numbers before, close afterwards. */
static void make_result(te_dtype dtype)
{
    buffer *b = &buffers[buffer_count - 1];
    fill_numbers(b, 0, dtype, 0);
    b->kind = CLOSE;
    b->dtype = dtype;
    b->bound = result_bound(dtype);
}

static te_tensor result_matrix(te_dtype dtype, extent size)
{
    te_tensor tensor =
        new_matrix(dtype, size.rows, size.columns, any_layout(size.columns, 8), CLOSE);
    make_result(dtype);
    return tensor;
}

static te_tensor input_matrix(te_dtype dtype, extent size)
{
    te_tensor tensor =
        new_matrix(dtype, size.rows, size.columns, any_layout(size.columns, 8), BITS);
    fill_numbers(&buffers[buffer_count - 1], 0, dtype, 0);
    return tensor;
}

static te_tensor input_vector(te_dtype dtype, int64_t length)
{
    te_tensor tensor = new_vector(dtype, length, BITS);
    fill_numbers(&buffers[buffer_count - 1], 0, dtype, 0);
    return tensor;
}

/* A vector of sums over `terms` numbers of either sign. */
static te_tensor result_sums(te_dtype dtype, int64_t length, int64_t terms)
{
    te_tensor tensor = new_vector(dtype, length, CLOSE);
    make_result(dtype);
    buffers[buffer_count - 1].norm = 8.0 * sqrt((double)length) * (double)(terms + 1);
    return tensor;
}

static te_tensor result_vector(int64_t length)
{
    te_tensor tensor = new_vector(TE_DTYPE_F32, length, CLOSE);
    make_result(TE_DTYPE_F32);
    return tensor;
}

static const int64_t *new_rng(void)
{
    return (const int64_t *)(const void *)new_buffer(2 * sizeof(int64_t), BITS)->initial;
}

/* ---- the FP8 form of a result ---- */

static te_tensor result_codes(te_dtype dtype, int64_t rows, int64_t columns)
{
    te_tensor tensor = new_matrix(dtype, rows, columns, any_layout(columns, 16), CLOSE);
    make_result(dtype);
    return tensor;
}

static void new_cast(te_cast_request *to, extent size, int variant)
{
    const te_dtype dtype = fp8[variant % 2];
    const int usages = (int)pick(4);
    if (pick(2) == 0) {
        to->amax_partials =
            (float *)(void *)new_buffer(TE_AMAX_PARTIALS * sizeof(float), MAXIMUM)->initial;
        buffers[buffer_count - 1].bound = 1e-5;
    }
    if (pick(4) == 0) return;
    to->result.mode = TE_SCALING_TENSOR;
    if (usages & 1) to->result.row = result_codes(dtype, size.rows, padded(size.columns));
    if (usages & 2) to->result.column = result_codes(dtype, size.columns, padded(size.rows));
    if (pick(2) == 0) {
        const float before[] = {0.0F, 1e9F};
        to->amax = new_floats(&before[pick(2)], 1);
        buffers[buffer_count - 1].kind = CLOSE;
        buffers[buffer_count - 1].dtype = TE_DTYPE_F32;
        buffers[buffer_count - 1].bound = 1e-5;
    }
    if (usages == 0 || pick(2) == 0) { /* without data no dtype says what partials scale to */
        const float scale = 37.0F;
        to->scale = new_floats(&scale, 1);
    } else {
        float partials[TE_AMAX_PARTIALS] = {0};
        const float pair[2] = {-1.0F, -1.0F};
        partials[pick(TE_AMAX_PARTIALS)] = 3.7F;
        to->partials = new_floats(partials, TE_AMAX_PARTIALS);
        to->amax_epsilon = pick(2) == 0 ? 0.0F : 5.0F;
        to->power_2_scale = pick(2) == 0;
        to->result.row_scales = new_scales(pair);
        to->result.column_scales = pick(2) == 0 ? to->result.row_scales : new_scales(pair);
    }
}

/* ---- norms ---- */

/* Rows that fit no block; enough rows for blocks that stay. */
static const extent many_rows[] = {{3, 20000}, {5000, 64}, {3000, 1100}, {2200, 4096}, {300, 9000}};

static void norm_case(extent size, int variant)
{
    const te_dtype from = high[pick(3)], parameters = high[pick(3)], to = high[pick(3)];
    any_args any = {0};
    te_norm_args *args = &any.norm;
    args->size = sizeof *args;
    args->kind = (te_norm_kind)(variant % 3);
    args->eps = 1e-5F;
    args->flags = pick(2) == 0 ? TE_NORM_ZERO_CENTERED : 0;
    args->input = input_matrix(from, size);
    if (pick(4) != 0) args->gamma = input_vector(parameters, size.columns);
    if (args->kind == TE_NORM_LAYERNORM) {
        if (pick(4) != 0) args->beta = input_vector(parameters, size.columns);
        if (pick(4) != 0) args->mean = result_vector(size.rows);
        if (args->mean.data != NULL) buffers[buffer_count - 1].norm = (double)size.rows;
    }
    if (pick(4) != 0) args->rsigma = result_vector(size.rows);
    if (pick(4) != 0) args->cast.result.wide = result_matrix(to, size);
    new_cast(&args->cast, size, variant);
    (void)snprintf(case_name, sizeof case_name, "norm %d %s to %s, %lld x %lld, variant %d",
                   (int)args->kind, te_dtype_name(from), te_dtype_name(to), (long long)size.rows,
                   (long long)size.columns, variant);
    run_case(TE_OP_NORM, &any);
}

static void cases_norm(void)
{
    for (int i = 0; i < 9 * EXTENTS; i++) {
        const extent size = extents[i % EXTENTS];
        if (size.columns > 1) norm_case(size, i / EXTENTS); /* one: rounding alone decides */
    }
    for (int i = 0; i < 20; i++) norm_case(many_rows[i % 5], i);
}

static void norm_backward_case(extent size, int variant)
{
    const te_dtype from = high[pick(3)], grads = high[pick(3)], to = high[pick(3)];
    any_args any = {0};
    te_norm_backward_args *args = &any.norm_backward;
    args->size = sizeof *args;
    args->kind = (te_norm_kind)(variant % 3);
    args->flags = pick(2) == 0 ? TE_NORM_ZERO_CENTERED : 0;
    args->grad_output = input_matrix(grads, size);
    if (pick(2) == 0) args->grad_add = input_matrix(grads, size);
    args->input = input_matrix(from, size);
    if (pick(4) != 0) args->gamma = input_vector(high[pick(3)], size.columns);
    if (args->kind == TE_NORM_LAYERNORM) args->mean = input_vector(TE_DTYPE_F32, size.rows);
    args->rsigma = input_vector(TE_DTYPE_F32, size.rows);
    if (pick(4) != 0) args->grad_input = result_matrix(to, size);
    if (args->grad_input.data != NULL && pick(2) == 0) args->grad_residual = input_matrix(to, size);
    if (pick(4) != 0) args->gamma_grad = result_sums(to, size.columns, size.rows);
    if (args->kind == TE_NORM_LAYERNORM && pick(4) != 0) {
        args->beta_grad = result_sums(to, size.columns, size.rows);
    }
    (void)snprintf(case_name, sizeof case_name,
                   "norm_backward %d %s to %s, %lld x %lld, variant %d", (int)args->kind,
                   te_dtype_name(from), te_dtype_name(to), (long long)size.rows,
                   (long long)size.columns, variant);
    run_case(TE_OP_NORM_BACKWARD, &any);
}

static void cases_norm_backward(void)
{
    for (int i = 0; i < 9 * EXTENTS; i++) {
        const extent size = extents[i % EXTENTS];
        if (size.columns > 1) norm_backward_case(size, i / EXTENTS);
    }
    for (int i = 0; i < 20; i++) norm_backward_case(many_rows[i % 5], i);
}

/* ---- activations ---- */

static const te_activation_params clamp_numbers = {
    .limit = 2.0F, .alpha = 1.702F, .linear_offset = 1.0F};

static extent input_extent(te_activation_kind kind, extent size)
{
    return te_activation_is_gated(kind) ? (extent){size.rows, 2 * size.columns} : size;
}

static void activation_case(extent size, int variant)
{
    const te_dtype from = high[pick(3)], to = high[pick(3)];
    any_args any = {0};
    te_activation_args *args = &any.activation;
    args->size = sizeof *args;
    args->kind = (te_activation_kind)(variant % TE_ACTIVATION_COUNT);
    args->params = clamp_numbers;
    args->input = input_matrix(from, input_extent(args->kind, size));
    if (pick(4) != 0) args->cast.result.wide = result_matrix(to, size);
    new_cast(&args->cast, size, variant);
    (void)snprintf(case_name, sizeof case_name, "activation %s %s to %s, %lld x %lld, variant %d",
                   te_activation_name(args->kind), te_dtype_name(from), te_dtype_name(to),
                   (long long)size.rows, (long long)size.columns, variant);
    run_case(TE_OP_ACTIVATION, &any);
}

static void cases_activation(void)
{
    for (int i = 0; i < TE_ACTIVATION_COUNT * EXTENTS; i++) {
        activation_case(extents[i % EXTENTS], i / EXTENTS);
    }
    activation_case((extent){5000, 64}, TE_ACTIVATION_GEGLU);
}

static void activation_backward_case(extent size, int variant)
{
    const te_dtype from = high[pick(3)], to = high[pick(3)];
    any_args any = {0};
    te_activation_backward_args *args = &any.activation_backward;
    extent wide;
    args->size = sizeof *args;
    args->kind = (te_activation_kind)(variant % TE_ACTIVATION_COUNT);
    args->params = clamp_numbers;
    wide = input_extent(args->kind, size);
    args->grad_output = input_matrix(high[pick(3)], size);
    args->input = input_matrix(from, wide);
    if (pick(4) != 0) args->cast.result.wide = result_matrix(to, wide);
    if (pick(2) == 0) args->bias_grad = result_sums(to, wide.columns, 100 * wide.rows);
    new_cast(&args->cast, wide, variant);
    (void)snprintf(case_name, sizeof case_name,
                   "activation_backward %s %s to %s, %lld x %lld, variant %d",
                   te_activation_name(args->kind), te_dtype_name(from), te_dtype_name(to),
                   (long long)size.rows, (long long)size.columns, variant);
    run_case(TE_OP_ACTIVATION_BACKWARD, &any);
}

static void cases_activation_backward(void)
{
    for (int i = 0; i < TE_ACTIVATION_COUNT * EXTENTS; i++) {
        activation_backward_case(extents[i % EXTENTS], i / EXTENTS);
    }
    activation_backward_case((extent){5000, 64}, TE_ACTIVATION_GEGLU);
}

static void cases_softcap(void)
{
    for (int i = 0; i < 12 * EXTENTS; i++) {
        const extent size = extents[i % EXTENTS];
        const te_dtype from = high[pick(3)], to = high[pick(3)];
        any_args any = {0};
        te_softcap_args *args = &any.softcap;
        args->size = sizeof *args;
        args->cap = 2.0F;
        args->input = input_matrix(from, size);
        if (pick(2) == 0) args->grad_output = input_matrix(from, size);
        if (pick(4) != 0) args->cast.result.wide = result_matrix(to, size);
        new_cast(&args->cast, size, i / EXTENTS);
        (void)snprintf(case_name, sizeof case_name, "softcap %s to %s, %lld x %lld, case %d",
                       te_dtype_name(from), te_dtype_name(to), (long long)size.rows,
                       (long long)size.columns, i);
        run_case(TE_OP_SOFTCAP, &any);
    }
}

/* ---- dropout ---- */

static int64_t divisor_of(int64_t rows)
{
    int64_t samples = 1 + pick(7);
    while (rows % samples != 0) samples--;
    return samples;
}

static void dropout_add_case(extent size, int variant)
{
    const te_dtype dtype = high[variant % 3];
    any_args any = {0};
    te_dropout_add_args *args = &any.dropout_add;
    args->size = sizeof *args;
    args->input = input_matrix(dtype, size);
    if (pick(2) == 0) args->bias = input_vector(high[pick(3)], size.columns);
    if (pick(2) == 0) args->residual = input_matrix(dtype, size);
    args->output = result_matrix(dtype, size);
    args->dropout = pick(3) == 0 ? 0.0F : 0.3F;
    args->drop_path = pick(2) == 0 ? 0.0F : 0.5F;
    args->samples = divisor_of(size.rows);
    if (pick(4) != 0 || args->dropout > 0.0F || args->drop_path > 0.0F) args->rng = new_rng();
    (void)snprintf(case_name, sizeof case_name, "dropout_add %s, %lld x %lld, variant %d",
                   te_dtype_name(dtype), (long long)size.rows, (long long)size.columns, variant);
    run_case(TE_OP_DROPOUT_ADD, &any);
}

static void cases_dropout_add(void)
{
    for (int i = 0; i < 9 * EXTENTS; i++) dropout_add_case(extents[i % EXTENTS], i / EXTENTS);
}

static void dropout_backward_case(extent size, int variant)
{
    const te_dtype dtype = high[variant % 3];
    any_args any = {0};
    te_dropout_backward_args *args = &any.dropout_backward;
    args->size = sizeof *args;
    args->grad_output = input_matrix(dtype, size);
    if (pick(4) != 0) args->grad_input = result_matrix(dtype, size);
    if (pick(4) != 0) args->bias_grad = result_sums(high[pick(3)], size.columns, size.rows);
    args->dropout = pick(3) == 0 ? 0.0F : 0.3F;
    args->drop_path = pick(2) == 0 ? 0.0F : 0.5F;
    args->samples = divisor_of(size.rows);
    if (args->dropout > 0.0F || args->drop_path > 0.0F) args->rng = new_rng();
    (void)snprintf(case_name, sizeof case_name, "dropout_backward %s, %lld x %lld, variant %d",
                   te_dtype_name(dtype), (long long)size.rows, (long long)size.columns, variant);
    run_case(TE_OP_DROPOUT_BACKWARD, &any);
}

static void cases_dropout_backward(void)
{
    for (int i = 0; i < 9 * EXTENTS; i++) dropout_backward_case(extents[i % EXTENTS], i / EXTENTS);
    dropout_backward_case((extent){5000, 64}, 1);
}

#endif
