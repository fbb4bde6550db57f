/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.c - residual + drop_path(dropout(input + bias)), and its gradient: rows that are made for
 * the tiles of tiles.h, so that the bias is converted once for several rows.
 */
#include <string.h>

#include "core/status.h"
#include "cpu/ops.h"
#include "cpu/random.h"
#include "cpu/tiles.h"

/* The random decisions of both operators. */
typedef struct drop_plan {
    te_cpu_dropout dropout, drop_path;
    int64_t sample_rows; /* rows of one sample */
} drop_plan;

/* One call, and the columns of the tile being made. */
typedef struct dropout_job {
    const te_cpu_kernels *kernels;
    te_cpu_matrix input, residual, bias; /* data NULL: absent; the bias is one row */
    drop_plan plan;
    float bias_values[TE_CPU_MADE_COLUMNS];
} dropout_job;

static drop_plan plan_of(const int64_t *rng, float dropout, float drop_path, int64_t samples,
                         const te_cpu_matrix *matrix)
{
    drop_plan plan = {.dropout = te_cpu_dropout_of(rng, dropout),
                      .drop_path = te_cpu_dropout_of(rng, drop_path),
                      .sample_rows = samples > 0 ? matrix->rows / samples : matrix->rows};
    plan.drop_path.offset += (uint64_t)((matrix->rows * matrix->columns + 3) / 4);
    return plan;
}

/* Whether the path of a row is kept. */
static int path_kept(const te_cpu_kernels *kernels, const drop_plan *plan, int64_t row)
{
    int32_t decisions[TE_CPU_DECISIONS(1)];
    return *te_cpu_decide_run(kernels, &plan->drop_path, row / plan->sample_rows, 1, decisions) !=
           0;
}

/* n values from (row, column) on, through both dropouts, in place. */
static void drop(const dropout_job *job, int64_t row, int64_t column, int64_t n, float *values)
{
    const drop_plan *plan = &job->plan;
    int32_t decisions[TE_CPU_DECISIONS(TE_CPU_MADE_COLUMNS)];
    if (plan->drop_path.active && !path_kept(job->kernels, plan, row)) {
        memset(values, 0, (size_t)n * sizeof *values);
        return;
    }
    if (plan->dropout.active) {
        te_cpu_drop(job->kernels, &plan->dropout, row * job->input.columns + column, values, n,
                    decisions);
    }
    if (plan->drop_path.active) job->kernels->multiply(values, plan->drop_path.factor, n);
}

/* Of the gradient there are neither bias nor residual. The buffer may be the output itself, and so
 * the memory of the input or of the residual. */
static const void *dropout_row(const void *self, int64_t row, int64_t column, int64_t n,
                               float *buffer)
{
    const dropout_job *job = self;
    const te_cpu_kernels *kernels = job->kernels;
    float made[TE_CPU_MADE_COLUMNS], residual[TE_CPU_MADE_COLUMNS];
    float *values = job->residual.data == NULL ? buffer : made;
    const float *input = te_cpu_numbers(kernels, &job->input, row, column, n, values);
    if (input != values) memcpy(values, input, (size_t)n * sizeof *values);
    if (job->bias.data != NULL) kernels->add(values, job->bias_values, n);
    drop(job, row, column, n, values);
    if (job->residual.data == NULL) return buffer;
    kernels->add(made, te_cpu_numbers(kernels, &job->residual, row, column, n, residual), n);
    memcpy(buffer, made, (size_t)n * sizeof *made);
    return buffer;
}

static void do_tile(const dropout_job *job, const te_cpu_tiles *tiles, int64_t row, int64_t column)
{
    dropout_job own = *job;
    if (own.bias.data != NULL) {
        own.kernels->to_f32[own.bias.dtype](
            te_cpu_at(&own.bias, 0, column), own.bias_values,
            te_cpu_min(tiles->tile_columns, tiles->columns - column));
    }
    (void)te_cpu_tile(tiles, &own, row, column);
}

static void do_all(const dropout_job *job, const te_cpu_request *request)
{
    te_cpu_tiles tiles =
        te_cpu_tiles_begin(request, job->input.rows, job->input.columns, TE_DTYPE_F32, 1);
    int64_t across = te_ceil_div(tiles.columns, tiles.tile_columns);
    int64_t count = te_ceil_div(tiles.rows, tiles.tile_rows) * across;
    tiles.source = dropout_row;
#pragma omp parallel for num_threads(te_cpu_threads(tiles.rows, tiles.columns))
    for (int64_t tile = 0; tile < count; tile++) {
        do_tile(job, &tiles, tile / across * tiles.tile_rows, tile % across * tiles.tile_columns);
    }
    te_cpu_tiles_end(&tiles, request, 0);
}

te_status te_cpu_dropout_add(const te_dropout_add_args *args)
{
    const te_cast_request cast = {.result.wide = args->output};
    const te_cpu_request request = {.cast = &cast};
    dropout_job job = {.kernels = te_cpu_kernels_get(), .input = te_cpu_matrix_of(&args->input)};
    if (args->bias.data != NULL) job.bias = te_cpu_matrix_of(&args->bias);
    if (args->residual.data != NULL) job.residual = te_cpu_matrix_of(&args->residual);
    job.plan = plan_of(args->rng, args->dropout, args->drop_path, args->samples, &job.input);
    do_all(&job, &request);
    return TE_OK;
}

TE_CPU_SUMS_WORKSPACE(dropout_backward, grad_output)

te_status te_cpu_dropout_backward(const te_dropout_backward_args *args)
{
    const te_cast_request cast = {.result.wide = args->grad_input};
    const te_cpu_request request = {&cast, &args->bias_grad, args->workspace, args->workspace_size};
    dropout_job job = {.kernels = te_cpu_kernels_get(),
                       .input = te_cpu_matrix_of(&args->grad_output)};
    TE_TRY(te_cpu_check_sums(TE_OP_DROPOUT_BACKWARD, &args->grad_output, &request));
    job.plan = plan_of(args->rng, args->dropout, args->drop_path, args->samples, &job.input);
    do_all(&job, &request);
    return TE_OK;
}
