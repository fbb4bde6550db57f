/* SPDX-License-Identifier: Apache-2.0 */
#include "core/backend.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/context.h"
#include "core/counters.h"
#include "core/fork.h"
#include "core/status.h"

/* Registered plug-ins, guarded by the lock; the built-in backends come from the device drivers. */
TE_PROCESS_LOCK(lock);
static te_backend registered[TE_MAX_BACKENDS - 1];
static int registered_count;
static _Atomic(te_op_table *) published[TE_DEVICE_COUNT];
static const te_op_table empty_table;

static void add_backend(te_op_table *table, const te_backend *backend, const int32_t *priorities[])
{
    for (int op = 0; op < TE_OP_COUNT; op++) {
        te_op_candidate *list = table->candidates[op];
        int at = table->count[op];
        if (backend->slots[op].function == NULL || at == TE_MAX_BACKENDS) continue;
        /* Later registrations of the same priority come first: an override overrides. */
        while (at > 0 && *priorities[op * TE_MAX_BACKENDS + at - 1] <= backend->priority) {
            list[at] = list[at - 1];
            priorities[op * TE_MAX_BACKENDS + at] = priorities[op * TE_MAX_BACKENDS + at - 1];
            at--;
        }
        list[at].backend = backend->name;
        list[at].slot = backend->slots[op];
        priorities[op * TE_MAX_BACKENDS + at] = &backend->priority;
        table->count[op]++;
    }
}

/* Builds and publishes the table of a device; the lock is held. */
static const te_op_table *publish(te_device_type device)
{
    const int32_t *priorities[TE_OP_COUNT * TE_MAX_BACKENDS];
    const te_device_driver *driver = device == TE_DEVICE_CPU ? te_cpu_driver() : te_cuda_driver();
    te_op_table *table = calloc(1, sizeof *table);
    if (table == NULL) return NULL;
    if (driver != NULL) add_backend(table, driver->backend, priorities);
    for (int i = 0; i < registered_count; i++) {
        if (registered[i].device == device) add_backend(table, &registered[i], priorities);
    }
    atomic_store_explicit(&published[device], table, memory_order_release);
    return table;
}

const te_op_table *te_op_table_current(te_device_type device)
{
    const te_op_table *table = atomic_load_explicit(&published[device], memory_order_acquire);
    if (table != NULL) return table;
    (void)pthread_mutex_lock(&lock);
    table = atomic_load_explicit(&published[device], memory_order_acquire);
    if (table == NULL) table = publish(device);
    (void)pthread_mutex_unlock(&lock);
    return table != NULL ? table : &empty_table;
}

static int find_registered(const char *name)
{
    for (int i = 0; i < registered_count; i++) {
        if (strcmp(registered[i].name, name) == 0) return i;
    }
    return -1;
}

te_status te_backend_register(const te_backend *backend)
{
    te_status st = TE_OK;
    if (backend == NULL || backend->size < offsetof(te_backend, slots) || backend->name == NULL) {
        return TE_FAIL(TE_ERROR_INVALID, "backend: size and name must be set");
    }
    if ((int)backend->device < 0 || backend->device >= TE_DEVICE_COUNT) {
        return TE_FAIL(TE_ERROR_INVALID, "backend %s: device = %d, expected 0 (CPU) or 1 (CUDA)",
                       backend->name, (int)backend->device);
    }
    (void)pthread_mutex_lock(&lock);
    if (find_registered(backend->name) >= 0) {
        st = TE_FAIL(TE_ERROR_INVALID, "backend %s is registered already: unregister it first",
                     backend->name);
        goto done;
    }
    if (registered_count == TE_MAX_BACKENDS - 1) {
        st = TE_FAIL(TE_ERROR_STATE, "backend %s: %d backends are registered, no more fit",
                     backend->name, registered_count);
        goto done;
    }
    memset(&registered[registered_count], 0, sizeof registered[0]);
    memcpy(&registered[registered_count], backend,
           backend->size < sizeof *backend ? backend->size : sizeof *backend);
    registered_count++;
    if (publish(backend->device) == NULL) {
        registered_count--;
        st = TE_FAIL(TE_ERROR_MEMORY, "backend %s: no memory for an operator table", backend->name);
    }
done:
    (void)pthread_mutex_unlock(&lock);
    return st;
}

te_status te_backend_unregister(const char *name)
{
    te_status st = TE_OK;
    te_backend removed;
    int at;
    if (name == NULL) return TE_FAIL(TE_ERROR_INVALID, "name is NULL");
    (void)pthread_mutex_lock(&lock);
    at = find_registered(name);
    if (at < 0) {
        st = TE_FAIL(TE_ERROR_INVALID, "no backend named %s is registered", name);
        goto done;
    }
    removed = registered[at];
    memmove(&registered[at], &registered[at + 1],
            (size_t)(registered_count - at - 1) * sizeof registered[0]);
    registered_count--;
    if (publish(removed.device) == NULL) {
        memmove(&registered[at + 1], &registered[at],
                (size_t)(registered_count - at) * sizeof registered[0]);
        registered[at] = removed;
        registered_count++;
        st = TE_FAIL(TE_ERROR_MEMORY, "backend %s: no memory for an operator table", name);
    }
done:
    (void)pthread_mutex_unlock(&lock);
    return st;
}

/* The next candidate from *at on that supports the call; *at moves behind it. */
static te_status resolve(const te_op_table *table, te_context *context, te_op op, const void *args,
                         int *at, const te_op_candidate **out)
{
    te_status st = TE_OK;
    while (*at < table->count[op]) {
        const te_op_candidate *candidate = &table->candidates[op][(*at)++];
        st = candidate->slot.supports == NULL
                 ? TE_OK
                 : candidate->slot.supports(candidate->slot.self, context, args);
        if (st == TE_OK) {
            *out = candidate;
            return TE_OK;
        }
        if (st != TE_ERROR_UNSUPPORTED) return st;
    }
    if (st == TE_ERROR_UNSUPPORTED) return st; /* the last candidate said why */
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: no backend of this device has it", te_op_name(op));
}

static te_status check_call(te_context *context, te_op op, const void *args)
{
    if ((int)op < 0 || op >= TE_OP_COUNT) {
        return TE_FAIL(TE_ERROR_INVALID, "operator %d does not exist", (int)op);
    }
    TE_TRY(te_context_check(context));
    return te_check_args(op, te_context_device(context), args);
}

te_status te_op_run_in(const te_op_table *table, te_context *context, te_op op, const void *args,
                       void *stream)
{
    const te_op_candidate *candidate = NULL;
    te_status st;
    int at = 0;
    TE_TRY(check_call(context, op, args));
    do { /* a function may find out only when called that it does not take the arguments */
        TE_TRY(resolve(table, context, op, args, &at, &candidate));
        st = candidate->slot.function(candidate->slot.self, context, args, stream);
    } while (st == TE_ERROR_UNSUPPORTED && at < table->count[op]);
    if (st == TE_OK) te_count_op(te_context_device(context).type, op);
    return st;
}

te_status te_op_workspace_in(const te_op_table *table, te_context *context, te_op op,
                             const void *args, size_t *bytes)
{
    const te_op_candidate *candidate = NULL;
    te_status st;
    int at = 0;
    *bytes = 0;
    TE_TRY(check_call(context, op, args));
    TE_TRY(resolve(table, context, op, args, &at, &candidate));
    for (;;) { /* enough for every candidate that the call may end at */
        size_t need = 0;
        if (candidate->slot.workspace != NULL) {
            TE_TRY(candidate->slot.workspace(candidate->slot.self, context, args, &need));
        }
        if (need > *bytes) *bytes = need;
        if (at == table->count[op]) return TE_OK;
        st = resolve(table, context, op, args, &at, &candidate);
        if (st != TE_OK) return st == TE_ERROR_UNSUPPORTED ? TE_OK : st;
    }
}

te_status te_op_run(te_context *context, te_op op, const void *args, void *stream)
{
    TE_TRY(te_context_check(context));
    return te_op_run_in(te_op_table_current(te_context_device(context).type), context, op, args,
                        stream);
}

te_status te_op_workspace(te_context *context, te_op op, const void *args, size_t *bytes)
{
    TE_TRY(te_context_check(context));
    return te_op_workspace_in(te_op_table_current(te_context_device(context).type), context, op,
                              args, bytes);
}

#define X(NAME, name)                                                                              \
    te_status te_##name(te_context *context, const te_##name##_args *args, void *stream)           \
    {                                                                                              \
        return te_op_run(context, TE_OP_##NAME, args, stream);                                     \
    }
TE_OPS(X)
#undef X
