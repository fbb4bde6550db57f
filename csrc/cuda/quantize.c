/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c - host side of quantize, dequantize and amax: which kernel, which grid, which
 * addresses allow 16-byte accesses.
 */
#include "cuda/tiles.h"

#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"
#include "cuda/kernels/dequantize.h"
#include "cuda/microscale.h"
#include "cuda/ops.h"

#define WALK_BLOCKS 16384

static te_cuda_tile_request quantize_request(const te_quantize_args *args)
{
    const int sums = te_tensor_requested(&args->bias_grad);
    return (te_cuda_tile_request){.op = TE_OP_QUANTIZE,
                                  .outputs = 1,
                                  .dtype = args->input.dtype,
                                  .rows = args->input.shape[0],
                                  .columns = args->input.shape[1],
                                  .cast = &args->cast,
                                  .bias_grad = sums ? &args->bias_grad : NULL,
                                  .noop = args->noop,
                                  .workspace = args->workspace,
                                  .workspace_size = args->workspace_size};
}

/* Column sums of several row groups meet in the workspace. */
te_status te_cuda_quantize_workspace(void *self, te_context *context, const void *args_,
                                     size_t *bytes)
{
    const te_quantize_args *args = args_;
    const te_cuda_tile_request request = quantize_request(args);
    (void)self, (void)context;
    *bytes = te_cuda_tile_workspace(&request);
    return TE_OK;
}

te_status te_cuda_quantize(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[TE_CUDA_WAYS][TE_DTYPE_COUNT][TE_DTYPE_COUNT + 1] = {
#define X(I, i, O, o) [TE_CUDA_BY_SCALE][TE_DTYPE_##I][TE_DTYPE_##O] = "te_quantize_" #i "_" #o,
        TE_QUANTIZE_INSTANCES(X)
#undef X
#define X(I, i, O, o)                                                                              \
    [TE_CUDA_BY_TILES][TE_DTYPE_##I][TE_DTYPE_##O] = "te_quantize_scaled_" #i "_" #o,
            TE_QUANTIZE_SCALED_INSTANCES(X)
#undef X
#define X(I, i, O, o) [TE_CUDA_MXFP8][TE_DTYPE_##I][TE_DTYPE_##O] = "te_mxfp8_" #i "_" #o,
                TE_MXFP8_INSTANCES(X)
#undef X
    };
    static const char *const nvfp4[TE_DTYPE_COUNT] = TE_CUDA_NAMES("te_nvfp4_");
    const te_quantize_args *args = args_;
    const te_cuda_tile_request request = quantize_request(args);
    const int by_rows = args->cast.row_scaled != 0 && args->input.shape[0] > 0 &&
                        te_tensor_requested(&args->cast.result.row);
    te_quantize_params params = {.input = te_cuda_view(&args->input)};
    te_cuda_call call = {.params = &params, .params_size = sizeof params}, rows_call;
    te_nvfp4_rows_params rows;
    te_cuda_tile_job job;
    (void)self;
    TE_TRY(te_cuda_plan_tile_job(&request, &params.tile, &job));
    params.input_aligned = te_cuda_aligned(&params.input, te_dtype_bytes(args->input.dtype), 16);
    call.family = te_cuda_is_micro(job.way) ? "microscale" : "quantize";
    call.name = job.way == TE_CUDA_NVFP4 ? nvfp4[args->input.dtype]
                                         : kernels[job.way][args->input.dtype][job.dtype];
    if (by_rows) rows_call = te_cuda_micro_rows_call(args, &rows);
    return te_cuda_run_tile_job(te_context_state(context), &job, &call, by_rows ? &rows_call : NULL,
                                stream);
}

te_status te_cuda_amax(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT] = TE_CUDA_NAMES("te_amax_");
    const te_amax_args *args = args_;
    const size_t bytes = te_dtype_bytes(args->input.dtype);
    te_amax_params params = {.input = te_cuda_view(&args->input), .partials = args->partials};
    te_cuda_call call = {"quantize",
                         kernels[args->input.dtype],
                         {1, 1, 1, TE_AMAX_THREADS, 1, 1, 0},
                         &params,
                         sizeof params};
    (void)self;
    if (args->hadamard != 0) {
        return te_cuda_hadamard_amax(te_context_state(context), args, stream);
    }
    if (te_cuda_is_dense(&params.input)) te_cuda_flatten(&params.input);
    params.aligned = te_cuda_aligned(&params.input, bytes, 16);
    params.walk = te_cuda_plan_walk(params.input.rows, params.input.columns, 16 / (int)bytes,
                                    TE_AMAX_PARTIALS, &call.dims.grid_x);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

/* Steps from scale to scale: tiles have 1 or 128 elements in each direction, or all. */
static void set_scales(te_scaling_mode mode, const te_tensor *data, const te_tensor *scales,
                       te_dequantize_params *params)
{
    const te_scale_layout layout = te_scale_layout_of(mode, data->shape[0], data->shape[1]);
    params->scale_inv = te_inverse_scale(scales);
    params->across_step = layout.across_step;
    params->along_step = layout.along_step;
    params->across_log2 = layout.across == 128 ? 7 : 0;
    params->along_log2 = layout.along == 128 ? 7 : 0;
}

te_status te_cuda_dequantize(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[2][TE_DTYPE_COUNT][TE_DTYPE_COUNT] = {
#define X(O, o, I, i)                                                                              \
    [0][TE_DTYPE_##I][TE_DTYPE_##O] = "te_dequantize_" #i "_" #o,                                  \
    [1][TE_DTYPE_##I][TE_DTYPE_##O] = "te_dequantize_transposed_" #i "_" #o,
        TE_DEQUANTIZE_INSTANCES(X)
#undef X
    };
    const te_dequantize_args *args = args_;
    const int transposed = !te_tensor_present(&args->input.row);
    const te_tensor *input = transposed ? &args->input.column : &args->input.row;
    const size_t bytes = te_dtype_bytes(args->output.dtype);
    const int elements = 16 / (int)bytes;
    te_dequantize_params params = {.input = te_cuda_view(input),
                                   .output = te_cuda_view(&args->output),
                                   .limit = te_dtype_max(args->output.dtype)};
    te_cuda_call call = {"dequantize", NULL, {1, 1, 1, 1, 1, 1, 0}, &params, sizeof params};
    (void)self;
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    if (te_scales_micro(args->input.mode)) {
        return te_cuda_micro_dequantize(te_context_state(context), &args->input, !transposed, 0,
                                        &args->output, stream);
    }
    call.name = kernels[transposed][input->dtype][args->output.dtype];
    set_scales(args->input.mode, input,
               transposed ? &args->input.column_scales : &args->input.row_scales, &params);
    if (transposed) {
        params.input_aligned = te_cuda_aligned(&params.input, 1, 8);
        call.dims = te_cuda_tile_dims(&params.output);
    } else {
        if (!te_scales_own(args->input.mode) && params.input.columns == params.output.columns &&
            te_cuda_is_dense(&params.input) && te_cuda_is_dense(&params.output)) {
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
