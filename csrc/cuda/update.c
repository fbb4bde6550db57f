/* SPDX-License-Identifier: Apache-2.0
 *
 * update.c - host side of updates: many tensors in few launches.
 */
#include "core/status.h"
#include "core/update.h"
#include "cuda/kernels/update.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

_Static_assert(sizeof(te_update_params) <= 4096, "parameters of a kernel");

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
    };
    const te_cuda_call call = {"update",
                               kernels[kind],
                               {(uint32_t)blocks, 1, 1, TE_UPDATE_THREADS, 1, 1, 0},
                               params,
                               sizeof *params};
    if (params->count == 0) return TE_OK;
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

te_status te_cuda_update(te_context *context, const te_update_args *args, void *stream)
{
    te_update_params params = {.numbers = te_update_numbers_of(args),
                               .beta1 = args->beta1,
                               .beta2 = args->beta2,
                               .lr_at = args->lr_at,
                               .grad_scale_at = args->grad_scale_at,
                               .step_at = args->step_at,
                               .flag = args->flag};
    int64_t blocks = 0;
    for (int list = 0; list <= TE_UPDATE_ROUNDED; list++) {
        if (args->lists[list] == NULL) continue;
        params.dtypes |= (unsigned)te_cuda_store(args->lists[list][0].dtype) << (4 * list);
    }
    for (int64_t i = 0; i < args->count; i++) {
        const int64_t count = te_tensor_numel(&args->lists[TE_UPDATE_GRAD][i]);
        const int64_t more = te_ceil_div(count, TE_UPDATE_CHUNK);
        if (count == 0) continue;
        if (params.count == TE_UPDATE_ENTRIES || blocks + more > INT32_MAX) {
            TE_TRY(launch(context, args->kind, &params, blocks, stream));
            params.count = 0;
            blocks = 0;
        }
        params.entries[params.count++] = entry_of(args, i, (uint32_t)blocks);
        blocks += more;
    }
    return launch(context, args->kind, &params, blocks, stream);
}
