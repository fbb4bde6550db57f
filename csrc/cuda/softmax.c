/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.c - host side of softmax and its gradient: which team of threads holds a row in its
 * registers, and in which order the rows are gone through.
 */
#include "cuda/kernels/softmax.h"

#include "core/philox.h"
#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

#define UNLIMITED (INT64_MAX / 2) /* farther than any window; sums with a query do not overflow */

/* Kernels of one team. */
typedef struct kernel_set {
    int lanes, keys; /* threads of a warp that share a row; what each of them holds */
    const char *forward[TE_DTYPE_COUNT], *backward[TE_DTYPE_COUNT];
} kernel_set;

#define NAMES(I, i, ANY, LANES, KEYS)                                                              \
    .forward[TE_DTYPE_##I] = "te_softmax_" ANY #i "_" #LANES "_" #KEYS,                            \
    .backward[TE_DTYPE_##I] = "te_softmax_backward_" ANY #i "_" #LANES "_" #KEYS,
#define SET(ANY, LANES, KEYS) {.lanes = LANES, .keys = KEYS, TE_NUMBERS(NAMES, ANY, LANES, KEYS)},
static const kernel_set aligned_sets[] = {TE_SOFTMAX_TEAMS(SET, "")};
static const kernel_set any_sets[] = {TE_SOFTMAX_ANY_TEAMS(SET, "any_")};
#undef SET
#undef NAMES

static const kernel_set long_set = {
#define NAMES(I, i, ...)                                                                           \
    .forward[TE_DTYPE_##I] = "te_softmax_long_" #i,                                                \
    .backward[TE_DTYPE_##I] = "te_softmax_backward_long_" #i,
    TE_NUMBERS(NAMES, )
#undef NAMES
};

/* How a tensor of [batch, heads, queries, keys] is gone through. */
typedef struct softmax_plan {
    int64_t sizes[3]; /* outer, middle, inner */
    int order[3];     /* which dims they are */
    int64_t keys;
    int vector; /* elements of 16 bytes */
    const kernel_set *set;
    int threads; /* of a team */
} softmax_plan;

/* Heads of one batch entry follow each other. But where batch entries share a bias, those that
 * read the same line of it do; and where the queries would not fill a block, the largest dim is the
 * inner one. */
static softmax_plan plan_of(const te_tensor *tensor, int batches_inside)
{
    softmax_plan plan = {.order = {0, 1, 2},
                         .keys = tensor->shape[3],
                         .vector = 16 / (int)te_dtype_bytes(tensor->dtype)};
    int inner = 2;
    if (batches_inside && tensor->shape[0] > 1) {
        inner = 0;
    } else if (tensor->shape[2] < TE_SOFTMAX_THREADS / 16) {
        for (int i = 0; i < 2; i++) {
            if (tensor->shape[i] > tensor->shape[inner]) inner = i;
        }
    }
    for (int i = 0, next = 0; i < 3; i++) {
        if (i != inner) plan.order[next++] = i;
    }
    plan.order[2] = inner;
    for (int i = 0; i < 3; i++) plan.sizes[i] = tensor->shape[plan.order[i]];
    return plan;
}

/* The smallest team that holds a row. Rows that do not all begin at 16 bytes take up to one vector
 * more. */
static void choose_team(softmax_plan *plan, int aligned, int rows_aligned)
{
    const kernel_set *const sets = aligned ? aligned_sets : any_sets;
    const int count = (int)(aligned ? sizeof aligned_sets : sizeof any_sets) / (int)sizeof *sets;
    const int64_t keys = plan->keys > 0 ? plan->keys : 1; /* rows of none have a sum */
    const int64_t needed = keys + (rows_aligned ? 0 : plan->vector - 1);
    plan->set = &long_set;
    plan->threads = TE_SOFTMAX_LONG_THREADS;
    for (int i = count - 1; i >= 0; i--) {
        const int64_t lanes = te_ceil_div(needed, sets[i].keys);
        if (lanes > (sets[i].lanes < 32 ? sets[i].lanes : TE_SOFTMAX_THREADS)) break;
        plan->set = &sets[i];
        plan->threads = (int)te_round_up(lanes, sets[i].lanes);
    }
}

static te_softmax_walk walk_of(const softmax_plan *plan, const te_tensor *tensor)
{
    const int64_t *shape = tensor->shape;
    const int64_t rows[3] = {shape[1] * shape[2], shape[2], 1};
    te_softmax_walk walk = {.inner = plan->sizes[2]};
    for (int i = 0; i < 3; i++) {
        walk.row_strides[i] = rows[plan->order[i]];
        walk.head_strides[i] = plan->order[i] == 1;
        walk.query_strides[i] = plan->order[i] == 2;
    }
    return walk;
}

static te_view4 view_of(const softmax_plan *plan, const te_tensor *tensor)
{
    const te_view4 given = te_cuda_view4(tensor);
    te_view4 view = given;
    for (int i = 0; i < 3; i++) view.strides[i] = given.strides[plan->order[i]];
    return view;
}

/* Behind the last element. */
static const unsigned char *end_of(const te_tensor *tensor)
{
    const te_view4 view = te_cuda_view4(tensor);
    int64_t last = 0;
    if (view.data == NULL) return NULL;
    for (int i = 0; i < 4; i++) last += (tensor->shape[i] - 1) * view.strides[i];
    return view.data + (size_t)(last + 1) * te_dtype_bytes(tensor->dtype);
}

/* Every row of both begins at the same place within 16 bytes. */
static int rows_alike(const te_view4 *a, const te_view4 *b, size_t element)
{
    int alike = ((uintptr_t)a->data - (uintptr_t)b->data) % 16 == 0;
    for (int i = 0; i < 3; i++)
        alike &= (size_t)(a->strides[i] - b->strides[i]) * element % 16 == 0;
    return alike;
}

/* A line of mask or bias is read in vectors of as many elements as 16 bytes of the input hold. */
static int vectors_aligned(const te_view4 *view, size_t element, int vector)
{
    const int bytes = (int)element * vector;
    return view->data == NULL ||
           (view->strides[3] == 1 &&
            te_cuda_aligned4(view, element, (size_t)(bytes < 16 ? bytes : 16)));
}

/* One launch for each part of the rows that a grid can hold. */
static te_status run(te_cuda_state *cuda, const softmax_plan *plan, te_cuda_call *call,
                     te_softmax_walk *walk, void *stream)
{
    int64_t teams = plan->threads > 32 ? 1 : TE_SOFTMAX_THREADS / plan->threads;
    if (teams > plan->sizes[2]) teams = te_round_up(plan->sizes[2], 32 / plan->threads);
    call->dims = (te_cuda_dims){(uint32_t)te_ceil_div(plan->sizes[2], teams),
                                1,
                                1,
                                (uint32_t)plan->threads,
                                (uint32_t)teams,
                                1,
                                0};
    for (walk->outer = 0; walk->outer < plan->sizes[0]; walk->outer += TE_CUDA_MAX_GRID_Y) {
        const int64_t outer = plan->sizes[0] - walk->outer;
        call->dims.grid_z = (uint32_t)(outer < TE_CUDA_MAX_GRID_Y ? outer : TE_CUDA_MAX_GRID_Y);
        for (walk->middle = 0; walk->middle < plan->sizes[1]; walk->middle += TE_CUDA_MAX_GRID_Y) {
            const int64_t middle = plan->sizes[1] - walk->middle;
            call->dims.grid_y =
                (uint32_t)(middle < TE_CUDA_MAX_GRID_Y ? middle : TE_CUDA_MAX_GRID_Y);
            TE_TRY(te_cuda_run(cuda, call, 1, stream));
        }
    }
    return TE_OK;
}

/* How many rows there is something to write of: of those without keys, `sums`. */
static int64_t rows_of(const te_tensor *scores, const te_tensor *sums)
{
    const int64_t *shape = scores->shape;
    return shape[3] > 0 || te_tensor_requested(sums) ? shape[0] * shape[1] * shape[2] : 0;
}

static te_softmax_params params_of(const te_softmax_args *args, const softmax_plan *plan)
{
    te_softmax_params params = {.input = view_of(plan, &args->input),
                                .output = view_of(plan, &args->output),
                                .probabilities = view_of(plan, &args->probabilities),
                                .mask = view_of(plan, &args->mask),
                                .bias = view_of(plan, &args->bias),
                                .sink = args->sink.data,
                                .log_sum = args->log_sum.data,
                                .input_end = end_of(&args->input),
                                .mask_end = end_of(&args->mask),
                                .bias_end = end_of(&args->bias),
                                .keys = plan->keys,
                                .first_key = -UNLIMITED,
                                .end_key = UNLIMITED,
                                .windowed = args->window_left >= 0 || args->window_right >= 0,
                                .walk = walk_of(plan, &args->input),
                                .scale = args->scale,
                                .keep_factor = 1.0F,
                                .bias_dtype = te_cuda_store(args->bias.dtype)};
    if (args->window_left >= 0) params.first_key = args->diagonal - args->window_left;
    if (args->window_right >= 0) params.end_key = args->diagonal + args->window_right + 1;
    if (args->dropout > 0.0F) {
        params.rng = (const te_index *)args->rng;
        params.drop_limit = te_cuda_drop_limit(args->dropout);
        params.keep_factor = te_keep_factor(args->dropout);
    }
    params.probabilities_alike =
        rows_alike(&params.probabilities, &params.output, te_dtype_bytes(args->input.dtype));
    return params;
}

te_status te_cuda_softmax(void *self, te_context *context, const void *args_, void *stream)
{
    const te_softmax_args *args = args_;
    const te_dtype dtype = args->input.dtype;
    const size_t bytes = te_dtype_bytes(dtype);
    const int shared_bias = te_tensor_present(&args->bias) && args->bias.shape[0] == 1;
    softmax_plan plan = plan_of(&args->input, shared_bias);
    te_softmax_params params;
    te_cuda_call call = {"softmax", NULL, {0}, &params, sizeof params};
    int aligned, rows_aligned;
    (void)self;
    if (rows_of(&args->input, &args->log_sum) == 0) return TE_OK;
    params = params_of(args, &plan);
    rows_aligned = te_cuda_aligned4(&params.output, bytes, 16);
    aligned = rows_aligned && plan.keys % plan.vector == 0 &&
              te_cuda_aligned4(&params.input, bytes, 16) &&
              (params.probabilities.data == NULL || params.probabilities_alike) &&
              vectors_aligned(&params.mask, 1, plan.vector) &&
              vectors_aligned(&params.bias, bytes, plan.vector) &&
              (params.bias.data == NULL || args->bias.dtype == dtype);
    choose_team(&plan, aligned, rows_aligned);
    call.name = plan.set->forward[dtype];
    return run(te_context_state(context), &plan, &call, &params.walk, stream);
}

te_status te_cuda_softmax_backward(void *self, te_context *context, const void *args_, void *stream)
{
    const te_softmax_backward_args *args = args_;
    const te_dtype dtype = args->grad_output.dtype;
    const size_t bytes = te_dtype_bytes(dtype);
    softmax_plan plan = plan_of(&args->grad_output, 0);
    te_softmax_backward_params params = {.grad_output = view_of(&plan, &args->grad_output),
                                         .probabilities = view_of(&plan, &args->probabilities),
                                         .grad_input = view_of(&plan, &args->grad_input),
                                         .grad_output_end = end_of(&args->grad_output),
                                         .probabilities_end = end_of(&args->probabilities),
                                         .sink = args->sink.data,
                                         .log_sum = args->log_sum.data,
                                         .grad_sinks = args->grad_sinks.data,
                                         .keys = plan.keys,
                                         .walk = walk_of(&plan, &args->grad_output),
                                         .scale = args->scale,
                                         .keep_factor = 1.0F};
    te_cuda_call call = {"softmax_backward", NULL, {0}, &params, sizeof params};
    int aligned, rows_aligned;
    (void)self;
    if (rows_of(&args->grad_output, &args->grad_sinks) == 0) return TE_OK;
    if (args->dropout > 0.0F) {
        params.rng = (const te_index *)args->rng;
        params.drop_limit = te_cuda_drop_limit(args->dropout);
        params.keep_factor = te_keep_factor(args->dropout);
    }
    rows_aligned = te_cuda_aligned4(&params.grad_input, bytes, 16);
    aligned = rows_aligned && plan.keys % plan.vector == 0 &&
              te_cuda_aligned4(&params.grad_output, bytes, 16) &&
              te_cuda_aligned4(&params.probabilities, bytes, 16);
    choose_team(&plan, aligned, rows_aligned);
    call.name = plan.set->backward[dtype];
    return run(te_context_state(context), &plan, &call, &params.walk, stream);
}
