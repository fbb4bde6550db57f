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
_Static_assert(sizeof(te_update_cast_params) <= 4096, "parameters of a kernel");

/* The tensor of a list, and whether its groups are aligned. */
static unsigned char *take(const te_update_args *args, int list, int64_t i, int *aligned)
{
    const te_tensor *tensor = args->lists[list] == NULL ? NULL : &args->lists[list][i];
    if (tensor == NULL) return NULL;
    *aligned &= (uintptr_t)tensor->data % (TE_UPDATE_GROUP * te_dtype_bytes(tensor->dtype)) == 0;
    return tensor->data;
}

static te_update_entry entry_of(const te_update_args *args, int64_t i, uint32_t first)
{
    te_update_entry entry = {
        .count = te_tensor_numel(&args->lists[TE_UPDATE_GRAD][i]), .first = first, .aligned = 1};
    entry.grad = take(args, TE_UPDATE_GRAD, i, &entry.aligned);
    entry.value = take(args, TE_UPDATE_VALUE, i, &entry.aligned);
    entry.mean = take(args, TE_UPDATE_MEAN, i, &entry.aligned);
    entry.square = take(args, TE_UPDATE_SQUARE, i, &entry.aligned);
    entry.rounded = take(args, TE_UPDATE_ROUNDED, i, &entry.aligned);
    entry.remainder = take(args, TE_UPDATE_REMAINDER, i, &entry.aligned);
    return entry;
}

static te_status launch(te_context *context, te_update_kind kind, te_update_params *params,
                        int64_t blocks, void *stream)
{
    static const char *const kernels[TE_UPDATE_KIND_COUNT] = {
        [TE_UPDATE_ADAM] = "te_update_adam_kernel",
        [TE_UPDATE_SGD] = "te_update_sgd_kernel",
        [TE_UPDATE_SCALE] = "te_update_scale_kernel",
        [TE_UPDATE_RESCALE] = "te_update_rescale_kernel",
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

/* A tensor and its cast; the tiles of it and of those before are counted in *blocks. */
static te_update_cast_entry cast_entry_of(const te_update_args *args, int64_t i, int64_t *blocks)
{
    const te_quantize_args *quantize = &args->casts[i];
    const te_cuda_tile_request request = {.outputs = 1,
                                          .rows = quantize->input.shape[0],
                                          .columns = quantize->input.shape[1],
                                          .cast = &quantize->cast};
    te_dtype dtype;
    te_update_cast_entry entry = {.lists = entry_of(args, i, (uint32_t)*blocks),
                                  .to = te_cuda_cast_target(&request, &dtype),
                                  .rows = request.rows,
                                  .columns = request.columns};
    int64_t rows = request.rows, columns = request.columns; /* with padding */
    if (entry.to.column.data != NULL && entry.to.column.columns > rows)
        rows = entry.to.column.columns;
    if (entry.to.row.data != NULL && entry.to.row.columns > columns) columns = entry.to.row.columns;
    entry.lists.aligned &= request.columns % TE_UPDATE_GROUP == 0;
    entry.across = (int)te_ceil_div(columns, TE_CUDA_TILE);
    *blocks += entry.across * te_ceil_div(rows, TE_CUDA_TILE);
    return entry;
}

/* The tensors whose casts are part of their pass. */
static te_status launch_casts(te_context *context, const te_update_args *args,
                              const te_update_common *common, void *stream)
{
    te_update_cast_params params = {.common = *common};
    te_cuda_call call = {.family = "update",
                         .name = args->kind == TE_UPDATE_ADAM ? "te_update_adam_cast_kernel"
                                                              : "te_update_sgd_cast_kernel",
                         .params = &params,
                         .params_size = sizeof params};
    int64_t blocks = 0;
    for (int64_t i = 0; i < args->count; i++) {
        if (!joins(args, i)) continue;
        params.entries[params.count++] = cast_entry_of(args, i, &blocks);
        if (params.count < TE_UPDATE_CAST_ENTRIES && blocks < INT32_MAX / 2) continue;
        call.dims = (te_cuda_dims){(uint32_t)blocks, 1, 1, TE_UPDATE_THREADS, 1, 1, 0};
        TE_TRY(te_cuda_run(te_context_state(context), &call, blocks > 0, stream));
        params.count = 0;
        blocks = 0;
    }
    call.dims = (te_cuda_dims){(uint32_t)blocks, 1, 1, TE_UPDATE_THREADS, 1, 1, 0};
    return te_cuda_run(te_context_state(context), &call, blocks > 0, stream);
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
        if (count == 0 || joins(args, i)) continue;
        if (params.count == TE_UPDATE_ENTRIES || blocks + more > INT32_MAX) {
            TE_TRY(launch(context, args->kind, &params, blocks, stream));
            params.count = 0;
            blocks = 0;
        }
        params.entries[params.count++] = entry_of(args, i, (uint32_t)blocks);
        blocks += more;
    }
    TE_TRY(launch(context, args->kind, &params, blocks, stream));
    TE_TRY(launch_casts(context, args, &params.common, stream));
    return run_casts(context, args, stream);
}
