/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c - the intern table of plans, and what is inferred from a plan without a device.
 */
#include "layer/plan.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"
#include "core/tensor.h"
#include "layer/layout.h"

#define BUCKETS 1024

/* Nodes are immutable once published and never freed: readers need no lock. */
static _Atomic(te_plan *) buckets[BUCKETS];
TE_PROCESS_LOCK(lock);

te_extent te_constant(int64_t value)
{
    te_extent extent = {0, 1, value};
    return extent;
}

te_extent te_rows(int64_t multiply, int64_t align)
{
    te_extent extent = {multiply, align, 0};
    return extent;
}

int64_t te_extent_value(const te_extent *extent, int64_t rows)
{
    return extent->multiply * te_round_up(rows, extent->align) + extent->add;
}

static int16_t add_buffer(te_plan *plan, const te_buffer_info *info)
{
    if (plan->buffer_count == TE_PLAN_MAX_BUFFERS) {
        plan->buffer_count++; /* one too many: te_plan_intern reports it */
        return 0;
    }
    if (plan->buffer_count > TE_PLAN_MAX_BUFFERS) return 0;
    plan->buffers[plan->buffer_count] = *info;
    return (int16_t)plan->buffer_count++;
}

int16_t te_plan_vector(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype,
                       int64_t length)
{
    te_buffer_info info = {name, role, dtype, 1, 0, {te_constant(length), te_constant(1)}};
    return add_buffer(plan, &info);
}

int16_t te_plan_row_vector(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype)
{
    te_buffer_info info = {name, role, dtype, 1, 0, {te_rows(1, 1), te_constant(1)}};
    return add_buffer(plan, &info);
}

int16_t te_plan_matrix(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype,
                       te_extent rows, te_extent columns)
{
    te_buffer_info info = {name, role, dtype, 2, 0, {rows, columns}};
    return add_buffer(plan, &info);
}

int16_t te_plan_leading(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype,
                        int64_t gather, int64_t columns)
{
    te_buffer_info info = {name, role, dtype, 2, 1, {te_rows(gather, 1), te_constant(columns)}};
    return add_buffer(plan, &info);
}

te_stage *te_plan_stage(te_plan *plan, const char *name, te_op op, int external)
{
    static _Thread_local te_stage overflow;
    te_stage *stage = &overflow;
    if (plan->stage_count < TE_PLAN_MAX_STAGES) stage = &plan->stages[plan->stage_count];
    plan->stage_count++;
    memset(stage, 0, sizeof *stage);
    stage->name = name;
    stage->op = op;
    stage->external = external;
    for (int i = 0; i < TE_STAGE_BUFFERS; i++) stage->buffer[i] = TE_NO_BUFFER;
    return stage;
}

/* FNV-1a over the family and the description: the same in every process. 0 is no id. */
static int64_t hash_description(const char *family, const void *desc, size_t bytes)
{
    uint64_t hash = 0xcbf29ce484222325ULL;
    const unsigned char *p = desc;
    for (; *family != '\0'; family++) hash = (hash ^ (unsigned char)*family) * 0x100000001b3ULL;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3ULL;
    hash &= INT64_MAX;
    return hash == 0 ? 1 : (int64_t)hash;
}

static te_plan *find(int64_t id)
{
    te_plan *plan = atomic_load_explicit(&buckets[(uint64_t)id % BUCKETS], memory_order_acquire);
    while (plan != NULL && plan->id != id) plan = plan->next;
    return plan;
}

te_status te_plan_get(int64_t id, const te_plan **plan)
{
    *plan = find(id);
    if (*plan != NULL) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "plan %lld does not exist in this process", (long long)id);
}

te_status te_plan_find_desc(const char *family, const void *desc, size_t bytes, int64_t *id,
                            const te_plan **found)
{
    *id = hash_description(family, desc, bytes);
    *found = find(*id);
    if (*found != NULL &&
        ((*found)->desc_bytes != bytes || memcmp((*found)->desc, desc, bytes) != 0)) {
        return TE_FAIL(TE_ERROR_STATE, "plan %lld: two descriptions of %s have the same hash",
                       (long long)*id, family);
    }
    return TE_OK;
}

/* The saved buffer's size as one extent, exact for one member that varies with rows and else an
 * upper bound: every row count is rounded up to the largest alignment, every member to
 * TE_MEMBER_ALIGN. */
static te_status saved_extent(te_plan *plan)
{
    te_extent total = {0, 1, 0};
    int varying_members = 0;
    for (int i = 0; i < plan->buffer_count; i++) {
        const te_buffer_info *info = &plan->buffers[i];
        int64_t bytes = (int64_t)te_dtype_bytes(info->dtype);
        const te_extent *varying = info->shape[0].multiply != 0 ? &info->shape[0] : &info->shape[1];
        const te_extent *fixed = varying == &info->shape[0] ? &info->shape[1] : &info->shape[0];
        if (info->role != TE_ROLE_SAVED) continue;
        if (fixed->multiply != 0 || (varying->multiply != 0 && varying->add != 0)) {
            return TE_FAIL(TE_ERROR_STATE,
                           "plan %s: the size of the saved buffer %s is not linear in the rows",
                           plan->kind, info->name);
        }
        if (varying_members > 0) total.add += TE_MEMBER_ALIGN; /* where this member begins */
        if (varying->multiply == 0) {
            total.add += te_round_up(varying->add * fixed->add * bytes, TE_MEMBER_ALIGN);
            continue;
        }
        total.multiply += varying->multiply * fixed->add * bytes;
        if (varying->align > total.align) total.align = varying->align;
        varying_members++;
    }
    plan->saved_bytes = total;
    return TE_OK;
}

/* Between which stages each scratch buffer holds something; the whole run where the caller runs
 * stages of its own, whose buffers are not known here. */
static void find_lifetimes(te_plan *plan)
{
    int external = 0;
    for (int i = 0; i < plan->buffer_count; i++) {
        plan->first_use[i] = INT16_MAX;
        plan->last_use[i] = -1;
    }
    for (int s = 0; s < plan->stage_count; s++) {
        external |= plan->stages[s].external;
        for (int position = 0; position < TE_STAGE_BUFFERS; position++) {
            int16_t at = plan->stages[s].buffer[position];
            if (at == TE_NO_BUFFER) continue;
            if (plan->first_use[at] > s) plan->first_use[at] = (int16_t)s;
            plan->last_use[at] = (int16_t)s;
        }
    }
    for (int i = 0; external && i < plan->buffer_count; i++) {
        plan->first_use[i] = 0;
        plan->last_use[i] = (int16_t)plan->stage_count;
    }
}

te_status te_plan_intern(const te_plan *built, const char *family, const void *desc, size_t bytes)
{
    te_status st = TE_OK;
    te_plan *plan = NULL;
    _Atomic(te_plan *) *bucket;
    if (built->buffer_count > TE_PLAN_MAX_BUFFERS || built->stage_count > TE_PLAN_MAX_STAGES ||
        bytes > sizeof plan->desc) {
        return TE_FAIL(TE_ERROR_STATE,
                       "plan %s: %d buffers, %d stages, %zu bytes of description do not fit",
                       built->kind, built->buffer_count, built->stage_count, bytes);
    }
    plan = malloc(sizeof *plan);
    if (plan == NULL) return TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
    *plan = *built;
    plan->id = hash_description(family, desc, bytes);
    plan->desc_bytes = bytes;
    memcpy(plan->desc, desc, bytes);
    for (int i = 0; i < plan->stage_count; i++) {
        const te_stage *stage = &plan->stages[i];
        plan->stage_info[i].name = stage->name;
        plan->stage_info[i].op = stage->external ? "external" : te_op_name(stage->op);
    }
    find_lifetimes(plan);
    st = saved_extent(plan);
    if (st != TE_OK) goto done;
    bucket = &buckets[(uint64_t)plan->id % BUCKETS];
    (void)pthread_mutex_lock(&lock);
    if (find(plan->id) == NULL) { /* another thread may have been first */
        plan->next = atomic_load_explicit(bucket, memory_order_relaxed);
        atomic_store_explicit(bucket, plan, memory_order_release);
        plan = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
done:
    free(plan);
    return st;
}

te_status te_plan_describe(int64_t id, te_plan_info *info)
{
    const te_plan *plan = NULL;
    TE_TRY(te_plan_get(id, &plan));
    info->size = sizeof *info;
    info->kind = plan->kind;
    info->buffers = plan->buffers;
    info->buffer_count = plan->buffer_count;
    info->stages = plan->stage_info;
    info->stage_count = plan->stage_count;
    info->saved_bytes = plan->saved_bytes;
    return TE_OK;
}

/* The lowest place for `bytes` of scratch buffer i that no buffer alive at the same time has. */
static int64_t place_scratch(const te_plan *plan, const te_layout *layout, int i, int64_t bytes)
{
    int64_t place = 0;
    int moved = 1;
    while (moved) { /* ends: `place` only grows, past one buffer at a time */
        moved = 0;
        for (int other = 0; other < i; other++) {
            int64_t begin = layout->offset[other];
            int64_t end = begin + layout->bytes[other];
            if (plan->buffers[other].role != TE_ROLE_SCRATCH ||
                plan->last_use[other] < plan->first_use[i] ||
                plan->first_use[other] > plan->last_use[i] || end <= place ||
                begin >= place + bytes) {
                continue;
            }
            place = te_round_up(end, TE_MEMBER_ALIGN);
            moved = 1;
        }
    }
    return place;
}

void te_plan_layout(const te_plan *plan, int64_t rows, te_layout *layout)
{
    int64_t saved = 0;
    int64_t scratch = 0;
    for (int i = 0; i < plan->buffer_count; i++) {
        const te_buffer_info *info = &plan->buffers[i];
        layout->rows[i] = te_extent_value(&info->shape[0], rows);
        layout->columns[i] = te_extent_value(&info->shape[1], rows);
        layout->bytes[i] = 0;
        layout->offset[i] = -1;
        if (info->role != TE_ROLE_SAVED && info->role != TE_ROLE_SCRATCH) continue;
        layout->bytes[i] =
            layout->rows[i] * layout->columns[i] * (int64_t)te_dtype_bytes(info->dtype);
        if (info->role == TE_ROLE_SAVED) {
            layout->offset[i] = te_round_up(saved, TE_MEMBER_ALIGN);
            saved = layout->offset[i] + layout->bytes[i];
        } else {
            int64_t end;
            layout->offset[i] = place_scratch(plan, layout, i, layout->bytes[i]);
            end = layout->offset[i] + layout->bytes[i];
            if (end > scratch) scratch = end;
        }
    }
    layout->saved_bytes = te_extent_value(&plan->saved_bytes, rows);
    layout->scratch_bytes = te_round_up(scratch, TE_MEMBER_ALIGN);
}

const te_layout *te_plan_layout_cached(const te_plan *plan, int64_t rows)
{
    enum { ENTRIES = 32 };
    static _Thread_local struct {
        int64_t id, rows;
        te_layout layout;
    } cache[ENTRIES];
    unsigned at = (unsigned)((uint64_t)plan->id ^ (uint64_t)rows) % ENTRIES;
    if (cache[at].id != plan->id || cache[at].rows != rows) {
        te_plan_layout(plan, rows, &cache[at].layout);
        cache[at].id = plan->id;
        cache[at].rows = rows;
    }
    return &cache[at].layout;
}

te_status te_plan_infer(int64_t id, int64_t rows, te_plan_sizes *sizes, int64_t *offsets)
{
    const te_plan *plan = NULL;
    te_layout layout;
    TE_TRY(te_plan_get(id, &plan));
    if (rows < 0) return TE_FAIL(TE_ERROR_INVALID, "rows = %lld is negative", (long long)rows);
    te_plan_layout(plan, rows, &layout);
    sizes->size = sizeof *sizes;
    sizes->saved_bytes = layout.saved_bytes;
    sizes->scratch_bytes = layout.scratch_bytes;
    if (offsets != NULL) {
        memcpy(offsets, layout.offset, (size_t)plan->buffer_count * sizeof *offsets);
    }
    return TE_OK;
}
