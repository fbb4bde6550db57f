/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.c - host side of the activations and their gradients: one launch on tiles each, with
 * column sums and partial maxima around it.
 */
#include "cuda/kernels/activation.h"

#include "core/check.h"
#include "core/scales.h"
#include "core/status.h"
#include "cuda/ops.h"
#include "cuda/tiles.h"
#include "cuda/widen.h"

/* The kernels of a source. */
#define BY_WAY(prefix)                                                                             \
    {                                                                                              \
        [TE_CUDA_BY_SCALE] = TE_CUDA_NAMES(prefix),                                                \
        [TE_CUDA_BY_TILES] = TE_CUDA_NAMES(prefix "scaled_"),                                      \
        [TE_CUDA_MXFP8] = TE_CUDA_NAMES(prefix "mxfp8_"),                                          \
        [TE_CUDA_NVFP4] = TE_CUDA_NAMES(prefix "nvfp4_"),                                          \
    }

/* The function of one number in an activation, gated or not. */
typedef struct shape {
    int shape; /* TE_SHAPE_* */
    float alpha;
} shape;

static const shape shapes[TE_ACTIVATION_COUNT] = {
    [TE_ACTIVATION_GELU] = {TE_SHAPE_GELU, 0.0F},
    [TE_ACTIVATION_GEGLU] = {TE_SHAPE_GELU, 0.0F},
    [TE_ACTIVATION_QGELU] = {TE_SHAPE_SWISH, 1.702F},
    [TE_ACTIVATION_QGEGLU] = {TE_SHAPE_SWISH, 1.702F},
    [TE_ACTIVATION_RELU] = {TE_SHAPE_RELU, 0.0F},
    [TE_ACTIVATION_REGLU] = {TE_SHAPE_RELU, 0.0F},
    [TE_ACTIVATION_SRELU] = {TE_SHAPE_SRELU, 0.0F},
    [TE_ACTIVATION_SREGLU] = {TE_SHAPE_SRELU, 0.0F},
    [TE_ACTIVATION_SILU] = {TE_SHAPE_SWISH, 1.0F},
    [TE_ACTIVATION_SWIGLU] = {TE_SHAPE_SWISH, 1.0F},
    [TE_ACTIVATION_GLU] = {TE_SHAPE_GLU, 0.0F},
    [TE_ACTIVATION_CLAMPED_SWIGLU] = {TE_SHAPE_CLAMPED, 0.0F},
};

/* Sets what is read, but for the gradient, and the function; `columns` is a half where gated. */
static void set_input(te_activation_kernel_params *params, const te_tensor *input,
                      te_activation_kind kind, const te_activation_params *numbers)
{
    const size_t bytes = te_dtype_bytes(input->dtype);
    params->input = te_cuda_view(input);
    params->gate = params->input;
    if (te_activation_is_gated(kind)) {
        params->input.columns /= 2;
        params->gate.columns = params->input.columns;
        if (params->gate.data != NULL) {
            params->gate.data += (size_t)params->input.columns * bytes;
        }
    }
    params->aligned =
        te_cuda_aligned(&params->input, bytes, 16) && te_cuda_aligned(&params->gate, bytes, 16);
    params->shape = shapes[kind].shape;
    params->alpha = shapes[kind].alpha;
    if (kind == TE_ACTIVATION_CLAMPED_SWIGLU) {
        params->alpha = numbers->alpha;
        params->limit = numbers->limit;
        params->offset = numbers->linear_offset;
    }
}

static int64_t value_columns(const te_tensor *input, te_activation_kind kind)
{
    return te_activation_is_gated(kind) ? input->shape[1] / 2 : input->shape[1];
}

te_status te_cuda_activation(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[2][TE_CUDA_WAYS][TE_DTYPE_COUNT] = {
        BY_WAY("te_activation_"), BY_WAY("te_activation_gated_")};
    const te_activation_args *args = args_;
    const te_cuda_tile_request request = {.op = TE_OP_ACTIVATION,
                                          .outputs = 1,
                                          .dtype = TE_DTYPE_F32,
                                          .rows = args->input.shape[0],
                                          .columns = value_columns(&args->input, args->kind),
                                          .cast = &args->cast};
    te_activation_kernel_params params = {0};
    te_cuda_call call = {.family = "activation", .params = &params, .params_size = sizeof params};
    te_cuda_tile_job job;
    (void)self;
    TE_TRY(te_cuda_plan_tile_job(&request, &params.tile, &job));
    set_input(&params, &args->input, args->kind, &args->params);
    call.name = kernels[te_activation_is_gated(args->kind)][job.way][args->input.dtype];
    return te_cuda_run_tile_job(te_context_state(context), &job, &call, NULL, stream);
}

te_status te_cuda_softcap(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const kernels[TE_CUDA_WAYS][TE_DTYPE_COUNT] = BY_WAY("te_softcap_");
    const te_softcap_args *args = args_;
    const size_t bytes = te_dtype_bytes(args->input.dtype);
    const te_cuda_tile_request request = {.op = TE_OP_SOFTCAP,
                                          .outputs = 1,
                                          .dtype = TE_DTYPE_F32,
                                          .rows = args->input.shape[0],
                                          .columns = args->input.shape[1],
                                          .cast = &args->cast};
    te_activation_kernel_params params = {.input = te_cuda_view(&args->input), .limit = args->cap};
    te_cuda_call call = {.family = "activation", .params = &params, .params_size = sizeof params};
    te_cuda_tile_job job;
    (void)self;
    if (te_tensor_present(&args->grad_output)) params.grad = te_cuda_view(&args->grad_output);
    params.aligned =
        te_cuda_aligned(&params.input, bytes, 16) && te_cuda_aligned(&params.grad, bytes, 16);
    TE_TRY(te_cuda_plan_tile_job(&request, &params.tile, &job));
    call.name = kernels[job.way][args->input.dtype];
    return te_cuda_run_tile_job(te_context_state(context), &job, &call, NULL, stream);
}

static te_cuda_tile_request backward_request(const te_activation_backward_args *args)
{
    const int sums = te_tensor_requested(&args->bias_grad);
    return (te_cuda_tile_request){.op = TE_OP_ACTIVATION_BACKWARD,
                                  .outputs = te_activation_is_gated(args->kind) ? 2 : 1,
                                  .dtype = TE_DTYPE_F32,
                                  .rows = args->input.shape[0],
                                  .columns = value_columns(&args->input, args->kind),
                                  .cast = &args->cast,
                                  .bias_grad = sums ? &args->bias_grad : NULL,
                                  .workspace = args->workspace,
                                  .workspace_size = args->workspace_size};
}

/* Tiles that belong to both halves of the result: then it is made in fp32 and cast from there. */
static int straddles(const te_activation_backward_args *args)
{
    const te_cuda_way way = te_cuda_way_of(&args->cast.result);
    return way != TE_CUDA_BY_SCALE && te_activation_is_gated(args->kind) &&
           args->input.shape[1] / 2 % te_cuda_tile_side(way) != 0;
}

static size_t wide_bytes(const te_activation_backward_args *args)
{
    return (te_dtype_size(TE_DTYPE_F32, te_tensor_numel(&args->input)) + 255) / 256 * 256;
}

static te_quantize_args cast_of_wide(const te_activation_backward_args *args)
{
    const te_tensor *x = &args->input;
    te_quantize_args cast = {.size = sizeof cast, .cast = args->cast, .bias_grad = args->bias_grad};
    cast.input = te_matrix(args->workspace, TE_DTYPE_F32, x->device, x->shape[0], x->shape[1]);
    cast.cast.result.wide = (te_tensor){.data = NULL};
    return cast;
}

static te_status cast_from_wide(te_context *context, const te_activation_backward_args *args,
                                void *stream)
{
    const size_t bytes = wide_bytes(args);
    te_quantize_args cast = cast_of_wide(args);
    te_activation_backward_args plain = *args;
    TE_TRY(te_check_workspace(TE_OP_ACTIVATION_BACKWARD, args->workspace, args->workspace_size,
                              bytes));
    plain.cast = (te_cast_request){.result = {.wide = cast.input}};
    plain.bias_grad = (te_tensor){.data = NULL};
    plain.workspace = (unsigned char *)args->workspace + bytes;
    plain.workspace_size = args->workspace_size - bytes;
    TE_TRY(te_cuda_activation_backward(NULL, context, &plain, stream));
    if (te_tensor_present(&args->cast.result.wide)) {
        const te_cast_args copy = {
            .size = sizeof copy, .input = cast.input, .output = args->cast.result.wide};
        TE_TRY(te_cuda_cast(NULL, context, &copy, stream));
    }
    cast.workspace = plain.workspace;
    cast.workspace_size = plain.workspace_size;
    return te_cuda_quantize(NULL, context, &cast, stream);
}

/* Column sums of several row groups, behind copies of inputs whose dtypes differ. */
te_status te_cuda_activation_backward_workspace(void *self, te_context *context, const void *args_,
                                                size_t *bytes)
{
    const te_activation_backward_args *args = args_;
    const te_tensor *const inputs[] = {&args->grad_output, &args->input};
    const te_cuda_tile_request request = backward_request(args);
    *bytes = te_cuda_widen_workspace(inputs, 2) + te_cuda_tile_workspace(&request);
    if (straddles(args)) {
        const te_quantize_args cast = cast_of_wide(args);
        size_t sums = 0;
        TE_TRY(te_cuda_quantize_workspace(self, context, &cast, &sums));
        if (sums > *bytes) *bytes = sums;
        *bytes += wide_bytes(args);
    }
    return TE_OK;
}

te_status te_cuda_activation_backward(void *self, te_context *context, const void *args_,
                                      void *stream)
{
    static const char *const kernels[2][TE_CUDA_WAYS][TE_DTYPE_COUNT] = {
        BY_WAY("te_activation_backward_"), BY_WAY("te_activation_backward_gated_")};
    const te_activation_backward_args *args = args_;
    te_cuda_tile_request request = backward_request(args);
    te_activation_kernel_params params = {0};
    te_cuda_call call = {.family = "activation", .params = &params, .params_size = sizeof params};
    te_tensor grad = args->grad_output, input = args->input;
    te_tensor *const inputs[] = {&grad, &input};
    const size_t copies = te_cuda_widen_workspace((const te_tensor *const *)inputs, 2);
    te_cuda_tile_job job;
    (void)self;
    if (straddles(args)) return cast_from_wide(context, args, stream);
    TE_TRY(te_cuda_widen(context, inputs, 2, args->workspace, args->workspace_size, stream));
    if (copies > 0) {
        request.workspace = (unsigned char *)args->workspace + copies;
        request.workspace_size = args->workspace_size - copies;
    }
    TE_TRY(te_cuda_plan_tile_job(&request, &params.tile, &job));
    set_input(&params, &input, args->kind, &args->params);
    params.grad = te_cuda_view(&grad);
    params.aligned =
        params.aligned && te_cuda_aligned(&params.grad, te_dtype_bytes(grad.dtype), 16);
    call.name = kernels[te_activation_is_gated(args->kind)][job.way][input.dtype];
    return te_cuda_run_tile_job(te_context_state(context), &job, &call, NULL, stream);
}
