/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.c - residual + drop_path(dropout(input + bias)), and its gradient.
 *
 * In tiles, so that the bias is converted once for several rows and the numbers between two steps
 * stay in the first-level cache. Column sums are per tile and joined in the order of the tiles:
 * nothing depends on the number of threads.
 */
#include <string.h>

#include "core/scaling_math.h"
#include "core/status.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"
#include "cpu/random.h"

enum { TILE_ROWS = 64, TILE_COLUMNS = 1024 };

/* The random decisions of both operators. */
typedef struct drop_plan {
    te_cpu_dropout dropout, drop_path;
    int64_t sample_rows; /* rows of one sample */
} drop_plan;

typedef struct dropout_job {
    const te_cpu_kernels *kernels;
    te_cpu_matrix input, residual, output; /* data NULL: absent */
    te_cpu_matrix bias;                    /* one row; data NULL: absent */
    drop_plan plan;
    float *sums; /* [row tiles, columns] of the output's fp32 values, or NULL */
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
    int32_t decisions[TE_CPU_DECISIONS(TILE_COLUMNS)];
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

static void do_tile(const dropout_job *job, int64_t row, int64_t column)
{
    const te_cpu_kernels *kernels = job->kernels;
    float values[TILE_COLUMNS], bias[TILE_COLUMNS], residual[TILE_COLUMNS], *sums = NULL;
    int64_t n = te_cpu_min(TILE_COLUMNS, job->input.columns - column);
    int64_t end = te_cpu_min(row + TILE_ROWS, job->input.rows);
    if (job->bias.data != NULL) {
        kernels->to_f32[job->bias.dtype](te_cpu_at(&job->bias, 0, column), bias, n);
    }
    if (job->sums != NULL) {
        sums = job->sums + row / TILE_ROWS * job->input.columns + column;
        memset(sums, 0, (size_t)n * sizeof *sums);
    }
    for (int64_t r = row; r < end; r++) {
        kernels->to_f32[job->input.dtype](te_cpu_at(&job->input, r, column), values, n);
        if (job->bias.data != NULL) kernels->add(values, bias, n);
        drop(job, r, column, n, values);
        if (sums != NULL) kernels->add(sums, values, n);
        if (job->residual.data != NULL) {
            kernels->to_f32[job->residual.dtype](te_cpu_at(&job->residual, r, column), residual, n);
            kernels->add(values, residual, n);
        }
        if (job->output.data != NULL) {
            kernels->from_f32[job->output.dtype](values, te_cpu_at(&job->output, r, column), n);
        }
    }
}

static int64_t row_tiles(int64_t rows)
{
    return te_ceil_div(rows, TILE_ROWS);
}

static void do_all(const dropout_job *job)
{
    int64_t across = te_ceil_div(job->input.columns, TILE_COLUMNS);
    int64_t tiles = row_tiles(job->input.rows) * across;
    int threads = te_cpu_threads(job->input.rows * job->input.columns);
    (void)threads;
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < tiles; tile++) {
        do_tile(job, tile / across * TILE_ROWS, tile % across * TILE_COLUMNS);
    }
}

static te_cpu_matrix optional(const te_tensor *tensor)
{
    te_cpu_matrix absent = {0};
    return tensor->data == NULL ? absent : te_cpu_matrix_of(tensor);
}

te_status te_cpu_dropout_add(void *self, te_context *context, const void *opaque, void *stream)
{
    const te_dropout_add_args *args = opaque;
    dropout_job job = {.kernels = te_cpu_kernels_get(),
                       .input = te_cpu_matrix_of(&args->input),
                       .bias = optional(&args->bias),
                       .residual = optional(&args->residual),
                       .output = te_cpu_matrix_of(&args->output)};
    (void)self, (void)context, (void)stream;
    job.plan = plan_of(args->rng, args->dropout, args->drop_path, args->samples, &job.input);
    do_all(&job);
    return TE_OK;
}

/* ---- backward ----------------------------------------------------------------------------- */

te_status te_cpu_dropout_backward_workspace(void *self, te_context *context, const void *opaque,
                                            size_t *bytes)
{
    const te_dropout_backward_args *args = opaque;
    te_cpu_matrix grad = te_cpu_matrix_of(&args->grad_output);
    (void)self, (void)context;
    *bytes = 0;
    if (te_tensor_requested(&args->bias_grad)) {
        *bytes = (size_t)(row_tiles(grad.rows) * grad.columns) * sizeof(float);
    }
    return TE_OK;
}

/* bias_grad = column sums, in the order of the row tiles. */
static void finish_bias_grad(const dropout_job *job, const te_tensor *bias_grad)
{
    float totals[TILE_COLUMNS];
    te_cpu_matrix output = te_cpu_matrix_of(bias_grad);
    int64_t columns = job->input.columns, tiles = row_tiles(job->input.rows);
    for (int64_t first = 0; first < columns; first += TILE_COLUMNS) {
        int64_t n = te_cpu_min(TILE_COLUMNS, columns - first);
        memset(totals, 0, sizeof totals);
        for (int64_t tile = 0; tile < tiles; tile++) {
            job->kernels->add(totals, job->sums + tile * columns + first, n);
        }
        job->kernels->from_f32[output.dtype](totals, te_cpu_at(&output, 0, first), n);
    }
}

te_status te_cpu_dropout_backward(void *self, te_context *context, const void *opaque, void *stream)
{
    const te_dropout_backward_args *args = opaque;
    dropout_job job = {.kernels = te_cpu_kernels_get(),
                       .input = te_cpu_matrix_of(&args->grad_output),
                       .output = optional(&args->grad_input)};
    int with_sums = args->bias_grad.data != NULL;
    size_t needed = 0;
    (void)stream;
    if (with_sums) TE_TRY(te_cpu_dropout_backward_workspace(self, context, args, &needed));
    if (args->workspace_size < needed || (needed > 0 && args->workspace == NULL)) {
        return TE_FAIL(TE_ERROR_INVALID, "dropout_backward: workspace of %zu bytes, needs %zu",
                       args->workspace == NULL ? 0 : args->workspace_size, needed);
    }
    if (with_sums) job.sums = args->workspace;
    job.plan = plan_of(args->rng, args->dropout, args->drop_path, args->samples, &job.input);
    do_all(&job);
    if (with_sums) finish_bias_grad(&job, &args->bias_grad);
    return TE_OK;
}
