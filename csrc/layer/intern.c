/* SPDX-License-Identifier: Apache-2.0
 *
 * intern.c - the table of plans of the process, by the hash of their descriptions.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"
#include "layer/plan.h"

#define BUCKETS 1024

/* Plans are immutable once published and live as long as the process: readers need no lock. */
static _Atomic(te_plan *) buckets[BUCKETS];
TE_PROCESS_LOCK(lock);

/* FNV-1a: the same in every process. 0 is no id. */
static int64_t hash_description(const void *desc, size_t bytes)
{
    uint64_t hash = 0xcbf29ce484222325ULL;
    const unsigned char *p = desc;
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

te_status te_plan_find_desc(const void *desc, size_t bytes, int64_t *id, const te_plan **found)
{
    *id = hash_description(desc, bytes);
    *found = find(*id);
    if (*found != NULL &&
        ((*found)->desc_bytes != bytes || memcmp((*found)->desc, desc, bytes) != 0)) {
        return TE_FAIL(TE_ERROR_STATE, "plan %lld: two descriptions have the same hash",
                       (long long)*id);
    }
    return TE_OK;
}

te_status te_plan_intern(te_plan *built, const void *desc, size_t bytes)
{
    te_plan *plan = malloc(sizeof *plan);
    _Atomic(te_plan *) *bucket;
    built->desc = malloc(bytes);
    if (plan == NULL || built->desc == NULL) {
        free(plan);
        return TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
    }
    built->id = hash_description(desc, bytes);
    built->desc_bytes = bytes;
    memcpy(built->desc, desc, bytes);
    memcpy(plan, built, sizeof *plan);
    bucket = &buckets[(uint64_t)plan->id % BUCKETS];
    (void)pthread_mutex_lock(&lock);
    if (find(plan->id) == NULL) { /* another thread may have been first */
        plan->next = atomic_load_explicit(bucket, memory_order_relaxed);
        atomic_store_explicit(bucket, plan, memory_order_release);
        plan = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    if (plan != NULL) {
        te_plan_clear(plan);
        free(plan);
    }
    memset(built, 0, sizeof *built); /* what it owned has moved */
    return TE_OK;
}

te_status te_plan_describe(int64_t id, te_plan_info *info)
{
    const te_plan *plan = NULL;
    TE_TRY(te_plan_get(id, &plan));
    *info = (te_plan_info){.size = sizeof *info,
                           .direction = plan->direction,
                           .buffers = plan->buffer_infos,
                           .stages = plan->stage_infos,
                           .buffer_count = plan->buffer_count,
                           .stage_count = plan->stage_count,
                           .quantized = plan->quantized,
                           .owners = plan->owners,
                           .symbols = plan->symbols};
    memcpy(info->saved_bytes, plan->saved_bytes, sizeof info->saved_bytes);
    return TE_OK;
}
