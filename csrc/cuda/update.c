/* SPDX-License-Identifier: Apache-2.0
 *
 * update.c - host side of updates: many tensors in few launches.
 */
#include "core/status.h"
#include "core/update.h"
#include "cuda/kernels/update.h"
#include "cuda/ops.h"
#include "cuda/tiles.h"

_Static_assert(sizeof(te_update_params) <= 4096, "parameters of a kernel");

/* The tensor of a list, and whether its groups of so many elements are aligned. */
static unsigned char *take(const te_update_args *args, int list, int64_t i, size_t group,
                           int *aligned)
{
    const te_tensor *tensor = args->lists[list] == NULL ? NULL : &args->lists[list][i];
    size_t bytes;
    if (tensor == NULL) return NULL;
    bytes = group * te_dtype_bytes(tensor->dtype);
    *aligned &= (uintptr_t)tensor->data % (bytes < 16 ? bytes : 16) == 0;
    return tensor->data;
}

static te_update_entry entry_of(const te_update_args *args, int64_t i, size_t group, uint32_t first)
{
    te_update_entry entry = {
        .count = te_tensor_numel(&args->lists[TE_UPDATE_GRAD][i]), .first = first, .aligned = 1};
    entry.grad = take(args, TE_UPDATE_GRAD, i, group, &entry.aligned);
    entry.value = take(args, TE_UPDATE_VALUE, i, group, &entry.aligned);
    entry.mean = take(args, TE_UPDATE_MEAN, i, group, &entry.aligned);
    entry.square = take(args, TE_UPDATE_SQUARE, i, group, &entry.aligned);
    entry.rounded = take(args, TE_UPDATE_ROUNDED, i, group, &entry.aligned);
    entry.remainder = take(args, TE_UPDATE_REMAINDER, i, group, &entry.aligned);
    return entry;
}

static te_status launch(te_context *context, te_update_kind kind, te_update_params *params,
                        int64_t blocks, void *stream)
{
    static const char *const kernels[TE_UPDATE_KIND_COUNT] = {
        [TE_UPDATE_ADAM] = "te_update_adam_kernel",
        [TE_UPDATE_SGD] = "te_update_sgd_kernel",
        [TE_UPDATE_SCALE] = "te_update_scale_kernel",
    };
    const te_cuda_call call = {"update",
                               kernels[kind],
                               {(uint32_t)blocks, 1, 1, TE_UPDATE_THREADS, 1, 1, 0},
                               params,
                               sizeof *params};
    if (params->count == 0) return TE_OK;
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

static te_update_common common_of(const te_update_args *args)
{
    te_update_common common = {.numbers = te_update_numbers_of(args),
                               .beta1 = args->beta1,
                               .beta2 = args->beta2,
                               .lr_at = args->lr_at,
                               .grad_scale_at = args->grad_scale_at,
                               .step_at = args->step_at,
                               .flag = args->flag};
    for (int list = 0; list <= TE_UPDATE_ROUNDED; list++) {
        if (args->lists[list] == NULL) continue;
        common.dtypes |= (unsigned)te_cuda_store(args->lists[list][0].dtype) << (4 * list);
    }
    return common;
}

/* Whether the cast of a tensor is part of its pass: it has one scale. */
static int joins(const te_update_args *args, int64_t i)
{
    const te_operand *result = args->casts == NULL ? NULL : &args->casts[i].cast.result;
    return result != NULL && te_cuda_way_of(result) == TE_CUDA_BY_SCALE &&
           (te_tensor_present(&result->row) || te_tensor_present(&result->column));
}

/* One tensor, and its cast. */
static te_status launch_cast(te_context *context, const te_update_args *args,
                             const te_update_common *common, int64_t i, void *stream)
{
    const te_quantize_args *quantize = &args->casts[i];
    const te_cuda_tile_request request = {.op = TE_OP_QUANTIZE,
                                          .outputs = 1,
                                          .dtype = quantize->input.dtype,
                                          .rows = quantize->input.shape[0],
                                          .columns = quantize->input.shape[1],
                                          .cast = &quantize->cast};
    te_update_cast_params params = {.entry = entry_of(args, i, TE_UPDATE_GROUP, 0),
                                    .common = *common};
    const te_cuda_call call = {.family = "update",
                               .name = args->kind == TE_UPDATE_ADAM ? "te_update_adam_cast_kernel"
                                                                    : "te_update_sgd_cast_kernel",
                               .params = &params,
                               .params_size = sizeof params};
    te_cuda_tile_job job;
    TE_TRY(te_cuda_plan_tile_job(&request, &params.tile, &job));
    params.entry.aligned &= request.columns % TE_UPDATE_GROUP == 0;
    job.dims.block_x = TE_UPDATE_THREADS;
    job.dims.grid_y *= (uint32_t)params.tile.depth; /* a tile a block, as far as the grid goes */
    if (job.dims.grid_y > TE_CUDA_MAX_GRID_Y) job.dims.grid_y = TE_CUDA_MAX_GRID_Y;
    return te_cuda_run_tile_job(te_context_state(context), &job, &call, NULL, stream);
}

/* The casts that are passes of their own, after the update. */
static te_status run_casts(te_context *context, const te_update_args *args, void *stream)
{
    for (int64_t i = 0; args->casts != NULL && i < args->count; i++) {
        te_quantize_args cast = args->casts[i];
        if (joins(args, i)) continue;
        cast.noop = (const float *)args->flag; /* an integer is 0 where its bits as a float are */
        TE_TRY(te_cuda_quantize(NULL, context, &cast, stream));
    }
    return TE_OK;
}

te_status te_cuda_update(te_context *context, const te_update_args *args, void *stream)
{
    te_update_params params = {.common = common_of(args)};
    int64_t blocks = 0;
    for (int64_t i = 0; i < args->count; i++) {
        const int64_t count = te_tensor_numel(&args->lists[TE_UPDATE_GRAD][i]);
        const int64_t more = te_ceil_div(count, TE_UPDATE_CHUNK);
        if (joins(args, i)) {
            TE_TRY(launch_cast(context, args, &params.common, i, stream));
            continue;
        }
        if (count == 0) continue;
        if (params.count == TE_UPDATE_ENTRIES || blocks + more > INT32_MAX) {
            TE_TRY(launch(context, args->kind, &params, blocks, stream));
            params.count = 0;
            blocks = 0;
        }
        params.entries[params.count++] = entry_of(args, i, TE_UPDATE_GROUP, (uint32_t)blocks);
        blocks += more;
    }
    TE_TRY(launch(context, args->kind, &params, blocks, stream));
    return run_casts(context, args, stream);
}
