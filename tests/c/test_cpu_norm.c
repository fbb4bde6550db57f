/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cpu_norm.c - norms and activations give the same bits with every instruction set and with
 * every number of threads.
 */
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "testing.h"

/* An internal hook (csrc/cpu/isa.h), reachable through the static library only. */
te_status te_cpu_force_isa(int isa);

enum { PORTABLE, AVX2, AVX512, BEST = -1, ROWS = 75, COLUMNS = 1131, PADDED = 80 };

static int copy(void *target, const void *source, size_t bytes)
{
    memcpy(target, source, bytes);
    return 0;
}

/* Inputs, and the outputs of one operator. The gated activations take `x` as two halves. */
typedef struct norm_data {
    te_dtype dtype;
    test_matrix x, grad, gamma, beta;
    test_matrix mean, rsigma, wide, made, row, column, sums, more_sums;
    test_buffer *scale, *amax;
} norm_data;

/* A digest of everything made so far (FNV-1a); what is not written keeps the guard byte. */
static uint64_t digest(const norm_data *d, uint64_t hash)
{
    const test_matrix *made[] = {&d->mean, &d->rsigma, &d->wide, &d->made,
                                 &d->row,  &d->column, &d->sums, &d->more_sums};
    for (int i = 0; i < 8; i++) {
        for (size_t b = 0; b < made[i]->buffer->bytes; b++) {
            hash = (hash ^ made[i]->buffer->device[b]) * 1099511628211U;
        }
    }
    return (hash ^ d->amax->device[0] ^ (uint64_t)d->amax->device[1] << 8) * 1099511628211U;
}

static te_quantized cast_of(const norm_data *d, const test_matrix *column)
{
    return (te_quantized){.mode = TE_SCALING_TENSOR,
                          .rowwise = d->row.tensor,
                          .columnwise = column->tensor,
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
                             .output = d->made.tensor,
                             .quantized = cast_of(d, &d->column),
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
                                   .output = first_columns(&d->made, columns),
                                   .quantized = cast_of(d, &d->column)};
        te_activation_backward_args back = {.size = sizeof back,
                                            .kind = args.kind,
                                            .params = args.params,
                                            .grad_output = first_columns(&d->grad, columns),
                                            .input = args.input,
                                            .grad_input = first_columns(&d->wide, wide),
                                            .quantized = args.quantized,
                                            .bias_grad = d->sums.tensor};
        args.quantized.columnwise.shape[0] = columns;
        TEST_OK(t, te_activation(t->context, &args, NULL));
        *hash = digest(d, *hash);
        back.quantized.columnwise.shape[0] = back.bias_grad.shape[0] = wide;
        back.workspace = test_workspace(t, TE_OP_ACTIVATION_BACKWARD, &back, &back.workspace_size);
        TEST_OK(t, te_activation_backward(t->context, &back, NULL));
        *hash = digest(d, *hash);
    }
}

static uint64_t run_all(test_device *t, norm_data d)
{
    int inputs = t->buffer_count;
    uint64_t hash = 14695981039346656037U;
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
    while (t->buffer_count > inputs) {
        test_buffer *last = &t->buffers[--t->buffer_count];
        free(last->host);
        t->release(last->device);
    }
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
    (void)te_cpu_force_isa(PORTABLE);
    uint64_t expected = run_all(t, d);
    for (int isa = AVX2; isa <= AVX512; isa++) {
        if (te_cpu_force_isa(isa) != TE_OK) continue;
        TEST_CHECK(t, run_all(t, d) == expected, "%s: instruction set %d gives other bits",
                   te_dtype_name(dtype), isa);
    }
    (void)te_cpu_force_isa(BEST);
#if defined(_OPENMP)
    int threads = omp_get_max_threads();
    for (int count = 1; count <= 3; count++) {
        omp_set_num_threads(count);
        TEST_CHECK(t, run_all(t, d) == expected, "%s: %d threads give other bits",
                   te_dtype_name(dtype), count);
    }
    omp_set_num_threads(threads);
#endif
    test_release(t);
}

int main(void)
{
    static test_device t = {.device = {TE_DEVICE_CPU, 0},
                            .running = "norm",
                            .allocate = malloc,
                            .release = free,
                            .upload = copy,
                            .download = copy};
    if (te_context_create(t.device, &t.context) != TE_OK) {
        (void)fprintf(stderr, "%s\n", te_last_error());
        return EXIT_FAILURE;
    }
    for (int dtype = TE_DTYPE_F32; dtype <= TE_DTYPE_BF16; dtype++) compare(&t, (te_dtype)dtype);
    te_context_destroy(t.context);
    if (t.failures > 0) (void)fprintf(stderr, "%d checks failed\n", t.failures);
    return t.failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
