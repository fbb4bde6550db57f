/* SPDX-License-Identifier: Apache-2.0
 *
 * plans.h - runs plans from C: their buffers by name, memory of the sizes that they ask for with
 * guards behind it, and scratch memory full of NaN.
 */
#ifndef TE_TESTS_PLANS_H
#define TE_TESTS_PLANS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

enum { PLAN_MAX_BUFFERS = 64, PLAN_ALIGN = 256, PLAN_GUARD = 64, PLAN_GUARD_BYTE = 0xa5 };

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

/* A tensor of the caller's; FP8 ones that a deferred plan passes on have another dtype than f32. */
typedef struct plan_tensor {
    const char *name;
    void *data;
    int64_t rows, columns; /* 0 rows: a vector */
} plan_tensor;

static inline te_tensor plan_view(const plan_tensor *table, const te_buffer_info *info)
{
    te_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    for (; table->name != NULL; table++) {
        if (strcmp(table->name, info->name) != 0) continue;
        tensor.data = table->data;
        tensor.dtype = info->dtype;
        tensor.device = plan_cpu;
        tensor.ndim = table->rows > 0 ? 2 : 1;
        tensor.shape[0] = table->rows > 0 ? table->rows : table->columns;
        tensor.strides[0] = table->rows > 0 ? table->columns : 1;
        tensor.shape[1] = table->rows > 0 ? table->columns : 0;
        tensor.strides[1] = 1;
        return tensor;
    }
    EXPECT(0, "the plan wants a buffer %s", info->name);
    return tensor;
}

/* Aligned memory of exactly `bytes`, full of NaN, and a guard. */
static inline void *plan_memory(size_t bytes)
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

/* Runs a whole plan over the tensors of a table that ends with a NULL name. A forward allocates
 * *saved; the caller frees it. */
static inline void plan_run(te_context *context, int64_t plan, int64_t rows,
                            const plan_tensor *table, void **saved, const int32_t slots[2])
{
    te_tensor buffers[PLAN_MAX_BUFFERS];
    te_plan_info info;
    te_plan_sizes sizes;
    te_plan_call call;
    size_t scratch_bytes = 0;
    int32_t next = 0;
    memset(buffers, 0, sizeof buffers);
    memset(&call, 0, sizeof call);
    OK(te_plan_describe(plan, &info));
    EXPECT(info.buffer_count <= PLAN_MAX_BUFFERS, "%d buffers", info.buffer_count);
    OK(te_plan_infer(plan, rows, &sizes, NULL));
    OK(te_plan_scratch(context, plan, rows, &scratch_bytes));
    for (int i = 0; i < info.buffer_count; i++) {
        te_buffer_role role = info.buffers[i].role;
        if (role == TE_ROLE_SAVED || role == TE_ROLE_SCRATCH) continue;
        buffers[i] = plan_view(table, &info.buffers[i]);
    }
    if (strstr(info.kind, "forward") != NULL) *saved = plan_memory((size_t)sizes.saved_bytes);
    call.size = sizeof call;
    call.plan = plan;
    call.rows = rows;
    call.last = -1;
    call.buffers = buffers;
    call.saved = *saved;
    call.scratch_size = scratch_bytes;
    call.scratch = plan_memory(scratch_bytes);
    call.slots[0] = slots[0];
    call.slots[1] = slots[1];
    OK(te_plan_run(context, &call, &next, NULL));
    EXPECT(next == info.stage_count, "stopped at stage %d of %d", next, info.stage_count);
    plan_check_guard(call.scratch, scratch_bytes, "scratch");
    plan_check_guard(call.saved, (size_t)sizes.saved_bytes, "saved");
    free(call.scratch);
}

static inline void plan_fill_integers(float *values, int64_t count, int largest, unsigned seed)
{
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525U + 1013904223U;
        values[i] = (float)((int)(seed >> 16) % (2 * largest + 1) - largest);
    }
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
