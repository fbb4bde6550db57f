/* SPDX-License-Identifier: Apache-2.0
 *
 * run.c - runs a range of a plan's stages: resolves each stage's buffers and fills its args struct.
 */
#include <string.h>

#include "core/backend.h"
#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"
#include "layer/layout.h"
#include "layer/plan.h"

/* What one run resolves its stages against. */
typedef struct run_state {
    const te_plan *plan;
    te_op_table *table; /* held while stages run or are measured */
    te_context *context;
    te_tensor buffers[TE_PLAN_MAX_BUFFERS];
    int32_t slots[TE_PLAN_SLOTS];
    void *workspace;
    size_t workspace_size;
    void *stream;
} run_state;

typedef union stage_args {
    te_quantize_args quantize;
    te_gemm_args gemm;
    te_amax_args amax;
    te_cast_args cast;
    te_norm_args norm;
    te_norm_backward_args norm_backward;
    te_activation_args activation;
    te_activation_backward_args activation_backward;
} stage_args;

static const te_tensor *stage_buffer(const run_state *run, const te_stage *stage, int position)
{
    static const te_tensor absent;
    int16_t at = stage->buffer[position];
    return at == TE_NO_BUFFER ? &absent : &run->buffers[at];
}

/* Address of the stage's element of a float buffer: its slot of a state chunk, element `index` of a
 * pair. NULL where the stage has no such buffer. */
static float *stage_float(const run_state *run, const te_stage *stage, int position, int index)
{
    int16_t at = stage->buffer[position];
    if (at == TE_NO_BUFFER) return NULL;
    if (run->plan->buffers[at].role == TE_ROLE_STATE) {
        index = run->slots[stage->direction] + stage->slot;
    }
    return (float *)run->buffers[at].data + index;
}

/* What a stage casts. */
static te_cast_request stage_cast(const run_state *run, const te_stage *stage)
{
    te_cast_request cast = {
        .result = {.row = *stage_buffer(run, stage, TE_QUANTIZE_ROW),
                   .row_scales = *stage_buffer(run, stage, TE_QUANTIZE_PAIR),
                   .column = *stage_buffer(run, stage, TE_QUANTIZE_COLUMN),
                   .column_scales = *stage_buffer(run, stage, TE_QUANTIZE_PAIR)},
        .scale = stage_float(run, stage, TE_QUANTIZE_SCALE, TE_SCALES_SCALE),
        .amax = stage_float(run, stage, TE_QUANTIZE_HISTORY, 0),
        .partials = stage_float(run, stage, TE_QUANTIZE_PARTIALS, 0),
        .amax_epsilon = stage->amax_epsilon,
        .power_2_scale = stage->power_2_scale};
    if (cast.scale != NULL || cast.partials != NULL) cast.result.mode = TE_SCALING_TENSOR;
    return cast;
}

/* The same of a stage that makes its values. */
static te_cast_request stage_result(const run_state *run, const te_stage *stage)
{
    te_cast_request cast = stage_cast(run, stage);
    cast.result.wide = *stage_buffer(run, stage, TE_PRODUCE_OUTPUT);
    cast.amax_partials = stage_float(run, stage, TE_PRODUCE_AMAX_PARTIALS, 0);
    return cast;
}

static void bind_quantize(const run_state *run, const te_stage *stage, te_quantize_args *args)
{
    args->size = sizeof *args;
    args->input = *stage_buffer(run, stage, TE_QUANTIZE_INPUT);
    args->bias_grad = *stage_buffer(run, stage, TE_QUANTIZE_BIAS_GRAD);
    args->cast = stage_cast(run, stage);
    args->workspace = run->workspace;
    args->workspace_size = run->workspace_size;
}

static void bind_norm(const run_state *run, const te_stage *stage, te_norm_args *args)
{
    args->size = sizeof *args;
    args->kind = (te_norm_kind)stage->kind;
    args->flags = stage->flags;
    args->eps = stage->norm_eps;
    args->input = *stage_buffer(run, stage, TE_QUANTIZE_INPUT);
    args->gamma = *stage_buffer(run, stage, TE_NORM_GAMMA);
    args->beta = *stage_buffer(run, stage, TE_NORM_BETA);
    args->mean = *stage_buffer(run, stage, TE_NORM_MEAN);
    args->rsigma = *stage_buffer(run, stage, TE_NORM_RSIGMA);
    args->cast = stage_result(run, stage);
    args->workspace = run->workspace;
    args->workspace_size = run->workspace_size;
}

static void bind_norm_backward(const run_state *run, const te_stage *stage,
                               te_norm_backward_args *args)
{
    args->size = sizeof *args;
    args->kind = (te_norm_kind)stage->kind;
    args->flags = stage->flags;
    args->grad_output = *stage_buffer(run, stage, TE_NORM_BACKWARD_GRAD_OUTPUT);
    args->grad_add = *stage_buffer(run, stage, TE_NORM_BACKWARD_GRAD_ADD);
    args->input = *stage_buffer(run, stage, TE_NORM_BACKWARD_INPUT);
    args->gamma = *stage_buffer(run, stage, TE_NORM_BACKWARD_GAMMA);
    args->mean = *stage_buffer(run, stage, TE_NORM_BACKWARD_MEAN);
    args->rsigma = *stage_buffer(run, stage, TE_NORM_BACKWARD_RSIGMA);
    args->grad_input = *stage_buffer(run, stage, TE_NORM_BACKWARD_GRAD_INPUT);
    args->gamma_grad = *stage_buffer(run, stage, TE_NORM_BACKWARD_GRAD_GAMMA);
    args->beta_grad = *stage_buffer(run, stage, TE_NORM_BACKWARD_GRAD_BETA);
    args->workspace = run->workspace;
    args->workspace_size = run->workspace_size;
}

static void bind_activation(const run_state *run, const te_stage *stage, te_activation_args *args)
{
    args->size = sizeof *args;
    args->kind = (te_activation_kind)stage->kind;
    args->params = stage->activation;
    args->input = *stage_buffer(run, stage, TE_QUANTIZE_INPUT);
    args->cast = stage_result(run, stage);
    args->workspace = run->workspace;
    args->workspace_size = run->workspace_size;
}

static void bind_activation_backward(const run_state *run, const te_stage *stage,
                                     te_activation_backward_args *args)
{
    args->size = sizeof *args;
    args->kind = (te_activation_kind)stage->kind;
    args->params = stage->activation;
    args->grad_output = *stage_buffer(run, stage, TE_ACTIVATION_GRAD_OUTPUT);
    args->input = *stage_buffer(run, stage, TE_QUANTIZE_INPUT);
    args->bias_grad = *stage_buffer(run, stage, TE_QUANTIZE_BIAS_GRAD);
    args->cast = stage_result(run, stage);
    args->workspace = run->workspace;
    args->workspace_size = run->workspace_size;
}

/* Stages name the data as the GEMM reads it: quantized, rows run along k. */
static te_operand gemm_operand(const run_state *run, const te_stage *stage, int data, int scales)
{
    const te_tensor *given = stage_buffer(run, stage, data);
    if (!te_dtype_is_fp8(given->dtype)) return (te_operand){.wide = *given};
    return (te_operand){
        .mode = TE_SCALING_TENSOR, .row = *given, .row_scales = *stage_buffer(run, stage, scales)};
}

static void bind_gemm(const run_state *run, const te_stage *stage, te_gemm_args *args)
{
    args->size = sizeof *args;
    args->a = gemm_operand(run, stage, TE_GEMM_A, TE_GEMM_A_PAIR);
    args->b = gemm_operand(run, stage, TE_GEMM_B, TE_GEMM_B_PAIR);
    args->a_transposed = stage->a_transposed;
    args->b_transposed = stage->b_transposed;
    args->d = *stage_buffer(run, stage, TE_GEMM_D);
    args->bias = *stage_buffer(run, stage, TE_GEMM_BIAS);
    args->bias_grad = *stage_buffer(run, stage, TE_GEMM_BIAS_GRAD);
    args->aux = *stage_buffer(run, stage, TE_GEMM_AUX);
    args->epilogue = (te_epilogue)stage->kind;
    args->flags = stage->flags;
    args->workspace = run->workspace;
    args->workspace_size = run->workspace_size;
}

/* A vector as a matrix of one row; a matrix as it is. */
static te_tensor one_row(const te_tensor *tensor)
{
    if (tensor->ndim != 1) return *tensor;
    return te_matrix(tensor->data, tensor->dtype, tensor->device, 1, tensor->shape[0]);
}

/* Fills the args struct of a stage. Operators that no plan uses have no binding. */
static te_status bind_stage(const run_state *run, const te_stage *stage, stage_args *args)
{
    memset(args, 0, sizeof *args);
    switch (stage->op) {
    case TE_OP_QUANTIZE:
        bind_quantize(run, stage, &args->quantize);
        return TE_OK;
    case TE_OP_GEMM:
        bind_gemm(run, stage, &args->gemm);
        return TE_OK;
    case TE_OP_NORM:
        bind_norm(run, stage, &args->norm);
        return TE_OK;
    case TE_OP_NORM_BACKWARD:
        bind_norm_backward(run, stage, &args->norm_backward);
        return TE_OK;
    case TE_OP_ACTIVATION:
        bind_activation(run, stage, &args->activation);
        return TE_OK;
    case TE_OP_ACTIVATION_BACKWARD:
        bind_activation_backward(run, stage, &args->activation_backward);
        return TE_OK;
    case TE_OP_AMAX:
        args->amax.size = sizeof args->amax;
        args->amax.input = *stage_buffer(run, stage, TE_AMAX_INPUT);
        args->amax.partials = stage_float(run, stage, TE_AMAX_OUTPUT, 0);
        return TE_OK;
    case TE_OP_CAST:
        args->cast.size = sizeof args->cast;
        args->cast.input = one_row(stage_buffer(run, stage, TE_CAST_INPUT));
        args->cast.output = one_row(stage_buffer(run, stage, TE_CAST_OUTPUT));
        return TE_OK;
    default:
        return TE_FAIL(TE_ERROR_STATE, "plan %s: stage %s: no binding for operator %s",
                       run->plan->kind, stage->name, te_op_name(stage->op));
    }
}

/* A packed member, or the shape that the caller's buffer must have. */
static te_tensor member(const te_buffer_info *info, const te_layout *layout, int i,
                        te_device device, void *base)
{
    char *data = base == NULL ? NULL : (char *)base + layout->offset[i];
    if (info->ndim == 1) return te_vector(data, info->dtype, device, layout->rows[i]);
    return te_matrix(data, info->dtype, device, layout->rows[i], layout->columns[i]);
}

static int length_fits(int64_t given, int64_t expected)
{
    return expected == TE_ANY_LENGTH ? given >= 1 : given == expected;
}

static te_status check_buffer(const te_plan *plan, const te_buffer_info *info,
                              const te_tensor *expected, const te_tensor *given)
{
    if (given->dtype != expected->dtype) {
        return TE_FAIL(TE_ERROR_TYPE, "%s: %s: dtype %s, expected %s", plan->kind, info->name,
                       te_dtype_name(given->dtype), te_dtype_name(expected->dtype));
    }
    if (given->ndim != expected->ndim || !length_fits(given->shape[0], expected->shape[0]) ||
        (expected->ndim == 2 && !length_fits(given->shape[1], expected->shape[1]))) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "%s: %s: shape [%lld, %lld] (%d dims), expected [%lld, %lld]", plan->kind,
                       info->name, (long long)given->shape[0],
                       (long long)(given->ndim > 1 ? given->shape[1] : 1), given->ndim,
                       (long long)expected->shape[0],
                       (long long)(expected->ndim > 1 ? expected->shape[1] : 1));
    }
    return TE_OK;
}

/* The module's slots must lie inside every chunk that its stages use. */
static te_status check_slots(const run_state *run)
{
    for (int s = 0; s < run->plan->stage_count; s++) {
        const te_stage *stage = &run->plan->stages[s];
        for (int position = 0; position < TE_STAGE_BUFFERS; position++) {
            int16_t at = stage->buffer[position];
            int64_t slot = run->slots[stage->direction] + (int64_t)stage->slot;
            const te_tensor *chunk = at == TE_NO_BUFFER ? NULL : &run->buffers[at];
            if (chunk == NULL || run->plan->buffers[at].role != TE_ROLE_STATE ||
                run->plan->buffers[at].dtype != TE_DTYPE_F32 || stage->op == TE_OP_GEMM) {
                continue;
            }
            if (slot < 0 || slot >= chunk->shape[chunk->ndim - 1] ||
                chunk->strides[chunk->ndim - 1] != 1) {
                return TE_FAIL(TE_ERROR_INVALID,
                               "%s: %s: slot %lld is outside the chunk of %lld slots",
                               run->plan->kind, run->plan->buffers[at].name, (long long)slot,
                               (long long)chunk->shape[chunk->ndim - 1]);
            }
        }
    }
    return TE_OK;
}

static te_status resolve_buffers(run_state *run, const te_plan_call *call, const te_layout *layout)
{
    te_device device = te_context_device(run->context);
    for (int i = 0; i < run->plan->buffer_count; i++) {
        const te_buffer_info *info = &run->plan->buffers[i];
        int packed = info->role == TE_ROLE_SAVED || info->role == TE_ROLE_SCRATCH;
        void *base = info->role == TE_ROLE_SAVED     ? call->saved
                     : info->role == TE_ROLE_SCRATCH ? call->scratch
                                                     : NULL;
        te_tensor expected = member(info, layout, i, device, base);
        if (packed) {
            if (base == NULL && te_tensor_numel(&expected) > 0) {
                return TE_FAIL(TE_ERROR_INVALID, "%s: %s: the %s buffer is NULL", run->plan->kind,
                               info->name, info->role == TE_ROLE_SAVED ? "saved" : "scratch");
            }
            run->buffers[i] = expected;
        } else {
            TE_TRY(check_buffer(run->plan, info, &expected, &call->buffers[i]));
            run->buffers[i] = call->buffers[i];
        }
    }
    return check_slots(run);
}

/* The stages [*s, last) as far as the next external one; *s moves to where it stopped. */
static te_status run_stages(run_state *run, int32_t *s, int32_t last)
{
    stage_args args;
    te_status st = TE_OK;
    run->table = te_op_table_acquire(te_context_device(run->context).type);
    for (; *s < last && !run->plan->stages[*s].external; (*s)++) {
        const te_stage *stage = &run->plan->stages[*s];
        TE_TRY_DONE(bind_stage(run, stage, &args));
        TE_TRY_DONE(te_op_run_in(run->table, run->context, stage->op, &args, run->stream));
    }
done:
    te_op_table_release(run->table);
    return st;
}

te_status te_plan_run(te_context *context, const te_plan_call *call, int32_t *next, void *stream)
{
    run_state run;
    const te_layout *layout;
    int32_t last;
    int32_t s;
    TE_TRY(te_context_check(context));
    if (call == NULL || call->size != sizeof *call || call->buffers == NULL || call->rows < 0) {
        return TE_FAIL(TE_ERROR_INVALID, "plan: call is incomplete (size, buffers or rows)");
    }
    TE_TRY(te_plan_get(call->plan, &run.plan));
    last = call->last < 0 ? run.plan->stage_count : call->last;
    if (call->first < 0 || call->first > last || last > run.plan->stage_count) {
        return TE_FAIL(TE_ERROR_INVALID, "%s: stages [%d, %d) are not among its %d", run.plan->kind,
                       call->first, last, run.plan->stage_count);
    }
    run.context = context;
    run.stream = stream;
    memcpy(run.slots, call->slots, sizeof run.slots);
    layout = te_plan_layout_cached(run.plan, call->rows);
    if (call->scratch_size < (size_t)layout->scratch_bytes) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "%s: scratch of %zu bytes, expected at least %lld (te_plan_scratch)",
                       run.plan->kind, call->scratch_size, (long long)layout->scratch_bytes);
    }
    TE_TRY(resolve_buffers(&run, call, layout));
    run.workspace = (char *)call->scratch + layout->scratch_bytes;
    run.workspace_size = call->scratch_size - (size_t)layout->scratch_bytes;
    if (run.workspace_size == 0) run.workspace = NULL;
    s = call->first;
    TE_TRY(run_stages(&run, &s, last));
    if (next != NULL) *next = s;
    return TE_OK;
}

/* Stand-in address for buffers while only sizes are asked: aligned as packed members are. */
#define ANY_ADDRESS ((void *)(uintptr_t)0x10000)

/* The plan's own scratch and the largest workspace of its operators, for the buffers in run. */
static te_status measure_scratch(run_state *run, const te_layout *layout, size_t *bytes)
{
    te_status st = TE_OK;
    stage_args args;
    size_t largest = 0;
    run->table = te_op_table_acquire(te_context_device(run->context).type);
    for (int s = 0; s < run->plan->stage_count; s++) {
        const te_stage *stage = &run->plan->stages[s];
        size_t need = 0;
        if (stage->external) continue;
        TE_TRY_DONE(bind_stage(run, stage, &args));
        TE_TRY_DONE(te_op_workspace_in(run->table, run->context, stage->op, &args, &need));
        if (need > largest) largest = need;
    }
    *bytes = (size_t)layout->scratch_bytes + largest;
done:
    te_op_table_release(run->table);
    return st;
}

/* Dense buffers at ANY_ADDRESS for the whole plan. */
static te_status imagine(run_state *run, te_context *context, int64_t id, int64_t rows,
                         te_layout *layout)
{
    if (rows < 0) return TE_FAIL(TE_ERROR_INVALID, "rows = %lld is negative", (long long)rows);
    memset(run, 0, sizeof *run);
    TE_TRY(te_plan_get(id, &run->plan));
    run->context = context;
    te_plan_layout(run->plan, rows, layout);
    for (int i = 0; i < run->plan->buffer_count; i++) {
        layout->offset[i] = 0;
        run->buffers[i] =
            member(&run->plan->buffers[i], layout, i, te_context_device(context), ANY_ADDRESS);
    }
    return TE_OK;
}

te_status te_plan_scratch(te_context *context, int64_t id, int64_t rows, size_t *bytes)
{
    run_state run;
    te_layout layout;
    te_scratch_key key = {id, rows, 0};
    TE_TRY(te_context_check(context)); /* before its lock is taken */
    run.table = te_op_table_acquire(te_context_device(context).type);
    key.table = te_op_table_number(run.table);
    te_op_table_release(run.table);
    if (te_context_scratch_lookup(context, &key, bytes)) return TE_OK;
    TE_TRY(imagine(&run, context, id, rows, &layout));
    TE_TRY(measure_scratch(&run, &layout, bytes));
    te_context_scratch_store(context, &key, *bytes);
    return TE_OK;
}

/* The caller gives it before the run. */
static int is_given(te_buffer_role role)
{
    return role == TE_ROLE_INPUT || role == TE_ROLE_PARAMETER || role == TE_ROLE_STATE;
}

/* As imagine() has it: dense rows, and aligned as every library wants it. */
static int is_ordinary(const te_tensor *tensor)
{
    return ((uintptr_t)tensor->data & 15U) == 0 &&
           (tensor->ndim < 2 || tensor->shape[0] < 2 || tensor->strides[0] == tensor->shape[1]);
}

te_status te_plan_scratch_for(te_context *context, const te_plan_call *call, size_t *bytes)
{
    run_state run;
    te_layout layout;
    const te_plan *plan = NULL;
    int ordinary = 1;
    TE_TRY(te_plan_get(call->plan, &plan));
    for (int i = 0; i < plan->buffer_count; i++) {
        if (is_given(plan->buffers[i].role)) ordinary &= is_ordinary(&call->buffers[i]);
    }
    if (ordinary) return te_plan_scratch(context, call->plan, call->rows, bytes);
    TE_TRY(te_context_check(context));
    TE_TRY(imagine(&run, context, call->plan, call->rows, &layout));
    for (int i = 0; i < plan->buffer_count; i++) {
        if (is_given(plan->buffers[i].role) && te_tensor_present(&call->buffers[i])) {
            run.buffers[i] = call->buffers[i];
        }
    }
    return measure_scratch(&run, &layout, bytes);
}
