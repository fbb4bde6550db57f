/* SPDX-License-Identifier: Apache-2.0
 *
 * intern.c - the table of the plans that somebody holds, by the hash of their descriptions.
 *
 * A call has its plan by pointer, and its caller holds it: the table is searched where plans are
 * made, or found by id, and where the last holder lets one go.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"
#include "layer/plan.h"

#define BUCKETS 1024

/* The lock guards the lists; each store leaves them whole, for a child that is forked meanwhile. */
static _Atomic(te_plan *) buckets[BUCKETS];
static _Atomic int64_t count; /* of plans that are held */
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

static _Atomic(te_plan *) *bucket_of(int64_t id)
{
    return &buckets[(uint64_t)id % BUCKETS];
}

/* One holder more, unless the last one is just letting go: then the plan is about to leave. */
static int hold(te_plan *plan)
{
    int64_t holders = atomic_load(&plan->holders);
    while (holders > 0 && !atomic_compare_exchange_weak(&plan->holders, &holders, holders + 1)) {
    }
    return holders > 0;
}

/* The plan of an id, held for the caller; `made`, which nobody knows yet, where there is none. */
static te_plan *find_or_add(int64_t id, te_plan *made)
{
    _Atomic(te_plan *) *bucket = bucket_of(id);
    te_plan *plan;
    (void)pthread_mutex_lock(&lock);
    plan = atomic_load(bucket);
    while (plan != NULL && (plan->id != id || !hold(plan))) plan = atomic_load(&plan->next);
    if (plan == NULL && made != NULL) {
        plan = made;
        atomic_store(&plan->holders, 1);
        atomic_store(&plan->next, atomic_load(bucket));
        atomic_store(bucket, plan);
        (void)atomic_fetch_add(&count, 1);
    }
    (void)pthread_mutex_unlock(&lock);
    return plan;
}

te_status te_plan_find(int64_t id, te_plan **plan)
{
    TE_FAIL_IF(plan == NULL, TE_ERROR_INVALID, "plan is NULL");
    *plan = find_or_add(id, NULL);
    if (*plan != NULL) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID,
                   "plan %lld is not held in this process: make it from its graph", (long long)id);
}

void te_plan_retain(te_plan *plan)
{
    if (plan != NULL) (void)atomic_fetch_add_explicit(&plan->holders, 1, memory_order_relaxed);
}

void te_plan_release(te_plan *plan)
{
    _Atomic(te_plan *) *at;
    if (plan == NULL || atomic_fetch_sub(&plan->holders, 1) != 1) return;
    at = bucket_of(plan->id);
    (void)pthread_mutex_lock(&lock);
    while (atomic_load(at) != plan) at = &atomic_load(at)->next;
    atomic_store(at, atomic_load(&plan->next));
    (void)pthread_mutex_unlock(&lock);
    (void)atomic_fetch_sub(&count, 1);
    te_plan_clear(plan);
    free(plan);
}

int64_t te_plan_count(void)
{
    return atomic_load(&count);
}

te_status te_plan_find_desc(const void *desc, size_t bytes, te_plan **plan)
{
    int64_t id = hash_description(desc, bytes);
    *plan = find_or_add(id, NULL);
    if (*plan == NULL ||
        ((*plan)->desc_bytes == bytes && memcmp((*plan)->desc, desc, bytes) == 0)) {
        return TE_OK;
    }
    te_plan_release(*plan);
    *plan = NULL;
    return TE_FAIL(TE_ERROR_STATE, "plan %lld: two descriptions have the same hash", (long long)id);
}

te_status te_plan_intern(te_plan *built, const void *desc, size_t bytes, te_plan **plan)
{
    te_plan *made = malloc(sizeof *made);
    built->desc = malloc(bytes);
    if (made == NULL || built->desc == NULL) {
        free(made);
        return TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
    }
    built->id = hash_description(desc, bytes);
    built->desc_bytes = bytes;
    memcpy(built->desc, desc, bytes);
    memcpy(made, built, sizeof *made);
    memset(built, 0, sizeof *built); /* what it owned has moved */
    *plan = find_or_add(made->id, made);
    if (*plan != made) { /* another thread was first */
        te_plan_clear(made);
        free(made);
    }
    return TE_OK;
}

te_status te_plan_check(const te_plan *plan)
{
    return plan != NULL ? TE_OK : TE_FAIL(TE_ERROR_INVALID, "plan is NULL");
}

te_status te_plan_describe(const te_plan *plan, te_plan_info *info)
{
    TE_TRY(te_plan_check(plan));
    *info = (te_plan_info){.size = sizeof *info,
                           .id = plan->id,
                           .direction = plan->direction,
                           .buffers = plan->buffer_infos,
                           .stages = plan->stage_infos,
                           .buffer_count = plan->buffer_count,
                           .stage_count = plan->stage_count,
                           .quantized = plan->quantized,
                           .owners = plan->owners,
                           .symbols = plan->symbols};
    memcpy(info->saved_bytes, plan->saved_bytes, sizeof info->saved_bytes);
    te_plan_count_ports(info);
    return TE_OK;
}
