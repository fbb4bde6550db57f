/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c - host side of quantize, dequantize and amax: which kernel, which grid, which
 * addresses allow 16-byte accesses. Grids are pure functions of the shape, so that sums are made in
 * the same order on every device.
 */
#include "cuda/kernels/quantize.h"

#include "core/status.h"
#include "cuda/kernels/dequantize.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

#define TILE 64
#define TILE_THREADS 128
#define TARGET_BLOCKS                                                                              \
    4096             /* beyond, a quantize block takes several tiles: fastest at 8192 x 4096 */
#define MAX_DEPTH 16 /* tiles of one block, unless the grid would not hold them */
#define WALK_BLOCKS 16384

_Static_assert(TE_QUANTIZE_PARTIALS == TE_AMAX_PARTIALS, "two names of one size");

/* How the tiles of a quantize call are dealt out. */
typedef struct tiling {
    int64_t columns; /* column tiles */
    int64_t groups;  /* row groups */
    int64_t depth;   /* row tiles of a group */
} tiling;

static tiling plan_tiles(const te_quantize_args *args)
{
    const te_quantized *output = &args->output;
    int64_t rows = args->input.shape[0], columns = args->input.shape[1], row_tiles, least;
    tiling tiles;
    /* The padding of either usage is written by the tiles that reach into it. Shapes alone decide:
     * the workspace query reads no pointers. */
    if (output->columnwise.ndim == 2 && output->columnwise.shape[1] > rows) {
        rows = output->columnwise.shape[1];
    }
    if (output->rowwise.ndim == 2 && output->rowwise.shape[1] > columns) {
        columns = output->rowwise.shape[1];
    }
    row_tiles = rows > 0 ? te_ceil_div(rows, TILE) : 1;
    tiles.columns = columns > 0 ? te_ceil_div(columns, TILE) : 1;
    tiles.depth = row_tiles * tiles.columns / TARGET_BLOCKS;
    if (tiles.depth > MAX_DEPTH) tiles.depth = MAX_DEPTH;
    least = te_ceil_div(row_tiles, TE_CUDA_MAX_GRID_Y);
    if (tiles.depth < least) tiles.depth = least;
    tiles.groups = te_ceil_div(row_tiles, tiles.depth);
    return tiles;
}

/* Column sums of several row groups meet in the workspace. */
te_status te_cuda_quantize_workspace(void *self, te_context *context, const void *args_,
                                     size_t *bytes)
{
    const te_quantize_args *args = args_;
    (void)self, (void)context;
    *bytes = 0;
    if (te_tensor_present(&args->bias_grad) || args->bias_grad.ndim > 0) {
        tiling tiles = plan_tiles(args);
        if (tiles.groups > 1) {
            *bytes = (size_t)tiles.groups * (size_t)args->input.shape[1] * sizeof(float);
        }
    }
    return TE_OK;
}

static void set_outputs(const te_quantize_args *args, te_quantize_params *params, te_dtype *dtype)
{
    const te_quantized *output = &args->output;
    const te_dtype either =
        te_dtype_is_fp8(output->rowwise.dtype) ? output->rowwise.dtype : output->columnwise.dtype;
    *dtype = TE_DTYPE_COUNT;
    if (output->mode == TE_SCALING_NONE) return;
    params->scale = output->scale;
    params->partials = args->partials;
    params->scale_pair = output->scale_pair;
    params->epsilon = args->amax_epsilon;
    params->power_2 = args->power_2_scale;
    params->partials_aligned = (uintptr_t)args->partials % 16 == 0;
    if (te_tensor_present(&output->rowwise)) {
        *dtype = output->rowwise.dtype;
        params->rowwise = te_cuda_view(&output->rowwise);
        params->rowwise_aligned = te_cuda_aligned(&params->rowwise, 1, 8);
    }
    if (te_tensor_present(&output->columnwise)) {
        *dtype = output->columnwise.dtype;
        params->columnwise = te_cuda_view(&output->columnwise);
        params->columnwise_aligned = te_cuda_aligned(&params->columnwise, 1, 16);
    }
    /* Without data the dtypes still say what the scale is for. */
    params->fp8_max = te_dtype_max(*dtype != TE_DTYPE_COUNT ? *dtype : either);
}

te_status te_cuda_quantize(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT][TE_DTYPE_COUNT + 1] = {
#define X(I, i, O, o) [TE_DTYPE_##I][TE_DTYPE_##O] = "te_quantize_" #i "_" #o,
        TE_QUANTIZE_INSTANCES(X)
#undef X
    };
    const te_quantize_args *args = args_;
    const tiling tiles = plan_tiles(args);
    te_quantize_params params = {.input = te_cuda_view(&args->input),
                                 .noop = args->noop,
                                 .amax = args->output.amax,
                                 .depth = (int)tiles.depth};
    te_quantize_sums_params sums = {.sums = args->workspace,
                                    .noop = args->noop,
                                    .groups = tiles.groups,
                                    .columns = params.input.columns};
    te_cuda_call calls[2] = {
        {"quantize",
         NULL,
         {(uint32_t)tiles.columns, (uint32_t)tiles.groups, 1, TILE_THREADS, 1, 1, 0},
         &params,
         sizeof params},
        {"quantize", "te_quantize_sums", {1, 1, 1, TE_SUMS_THREADS, 1, 1, 0}, &sums, sizeof sums}};
    te_dtype dtype;
    int count = 1;
    (void)self;
    set_outputs(args, &params, &dtype);
    params.input_aligned = te_cuda_aligned(&params.input, te_dtype_bytes(args->input.dtype), 16);
    if (te_tensor_present(&args->bias_grad) && params.input.columns > 0) {
        params.bias_dtype = sums.bias_dtype = te_cuda_store(args->bias_grad.dtype);
        params.bias_grad = sums.bias_grad = args->bias_grad.data;
        if (tiles.groups > 1) {
            size_t needed = (size_t)(tiles.groups * params.input.columns) * sizeof(float);
            if (args->workspace == NULL || args->workspace_size < needed) {
                return TE_FAIL(TE_ERROR_INVALID, "quantize: workspace of %zu bytes, %zu are needed",
                               args->workspace != NULL ? args->workspace_size : 0, needed);
            }
            params.sums = args->workspace;
            calls[1].dims.grid_x = (uint32_t)te_ceil_div(params.input.columns, TE_SUMS_COLUMNS);
            count = 2;
        }
    }
    calls[0].name = kernels[args->input.dtype][dtype];
    if (calls[0].name == NULL) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "quantize: %s to %s", te_dtype_name(args->input.dtype),
                       te_dtype_name(dtype));
    }
    return te_cuda_run(te_context_state(context), calls, count, stream);
}

te_status te_cuda_amax(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT] = {
#define X(I, i) [TE_DTYPE_##I] = "te_amax_" #i,
        TE_AMAX_INSTANCES(X)
#undef X
    };
    const te_amax_args *args = args_;
    const size_t bytes = te_dtype_bytes(args->input.dtype);
    te_amax_params params = {.input = te_cuda_view(&args->input), .partials = args->partials};
    te_cuda_call call = {"quantize",
                         kernels[args->input.dtype],
                         {1, 1, 1, TE_AMAX_THREADS, 1, 1, 0},
                         &params,
                         sizeof params};
    (void)self;
    if (call.name == NULL) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "amax: %s", te_dtype_name(args->input.dtype));
    }
    if (te_cuda_is_dense(&params.input)) te_cuda_flatten(&params.input);
    params.aligned = te_cuda_aligned(&params.input, bytes, 16);
    params.walk = te_cuda_plan_walk(params.input.rows, params.input.columns, 16 / (int)bytes,
                                    TE_AMAX_PARTIALS, &call.dims.grid_x);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

te_status te_cuda_dequantize(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[2][TE_DTYPE_COUNT][TE_DTYPE_COUNT] = {
#define X(I, i, O, o)                                                                              \
    [0][TE_DTYPE_##I][TE_DTYPE_##O] = "te_dequantize_" #i "_" #o,                                  \
    [1][TE_DTYPE_##I][TE_DTYPE_##O] = "te_dequantize_transposed_" #i "_" #o,
        TE_DEQUANTIZE_INSTANCES(X)
#undef X
    };
    const te_dequantize_args *args = args_;
    const int transposed = !te_tensor_present(&args->input.rowwise);
    const te_tensor *input = transposed ? &args->input.columnwise : &args->input.rowwise;
    const size_t bytes = te_dtype_bytes(args->output.dtype);
    const int elements = 16 / (int)bytes;
    te_dequantize_params params = {.input = te_cuda_view(input),
                                   .output = te_cuda_view(&args->output)};
    te_cuda_call call = {"dequantize", NULL, {1, 1, 1, 1, 1, 1, 0}, &params, sizeof params};
    (void)self;
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    call.name = kernels[transposed][input->dtype][args->output.dtype];
    if (call.name == NULL) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "dequantize: %s to %s", te_dtype_name(input->dtype),
                       te_dtype_name(args->output.dtype));
    }
    params.scale_inv = args->input.scale_pair + TE_PAIR_INVERSE;
    if (transposed) {
        int64_t tiles = te_ceil_div(params.output.columns, TILE);
        params.input_aligned = te_cuda_aligned(&params.input, 1, 8);
        call.dims.grid_x = (uint32_t)te_ceil_div(params.output.rows, TILE);
        call.dims.grid_y = (uint32_t)(tiles < TE_CUDA_MAX_GRID_Y ? tiles : TE_CUDA_MAX_GRID_Y);
        call.dims.block_x = TILE_THREADS;
    } else {
        if (params.input.columns == params.output.columns && te_cuda_is_dense(&params.input) &&
            te_cuda_is_dense(&params.output)) {
            te_cuda_flatten(&params.input);
            te_cuda_flatten(&params.output);
        }
        params.walk = te_cuda_plan_walk(params.output.rows, params.output.columns, elements,
                                        WALK_BLOCKS, &call.dims.grid_x);
        params.input_aligned = te_cuda_aligned(&params.input, 1, (size_t)elements);
        call.dims.block_x = 256;
    }
    params.output_aligned = te_cuda_aligned(&params.output, bytes, 16);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
