/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.c - host side of softmax and its gradient: a warp per row where everything is aligned and
 * a row fits into its registers, else a block per row.
 */
#include "cuda/kernels/softmax.h"

#include "core/philox.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

#define MOST_BLOCKS INT32_MAX
#define UNLIMITED (INT64_MAX / 2) /* farther than any window; sums with a query do not overflow */
#define SIZES 3                   /* of a warp's registers: set i holds 512 << i keys */

/* Kernels of one size. */
typedef struct kernel_set {
    const char *forward[TE_DTYPE_COUNT], *backward[TE_DTYPE_COUNT];
} kernel_set;

typedef struct softmax_shape {
    int64_t rows, heads, queries, keys;
    int vector; /* elements of 16 bytes */
} softmax_shape;

static softmax_shape shape_of(const te_tensor *tensor)
{
    const int64_t *shape = tensor->shape;
    return (softmax_shape){shape[0] * shape[1] * shape[2], shape[1], shape[2], shape[3],
                           16 / (int)te_dtype_bytes(tensor->dtype)};
}

/* The smallest kernel that holds a row; NULL where none does. */
static const kernel_set *find_kernels(int64_t keys)
{
    static const kernel_set sets[SIZES] = {
#define X(I, i, KEYS)                                                                              \
    [KEYS / 32].forward[TE_DTYPE_##I] = "te_softmax_" #i "_" #KEYS,                                \
            [KEYS / 32].backward[TE_DTYPE_##I] = "te_softmax_backward_" #i "_" #KEYS,
        TE_SOFTMAX_INSTANCES(X)
#undef X
    };
    for (int i = 0; i < SIZES; i++) {
        if (keys <= INT64_C(512) << i) return &sets[i];
    }
    return NULL;
}

static te_cuda_dims dims_of(const softmax_shape *shape, int by_warps)
{
    int64_t blocks = by_warps ? te_ceil_div(shape->rows, TE_SOFTMAX_WARPS) : shape->rows;
    int64_t threads = te_round_up(te_ceil_div(shape->keys, shape->vector), 32);
    if (threads > TE_SOFTMAX_ANY_THREADS) threads = TE_SOFTMAX_ANY_THREADS;
    if (by_warps) threads = TE_SOFTMAX_WARPS * 32;
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    return (te_cuda_dims){(uint32_t)blocks, 1, 1, (uint32_t)threads, 1, 1, 0};
}

/* A lane of mask or bias is read in vectors of as many elements as 16 bytes of the input hold. */
static int vectors_aligned(const te_view4 *view, size_t element, int vector)
{
    const int bytes = (int)element * vector;
    return view->data == NULL || te_cuda_aligned4(view, element, (size_t)(bytes < 16 ? bytes : 16));
}

static te_softmax_params params_of(const te_softmax_args *args, const softmax_shape *shape)
{
    const size_t bytes = te_dtype_bytes(args->input.dtype);
    te_softmax_params params = {.input = te_cuda_view4(&args->input),
                                .output = te_cuda_view4(&args->output),
                                .probabilities = te_cuda_view4(&args->probabilities),
                                .mask = te_cuda_view4(&args->mask),
                                .bias = te_cuda_view4(&args->bias),
                                .rows = shape->rows,
                                .heads = shape->heads,
                                .queries = shape->queries,
                                .keys = shape->keys,
                                .first_key = -UNLIMITED,
                                .end_key = UNLIMITED,
                                .scale = args->scale,
                                .bias_dtype = te_cuda_store(args->bias.dtype)};
    if (args->window_left >= 0) params.first_key = args->diagonal - args->window_left;
    if (args->window_right >= 0) params.end_key = args->diagonal + args->window_right + 1;
    if (args->dropout > 0.0F) {
        params.rng = (const te_index *)args->rng;
        params.drop_limit = te_cuda_drop_limit(args->dropout);
        params.keep_factor = te_keep_factor(args->dropout);
    }
    params.input_aligned = te_cuda_aligned4(&params.input, bytes, 16);
    params.output_aligned = te_cuda_aligned4(&params.output, bytes, 16);
    params.probabilities_aligned = te_cuda_aligned4(&params.probabilities, bytes, 16);
    params.mask_aligned = vectors_aligned(&params.mask, 1, shape->vector);
    params.bias_aligned =
        vectors_aligned(&params.bias, te_dtype_bytes(args->bias.dtype), shape->vector);
    return params;
}

/* Whether the kernels of a warp per row can read and write everything. */
static int fits_warp(const te_softmax_args *args, const te_softmax_params *params,
                     const softmax_shape *shape)
{
    if (shape->keys % shape->vector != 0 || !params->input_aligned || !params->output_aligned ||
        !params->probabilities_aligned) {
        return 0;
    }
    if (params->mask.data != NULL && (!params->mask_aligned || params->mask.strides[3] != 1)) {
        return 0;
    }
    return params->bias.data == NULL || (params->bias_aligned && params->bias.strides[3] == 1 &&
                                         args->bias.dtype == args->input.dtype);
}

te_status te_cuda_softmax(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const any[TE_DTYPE_COUNT] = {
#define X(I, i) [TE_DTYPE_##I] = "te_softmax_any_" #i,
        TE_SOFTMAX_ANY_INSTANCES(X)
#undef X
    };
    const te_softmax_args *args = args_;
    const softmax_shape shape = shape_of(&args->input);
    const kernel_set *set = find_kernels(shape.keys);
    te_softmax_params params;
    te_cuda_call call = {"softmax", any[args->input.dtype], {0}, &params, sizeof params};
    (void)self;
    if (te_tensor_numel(&args->input) == 0) return TE_OK;
    params = params_of(args, &shape);
    if (set != NULL && !fits_warp(args, &params, &shape)) set = NULL;
    if (set != NULL) call.name = set->forward[args->input.dtype];
    if (call.name == NULL) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "softmax: %s", te_dtype_name(args->input.dtype));
    }
    call.dims = dims_of(&shape, set != NULL);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

te_status te_cuda_softmax_backward(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const any[TE_DTYPE_COUNT] = {
#define X(I, i) [TE_DTYPE_##I] = "te_softmax_backward_any_" #i,
        TE_SOFTMAX_ANY_INSTANCES(X)
#undef X
    };
    const te_softmax_backward_args *args = args_;
    const te_dtype dtype = args->grad_output.dtype;
    const size_t bytes = te_dtype_bytes(dtype);
    const softmax_shape shape = shape_of(&args->grad_output);
    const kernel_set *set = find_kernels(shape.keys);
    te_softmax_backward_params params = {.grad_output = te_cuda_view4(&args->grad_output),
                                         .probabilities = te_cuda_view4(&args->probabilities),
                                         .grad_input = te_cuda_view4(&args->grad_input),
                                         .rows = shape.rows,
                                         .heads = shape.heads,
                                         .queries = shape.queries,
                                         .keys = shape.keys,
                                         .scale = args->scale,
                                         .keep_factor = 1.0F};
    te_cuda_call call = {"softmax_backward", any[dtype], {0}, &params, sizeof params};
    (void)self;
    if (te_tensor_numel(&args->grad_output) == 0) return TE_OK;
    if (args->dropout > 0.0F) {
        params.rng = (const te_index *)args->rng;
        params.drop_limit = te_cuda_drop_limit(args->dropout);
        params.keep_factor = te_keep_factor(args->dropout);
    }
    params.grad_output_aligned = te_cuda_aligned4(&params.grad_output, bytes, 16);
    params.probabilities_aligned = te_cuda_aligned4(&params.probabilities, bytes, 16);
    params.grad_input_aligned = te_cuda_aligned4(&params.grad_input, bytes, 16);
    if (shape.keys % shape.vector != 0 || !params.grad_output_aligned ||
        !params.probabilities_aligned || !params.grad_input_aligned) {
        set = NULL;
    }
    if (set != NULL) call.name = set->backward[dtype];
    if (call.name == NULL) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "softmax_backward: %s", te_dtype_name(dtype));
    }
    call.dims = dims_of(&shape, set != NULL);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
