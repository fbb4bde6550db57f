/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.c - the CPU as a device: always there, without state of its own.
 */
#include "core/context.h"
#include "core/status.h"
#include "cpu/ops.h"

static te_status open_cpu(int32_t index, void **state)
{
    *state = NULL;
    TE_FAIL_IF(index != 0, TE_ERROR_INVALID, "device index %d: the CPU is one device, number 0",
               (int)index);
    return TE_OK;
}

static void close_cpu(void *state)
{
    (void)state;
}

static te_status current_cpu(int32_t *index)
{
    *index = 0;
    return TE_OK;
}

#define X(NAME, name)                                                                              \
    static te_status run_##name(void *self, te_context *context, const void *args, void *stream)   \
    {                                                                                              \
        (void)self, (void)context, (void)stream;                                                   \
        return te_cpu_##name(args);                                                                \
    }
TE_OPS(X)
#undef X
#define X(NAME, name)                                                                              \
    static te_status ask_##name(void *self, te_context *context, const void *args, size_t *bytes)  \
    {                                                                                              \
        (void)self, (void)context;                                                                 \
        *bytes = te_cpu_##name##_workspace(args);                                                  \
        return TE_OK;                                                                              \
    }
TE_CPU_WORKSPACES(X)
#undef X

static const te_backend backend = {
    .size = sizeof(te_backend),
    .name = "cpu",
    .device = TE_DEVICE_CPU,
    .slots =
        {
#define X(NAME, name) [TE_OP_##NAME].function = run_##name,
            TE_OPS(X)
#undef X
#define X(NAME, name) [TE_OP_##NAME].workspace = ask_##name,
                TE_CPU_WORKSPACES(X)
#undef X
        },
};

const te_device_driver *te_cpu_driver(void)
{
    static const te_device_driver driver = {
        .open = open_cpu,
        .close = close_cpu,
        .backend = &backend,
        .update = te_cpu_update,
        .l2norm = te_cpu_l2norm,
        .current = current_cpu,
    };
    return &driver;
}
