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

_Static_assert((int)TE_ROPE_PART_COUNT == TE_ROPE_PARTS, "the kernel has as many parts");

/* Lines that lie one behind the other are lines of one head each. */
static te_rope_heads heads_of(const te_tensor *tensor, int64_t channels, int64_t per_line)
{
    te_rope_heads heads = {te_cuda_view4(tensor), (int)per_line};
    if (per_line > 1 &&
        (tensor->shape[tensor->ndim - 2] == 1 || heads.view.strides[2] == channels * per_line)) {
        heads.view.strides[2] = channels;
        heads.per_line = 1;
    }
    return heads;
}

/* The kernel counts heads and channels of all parts in 32 bits. */
static te_status check_size(const te_tensor *input)
{
    const int64_t lines = input->shape[input->ndim - 2], width = input->shape[input->ndim - 1];
    if (width <= INT32_MAX / 4 / lines) return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "rope: %lld x %lld channels of a token, expected up to %d",
                   (long long)lines, (long long)width, INT32_MAX / 4);
}

/* Adds a part, and the round that it belongs to. */
static void add_part(te_rope_params *params, const te_rope_part *part, int64_t channels,
                     int64_t vector)
{
    const te_tensor *input = &part->input, *freqs = &part->freqs;
    const int64_t width = input->shape[input->ndim - 1], lines = input->shape[input->ndim - 2];
    const int turns = te_tensor_present(freqs) && freqs->shape[1] > 0;
    const int64_t dim = turns && channels > 0 ? channels : width;
    te_rope_part_params *added = &params->parts[params->count];
    te_rope_round *round = &params->rounds[params->round_count];
    added->heads = (int)(lines * (width / dim));
    added->dim = (int)dim;
    added->input = heads_of(input, dim, width / dim);
    added->output = heads_of(&part->output, dim, width / dim);
    added->in_place =
        added->input.per_line == added->output.per_line &&
        memcmp(&added->input.view, &added->output.view, sizeof added->input.view) == 0;
    params->count++;
    if (!added->in_place && (!turns || freqs->shape[1] < dim)) {
        params->copies[params->copy_count++] =
            (te_rope_copy){params->count - 1, turns ? (int)freqs->shape[1] : 0};
    }
    if (!turns) return;
    if (params->round_count > 0 && round[-1].last == params->count - 1 &&
        round[-1].freqs == freqs->data && round[-1].positions == freqs->shape[0] &&
        round[-1].rotary == freqs->shape[1]) {
        round[-1].heads += added->heads;
        round[-1].last = params->count;
        return;
    }
    *round = (te_rope_round){.freqs = freqs->data,
                             .positions = freqs->shape[0],
                             .rotary = (int)freqs->shape[1],
                             .split = (int)(freqs->shape[1] / 2),
                             .heads = added->heads,
                             .first = params->count - 1,
                             .last = params->count};
    if (params->interleaved) round->split = (int)te_round_up(round->split, vector);
    round->units = (int)te_ceil_div(round->split, vector);
    params->round_count++;
}

/* Every vector is a whole one at 16 bytes. */
static int vectors_fit(const te_rope_params *params, size_t bytes)
{
    const int64_t vector = 16 / (int64_t)bytes;
    int fit = 1;
    for (int i = 0; i < params->count; i++) {
        const te_rope_part_params *part = &params->parts[i];
        const int alone = part->input.per_line == 1 && part->output.per_line == 1;
        fit &= te_cuda_aligned4(&part->input.view, bytes, 16) &&
               te_cuda_aligned4(&part->output.view, bytes, 16) &&
               (alone || part->dim % vector == 0);
    }
    for (int i = 0; i < params->round_count; i++) {
        const te_rope_round *round = &params->rounds[i];
        fit &= round->split % vector == 0 && round->rotary == 2 * round->split;
    }
    return fit;
}

/* As few as go through the heads of a round, and the vectors that are copied, as often as the most
 * that are allowed. */
static uint32_t threads_of(const te_rope_params *params, int64_t vector)
{
    int64_t threads = MIN_THREADS, vectors = 0;
    for (int i = 0; i < params->round_count; i++) {
        const te_rope_round *round = &params->rounds[i];
        const int64_t units = round->units < TE_ROPE_UNITS ? round->units : TE_ROPE_UNITS;
        const int64_t turns =
            te_ceil_div((int64_t)round->heads * units, (int64_t)TE_ROPE_HEADS * TE_ROPE_THREADS);
        const int64_t needed = te_ceil_div(round->heads, turns * TE_ROPE_HEADS) * units;
        if (threads < needed) threads = needed;
    }
    for (int i = 0; i < params->count && params->round_count == 0; i++) {
        vectors += params->parts[i].heads * te_ceil_div(params->parts[i].dim, vector);
    }
    if (threads < te_ceil_div(vectors, TE_ROPE_HEADS)) {
        threads = te_ceil_div(vectors, TE_ROPE_HEADS);
    }
    threads = te_round_up(threads, 32);
    return threads < TE_ROPE_THREADS ? (uint32_t)threads : TE_ROPE_THREADS;
}

te_status te_cuda_rope(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[2][TE_DTYPE_COUNT] = {TE_CUDA_NAMES("te_rope_any_"),
                                                           TE_CUDA_NAMES("te_rope_")};
    const te_rope_args *args = args_;
    const te_tensor *input = &args->parts[0].input;
    const int first = input->ndim - 3; /* the dim of tokens */
    const size_t bytes = te_dtype_bytes(input->dtype);
    const int64_t vector = 16 / (int64_t)bytes;
    te_rope_params params = {.cu_seqlens = args->cu_seqlens.data,
                             .starts = args->start_positions.data,
                             .tokens = (first > 0 ? input->shape[0] : 1) * input->shape[first],
                             .sequence = input->shape[first],
                             .ranks = args->cp_size > 1 ? args->cp_size : 1,
                             .rank = args->cp_rank,
                             .interleaved = args->interleaved != 0,
                             .backward = args->backward != 0};
    te_cuda_call call = {"rope", NULL, {1, 1, 1, 1, 1, 1, 0}, &params, sizeof params};
    (void)self;
    for (int i = 0; i < TE_ROPE_PARTS; i++) {
        if (!te_tensor_present(&args->parts[i].input)) continue;
        if (te_tensor_numel(&args->parts[i].input) == 0) continue;
        TE_TRY(check_size(&args->parts[i].input));
        add_part(&params, &args->parts[i], args->channels, vector);
    }
    if (params.count == 0) return TE_OK;
    if (params.cu_seqlens != NULL) params.sequences = args->cu_seqlens.shape[0] - 1;
    call.name = kernels[vectors_fit(&params, bytes)][input->dtype];
    call.dims.grid_x = (uint32_t)(params.tokens < MAX_BLOCKS ? params.tokens : MAX_BLOCKS);
    call.dims.block_x = threads_of(&params, vector);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
