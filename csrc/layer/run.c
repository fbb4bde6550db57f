/* SPDX-License-Identifier: Apache-2.0
 *
 * run.c - runs a plan: resolves its buffers, fills the args struct of each stage and calls the
 * operator; stages of the caller are called in their turn.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend.h"
#include "core/context.h"
#include "core/fields.h"
#include "core/status.h"
#include "core/tensor.h"
#include "layer/plan.h"

/* A plan of up to so many buffers runs without an allocation for them. */
#define FEW_BUFFERS 160

/* What one run resolves its stages against. */
typedef struct run_state {
    const te_plan *plan;
    te_op_table *table; /* held until the run is over */
    const te_selection *selection;
    te_context *context;
    const te_layout *layout;
    te_layout *own_layout;
    te_tensor *buffers;
    te_tensor few[FEW_BUFFERS];
    const int32_t *slots; /* two per owner */
    int32_t first, end;   /* stages that run */
    void *workspace;
    size_t workspace_size;
} run_state;

static te_op_candidates candidates_of(const run_state *run)
{
    return (te_op_candidates){run->selection, run->table};
}

static te_status begin(run_state *run, te_context *context, const te_plan_call *call)
{
    run->buffers = NULL;
    run->own_layout = NULL;
    run->table = NULL;
    run->selection = call->selection;
    TE_TRY(te_context_check(context));
    TE_TRY(te_plan_check(call->plan));
    run->plan = call->plan;
    run->first = call->first_stage;
    run->end = call->end_stage == 0 ? run->plan->stage_count : call->end_stage;
    TE_FAIL_IF(run->first < 0 || run->end < run->first || run->end > run->plan->stage_count,
               TE_ERROR_INVALID, "plan: stages %d to %d, of %d", (int)run->first, (int)run->end,
               (int)run->plan->stage_count);
    run->context = context;
    run->table = te_op_table_acquire(te_context_device(context).type);
    TE_TRY(te_plan_layout(run->plan, te_context_device(context), &call->sizes,
                          call->consumes_saved != 0, &run->layout, &run->own_layout));
    run->buffers = run->few;
    if (run->plan->buffer_count > FEW_BUFFERS) {
        run->buffers = malloc((size_t)run->plan->buffer_count * sizeof *run->buffers);
        TE_FAIL_IF(run->buffers == NULL, TE_ERROR_MEMORY, "no memory for a run");
    }
    memcpy(run->buffers, run->layout->tensors,
           (size_t)run->plan->buffer_count * sizeof *run->buffers);
    return TE_OK;
}

static void end(run_state *run)
{
    if (run->buffers != run->few) free(run->buffers);
    free(run->own_layout);
    if (run->table != NULL) te_op_table_release(run->table);
}

/* Address of an element of a buffer; of a chunk, of the owner's slot. */
static char *element_of(const run_state *run, const te_use *use)
{
    const te_tensor *tensor = &run->buffers[use->buffer];
    int64_t at = use->element + (use->chunk > 0 ? run->slots[use->chunk - 1] : 0);
    return (char *)tensor->data + at * (int64_t)te_dtype_bytes(tensor->dtype);
}

/* A vector as a matrix of one row, where the field is one. */
static void put_tensor(te_tensor *field, const te_tensor *tensor, te_field_form form)
{
    *field = *tensor;
    if (form == TE_FORM_MATRIX && tensor->ndim == 1) {
        *field = te_matrix(tensor->data, tensor->dtype, tensor->device, 1, tensor->shape[0]);
    }
}

static void bind(const run_state *run, const te_stage *stage, te_any_args *args)
{
    const te_op_info *info = te_op_describe(stage->op);
    char *workspace;
    memcpy(args, stage->args, info->size);
    for (int32_t u = 0; u < stage->use_count; u++) {
        const te_use *use = &stage->uses[u];
        const te_field *field = &info->fields[use->field];
        char *member = (char *)args + field->offset;
        if (use->buffer == TE_NO_BUFFER) {
            int64_t size = run->layout->sizes.of[use->element];
            te_field_set_number(field, args, size > 0 ? (double)size : 1.0);
        } else if (field->kind == TE_FIELD_TENSOR) {
            put_tensor((te_tensor *)(void *)member, &run->buffers[use->buffer], field->form);
        } else {
            *(void **)(void *)member = element_of(run, use);
        }
    }
    workspace = (char *)args + info->fields[info->field_count - 1].offset;
    *(void **)(void *)workspace = run->workspace;
    *(size_t *)(void *)(workspace + sizeof(void *)) = run->workspace_size;
}

static int length_fits(int64_t given, int64_t expected)
{
    return expected == TE_ANY_LENGTH ? given >= 1 : given == expected;
}

static te_status check_buffer(const te_buffer *buffer, const te_tensor *expected,
                              const te_tensor *given)
{
    int fits = given->ndim == expected->ndim;
    TE_FAIL_IF(given->dtype != expected->dtype, TE_ERROR_TYPE, "plan: %s: dtype %s, expected %s",
               buffer->name, te_dtype_name(given->dtype), te_dtype_name(expected->dtype));
    for (int32_t d = 0; fits && d < expected->ndim; d++) {
        if (length_fits(given->shape[d], expected->shape[d])) continue;
        return TE_FAIL(TE_ERROR_INVALID, "plan: %s: dim %d has size %lld, expected %lld",
                       buffer->name, (int)d, (long long)given->shape[d],
                       (long long)expected->shape[d]);
    }
    if (fits) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "plan: %s: %d dims, expected %d", buffer->name,
                   (int)given->ndim, (int)expected->ndim);
}

/* The slots of each owner must lie inside every chunk that its stages use. */
static te_status check_slots(const run_state *run)
{
    for (int32_t s = run->first; s < run->end; s++) {
        const te_stage *stage = &run->plan->stages[s];
        for (int32_t u = 0; u < stage->use_count; u++) {
            const te_use *use = &stage->uses[u];
            const te_tensor *chunk;
            int64_t slot;
            if (use->chunk == 0) continue;
            chunk = &run->buffers[use->buffer];
            slot = run->slots[use->chunk - 1] + (int64_t)use->element;
            TE_FAIL_IF(slot < 0 || slot >= chunk->shape[chunk->ndim - 1] ||
                           chunk->strides[chunk->ndim - 1] != 1,
                       TE_ERROR_INVALID, "plan: %s: slot %lld is outside the chunk of %lld slots",
                       run->plan->buffers[use->buffer].name, (long long)slot,
                       (long long)chunk->shape[chunk->ndim - 1]);
        }
    }
    return TE_OK;
}

/* The base with its first two dims exchanged, or one more before them. */
static void turn(const te_tensor *base, te_view_kind kind, te_tensor *view)
{
    const int32_t more = kind == TE_VIEW_BATCH;
    *view = *base;
    view->ndim += more;
    for (int32_t d = 0; d < base->ndim; d++) {
        const int32_t to = more ? d + 1 : d < 2 ? 1 - d : d;
        view->shape[to] = base->shape[d];
        view->strides[to] = base->strides[d];
    }
    if (!more) return;
    view->shape[0] = 1;
    view->strides[0] = base->shape[0] * base->strides[0];
}

/* Lets views point into their buffers, as far as these are there. */
static te_status place_views(run_state *run)
{
    for (int32_t i = run->plan->buffer_count - 1; i >= 0; i--) {
        const te_buffer_info *info = &run->plan->buffers[i].info;
        const te_tensor *base = &run->buffers[info->base];
        int64_t dense = 1;
        if (info->role != TE_ROLE_VIEW) break;
        if (info->view != TE_VIEW_PART) {
            turn(base, info->view, &run->buffers[i]);
            continue;
        }
        for (int32_t d = base->ndim - 1; d >= 0; d--) {
            TE_FAIL_IF(base->shape[d] > 1 && base->strides[d] != dense, TE_ERROR_INVALID,
                       "plan: %s: dim %d has stride %lld, expected %lld",
                       run->plan->buffers[info->base].name, (int)d, (long long)base->strides[d],
                       (long long)dense);
            dense *= base->shape[d];
        }
        run->buffers[i].data = base->data == NULL
                                   ? NULL
                                   : (char *)base->data + (uintptr_t)run->layout->tensors[i].data;
    }
    return TE_OK;
}

/* Of buffers that lie apart, those that the stages of the run use must be there. */
static te_status check_used(const run_state *run)
{
    for (int32_t s = run->first; s < run->end; s++) {
        const te_stage *stage = &run->plan->stages[s];
        for (int32_t u = 0; u < stage->use_count; u++) {
            const int32_t at = te_plan_memory_of(run->plan, &stage->uses[u]);
            TE_FAIL_IF(at != TE_NO_BUFFER && run->buffers[at].data == NULL &&
                           te_tensor_numel(&run->buffers[at]) > 0,
                       TE_ERROR_INVALID, "plan: %s: stage %s uses it, and it was not given",
                       run->plan->buffers[at].name, stage->name);
        }
    }
    return TE_OK;
}

static te_status resolve_buffers(run_state *run, const te_plan_call *call)
{
    for (int32_t i = 0; i < run->plan->buffer_count; i++) {
        const te_buffer *buffer = &run->plan->buffers[i];
        te_tensor *tensor = &run->buffers[i];
        const int packed = te_is_packed(buffer->info.role);
        void *base = run->layout->in_saved[i] ? call->saved : call->scratch;
        if (buffer->info.role == TE_ROLE_VIEW) break; /* they come last */
        if (call->apart ? call->buffers[i].data != NULL : !packed) {
            TE_TRY(check_buffer(buffer, tensor, &call->buffers[i]));
            *tensor = call->buffers[i];
        } else if (packed && base != NULL) {
            tensor->data = (char *)base + (uintptr_t)tensor->data;
        } else if (call->apart || te_tensor_numel(tensor) == 0) {
            tensor->data = NULL;
        } else {
            return TE_FAIL(TE_ERROR_INVALID, "plan: %s: the %s buffer is NULL", buffer->name,
                           run->layout->in_saved[i] ? "saved" : "scratch");
        }
    }
    if (call->apart) TE_TRY(check_used(run));
    TE_TRY(place_views(run));
    return check_slots(run);
}

static te_status tell(run_state *run, const te_plan_call *call, int32_t s, te_stage_event event)
{
    TE_FAIL_IF(call->stage == NULL, TE_ERROR_STATE,
               "plan: stage %s is external and has no function", run->plan->stages[s].name);
    return call->stage(call->stage_self, s, event, run->buffers);
}

static te_status run_stage(run_state *run, const te_plan_call *call, int32_t s, void *stream)
{
    const te_stage *stage = &run->plan->stages[s];
    te_any_args args;
    if (stage->external) return tell(run, call, s, TE_STAGE_RUN);
    bind(run, stage, &args);
    return te_op_run_in(candidates_of(run), run->context, stage->op, &args, stream);
}

/* Ends what the first stages have started, so many of which have succeeded, and none of those that
 * were tried has finished; the text of the failure stays. */
static void abandon(run_state *run, const te_plan_call *call, int32_t succeeded, int32_t tried)
{
    char text[TE_ERROR_TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", te_last_error());
    for (int32_t s = run->first; s < succeeded; s++) {
        const int32_t finish = run->plan->stages[s].half;
        if (finish >= tried) (void)tell(run, call, finish, TE_STAGE_ABANDON);
    }
    te_set_error(text);
}

static te_status run_stages(run_state *run, const te_plan_call *call, void *stream)
{
    int32_t succeeded = run->first, tried = run->first;
    te_status st = TE_OK;
    for (int32_t s = run->first; s < run->end; s++) {
        if (call->observed) TE_TRY_DONE(tell(run, call, s, TE_STAGE_BEFORE));
        tried = s + 1;
        TE_TRY_DONE(run_stage(run, call, s, stream));
        succeeded = s + 1;
        if (call->observed) TE_TRY_DONE(tell(run, call, s, TE_STAGE_AFTER));
    }
done:
    if (st != TE_OK) abandon(run, call, succeeded, tried);
    return st;
}

te_status te_plan_run(te_context *context, const te_plan_call *call, void *stream)
{
    run_state run;
    te_status st;
    TE_FAIL_IF(call == NULL || call->size != sizeof *call || call->buffers == NULL,
               TE_ERROR_INVALID,
               "plan: call is NULL, call->size is wrong, or call->buffers is NULL");
    st = begin(&run, context, call);
    if (st != TE_OK) goto done;
    if (call->slots == NULL && run.plan->owners > 0) {
        st = TE_FAIL(TE_ERROR_INVALID, "plan: call->slots is NULL, and the plan has scaling state");
        goto done;
    }
    if (call->scratch_size < (size_t)run.layout->scratch_bytes) {
        st = TE_FAIL(TE_ERROR_INVALID,
                     "plan: scratch of %zu bytes, expected at least %lld (te_plan_scratch)",
                     call->scratch_size, (long long)run.layout->scratch_bytes);
        goto done;
    }
    run.slots = call->slots;
    run.workspace_size = call->scratch_size - (size_t)run.layout->scratch_bytes;
    run.workspace =
        run.workspace_size > 0 ? (char *)call->scratch + run.layout->scratch_bytes : NULL;
    st = resolve_buffers(&run, call);
    if (st == TE_OK) st = run_stages(&run, call, stream);
done:
    end(&run);
    return st;
}

/* ---- scratch ------------------------------------------------------------------------------- */

/* Stand-in address while only sizes are asked: aligned as packed members are. */
#define ANY_ADDRESS ((void *)(uintptr_t)0x10000)

/* The plan's own scratch and the largest workspace of its operators; `given` NULL: over dense,
 * aligned buffers. */
static te_status measure(te_context *context, const te_plan_call *call, const te_tensor *given,
                         size_t *bytes)
{
    static const int32_t first_slots[2 * TE_GRAPH_NODES];
    run_state run;
    te_any_args args;
    size_t largest = 0;
    te_status st = begin(&run, context, call);
    if (st != TE_OK) goto done;
    run.slots = first_slots;
    run.workspace = NULL;
    run.workspace_size = 0;
    for (int32_t i = 0; i < run.plan->buffer_count; i++) {
        te_buffer_role role = run.plan->buffers[i].info.role;
        run.buffers[i].data = ANY_ADDRESS;
        if (given != NULL && role <= TE_ROLE_STATE && te_tensor_present(&given[i])) {
            run.buffers[i] = given[i];
        }
    }
    st = place_views(&run);
    if (st != TE_OK) goto done;
    for (int32_t s = 0; s < run.plan->stage_count; s++) {
        const te_stage *stage = &run.plan->stages[s];
        size_t need = 0;
        if (stage->external) continue;
        bind(&run, stage, &args);
        st = te_op_workspace_in(candidates_of(&run), context, stage->op, &args, &need);
        if (st != TE_OK) goto done;
        if (need > largest) largest = need;
    }
    *bytes = (size_t)run.layout->scratch_bytes + largest;
done:
    end(&run);
    return st;
}

static te_status find_scratch(te_context *context, const te_plan_call *call, size_t *bytes)
{
    te_scratch_key key = {.plan = call->plan->id,
                          .sizes = call->sizes,
                          .consumes_saved = call->consumes_saved != 0,
                          .selection = call->selection == NULL ? 0 : call->selection->number};
    te_op_table *table = te_op_table_acquire(te_context_device(context).type);
    key.table = te_op_table_number(table);
    te_op_table_release(table);
    if (te_context_scratch_lookup(context, &key, bytes)) return TE_OK;
    TE_TRY(measure(context, call, NULL, bytes));
    te_context_scratch_store(context, &key, *bytes);
    return TE_OK;
}

te_status te_plan_scratch(te_context *context, const te_plan *plan, const te_sizes *sizes,
                          size_t *bytes)
{
    const te_plan_call call = {.plan = plan, .sizes = *sizes};
    TE_TRY(te_context_check(context)); /* before its lock is taken */
    TE_TRY(te_plan_check(plan));
    return find_scratch(context, &call, bytes);
}

/* Dense, and aligned as every library wants it. */
static int is_ordinary(const te_tensor *tensor)
{
    int ordinary = ((uintptr_t)tensor->data & 15U) == 0;
    int64_t dense = 1;
    if (te_tensor_numel(tensor) == 0) return 1;
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        ordinary &= tensor->shape[d] < 2 || tensor->strides[d] == dense;
        dense *= tensor->shape[d];
    }
    return ordinary;
}

te_status te_plan_scratch_for(te_context *context, const te_plan_call *call, size_t *bytes)
{
    const te_plan *plan = call->plan;
    int ordinary = 1;
    TE_TRY(te_context_check(context));
    TE_TRY(te_plan_check(plan));
    for (int32_t i = 0; i < plan->buffer_count; i++) {
        if (plan->buffers[i].info.role <= TE_ROLE_STATE) ordinary &= is_ordinary(&call->buffers[i]);
    }
    return ordinary ? find_scratch(context, call, bytes)
                    : measure(context, call, call->buffers, bytes);
}
