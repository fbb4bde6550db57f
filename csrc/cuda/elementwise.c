/* SPDX-License-Identifier: Apache-2.0
 *
 * elementwise.c - host side of fill, cast, copy and byte transpose.
 */
#include "cuda/ops.h"

#include <string.h>

#include "core/status.h"
#include "core/fp8.h"
#include "cuda/tiles.h"

#define WALK_THREADS 256
#define WALK_UNROLL 4
#define WALK_BLOCKS 16384 /* more gain nothing: blocks stride over what is left */

te_walk te_cuda_plan_walk(int64_t rows, int64_t columns, int elements, uint32_t limit,
                          uint32_t *blocks)
{
    te_walk walk = {0, 0, 0};
    int64_t vectors = te_ceil_div(columns, elements);
    while (walk.lanes_log2 < 8 && (1LL << walk.lanes_log2) < vectors) walk.lanes_log2++;
    walk.column_tiles = te_ceil_div(vectors, (int64_t)WALK_UNROLL << walk.lanes_log2);
    walk.tiles = te_ceil_div(rows, WALK_THREADS >> walk.lanes_log2) * walk.column_tiles;
    *blocks = walk.tiles < 1 ? 1 : walk.tiles < limit ? (uint32_t)walk.tiles : limit;
    return walk;
}

/* View of a matrix of 8-byte elements as one of twice as many of 4. */
static te_view narrow(te_view view, size_t element)
{
    if (element == 8) {
        view.columns *= 2;
        view.stride *= 2;
    }
    return view;
}

static te_status launch_walk(te_context *context, const char *name, uint32_t blocks,
                             const void *params, size_t size, void *stream)
{
    const te_cuda_call call = {
        "elementwise", name, {blocks, 1, 1, WALK_THREADS, 1, 1, 0}, params, size};
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

te_status te_cuda_cast(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT][TE_DTYPE_COUNT] = {
#define X(I, i, O, o) [TE_DTYPE_##I][TE_DTYPE_##O] = "te_cast_" #i "_" #o,
        TE_CAST_INSTANCES(X)
#undef X
    };
    static const char *const copies[] = {
#define X(BYTES) [BYTES] = "te_copy_" #BYTES,
        TE_COPY_INSTANCES(X)
#undef X
    };
    const te_cast_args *args = args_;
    const te_dtype from = args->input.dtype, to = args->output.dtype;
    size_t in_bytes = te_dtype_bytes(from), out_bytes = te_dtype_bytes(to);
    te_cast_params params = {.input = narrow(te_cuda_view(&args->input), in_bytes),
                             .output = narrow(te_cuda_view(&args->output), out_bytes)};
    const char *name;
    uint32_t blocks;
    int elements;
    (void)self;
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    if (in_bytes == 8) in_bytes = out_bytes = 4;
    name = from == to ? copies[in_bytes] : kernels[from][to];
    if (params.input.rows == params.output.rows && params.input.columns == params.output.columns &&
        te_cuda_is_dense(&params.input) && te_cuda_is_dense(&params.output)) {
        te_cuda_flatten(&params.input);
        te_cuda_flatten(&params.output);
    }
    elements = 16 / (int)(in_bytes > out_bytes ? in_bytes : out_bytes);
    params.walk = te_cuda_plan_walk(params.output.rows, params.output.columns, elements,
                                    WALK_BLOCKS, &blocks);
    params.input_aligned = te_cuda_aligned(&params.input, in_bytes, (size_t)elements * in_bytes);
    params.output_aligned =
        te_cuda_aligned(&params.output, out_bytes, (size_t)elements * out_bytes);
    return launch_walk(context, name, blocks, &params, sizeof params, stream);
}

te_status te_cuda_fill(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[] = {
#define X(BYTES) [BYTES] = "te_fill_" #BYTES,
        TE_COPY_INSTANCES(X)
#undef X
    };
    const te_fill_args *args = args_;
    unsigned char pattern[8];
    te_fill_params params = {0};
    uint32_t blocks;
    size_t bytes;
    (void)self;
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    bytes = te_encode(args->output.dtype, args->value, pattern);
    for (size_t i = bytes; i < sizeof pattern; i++) pattern[i] = pattern[i % bytes];
    memcpy(&params.pattern, pattern, sizeof params.pattern);
    memcpy(&params.pattern_high, pattern + 4, sizeof params.pattern_high);
    params.output = narrow(te_cuda_view(&args->output), bytes);
    if (bytes == 8) bytes = 4;
    if (te_cuda_is_dense(&params.output)) te_cuda_flatten(&params.output);
    params.walk = te_cuda_plan_walk(params.output.rows, params.output.columns, 16 / (int)bytes,
                                    WALK_BLOCKS, &blocks);
    params.output_aligned = te_cuda_aligned(&params.output, bytes, 16);
    return launch_walk(context, kernels[bytes], blocks, &params, sizeof params, stream);
}

te_status te_cuda_transpose(void *self, te_context *context, const void *args_, void *stream)
{
    const te_transpose_args *args = args_;
    te_transpose_params params = {te_cuda_view(&args->input), te_cuda_view(&args->output), 0, 0};
    const te_cuda_call call = {"elementwise", "te_transpose", te_cuda_tile_dims(&params.output),
                               &params, sizeof params};
    (void)self;
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    params.input_aligned = te_cuda_aligned(&params.input, 1, 8);
    params.output_aligned = te_cuda_aligned(&params.output, 1, 16);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
