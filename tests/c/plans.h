/* SPDX-License-Identifier: Apache-2.0
 *
 * plans.h - runs plans from C: memory for every buffer that the caller gives, kept by what the
 * buffer is and so handed from plan to plan, with guards behind it; and scratch memory full of NaN.
 */
#ifndef TE_TESTS_PLANS_H
#define TE_TESTS_PLANS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

enum { PLAN_MEMBERS = 512, PLAN_ALIGN = 256, PLAN_GUARD = 64, PLAN_GUARD_BYTE = 0xa5 };
enum { PLAN_SLOTS = 256, PLAN_HISTORY = 4, PLAN_OWNERS = 8, PLAN_ANY_LENGTH = 40 };

#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                  \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fputc('\n', stderr);                                                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define OK(call) EXPECT((call) == TE_OK, "%s", te_last_error())

static const te_device plan_cpu = {TE_DEVICE_CPU, 0};

typedef struct plan_member {
    te_link link;
    int32_t of;
    size_t bytes;
    void *data;
} plan_member;

/* What the plans of a graph are given and give, and what lives across them. */
typedef struct plan_memory {
    te_sizes sizes;
    int32_t slots[2 * PLAN_OWNERS];
    plan_member members[PLAN_MEMBERS];
    int count;
    void *saved;
    /* of an owner, forward and backward */
    float scale[PLAN_OWNERS][2][PLAN_SLOTS], history[PLAN_OWNERS][2][PLAN_HISTORY * PLAN_SLOTS];
    te_stage_function stage;    /* of external stages, with the memory as self */
    const te_graph_desc *graph; /* for it */
    int observed;
    int consuming; /* the last plan that reads what was saved writes over it */
    int consumes;  /* the one that runs is that */
    const te_plan *running;
} plan_memory;

/* Aligned memory of exactly `bytes`, full of NaN, and a guard. */
static inline void *plan_allocate(size_t bytes)
{
    size_t all = (bytes + PLAN_GUARD + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN;
    unsigned char *memory = aligned_alloc(PLAN_ALIGN, all);
    EXPECT(memory != NULL, "no memory");
    memset(memory, 0xff, bytes);
    memset(memory + bytes, PLAN_GUARD_BYTE, all - bytes);
    return memory;
}

static inline void plan_check_guard(const void *memory, size_t bytes, const char *what)
{
    for (size_t i = 0; i < PLAN_GUARD; i++) {
        EXPECT(((const unsigned char *)memory)[bytes + i] == PLAN_GUARD_BYTE,
               "written behind the %s memory", what);
    }
}

static inline void plan_memory_start(plan_memory *memory, const te_sizes *sizes)
{
    memset(memory, 0, sizeof *memory);
    memory->sizes = *sizes;
    for (int i = 0; i < PLAN_OWNERS * 2 * PLAN_SLOTS; i++) {
        memory->scale[i / (2 * PLAN_SLOTS)][i / PLAN_SLOTS % 2][i % PLAN_SLOTS] = 1.0F;
    }
}

static inline void plan_memory_end(plan_memory *memory)
{
    for (int i = 0; i < memory->count; i++) free(memory->members[i].data);
    free(memory->saved);
    memory->count = 0;
    memory->saved = NULL;
}

static inline plan_member *plan_find(plan_memory *memory, te_link link, int32_t of)
{
    for (int i = 0; i < memory->count; i++) {
        plan_member *member = &memory->members[i];
        if (member->link == link && member->of == of) return member;
    }
    return NULL;
}

/* Memory of a buffer, made where it is not there. */
static inline void *plan_data(plan_memory *memory, te_link link, int32_t of, size_t bytes)
{
    plan_member *member = plan_find(memory, link, of);
    if (member == NULL) {
        EXPECT(memory->count < PLAN_MEMBERS, "too many buffers");
        member = &memory->members[memory->count++];
        *member = (plan_member){link, of, bytes, plan_allocate(bytes)};
    }
    EXPECT(member->bytes == bytes, "link %d of %d: %zu bytes, expected %zu", (int)link, of, bytes,
           member->bytes);
    return member->data;
}

static inline float *plan_floats(plan_memory *memory, te_link link, int32_t of, int64_t count)
{
    return plan_data(memory, link, of, (size_t)count * sizeof(float));
}

/* Where the plan says no length, one that is the caller's. */
static inline int64_t plan_length(const te_extent *extent, const te_sizes *sizes)
{
    int64_t length = te_extent_value(extent, sizes);
    return length == TE_ANY_LENGTH ? PLAN_ANY_LENGTH : length;
}

/* A dense tensor without data for a buffer. */
static inline te_tensor plan_dense(const plan_memory *memory, const te_buffer_info *info)
{
    te_tensor tensor = {.dtype = info->dtype, .device = plan_cpu, .ndim = info->ndim};
    int64_t stride = 1;
    for (int32_t d = info->ndim - 1; d >= 0; d--) {
        int64_t length = plan_length(&info->shape[d], &memory->sizes);
        if (info->link == TE_LINK_SCALE || info->link == TE_LINK_HISTORY) {
            length = d == info->ndim - 1 ? PLAN_SLOTS : PLAN_HISTORY;
        }
        tensor.shape[d] = length;
        tensor.strides[d] = stride;
        stride *= length;
    }
    return tensor;
}

/* The same with data. Inputs have to be there, outputs are NaN again. */
static inline te_tensor plan_view(plan_memory *memory, const te_buffer_info *info, int backward)
{
    te_tensor tensor = plan_dense(memory, info);
    size_t bytes = te_dtype_bytes(info->dtype);
    for (int32_t d = 0; d < info->ndim; d++) bytes *= (size_t)tensor.shape[d];
    if (info->link == TE_LINK_SCALE || info->link == TE_LINK_HISTORY) {
        EXPECT(info->of < PLAN_OWNERS, "owner %d", info->of);
        tensor.data = info->link == TE_LINK_SCALE ? memory->scale[info->of][backward]
                                                  : memory->history[info->of][backward];
        return tensor;
    }
    EXPECT(info->role == TE_ROLE_OUTPUT || plan_find(memory, info->link, info->of) != NULL,
           "the plan reads %s, which nobody has made", info->name);
    tensor.data = plan_data(memory, info->link, info->of, bytes);
    if (info->role == TE_ROLE_OUTPUT) memset(tensor.data, 0xff, bytes);
    return tensor;
}

/* Runs a whole plan, as far as it goes. */
static inline te_status plan_try(te_context *context, const te_plan *plan, plan_memory *memory)
{
    te_status status;
    te_plan_info info;
    te_plan_sizes sizes;
    te_plan_call call = {.size = sizeof call, .plan = plan, .sizes = memory->sizes};
    te_tensor *buffers;
    OK(te_plan_describe(plan, &info));
    OK(te_plan_infer(plan, &memory->sizes, &sizes, NULL));
    buffers = calloc((size_t)info.buffer_count + 1, sizeof *buffers);
    EXPECT(buffers != NULL, "no memory");
    for (int i = 0; i < info.buffer_count; i++) {
        if (info.buffers[i].role > TE_ROLE_OUTPUT) continue;
        buffers[i] = plan_view(memory, &info.buffers[i], info.direction != TE_DIRECTION_FORWARD);
    }
    if (info.direction == TE_DIRECTION_FORWARD) {
        free(memory->saved);
        memory->saved = plan_allocate((size_t)sizes.saved_bytes);
    }
    call.buffers = buffers;
    call.saved = memory->saved;
    call.consumes_saved = memory->consumes;
    OK(te_plan_scratch_for(context, &call, &call.scratch_size));
    call.scratch = plan_allocate(call.scratch_size);
    call.slots = memory->slots;
    call.stage = memory->stage;
    call.stage_self = memory;
    call.observed = memory->observed;
    memory->running = plan;
    status = te_plan_run(context, &call, NULL);
    plan_check_guard(call.scratch, call.scratch_size, "scratch");
    plan_check_guard(call.saved, (size_t)sizes.saved_bytes, "saved");
    for (int i = 0; i < memory->count; i++) {
        plan_check_guard(memory->members[i].data, memory->members[i].bytes, "caller's");
    }
    free(call.scratch);
    free(buffers);
    return status;
}

static inline void plan_run(te_context *context, const te_plan *plan, plan_memory *memory)
{
    OK(plan_try(context, plan, memory));
}

/* ---- layouts ------------------------------------------------------------------------------ */

static inline int64_t plan_bytes(const te_buffer_info *info, const te_sizes *sizes)
{
    int64_t bytes = (int64_t)te_dtype_bytes(info->dtype);
    for (int d = 0; d < info->ndim; d++) bytes *= te_extent_value(&info->shape[d], sizes);
    return bytes;
}

/* First and last stage that uses a buffer, by itself or by views of it; {count of stages, -1}:
 * none.
 */
static inline void plan_lifetime(const te_plan_info *info, int32_t buffer, int32_t life[2])
{
    life[0] = info->stage_count;
    life[1] = -1;
    for (int32_t s = 0; s < info->stage_count; s++) {
        for (int32_t i = 0; i < info->stages[s].buffer_count; i++) {
            int32_t used = info->stages[s].buffers[i];
            if (info->buffers[used].role == TE_ROLE_VIEW) used = info->buffers[used].base;
            if (used != buffer) continue;
            if (life[0] > s) life[0] = s;
            life[1] = s;
        }
    }
}

/* A view lies inside of what it is a view of. */
static inline void plan_check_view(const te_plan_info *info, int32_t view, const te_sizes *sizes)
{
    const te_buffer_info *b = &info->buffers[view];
    const int64_t begin = te_extent_value(&b->offset, sizes);
    int64_t last = begin, bytes = (int64_t)te_dtype_bytes(b->dtype);
    EXPECT(info->buffers[b->base].role != TE_ROLE_VIEW, "%s is a view of a view", b->name);
    for (int d = 0; d < b->ndim; d++) {
        int64_t length = te_extent_value(&b->shape[d], sizes);
        if (length == 0) return;
        last += (length - 1) * te_extent_value(&b->strides[d], sizes);
    }
    EXPECT(begin >= 0 && (last + 1) * bytes <= plan_bytes(&info->buffers[b->base], sizes), "%s",
           b->name);
}

/* Members lie within the packed memory, aligned, and apart from those that live at the same time.
 * Returns how many bytes the saved ones take, each rounded up. */
static inline int64_t plan_check_layout(const te_plan *plan, const te_sizes *given)
{
    te_plan_info info;
    te_plan_sizes sizes;
    int64_t *offsets, saved = 0, largest = 0, members = 0, all = 0;
    int32_t life[2], other[2];
    OK(te_plan_describe(plan, &info));
    offsets = malloc(((size_t)info.buffer_count + 1) * sizeof *offsets);
    EXPECT(offsets != NULL, "no memory");
    OK(te_plan_infer(plan, given, &sizes, offsets));
    for (int32_t i = 0; i < info.buffer_count; i++) {
        const te_buffer_info *b = &info.buffers[i];
        int64_t bytes;
        if (b->role == TE_ROLE_VIEW) plan_check_view(&info, i, given);
        if (b->role != TE_ROLE_SCRATCH && b->role != TE_ROLE_SAVED) {
            EXPECT(offsets[i] == -1, "%s", b->name);
            continue;
        }
        bytes = plan_bytes(b, given);
        EXPECT(offsets[i] >= 0 && offsets[i] % PLAN_ALIGN == 0, "%s", b->name);
        if (b->role == TE_ROLE_SAVED) {
            EXPECT(offsets[i] >= saved, "%s", b->name);
            saved = offsets[i] + bytes;
            members += (bytes + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN;
            continue;
        }
        if (offsets[i] + bytes > largest) largest = offsets[i] + bytes;
        plan_lifetime(&info, i, life);
        for (int32_t j = 0; j < i && bytes > 0; j++) {
            if (info.buffers[j].role != TE_ROLE_SCRATCH) continue;
            plan_lifetime(&info, j, other);
            if (other[1] < life[0] || life[1] < other[0]) continue;
            EXPECT(offsets[j] >= offsets[i] + bytes ||
                       offsets[j] + plan_bytes(&info.buffers[j], given) <= offsets[i],
                   "%s and %s share memory", b->name, info.buffers[j].name);
        }
    }
    for (int s = 0; s < TE_SEQUENCES; s++) all += te_extent_value(&info.saved_bytes[s], given);
    EXPECT(all == sizes.saved_bytes && saved <= all, "saves %d bytes in %d", (int)saved, (int)all);
    EXPECT(largest <= sizes.scratch_bytes && sizes.scratch_bytes < largest + PLAN_ALIGN, "scratch");
    free(offsets);
    return members;
}

static inline int64_t plan_count(const char *name)
{
    te_counter counters[128];
    size_t count = 0;
    OK(te_counters_read(counters, 128, &count));
    for (size_t i = 0; i < count; i++) {
        if (strcmp(counters[i].name, name) == 0) return counters[i].value;
    }
    return 0;
}

#endif
