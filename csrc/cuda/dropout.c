/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.c - host side of dropout_add and its gradient. Grids are pure functions of the shape, so
 * that column sums are made in the same order on every device.
 */
#include "cuda/kernels/dropout.h"

#include "core/philox.h"
#include "core/check.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/ops.h"
#include "cuda/tiles.h"

#define TARGET_BLOCKS 1024

/* How a matrix is distributed. */
typedef struct strips {
    int lanes_log2;
    int64_t columns; /* of blocks */
    int64_t groups;  /* of rows */
    int64_t depth;   /* rows of a group */
} strips;

static strips plan_strips(int64_t rows, int64_t columns, te_dtype dtype)
{
    const int vector = 16 / (int)te_dtype_bytes(dtype);
    const int64_t vectors = te_ceil_div(columns, vector);
    strips plan = {0, 0, 0, 0};
    int64_t tile, tiles, deep, minimum;
    while (plan.lanes_log2 < TE_DROPOUT_LANES_LOG2 && (INT64_C(1) << plan.lanes_log2) < vectors) {
        plan.lanes_log2++;
    }
    plan.columns = te_ceil_div(vectors, INT64_C(1) << plan.lanes_log2);
    tile = ((int64_t)TE_DROPOUT_THREADS >> plan.lanes_log2) * TE_DROPOUT_ROWS;
    tiles = te_ceil_div(rows, tile);
    deep = tiles * plan.columns / TARGET_BLOCKS;
    minimum = te_ceil_div(tiles, TE_CUDA_MAX_GRID_Y);
    if (deep < minimum) deep = minimum;
    if (deep < 1) deep = 1;
    plan.depth = deep * tile;
    plan.groups = te_ceil_div(rows, plan.depth);
    if (plan.groups < 1) plan.groups = 1;
    return plan;
}

/* The random decisions that both operators share. */
static void set_drops(te_dropout_params *params, float dropout, float drop_path, const int64_t *rng,
                      int64_t samples)
{
    const int64_t elements = params->input.rows * params->input.columns;
    params->keep_factor = 1.0F;
    params->path_factor = 1.0F;
    params->sample_rows = samples > 0 ? params->input.rows / samples : params->input.rows;
    params->path_first = te_round_up(elements, 4);
    if (dropout > 0.0F || drop_path > 0.0F) params->rng = (const te_index *)rng;
    if (dropout > 0.0F) {
        params->drops = 1;
        params->drop_limit = te_cuda_drop_limit(dropout);
        params->keep_factor = te_keep_factor(dropout);
    }
    if (drop_path > 0.0F) {
        params->drops_path = 1;
        params->path_limit = te_cuda_drop_limit(drop_path);
        params->path_factor = te_keep_factor(drop_path);
    }
}

/* Whether all accesses of a matrix may be of 16 bytes. */
static int vectors_fit(const te_view *view, size_t element)
{
    return view->data == NULL ||
           (view->columns * (int64_t)element % 16 == 0 && te_cuda_aligned(view, element, 16));
}

static te_cuda_call call_of(te_dropout_params *params, const strips *plan, const char *name)
{
    params->lanes_log2 = plan->lanes_log2;
    params->depth = (int)plan->depth;
    return (te_cuda_call){
        "dropout",
        name,
        {(uint32_t)plan->columns, (uint32_t)plan->groups, 1, TE_DROPOUT_THREADS, 1, 1, 0},
        params,
        sizeof *params};
}

/* [aligned][dtype] */
typedef const char *kernel_names[2][TE_DTYPE_COUNT];

static const kernel_names plain_kernels = {TE_CUDA_NAMES("te_dropout_any_"),
                                           TE_CUDA_NAMES("te_dropout_")};
static const kernel_names sums_kernels = {TE_CUDA_NAMES("te_dropout_sums_any_"),
                                          TE_CUDA_NAMES("te_dropout_sums_")};

te_status te_cuda_dropout_add(void *self, te_context *context, const void *args_, void *stream)
{
    const te_dropout_add_args *args = args_;
    const te_dtype dtype = args->input.dtype;
    const size_t bytes = te_dtype_bytes(dtype);
    te_dropout_params params = {.input = te_cuda_view(&args->input),
                                .residual = te_cuda_view(&args->residual),
                                .output = te_cuda_view(&args->output),
                                .bias = args->bias.data,
                                .bias_dtype = te_cuda_store(args->bias.dtype)};
    const strips plan = plan_strips(params.input.rows, params.input.columns, dtype);
    te_cuda_call call;
    int aligned;
    (void)self;
    if (te_tensor_numel(&args->input) == 0) return TE_OK;
    set_drops(&params, args->dropout, args->drop_path, args->rng, args->samples);
    params.bias_alike =
        params.bias != NULL && args->bias.dtype == dtype && (uintptr_t)params.bias % 16 == 0;
    aligned = vectors_fit(&params.input, bytes) && vectors_fit(&params.residual, bytes) &&
              vectors_fit(&params.output, bytes);
    call = call_of(&params, &plan, plain_kernels[aligned][dtype]);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

/* ---- backward ---- */

static strips plan_backward(const te_dropout_backward_args *args)
{
    const te_tensor *grad = &args->grad_output;
    return plan_strips(grad->shape[0], grad->shape[1], grad->dtype);
}

/* Column sums of several groups of rows meet in the workspace. */
te_status te_cuda_dropout_backward_workspace(void *self, te_context *context, const void *args_,
                                             size_t *bytes)
{
    const te_dropout_backward_args *args = args_;
    (void)self, (void)context;
    *bytes = 0;
    if (te_tensor_requested(&args->bias_grad)) {
        const strips plan = plan_backward(args);
        if (plan.groups > 1) {
            *bytes = (size_t)plan.groups * (size_t)args->grad_output.shape[1] * sizeof(float);
        }
    }
    return TE_OK;
}

te_status te_cuda_dropout_backward(void *self, te_context *context, const void *args_, void *stream)
{
    const te_dropout_backward_args *args = args_;
    const te_dtype dtype = args->grad_output.dtype;
    const size_t bytes = te_dtype_bytes(dtype);
    const int with_sums = te_tensor_present(&args->bias_grad);
    const strips plan = plan_backward(args);
    te_dropout_params params = {.input = te_cuda_view(&args->grad_output),
                                .output = te_cuda_view(&args->grad_input),
                                .bias_grad = args->bias_grad.data,
                                .bias_dtype = te_cuda_store(args->bias_grad.dtype)};
    te_quantize_sums_params sums = {.sums = args->workspace,
                                    .groups = plan.groups,
                                    .columns = params.input.columns,
                                    .split = params.input.columns,
                                    .first = args->bias_grad.data,
                                    .first_dtype = params.bias_dtype};
    te_cuda_call calls[2];
    size_t needed;
    int aligned, count = 1;
    (void)self;
    if (params.input.columns == 0 || (params.input.rows == 0 && !with_sums)) return TE_OK;
    if (!with_sums && params.output.data == NULL) return TE_OK;
    set_drops(&params, args->dropout, args->drop_path, args->rng, args->samples);
    aligned = vectors_fit(&params.input, bytes) && vectors_fit(&params.output, bytes);
    calls[0] = call_of(&params, &plan, (with_sums ? sums_kernels : plain_kernels)[aligned][dtype]);
    if (with_sums && plan.groups > 1) {
        TE_TRY(te_cuda_dropout_backward_workspace(self, context, args, &needed));
        TE_TRY(te_check_workspace(TE_OP_DROPOUT_BACKWARD, args->workspace, args->workspace_size,
                                  needed));
        params.sums = args->workspace;
        calls[1] = te_cuda_sums_call(&sums);
        count = 2;
    }
    return te_cuda_run(te_context_state(context), calls, count, stream);
}
