/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cpu_norm.c - norms and activations give the same bits with every instruction set and with
 * every number of threads.
 */
#include "cpu_variants.h"

enum { ROWS = 75, COLUMNS = 1131, PADDED = 80 };

/* Inputs, and the outputs of one operator. The gated activations take `x` as two halves. */
typedef struct norm_data {
    te_dtype dtype;
    test_matrix x, grad, gamma, beta;
    test_matrix mean, rsigma, wide, made, row, column, sums, more_sums;
    test_buffer *scale, *amax;
} norm_data;

/* A digest of everything made so far. */
static uint64_t digest(const norm_data *d, uint64_t hash)
{
    const test_matrix *made[] = {&d->mean, &d->rsigma, &d->wide, &d->made,
                                 &d->row,  &d->column, &d->sums, &d->more_sums};
    for (int i = 0; i < 8; i++) hash = test_digest(hash, made[i]->buffer);
    return test_digest(hash, d->amax);
}

static te_cast_request cast_of(const norm_data *d, te_tensor wide)
{
    return (te_cast_request){.result = {.mode = TE_SCALING_TENSOR,
                                        .wide = wide,
                                        .row = d->row.tensor,
                                        .column = d->column.tensor},
                             .scale = (float *)(void *)d->scale->device,
                             .amax = (float *)(void *)d->amax->device};
}

static void run_norms(test_device *t, norm_data *d, uint64_t *hash)
{
    for (int kind = TE_NORM_LAYERNORM; kind <= TE_NORM_L2; kind++) {
        int centred = kind == TE_NORM_LAYERNORM;
        te_norm_args args = {.size = sizeof args,
                             .kind = (te_norm_kind)kind,
                             .input = d->x.tensor,
                             .gamma = d->gamma.tensor,
                             .rsigma = d->rsigma.tensor,
                             .cast = cast_of(d, d->made.tensor),
                             .eps = 1e-5F};
        te_norm_backward_args back = {.size = sizeof back,
                                      .kind = (te_norm_kind)kind,
                                      .flags = TE_NORM_ZERO_CENTERED,
                                      .grad_output = d->grad.tensor,
                                      .grad_add = d->grad.tensor,
                                      .input = d->x.tensor,
                                      .gamma = d->gamma.tensor,
                                      .rsigma = d->rsigma.tensor,
                                      .grad_input = d->wide.tensor,
                                      .gamma_grad = d->sums.tensor};
        if (centred) {
            args.beta = d->beta.tensor;
            args.mean = back.mean = d->mean.tensor;
            back.beta_grad = d->more_sums.tensor;
        }
        TEST_OK(t, te_norm(t->context, &args, NULL));
        back.workspace = test_workspace(t, TE_OP_NORM_BACKWARD, &back, &back.workspace_size);
        TEST_OK(t, te_norm_backward(t->context, &back, NULL));
        *hash = digest(d, *hash);
    }
}

/* Columns [0, columns) of a matrix. */
static te_tensor first_columns(const test_matrix *matrix, int64_t columns)
{
    te_tensor tensor = matrix->tensor;
    tensor.shape[1] = columns;
    return tensor;
}

static void run_activations(test_device *t, norm_data *d, uint64_t *hash)
{
    for (int kind = 0; kind < TE_ACTIVATION_COUNT; kind++) {
        int64_t columns = te_activation_is_gated((te_activation_kind)kind) ? COLUMNS / 2 : COLUMNS;
        int64_t wide = columns == COLUMNS ? columns : 2 * columns;
        te_activation_args args = {.size = sizeof args,
                                   .kind = (te_activation_kind)kind,
                                   .params = {2.0F, 1.5F, 0.5F},
                                   .input = first_columns(&d->x, wide),
                                   .cast = cast_of(d, first_columns(&d->made, columns))};
        te_activation_backward_args back = {.size = sizeof back,
                                            .kind = args.kind,
                                            .params = args.params,
                                            .grad_output = first_columns(&d->grad, columns),
                                            .input = args.input,
                                            .cast = cast_of(d, first_columns(&d->wide, wide)),
                                            .bias_grad = d->sums.tensor};
        args.cast.result.column.shape[0] = columns;
        TEST_OK(t, te_activation(t->context, &args, NULL));
        *hash = digest(d, *hash);
        back.cast.result.column.shape[0] = back.bias_grad.shape[0] = wide;
        back.workspace = test_workspace(t, TE_OP_ACTIVATION_BACKWARD, &back, &back.workspace_size);
        TEST_OK(t, te_activation_backward(t->context, &back, NULL));
        *hash = digest(d, *hash);
    }
}

static uint64_t run_all(test_device *t, const void *data)
{
    norm_data d = *(const norm_data *)data;
    uint64_t hash = empty_digest;
    d.mean = test_vector_new(t, TE_DTYPE_F32, ROWS);
    d.rsigma = test_vector_new(t, TE_DTYPE_F32, ROWS);
    d.wide = test_matrix_new(t, TE_DTYPE_F32, ROWS, COLUMNS, 0);
    d.made = test_matrix_new(t, TE_DTYPE_BF16, ROWS, COLUMNS, 0);
    d.row = test_matrix_new(t, TE_DTYPE_E4M3, ROWS, COLUMNS, 0);
    d.column = test_matrix_new(t, TE_DTYPE_E4M3, COLUMNS, PADDED, 0);
    d.sums = test_vector_new(t, TE_DTYPE_F32, COLUMNS);
    d.more_sums = test_vector_new(t, TE_DTYPE_F32, COLUMNS);
    d.scale = test_float(t, 20.0F);
    d.amax = test_float(t, 0.0F);
    run_norms(t, &d, &hash);
    run_activations(t, &d, &hash);
    return hash;
}

static void compare(test_device *t, te_dtype dtype)
{
    norm_data d = {.dtype = dtype};
    d.x = test_matrix_new(t, dtype, ROWS, COLUMNS, 0);
    d.grad = test_matrix_new(t, dtype, ROWS, COLUMNS, 0);
    d.gamma = test_vector_new(t, dtype, COLUMNS);
    d.beta = test_vector_new(t, dtype, COLUMNS);
    test_fill_random(t, &d.x, 6.0, 0);
    test_fill_random(t, &d.grad, 2.0, 0);
    test_fill_random(t, &d.gamma, 1.0, 0);
    test_fill_random(t, &d.beta, 1.0, 0);
    compare_variants(t, te_dtype_name(dtype), PORTABLE, run_all, &d);
    test_release(t);
}

static void check_all(test_device *t)
{
    for (int dtype = TE_DTYPE_F32; dtype <= TE_DTYPE_BF16; dtype++) compare(t, (te_dtype)dtype);
}

int main(void)
{
    return test_on_cpu("norm", check_all);
}
