/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c - what a builder adds to a plan, and the last steps of its making.
 */
#include "layer/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"

te_extent te_constant(int64_t value)
{
    return (te_extent){.symbol = TE_SYMBOL_NONE, .align = 1, .add = value, .divide = 1};
}

te_extent te_multiple(int32_t symbol, int64_t multiply)
{
    return (te_extent){.symbol = symbol, .align = 1, .multiply = multiply, .divide = 1};
}

int64_t te_extent_value(const te_extent *extent, const te_sizes *sizes)
{
    int64_t aligned;
    if (extent->symbol == TE_SYMBOL_NONE) return extent->add;
    aligned = te_round_up(extent->multiply * sizes->of[extent->symbol], extent->align);
    if (extent->divide > 1) aligned /= extent->divide;
    return aligned + extent->add;
}

void *te_plan_grow(te_plan *plan, void *array, int32_t count, int32_t *capacity, size_t size)
{
    int32_t wanted = *capacity == 0 ? 8 : 2 * *capacity;
    void *grown;
    if (count < *capacity) return array;
    grown = realloc(array, (size_t)wanted * size);
    if (grown == NULL) {
        plan->status = TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
        return NULL;
    }
    *capacity = wanted;
    return grown;
}

int32_t te_plan_add_buffer(te_plan *plan, const te_buffer_info *info)
{
    te_buffer *buffers, *added;
    if (plan->status != TE_OK) return 0;
    buffers = te_plan_grow(plan, plan->buffers, plan->buffer_count, &plan->buffer_capacity,
                           sizeof *buffers);
    if (buffers == NULL) return 0;
    plan->buffers = buffers;
    added = &buffers[plan->buffer_count];
    memset(added, 0, sizeof *added);
    added->info = *info;
    (void)snprintf(added->name, sizeof added->name, "%s", info->name);
    return plan->buffer_count++;
}

te_stage *te_plan_add_stage(te_plan *plan, const char *prefix, const char *name, te_op op)
{
    /* Takes what is said of a stage that there is no memory for. */
    static _Thread_local te_stage nowhere;
    static _Thread_local te_any_args no_args;
    te_stage *stages, *added;
    nowhere = (te_stage){.op = op, .args = &no_args};
    if (plan->status != TE_OK) return &nowhere;
    stages =
        te_plan_grow(plan, plan->stages, plan->stage_count, &plan->stage_capacity, sizeof *stages);
    if (stages == NULL) return &nowhere;
    plan->stages = stages;
    added = &stages[plan->stage_count];
    memset(added, 0, sizeof *added);
    added->args = malloc(te_op_describe(op)->size);
    if (added->args == NULL) {
        plan->status = TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
        return &nowhere;
    }
    te_op_initial(op, added->args);
    added->op = op;
    added->step = added->half = -1;
    (void)snprintf(added->name, sizeof added->name, "%s%s", prefix, name);
    plan->stage_count++;
    return added;
}

static void add_use(te_plan *plan, te_stage *stage, te_use use)
{
    te_use *uses;
    if (plan->status != TE_OK) return;
    uses = te_plan_grow(plan, stage->uses, stage->use_count, &stage->use_capacity, sizeof *uses);
    if (uses == NULL) return;
    stage->uses = uses;
    uses[stage->use_count++] = use;
}

void te_stage_use_at(te_plan *plan, te_stage *stage, int field, int32_t buffer, int32_t element,
                     int32_t chunk)
{
    int written = te_op_describe(stage->op)->fields[field].access != TE_ACCESS_READ;
    add_use(plan, stage, (te_use){field, buffer, written, element, chunk});
}

void te_stage_hand(te_plan *plan, te_stage *stage, int32_t buffer, int written)
{
    add_use(plan, stage, (te_use){TE_NO_FIELD, buffer, written, 0, 0});
}

void te_plan_clear(te_plan *plan)
{
    te_layout *layout = plan->layouts;
    while (layout != NULL) {
        te_layout *next = layout->next;
        free(layout);
        layout = next;
    }
    for (int32_t s = 0; s < plan->stage_count; s++) {
        free(plan->stages[s].uses);
        free(plan->stages[s].args);
        if (plan->stage_infos != NULL) free((void *)(uintptr_t)plan->stage_infos[s].buffers);
    }
    free(plan->stages);
    free(plan->buffers);
    free(plan->stage_infos);
    free(plan->buffer_infos);
    free(plan->desc);
}

/* ---- the last steps ------------------------------------------------------------------------ */

int32_t te_plan_memory_of(const te_plan *plan, const te_use *use)
{
    const te_buffer_info *info;
    if (use->buffer == TE_NO_BUFFER) return TE_NO_BUFFER;
    info = &plan->buffers[use->buffer].info;
    return info->role == TE_ROLE_VIEW ? info->base : use->buffer;
}

/* Whether two stages have to run in their order. */
static int depend(const te_plan *plan, const te_stage *a, const te_stage *b)
{
    for (int32_t i = 0; i < a->use_count; i++) {
        const int32_t memory = te_plan_memory_of(plan, &a->uses[i]);
        for (int32_t j = 0; memory != TE_NO_BUFFER && j < b->use_count; j++) {
            if (!a->uses[i].written && !b->uses[j].written) continue;
            if (te_plan_memory_of(plan, &b->uses[j]) == memory) return 1;
        }
    }
    return 0;
}

/* Adds the second half of stage s, a copy of it, as stage `at`. */
static void add_finish(te_plan *plan, int32_t s, int32_t at)
{
    const int32_t last = plan->stage_count;
    const te_stage start = plan->stages[s]; /* stages move where there is one more */
    te_stage *finish = te_plan_add_stage(plan, start.name, "_finish", start.op), moved;
    finish->external = 1;
    finish->node = start.node;
    finish->step = start.step;
    for (int32_t u = 0; u < start.use_count; u++) add_use(plan, finish, start.uses[u]);
    if (plan->status != TE_OK) return;
    moved = *finish;
    memmove(&plan->stages[at + 1], &plan->stages[at], (size_t)(last - at) * sizeof moved);
    plan->stages[at] = moved;
    for (int32_t t = 0; t <= last; t++) plan->stages[t].half += plan->stages[t].half >= at;
    plan->stages[at].half = s;
    plan->stages[s].half = at;
}

/* Lets what was started be finished as late as it can be. */
static te_status add_finishes(te_plan *plan)
{
    for (int32_t s = 0; s < plan->stage_count && plan->status == TE_OK; s++) {
        int32_t at = s + 1;
        if (!plan->stages[s].halved) continue;
        while (at < plan->stage_count && !depend(plan, &plan->stages[s], &plan->stages[at])) at++;
        add_finish(plan, s, at);
    }
    return plan->status;
}

static int varies(const te_buffer_info *info)
{
    for (int32_t d = 0; d < info->ndim; d++) {
        if (info->shape[d].symbol != TE_SYMBOL_NONE) return 1;
    }
    return 0;
}

/* Arguments first, in the order of a call: gradients, values, quantized forms, state; then outputs,
 * likewise; then what is packed, the saved buffers of a fixed size before the others. Within a kind
 * by number; so the saved buffers lie alike in every plan of a graph. */
static int compare(const void *left, const void *right)
{
    const te_buffer_info *a = &((const te_buffer *)left)->info;
    const te_buffer_info *b = &((const te_buffer *)right)->info;
    static const int order[TE_ROLE_COUNT] = {0, 0, 1, 2, 3, 4, 5};
    if (order[a->role] != order[b->role]) return order[a->role] < order[b->role] ? -1 : 1;
    /* The gradients of parameters that a plan adds to are state, and behind the chunks. */
    if (a->role == TE_ROLE_STATE &&
        (a->link == TE_LINK_GRADIENT) != (b->link == TE_LINK_GRADIENT)) {
        return a->link == TE_LINK_GRADIENT ? 1 : -1;
    }
    if (a->role == TE_ROLE_SAVED && varies(a) != varies(b)) return varies(a) - varies(b);
    if (a->link != b->link) return a->link < b->link ? -1 : 1;
    if (a->of != b->of) return a->of < b->of ? -1 : 1;
    if (a->offset.multiply != b->offset.multiply) {
        return a->offset.multiply < b->offset.multiply ? -1 : 1;
    }
    return (a->offset.add > b->offset.add) - (a->offset.add < b->offset.add);
}

static te_status sort_buffers(te_plan *plan)
{
    int32_t count = plan->buffer_count;
    int32_t *place;
    if (count == 0) return TE_OK;
    place = malloc((size_t)count * sizeof *place);
    TE_FAIL_IF(place == NULL, TE_ERROR_MEMORY, "no memory for a plan");
    for (int32_t i = 0; i < count; i++) plan->buffers[i].first_use = i; /* where it was */
    qsort(plan->buffers, (size_t)count, sizeof *plan->buffers, compare);
    for (int32_t i = 0; i < count; i++) place[plan->buffers[i].first_use] = i;
    for (int32_t i = 0; i < count; i++) {
        te_buffer_info *info = &plan->buffers[i].info;
        if (info->role == TE_ROLE_VIEW) info->base = place[info->base];
    }
    for (int32_t s = 0; s < plan->stage_count; s++) {
        te_stage *stage = &plan->stages[s];
        for (int32_t u = 0; u < stage->use_count; u++) {
            if (stage->uses[u].buffer == TE_NO_BUFFER) continue;
            stage->uses[u].buffer = place[stage->uses[u].buffer];
        }
    }
    free(place);
    return TE_OK;
}

static void find_lifetimes(te_plan *plan)
{
    for (int32_t i = 0; i < plan->buffer_count; i++) {
        plan->buffers[i].first_use = INT32_MAX;
        plan->buffers[i].last_use = -1;
    }
    for (int32_t s = 0; s < plan->stage_count; s++) {
        for (int32_t u = 0; u < plan->stages[s].use_count; u++) {
            int32_t used = plan->stages[s].uses[u].buffer;
            te_buffer *buffer;
            if (used == TE_NO_BUFFER) continue;
            buffer = &plan->buffers[used];
            if (buffer->info.role == TE_ROLE_VIEW) buffer = &plan->buffers[buffer->info.base];
            if (buffer->first_use > s) buffer->first_use = s;
            buffer->last_use = s;
        }
    }
}

/* So that the size of the saved buffer stays within 64 bits. */
#define MOST_SAVED_PER_ROW ((int64_t)1 << 31)

/* The saved buffer's size as one extent per sequence, exact for one member that varies with the
 * rows of one rank, and else an upper bound: every row count is rounded up to the largest
 * alignment, every member to TE_MEMBER_ALIGN. */
static te_status sum_saved(te_plan *plan)
{
    te_extent totals[TE_SEQUENCES] = {te_multiple(TE_SYMBOL_ROWS, 0),
                                      te_multiple(TE_SYMBOL_SOURCE_ROWS, 0)};
    int varying_members = 0;
    for (int32_t i = 0; i < plan->buffer_count; i++) {
        const te_buffer_info *info = &plan->buffers[i].info;
        int64_t fixed = (int64_t)te_dtype_bytes(info->dtype);
        const te_extent *varying = NULL;
        te_extent *total = &totals[0];
        if (info->role != TE_ROLE_SAVED) continue;
        for (int32_t d = 0; d < info->ndim; d++) {
            const te_extent *extent = &info->shape[d];
            if (extent->symbol == TE_SYMBOL_NONE) {
                fixed *= extent->add;
            } else if (varying == NULL && extent->add == 0 &&
                       (extent->symbol == TE_SYMBOL_ROWS ||
                        extent->symbol == TE_SYMBOL_SOURCE_ROWS)) {
                varying = extent;
            } else {
                return TE_FAIL(TE_ERROR_STATE,
                               "the size of the saved buffer %s is not linear in the rows",
                               plan->buffers[i].name);
            }
        }
        if (varying_members > 0) total->add += TE_MEMBER_ALIGN; /* where this member begins */
        if (varying == NULL) {
            total->add += te_round_up(fixed, TE_MEMBER_ALIGN);
            continue;
        }
        total += varying->symbol == TE_SYMBOL_SOURCE_ROWS;
        fixed *= varying->multiply;
        total->multiply += varying->divide > 1 ? te_ceil_div(fixed, varying->divide) : fixed;
        TE_FAIL_IF(total->multiply > MOST_SAVED_PER_ROW, TE_ERROR_INVALID,
                   "graph: it saves %lld bytes per row", (long long)total->multiply);
        if (varying->align > total->align) total->align = varying->align;
        varying_members++;
    }
    for (int s = 0; s < TE_SEQUENCES; s++) { /* bytes of so many rows, not a number of bytes */
        totals[s].align = totals[s].multiply > 0 ? totals[s].align * totals[s].multiply : 1;
    }
    memcpy(plan->saved_bytes, totals, sizeof totals);
    return TE_OK;
}

/* A leading dim is named with its rows and the other one. */
static void name_symbol(te_plan *plan, int32_t symbol)
{
    int32_t rows = symbol < TE_SYMBOL_SOURCE_ROWS ? TE_SYMBOL_ROWS : TE_SYMBOL_SOURCE_ROWS;
    int dim = symbol > rows && symbol <= TE_SYMBOL_SOURCE_DIM_1;
    plan->symbols |= dim ? 7U << rows : 1U << symbol;
}

/* What te_plan_describe hands out. */
static te_status make_infos(te_plan *plan)
{
    plan->buffer_infos = calloc((size_t)plan->buffer_count + 1, sizeof *plan->buffer_infos);
    plan->stage_infos = calloc((size_t)plan->stage_count + 1, sizeof *plan->stage_infos);
    if (plan->buffer_infos == NULL || plan->stage_infos == NULL) goto no_memory;
    for (int32_t i = 0; i < plan->buffer_count; i++) {
        const te_buffer_info *info = &plan->buffers[i].info;
        plan->buffer_infos[i] = *info;
        plan->buffer_infos[i].name = plan->buffers[i].name;
        for (int32_t d = 0; d < TE_MAX_DIMS; d++) {
            te_extent *extent = &plan->buffer_infos[i].shape[d];
            if (extent->divide == 0) extent->divide = 1;
        }
        for (int32_t d = 0; d < info->ndim; d++) {
            name_symbol(plan, info->shape[d].symbol);
        }
        if (info->link == TE_LINK_SCALE && info->of >= plan->owners) plan->owners = info->of + 1;
    }
    for (int32_t s = 0; s < plan->stage_count; s++) {
        const te_stage *stage = &plan->stages[s];
        int32_t *numbers = malloc(((size_t)stage->use_count + 1) * sizeof *numbers);
        int32_t count = 0;
        if (numbers == NULL) goto no_memory;
        for (int32_t u = 0; u < stage->use_count; u++) {
            if (stage->uses[u].buffer != TE_NO_BUFFER) {
                numbers[count++] = stage->uses[u].buffer;
            } else {
                name_symbol(plan, stage->uses[u].element);
            }
        }
        plan->stage_infos[s] = (te_stage_info){.name = stage->name,
                                               .op = stage->op,
                                               .external = stage->external,
                                               .buffers = numbers,
                                               .buffer_count = count,
                                               .node = stage->node,
                                               .step = stage->step,
                                               .half = stage->half};
        if (stage->op == TE_OP_GEMM &&
            ((const te_gemm_args *)stage->args)->a.mode != TE_SCALING_NONE) {
            plan->quantized = 1;
        }
    }
    return TE_OK;
no_memory:
    return TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
}

te_status te_plan_finish(te_plan *plan)
{
    TE_TRY(plan->status);
    TE_TRY(add_finishes(plan));
    TE_TRY(sort_buffers(plan));
    find_lifetimes(plan);
    TE_TRY(sum_saved(plan));
    return make_infos(plan);
}
