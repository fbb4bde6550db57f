/* SPDX-License-Identifier: Apache-2.0 */
#include "core/context.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"

/* Direct-mapped: a newer entry replaces an older one. Table 0 marks an empty entry. */
#define SCRATCH_ENTRIES 2048

typedef struct scratch_entry {
    te_scratch_key key;
    size_t bytes;
} scratch_entry;

struct te_context {
    te_device device;
    int32_t generation; /* te_fork_generation() of the process that made it */
    const te_device_driver *driver;
    void *state;
    pthread_mutex_t lock; /* guards scratch */
    scratch_entry scratch[SCRATCH_ENTRIES];
};

te_status te_context_create(te_device device, te_context **out)
{
    te_status st;
    te_context *context;
    const te_device_driver *driver;
    TE_FAIL_IF(out == NULL, TE_ERROR_INVALID, "out is NULL");
    *out = NULL;
    TE_FAIL_IF(te_device_type_dlpack(device.type) == 0 || device.index < 0 ||
                   device.index >= TE_DEVICE_INDICES,
               TE_ERROR_INVALID, "device (%d, %d) does not exist", (int)device.type,
               (int)device.index);
    driver = te_driver_of(device.type);
    TE_FAIL_IF(driver == NULL, TE_ERROR_UNSUPPORTED,
               "this build has no CUDA backend: rebuild where the CUDA headers are found");
    context = calloc(1, sizeof *context);
    TE_FAIL_IF(context == NULL, TE_ERROR_MEMORY, "no memory for a context");
    context->device = device;
    context->generation = te_fork_generation();
    context->driver = driver;
    if (pthread_mutex_init(&context->lock, NULL) != 0) {
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for a lock");
    } else if ((st = driver->open(device.index, &context->state)) != TE_OK) {
        (void)pthread_mutex_destroy(&context->lock);
    }
    if (st != TE_OK) {
        free(context);
        return st;
    }
    *out = context;
    return TE_OK;
}

void te_context_destroy(te_context *context)
{
    if (context == NULL) return;
    if (context->generation == te_fork_generation()) {
        context->driver->close(context->state);
        (void)pthread_mutex_destroy(&context->lock);
    } /* else its handles are the parent's: vendor libraries hang or crash on them in a child */
    free(context);
}

te_status te_context_check(const te_context *context)
{
    TE_FAIL_IF(context == NULL, TE_ERROR_STATE, "the context is closed");
    if (context->generation == te_fork_generation()) return TE_OK;
    return TE_FAIL(TE_ERROR_STATE,
                   "the context is of the process that this one was forked from: make a new one "
                   "(CUDA can not be used in a forked child: start it with spawn)");
}

te_status te_context_tune_gemm(te_context *context, int32_t enabled, const char *cache_file)
{
    TE_TRY(te_context_check(context));
    TE_FAIL_IF(context->driver->tune_gemm == NULL, TE_ERROR_UNSUPPORTED,
               "tune_gemm: the GEMM of %s has no choice to tune",
               te_device_type_name(context->device.type));
    return context->driver->tune_gemm(context->state, enabled, cache_file);
}

te_device te_context_device(const te_context *context)
{
    return context->device;
}

const te_device_driver *te_context_driver(const te_context *context)
{
    return context->driver;
}

void *te_context_state(const te_context *context)
{
    return context->state;
}

static scratch_entry *scratch_slot(te_context *context, const te_scratch_key *key)
{
    uint64_t mixed = (uint64_t)key->plan;
    for (int s = 0; s < TE_SYMBOL_COUNT; s++) {
        mixed = (mixed ^ (uint64_t)key->sizes.of[s]) * 0x9e3779b97f4a7c15ULL;
    }
    return &context->scratch[(mixed * 0xff51afd7ed558ccdULL >> 32) % SCRATCH_ENTRIES];
}

int te_context_scratch_lookup(te_context *context, const te_scratch_key *key, size_t *bytes)
{
    scratch_entry *entry = scratch_slot(context, key);
    int hit;
    (void)pthread_mutex_lock(&context->lock);
    hit = entry->key.table == key->table && entry->key.selection == key->selection &&
          entry->key.plan == key->plan && entry->key.consumes_saved == key->consumes_saved &&
          memcmp(&entry->key.sizes, &key->sizes, sizeof key->sizes) == 0;
    if (hit) *bytes = entry->bytes;
    (void)pthread_mutex_unlock(&context->lock);
    return hit;
}

void te_context_scratch_store(te_context *context, const te_scratch_key *key, size_t bytes)
{
    scratch_entry *entry = scratch_slot(context, key);
    (void)pthread_mutex_lock(&context->lock);
    entry->key = *key;
    entry->bytes = bytes;
    (void)pthread_mutex_unlock(&context->lock);
}
