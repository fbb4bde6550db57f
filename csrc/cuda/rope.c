/* SPDX-License-Identifier: Apache-2.0
 *
 * rope.c - host side of the rotary position embedding: a block per token, as large as the heads
 * need.
 */
#include "cuda/kernels/rope.h"

#include <string.h>

#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

#define MAX_BLOCKS INT32_MAX
#define MIN_THREADS 64 /* that make cosines and sines where there is one head */

/* Every unit is two whole vectors at 16 bytes. */
static int vectors_fit(const te_rope_params *params, size_t bytes)
{
    const int64_t vector = 16 / (int64_t)bytes;
    return te_cuda_aligned4(&params->input, bytes, 16) &&
           te_cuda_aligned4(&params->output, bytes, 16) && params->split % vector == 0 &&
           params->rotary == 2 * params->split;
}

/* Half as many as there are units: a thread has two at a time. */
static uint32_t threads_of(const te_rope_params *params)
{
    const int64_t units = params->units < TE_ROPE_UNITS ? params->units : TE_ROPE_UNITS;
    const int64_t threads = te_round_up(te_ceil_div(params->heads, 2) * units, 32);
    if (threads < MIN_THREADS) return MIN_THREADS;
    return threads < TE_ROPE_THREADS ? (uint32_t)threads : TE_ROPE_THREADS;
}

te_status te_cuda_rope(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[2][TE_DTYPE_COUNT] = {TE_CUDA_NAMES("te_rope_any_"),
                                                           TE_CUDA_NAMES("te_rope_")};
    const te_rope_args *args = args_;
    const te_tensor *input = &args->input;
    const int64_t *shape = input->shape + input->ndim - 3; /* [sequence, heads, dim] */
    const int64_t batch = input->ndim > 3 ? input->shape[0] : 1;
    const size_t bytes = te_dtype_bytes(input->dtype);
    const int64_t vector = 16 / (int64_t)bytes, rotary = args->freqs.shape[1];
    te_rope_params params = {.input = te_cuda_view4(input),
                             .output = te_cuda_view4(&args->output),
                             .freqs = args->freqs.data,
                             .cu_seqlens = args->cu_seqlens.data,
                             .starts = args->start_positions.data,
                             .tokens = batch * shape[0],
                             .sequence = shape[0],
                             .positions = args->freqs.shape[0],
                             .heads = shape[1],
                             .dim = shape[2],
                             .rotary = rotary,
                             .split = rotary / 2,
                             .interleaved = args->interleaved != 0,
                             .backward = args->backward != 0};
    te_cuda_call call = {"rope", NULL, {1, 1, 1, 1, 1, 1, 0}, &params, sizeof params};
    (void)self;
    if (te_tensor_numel(input) == 0) return TE_OK;
    if (params.cu_seqlens != NULL) params.sequences = args->cu_seqlens.shape[0] - 1;
    if (params.interleaved) params.split = te_round_up(params.split, vector);
    params.units = te_ceil_div(params.split, vector);
    params.in_place = memcmp(&params.input, &params.output, sizeof params.input) == 0;
    call.name = kernels[vectors_fit(&params, bytes)][input->dtype];
    call.dims.grid_x = (uint32_t)(params.tokens < MAX_BLOCKS ? params.tokens : MAX_BLOCKS);
    call.dims.block_x = threads_of(&params);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
