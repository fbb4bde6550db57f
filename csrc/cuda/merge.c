/* SPDX-License-Identifier: Apache-2.0
 *
 * merge.c - host side of what joins two attentions: some lanes of a warp per head of a token.
 */
#include "cuda/kernels/merge.h"

#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

#define MAX_BLOCKS INT32_MAX

static te_merge_operand operand_of(const te_tensor *tensor)
{
    return (te_merge_operand){.view = te_cuda_view4(tensor), .dtype = te_cuda_store(tensor->dtype)};
}

te_status te_cuda_attention_merge(void *self, te_context *context, const void *args_, void *stream)
{
    const te_attention_merge_args *args = args_;
    const int64_t *shape = args->total.shape;
    te_merge_params params = {.total = operand_of(&args->total),
                              .step = operand_of(&args->step),
                              .output = operand_of(&args->output),
                              .total_statistics = te_cuda_view4(&args->total_statistics),
                              .step_statistics = te_cuda_view4(&args->step_statistics),
                              .statistics = te_cuda_view4(&args->statistics),
                              .rows = shape[0] * shape[1] * shape[2],
                              .tokens = shape[1],
                              .heads = shape[2],
                              .channels = shape[3]};
    int64_t blocks;
    te_cuda_call call = {"merge", "te_merge", {0}, &params, sizeof params};
    (void)self;
    if (params.rows == 0) return TE_OK;
    params.aligned = te_cuda_aligned4(&params.total.view, te_dtype_bytes(args->total.dtype), 16) &&
                     te_cuda_aligned4(&params.step.view, te_dtype_bytes(args->step.dtype), 16) &&
                     te_cuda_aligned4(&params.output.view, te_dtype_bytes(args->output.dtype), 16);
    while (params.lanes_log2 < TE_MERGE_LANES_LOG2 &&
           ((int64_t)TE_MERGE_VECTOR << params.lanes_log2) < params.channels) {
        params.lanes_log2++;
    }
    blocks = te_ceil_div(params.rows, TE_MERGE_THREADS >> params.lanes_log2);
    call.dims = (te_cuda_dims){
        (uint32_t)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS), 1, 1, TE_MERGE_THREADS, 1, 1, 0};
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
