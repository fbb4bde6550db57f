/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm.c - host side of norms: many tensors in few launches, then the roots.
 */
#include "core/update.h"

#include "core/status.h"
#include "cuda/kernels/l2norm.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

_Static_assert(sizeof(te_l2norm_params) <= 4096, "parameters of a kernel");
_Static_assert(sizeof(te_l2norm_root_params) <= 4096, "parameters of a kernel");

static te_status launch(te_context *context, const char *kernel, uint32_t threads, int64_t blocks,
                        const void *params, size_t size, void *stream)
{
    const te_cuda_call call = {
        "l2norm", kernel, {(uint32_t)blocks, 1, 1, threads, 1, 1, 0}, params, size};
    return te_cuda_run(te_context_state(context), &call, blocks > 0, stream);
}

static te_l2norm_entry entry_of(const te_tensor *tensor, int64_t first)
{
    const size_t group = TE_L2NORM_GROUP * te_dtype_bytes(tensor->dtype);
    return (te_l2norm_entry){.data = tensor->data,
                             .count = te_tensor_numel(tensor),
                             .first = (unsigned)first,
                             .dtype = (short)te_cuda_store(tensor->dtype),
                             .aligned = (uintptr_t)tensor->data % group == 0};
}

/* The sums of all chunks. */
static te_status launch_sums(te_context *context, const te_l2norm_args *args, void *stream)
{
    te_l2norm_params params = {.factor = args->factor, .sums = args->workspace};
    int64_t blocks = 0;
    for (int64_t i = 0; i < args->count; i++) {
        const int64_t more = te_l2norm_chunks(&args->tensors[i]);
        if (more == 0) continue;
        if (params.count == TE_L2NORM_ENTRIES || blocks + more > INT32_MAX) {
            TE_TRY(launch(context, "te_l2norm_kernel", TE_L2NORM_THREADS, blocks, &params,
                          sizeof params, stream));
            params.sums += blocks;
            params.count = 0;
            blocks = 0;
        }
        params.entries[params.count++] = entry_of(&args->tensors[i], blocks);
        blocks += more;
    }
    return launch(context, "te_l2norm_kernel", TE_L2NORM_THREADS, blocks, &params, sizeof params,
                  stream);
}

static te_status launch_roots(te_context *context, const te_l2norm_root_params *params,
                              int64_t count, void *stream)
{
    return launch(context, "te_l2norm_root_kernel", TE_L2NORM_ADDERS, count, params, sizeof *params,
                  stream);
}

te_status te_cuda_l2norm(te_context *context, const te_l2norm_args *args, void *stream)
{
    te_l2norm_root_params params = {.sums = args->workspace, .norms = args->each};
    int64_t chunks = 0, ranges = 0;
    TE_TRY(launch_sums(context, args, stream));
    for (int64_t i = 0; i < args->count; i++) {
        chunks += te_l2norm_chunks(&args->tensors[i]);
        if (args->each == NULL) continue;
        params.begin[++ranges] = chunks;
        if (ranges < TE_L2NORM_RANGES && i + 1 < args->count) continue;
        TE_TRY(launch_roots(context, &params, ranges, stream));
        params.norms += ranges;
        params.begin[0] = chunks;
        ranges = 0;
    }
    params.begin[0] = 0;
    params.begin[1] = chunks;
    params.norms = args->total;
    params.flag = args->flag;
    return launch_roots(context, &params, 1, stream);
}
