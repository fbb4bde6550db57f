/* SPDX-License-Identifier: Apache-2.0
 *
 * norm_backward.c - host side of the gradients of the norms: one kernel that stays on the device
 * for all rows and leaves a line of column sums per block, and one that adds these up. Rows that do
 * not fit its registers or shared memory take two kernels instead, which read matrices of one
 * dtype.
 */
#include "cuda/kernels/norm_backward.h"

#include "core/check.h"
#include "core/status.h"
#include "cuda/norm.h"
#include "cuda/ops.h"
#include "cuda/tiles.h"
#include "cuda/widen.h"

#define NARROW_BLOCKS (3 * TE_CUDA_NORM_BLOCKS)

typedef enum row_plan { NARROW, WIDE, LONG } row_plan;

typedef struct backward_plan {
    row_plan rows;
    te_cuda_row_teams teams;
    int64_t lines;       /* column sums side by side: 0, gamma, gamma and beta */
    int64_t groups;      /* lines of them below each other */
    size_t copies, sums; /* bytes of workspace */
} backward_plan;

static int is_mixed(const te_norm_backward_args *args)
{
    return args->grad_output.dtype != args->input.dtype;
}

/* Teams, blocks and shared memory of the kernel that stays; LONG where it can not serve. */
static void plan_rows(const te_norm_backward_args *args, size_t element, int64_t limit,
                      backward_plan *plan)
{
    const te_cuda_row_request request = {.rows = args->input.shape[0],
                                         .vectors = te_ceil_div(args->input.shape[1], 8),
                                         .each = TE_NORM_BACKWARD_BYTES / (8 * (int64_t)element),
                                         .threads = TE_NORM_BACKWARD_THREADS,
                                         .stages = TE_NORM_BACKWARD_STAGES,
                                         .piece = 8 * element *
                                                  (te_tensor_requested(&args->grad_add) ? 3 : 2),
                                         .factors = 8 * sizeof(float),
                                         .limit = limit};
    te_cuda_row_teams teams = {.lanes = 1, .threads = TE_NORM_NARROW_THREADS};
    int64_t tail = 32;
    if (request.vectors <= 32) {
        plan->rows = NARROW;
        while (teams.lanes < request.vectors) teams.lanes *= 2;
        teams.blocks = te_ceil_div(request.rows, teams.threads / teams.lanes);
        if (teams.blocks > NARROW_BLOCKS) teams.blocks = NARROW_BLOCKS;
        if (teams.blocks < 1) teams.blocks = 1;
        teams.stages = request.stages;
        teams.shared = teams.stages * teams.threads * (int64_t)request.piece;
    } else if (te_cuda_plan_row_teams(&request, &teams)) {
        plan->rows = WIDE;
        tail *= request.each;
    } else {
        plan->rows = LONG;
        teams = (te_cuda_row_teams){.threads = TE_NORM_BACKWARD_THREADS, .blocks = request.rows};
        if (teams.blocks > TE_CUDA_NORM_MANY_BLOCKS) teams.blocks = TE_CUDA_NORM_MANY_BLOCKS;
        plan->teams = teams;
        return;
    }
    tail *= teams.threads + 4; /* the column sums of a block, see write_sums() */
    if (teams.shared < tail) teams.shared = tail;
    plan->teams = teams;
}

/* The column sums of rows that do not fit: a kernel on tiles. */
static te_status plan_tiles(const te_norm_backward_args *args, te_tile_params *tile,
                            te_cuda_tile_job *job)
{
    const te_cast_request nothing = {0};
    const te_cuda_tile_request request = {.op = TE_OP_NORM_BACKWARD,
                                          .outputs = 2,
                                          .rows = args->input.shape[0],
                                          .columns = args->input.shape[1],
                                          .cast = &nothing};
    return te_cuda_plan_tile_job(&request, tile, job);
}

static te_status plan_backward(te_context *context, const te_norm_backward_args *args,
                               backward_plan *plan)
{
    const te_tensor *const inputs[] = {&args->grad_output, &args->input, &args->grad_add};
    const te_dtype dtype = is_mixed(args) ? TE_DTYPE_F32 : args->input.dtype;
    *plan = (backward_plan){0};
    plan_rows(args, te_dtype_bytes(dtype), te_cuda_shared_limit(te_context_state(context)), plan);
    if (plan->rows == LONG) plan->copies = te_cuda_widen_workspace(inputs, 3);
    if (te_tensor_requested(&args->beta_grad)) {
        plan->lines = 2;
    } else if (te_tensor_requested(&args->gamma_grad)) {
        plan->lines = 1;
    }
    plan->groups = plan->teams.blocks;
    if (plan->rows == LONG && plan->lines > 0) {
        te_tile_params tile;
        te_cuda_tile_job job;
        TE_TRY(plan_tiles(args, &tile, &job));
        plan->lines = 2; /* that kernel always makes both */
        plan->groups = job.dims.grid_y;
    }
    plan->sums =
        (size_t)(plan->groups * plan->lines) * (size_t)args->input.shape[1] * sizeof(float);
    return TE_OK;
}

/* The same with the rows of the input and of its gradient as matrices. */
static te_norm_backward_args by_rows(const te_norm_backward_args *args)
{
    te_norm_backward_args same = *args;
    same.input = te_tensor_rows(&args->input);
    if (te_tensor_requested(&args->grad_input)) {
        same.grad_input = te_tensor_rows(&args->grad_input);
    }
    return same;
}

te_status te_cuda_norm_backward_supports(void *self, te_context *context, const void *args_)
{
    const te_norm_backward_args *args = args_;
    (void)self, (void)context;
    TE_TRY(te_cuda_norm_check_heads(TE_OP_NORM_BACKWARD, &args->input));
    TE_TRY(te_cuda_norm_check_heads(TE_OP_NORM_BACKWARD, &args->grad_input));
    if (args->grad_output.dtype == args->input.dtype ||
        (!te_cuda_norm_is_heads(&args->input) && !te_cuda_norm_is_heads(&args->grad_input)))
        return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "norm_backward: heads of %s with a gradient of %s",
                   te_dtype_name(args->input.dtype), te_dtype_name(args->grad_output.dtype));
}

te_status te_cuda_norm_backward_workspace(void *self, te_context *context, const void *args_,
                                          size_t *bytes)
{
    const te_norm_backward_args args = by_rows(args_);
    backward_plan plan;
    (void)self;
    TE_TRY(plan_backward(context, &args, &plan));
    *bytes = plan.copies + plan.sums;
    return TE_OK;
}

/* What is read. */
static te_norm_gradients gradients_of(const te_norm_backward_args *args)
{
    const size_t bytes = te_dtype_bytes(args->grad_output.dtype);
    te_norm_gradients of = {.grad = te_cuda_view(&args->grad_output),
                            .input = te_cuda_view(&args->input),
                            .factors = te_cuda_norm_factors(&args->gamma, NULL, args->flags),
                            .mean = args->mean.data,
                            .rsigma = args->rsigma.data,
                            .input_dtype = te_cuda_store(args->input.dtype),
                            .grad_dtype = te_cuda_store(args->grad_output.dtype)};
    of.aligned = te_cuda_aligned(&of.grad, bytes, 16) &&
                 te_cuda_aligned(&of.input, te_dtype_bytes(args->input.dtype), 16);
    if (te_tensor_present(&args->grad_add)) {
        of.add = te_cuda_view(&args->grad_add);
        of.aligned = of.aligned && te_cuda_aligned(&of.add, bytes, 16);
    }
    return of;
}

/* The kernel on rows. Whole: of nothing but aligned vectors of 8 elements, of one dtype. */
static const char *name_kernel(const te_norm_backward_args *args, row_plan rows,
                               const te_norm_backward_params *params)
{
    enum {
        KERNEL_NARROW,
        KERNEL_HEADS,
        KERNEL_WIDE,
        KERNEL_ADDING,
        KERNEL_JOINING,
        KERNEL_ODD,
        KERNEL_LONG,
        KERNELS
    };
    static const char *const names[KERNELS][TE_DTYPE_COUNT] = {
        [KERNEL_NARROW] = TE_CUDA_NAMES("te_norm_backward_narrow_"),
        [KERNEL_HEADS] = TE_CUDA_NAMES("te_norm_backward_heads_"),
        [KERNEL_WIDE] = TE_CUDA_NAMES("te_norm_backward_wide_"),
        [KERNEL_ADDING] = TE_CUDA_NAMES("te_norm_backward_adding_"),
        [KERNEL_JOINING] = TE_CUDA_NAMES("te_norm_backward_joining_"),
        [KERNEL_ODD] = TE_CUDA_NAMES("te_norm_backward_odd_"),
        [KERNEL_LONG] = TE_CUDA_NAMES("te_norm_backward_long_")};
    const int adds = params->of.add.data != NULL, joins = params->residual.data != NULL;
    const int whole = params->of.aligned && params->of.input.columns % 8 == 0 &&
                      (params->output.data == NULL ||
                       (params->output_aligned && args->grad_input.dtype == args->input.dtype)) &&
                      (!joins || (params->residual_aligned && !adds));
    int kernel = KERNEL_ODD;
    if (is_mixed(args)) { /* rows that are too long have been copied */
        return rows == NARROW ? "te_norm_backward_narrow_mixed" : "te_norm_backward_wide_mixed";
    }
    if (rows == NARROW) {
        kernel = params->of.heads.inner > 0 ? KERNEL_HEADS : KERNEL_NARROW;
    } else if (rows == LONG) {
        kernel = KERNEL_LONG;
    } else if (whole) {
        kernel = adds ? KERNEL_ADDING : joins ? KERNEL_JOINING : KERNEL_WIDE;
    }
    return names[kernel][args->input.dtype];
}

/* Rows of heads, of the input or of its gradient, as `given`. */
static void place_heads(const te_norm_backward_args *given, te_norm_backward_params *params)
{
    const int writes = te_tensor_present(&given->grad_input);
    const size_t bytes = te_dtype_bytes(given->input.dtype);
    te_norm_gradients *of = &params->of;
    if (!te_cuda_norm_is_heads(&given->input) && !te_cuda_norm_is_heads(&given->grad_input)) return;
    of->heads = te_cuda_norm_heads(&given->input);
    of->aligned = te_cuda_norm_aligned(&given->input, 16) &&
                  te_cuda_aligned(&of->grad, bytes, 16) &&
                  (of->add.data == NULL || te_cuda_aligned(&of->add, bytes, 16));
    if (!writes) return;
    params->output_heads = te_cuda_norm_heads(&given->grad_input);
    params->output_aligned = te_cuda_norm_aligned(&given->grad_input, 16);
}

/* The launches: rows, column sums of rows that do not fit, adding up. `given` has the rows as they
 * lie. */
static te_status launch(te_context *context, const te_norm_backward_args *args,
                        const te_norm_backward_args *given, const backward_plan *plan, float *sums,
                        void *stream)
{
    static const char *const sum_kernels[TE_DTYPE_COUNT] = TE_CUDA_NAMES("te_norm_sums_");
    const te_dtype dtype = args->input.dtype;
    te_norm_backward_params params = {.of = gradients_of(args),
                                      .sums = sums,
                                      .inverse =
                                          te_cuda_norm_inverse(args->kind, args->input.shape[1]),
                                      .centered = args->kind == TE_NORM_LAYERNORM,
                                      .lines = (int)plan->lines,
                                      .lanes = (int)plan->teams.lanes,
                                      .stages = (int)plan->teams.stages};
    te_norm_sums_params tiles = {.of = params.of};
    const te_quantize_sums_params adds = {.sums = sums,
                                          .groups = plan->groups,
                                          .columns = plan->lines * args->input.shape[1],
                                          .split = args->input.shape[1],
                                          .first = args->gamma_grad.data,
                                          .second = args->beta_grad.data,
                                          .first_dtype = te_cuda_store(args->gamma_grad.dtype),
                                          .second_dtype = te_cuda_store(args->beta_grad.dtype)};
    te_cuda_call calls[3];
    int count = 0;
    if (te_tensor_present(&args->grad_input)) {
        const size_t bytes = te_dtype_bytes(args->grad_input.dtype);
        params.output = te_cuda_view(&args->grad_input);
        params.output_dtype = te_cuda_store(args->grad_input.dtype);
        params.output_aligned = te_cuda_aligned(&params.output, bytes, 16);
        if (te_tensor_present(&args->grad_residual)) {
            params.residual = te_cuda_view(&args->grad_residual);
            params.residual_aligned = te_cuda_aligned(&params.residual, bytes, 16);
        }
    }
    place_heads(given, &params);
    if (plan->rows != LONG || (params.output.data != NULL && plan->teams.blocks > 0)) {
        calls[count++] =
            (te_cuda_call){"norm_backward",
                           name_kernel(args, plan->rows, &params),
                           {(uint32_t)plan->teams.blocks, 1, 1, (uint32_t)plan->teams.threads, 1, 1,
                            (uint32_t)plan->teams.shared},
                           &params,
                           sizeof params};
    }
    if (plan->rows == LONG && sums != NULL) {
        te_cuda_tile_job job;
        TE_TRY(plan_tiles(args, &tiles.tile, &job));
        tiles.tile.sums = sums;
        calls[count++] =
            (te_cuda_call){"norm_backward", sum_kernels[dtype], job.dims, &tiles, sizeof tiles};
    }
    if (sums != NULL) calls[count++] = te_cuda_sums_call(&adds);
    return te_cuda_run(te_context_state(context), calls, count, stream);
}

te_status te_cuda_norm_backward(void *self, te_context *context, const void *args_, void *stream)
{
    te_norm_backward_args args = by_rows(args_);
    te_tensor *const inputs[] = {&args.grad_output, &args.input, &args.grad_add};
    backward_plan plan;
    float *sums = NULL;
    (void)self;
    if (!te_tensor_present(&args.grad_input) && !te_tensor_present(&args.gamma_grad) &&
        !te_tensor_present(&args.beta_grad)) {
        return TE_OK;
    }
    TE_TRY(plan_backward(context, &args, &plan));
    TE_TRY(te_check_workspace(TE_OP_NORM_BACKWARD, args.workspace, args.workspace_size,
                              plan.copies + plan.sums));
    if (plan.rows == LONG) {
        TE_TRY(te_cuda_widen(context, inputs, 3, args.workspace, args.workspace_size, stream));
    }
    if (plan.sums > 0) sums = (float *)((unsigned char *)args.workspace + plan.copies);
    return launch(context, &args, args_, &plan, sums, stream);
}
