/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.c - activations and their gradients, cast to FP8 on the way out. Each row of a tile is
 * made in fp32 from rows that lie in memory as fp32 or are converted first.
 */
#include <math.h>

#include "core/status.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"

/* Which loop of te_cpu_kernels.activation. */
enum { VALUE, GRADIENT, GATE_GRADIENT };

typedef struct activation_job {
    const te_cpu_kernels *kernels;
    const te_cpu_activate *loops;
    te_cpu_matrix input, grad; /* grad.data NULL: forward */
    int64_t half;              /* columns of the first half of a gated input, else of all of it */
    te_activation_params params;
} activation_job;

static const void *value_row(const void *self, int64_t row, int64_t column, int64_t n,
                             float *buffer)
{
    const activation_job *job = self;
    float a[TE_CPU_MADE_COLUMNS], b[TE_CPU_MADE_COLUMNS];
    te_cpu_activation_row values = {.params = job->params};
    values.a = te_cpu_numbers(job->kernels, &job->input, row, column, n, a);
    if (job->half < job->input.columns) {
        values.b = te_cpu_numbers(job->kernels, &job->input, row, job->half + column, n, b);
    }
    job->loops[VALUE](&values, buffer, n);
    return buffer;
}

/* Columns of the gradient; a piece may reach from the first half into the second. */
static const void *gradient_row(const void *self, int64_t row, int64_t column, int64_t n,
                                float *buffer)
{
    const activation_job *job = self;
    float a[TE_CPU_MADE_COLUMNS], b[TE_CPU_MADE_COLUMNS], grad[TE_CPU_MADE_COLUMNS];
    te_cpu_activation_row values = {.params = job->params};
    for (int64_t done = 0, width; done < n; done += width) {
        int second = column + done >= job->half;
        int64_t at = column + done - (second ? job->half : 0);
        width = te_cpu_min(n - done, job->half - at);
        values.a = te_cpu_numbers(job->kernels, &job->input, row, at, width, a);
        values.grad = te_cpu_numbers(job->kernels, &job->grad, row, at, width, grad);
        if (job->half < job->input.columns) {
            values.b = te_cpu_numbers(job->kernels, &job->input, row, job->half + at, width, b);
        }
        job->loops[second ? GATE_GRADIENT : GRADIENT](&values, buffer + done, width);
    }
    return buffer;
}

static activation_job job_of(te_activation_kind kind, const te_activation_params *params,
                             const te_tensor *input)
{
    activation_job job = {
        .kernels = te_cpu_kernels_get(), .input = te_cpu_matrix_of(input), .params = *params};
    job.loops = job.kernels->activation[kind];
    job.half = te_activation_is_gated(kind) ? job.input.columns / 2 : job.input.columns;
    return job;
}

te_status te_cpu_activation(const te_activation_args *args)
{
    const activation_job job = job_of(args->kind, &args->params, &args->input);
    const te_cpu_request request = {.cast = &args->cast};
    te_cpu_tiles tiles = te_cpu_tiles_begin(&request, job.input.rows, job.half, TE_DTYPE_F32, 1);
    tiles.source = value_row;
    te_cpu_tiles_end(&tiles, &request, te_cpu_all_tiles(&tiles, &job));
    return TE_OK;
}

/* params.limit is the cap. */
static const void *softcap_row(const void *self, int64_t row, int64_t column, int64_t n,
                               float *buffer)
{
    const activation_job *job = self;
    const float cap = job->params.limit;
    float a[TE_CPU_MADE_COLUMNS], b[TE_CPU_MADE_COLUMNS], slopes[TE_CPU_MADE_COLUMNS];
    const float *x = te_cpu_numbers(job->kernels, &job->input, row, column, n, a), *grad;
    if (job->grad.data == NULL) {
        if (x != buffer) memcpy(buffer, x, (size_t)n * sizeof *x);
        job->kernels->cap(buffer, cap, NULL, n);
        return buffer;
    }
    grad = te_cpu_numbers(job->kernels, &job->grad, row, column, n, b);
    if (x != a) memcpy(a, x, (size_t)n * sizeof *x);
    job->kernels->cap(a, cap, slopes, n);
    for (int64_t i = 0; i < n; i++) buffer[i] = grad[i] * slopes[i];
    return buffer;
}

te_status te_cpu_softcap(const te_softcap_args *args)
{
    const te_cpu_request request = {.cast = &args->cast};
    activation_job job = {.kernels = te_cpu_kernels_get(),
                          .input = te_cpu_matrix_of(&args->input),
                          .params.limit = args->cap};
    te_cpu_tiles tiles =
        te_cpu_tiles_begin(&request, job.input.rows, job.input.columns, TE_DTYPE_F32, 1);
    if (args->grad_output.data != NULL) job.grad = te_cpu_matrix_of(&args->grad_output);
    tiles.source = softcap_row;
    te_cpu_tiles_end(&tiles, &request, te_cpu_all_tiles(&tiles, &job));
    return TE_OK;
}

TE_CPU_SUMS_WORKSPACE(activation_backward, input)

te_status te_cpu_activation_backward(const te_activation_backward_args *args)
{
    activation_job job = job_of(args->kind, &args->params, &args->input);
    const te_cpu_request request = {&args->cast, &args->bias_grad, args->workspace,
                                    args->workspace_size};
    job.grad = te_cpu_matrix_of(&args->grad_output);
    TE_TRY(te_cpu_check_sums(TE_OP_ACTIVATION_BACKWARD, &args->input, &request));
    te_cpu_tiles tiles =
        te_cpu_tiles_begin(&request, job.input.rows, job.input.columns, TE_DTYPE_F32, 1);
    tiles.source = gradient_row;
    te_cpu_tiles_end(&tiles, &request, te_cpu_all_tiles(&tiles, &job));
    return TE_OK;
}
