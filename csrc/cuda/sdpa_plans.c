/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/sdpa_plans.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"
#include "cuda/api.h"
#include "core/disk_cache.h"

enum {
    BUCKETS = 256,
    MAX_PLANS = 1024, /* kept; past it the older half goes */
    MORE_PLANS = 64,  /* before that is tried again, where most had to stay */
    MAX_HANDLES = 16, /* kept: one for each thread that runs at a time */
    FORMAT = 2        /* of what is kept on disk: another one for other graphs of a key */
};

typedef struct entry {
    te_sdpa_key key;
    te_cudnn_plan plan;
    uint64_t used; /* when, in calls of the device */
    int users;     /* calls that are about to launch it */
    int captured;  /* a CUDA graph may launch it at any time */
    struct entry *next;
} entry;

/* A handle, and the stream that it was given last. */
typedef struct held_handle {
    cudnnHandle_t handle;
    void *stream;
} held_handle;

struct te_sdpa_plans {
    te_cuda_state *cuda;
    char device[96];        /* its name, and how many multiprocessors it has */
    pthread_mutex_t making; /* one plan at a time, so that no two threads make the same */
    pthread_mutex_t lock;   /* guards what follows */
    entry *buckets[BUCKETS];
    int count, limit; /* at which some go */
    uint64_t calls;
    held_handle handles[MAX_HANDLES];
    int handle_count;
};

static te_status name_device(te_sdpa_plans *plans)
{
    char name[64] = "";
    int processors = 0;
    TE_TRY(TE_CU(cuDeviceGetName, name, sizeof name - 1, plans->cuda->device));
    TE_TRY(TE_CU(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                 plans->cuda->device));
    (void)snprintf(plans->device, sizeof plans->device, "%s, %d", name, processors);
    return TE_OK;
}

te_status te_sdpa_open(te_cuda_state *cuda, te_sdpa_plans **out)
{
    te_status st = TE_OK;
    te_sdpa_plans *made = NULL;
    *out = atomic_load_explicit(&cuda->sdpa, memory_order_acquire);
    if (*out != NULL) return TE_OK;
    if (te_cudnn_load() != TE_OK) return TE_ERROR_UNSUPPORTED; /* the text says why */
    (void)pthread_mutex_lock(&cuda->lock);
    *out = atomic_load_explicit(&cuda->sdpa, memory_order_relaxed);
    if (*out != NULL) goto done;
    made = calloc(1, sizeof *made);
    if (made == NULL || pthread_mutex_init(&made->making, NULL) != 0 ||
        pthread_mutex_init(&made->lock, NULL) != 0) {
        free(made);
        made = NULL;
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for the plans of attention");
        goto done;
    }
    made->cuda = cuda;
    made->limit = MAX_PLANS;
    TE_TRY_DONE(name_device(made));
    atomic_store_explicit(&cuda->sdpa, made, memory_order_release);
    *out = made;
    made = NULL;
done:
    (void)pthread_mutex_unlock(&cuda->lock);
    te_sdpa_close(made);
    return st;
}

static void free_entry(entry *made)
{
    te_cudnn_plan_clear(&made->plan);
    free(made);
}

void te_sdpa_close(te_sdpa_plans *plans)
{
    if (plans == NULL) return;
    for (int i = 0; i < BUCKETS; i++) {
        while (plans->buckets[i] != NULL) {
            entry *first = plans->buckets[i];
            plans->buckets[i] = first->next;
            free_entry(first);
        }
    }
    for (int i = 0; i < plans->handle_count; i++) {
        (void)te_cudnn.cudnnDestroy(plans->handles[i].handle);
    }
    (void)pthread_mutex_destroy(&plans->making);
    (void)pthread_mutex_destroy(&plans->lock);
    free(plans);
}

/* ---- handles ---- */

/* It frees memory, which a capture of this thread would forbid. */
static void destroy_handle(cudnnHandle_t handle)
{
    te_cuda_relaxed relaxed;
    if (te_cuda_relax_capture(&relaxed) != TE_OK) return;
    (void)te_cudnn.cudnnDestroy(handle);
    te_cuda_restore_capture(&relaxed);
}

/* A handle of no other thread, on the stream. */
static te_status take_handle(te_sdpa_plans *plans, void *stream, held_handle *held)
{
    te_status st = TE_OK;
    *held = (held_handle){NULL, NULL};
    (void)pthread_mutex_lock(&plans->lock);
    if (plans->handle_count > 0) *held = plans->handles[--plans->handle_count];
    (void)pthread_mutex_unlock(&plans->lock);
    if (held->handle == NULL) {
        te_cuda_relaxed relaxed;
        TE_TRY(te_cuda_relax_capture(&relaxed));
        st = TE_CUDNN(cudnnCreate, &held->handle);
        te_cuda_restore_capture(&relaxed);
        if (st != TE_OK) return st;
    } else if (held->stream == stream) {
        return TE_OK;
    }
    st = TE_CUDNN(cudnnSetStream, held->handle, (cudaStream_t)stream);
    held->stream = stream;
    if (st != TE_OK) destroy_handle(held->handle);
    return st;
}

static void give_handle(te_sdpa_plans *plans, const held_handle *held)
{
    (void)pthread_mutex_lock(&plans->lock);
    if (plans->handle_count < MAX_HANDLES) {
        plans->handles[plans->handle_count++] = *held;
        held = NULL;
    }
    (void)pthread_mutex_unlock(&plans->lock);
    if (held != NULL) destroy_handle(held->handle);
}

/* ---- plans ---- */

static entry **bucket_of(te_sdpa_plans *plans, const te_sdpa_key *key)
{
    uint64_t words[sizeof *key / sizeof(uint64_t)], hash = 0x9e3779b97f4a7c15ULL;
    _Static_assert(sizeof *key % sizeof(uint64_t) == 0, "a key is whole words");
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        hash = (hash ^ words[i]) * 0xff51afd7ed558ccdULL;
        hash ^= hash >> 32;
    }
    return &plans->buckets[hash % BUCKETS];
}

/* The entry of a problem, for one user more; NULL where there is none. */
static entry *look_up(te_sdpa_plans *plans, const te_sdpa_key *key, int captures)
{
    entry *found;
    (void)pthread_mutex_lock(&plans->lock);
    found = *bucket_of(plans, key);
    while (found != NULL && memcmp(&found->key, key, sizeof *key) != 0) found = found->next;
    if (found != NULL) {
        found->used = ++plans->calls;
        found->users++;
        found->captured |= captures;
    }
    (void)pthread_mutex_unlock(&plans->lock);
    return found;
}

static void leave(te_sdpa_plans *plans, entry *made)
{
    (void)pthread_mutex_lock(&plans->lock);
    made->users--;
    (void)pthread_mutex_unlock(&plans->lock);
}

/* Takes entries that were used before a moment, and by nobody now, out of the table. */
static entry *take_old(te_sdpa_plans *plans, uint64_t before)
{
    entry *taken = NULL;
    (void)pthread_mutex_lock(&plans->lock);
    for (int i = 0; i < BUCKETS; i++) {
        entry **at = &plans->buckets[i];
        while (*at != NULL) {
            entry *this = *at;
            if (this->users > 0 || this->captured || this->used >= before) {
                at = &this->next;
                continue;
            }
            *at = this->next;
            this->next = taken;
            taken = this;
            plans->count--;
        }
    }
    (void)pthread_mutex_unlock(&plans->lock);
    return taken;
}

static int compare_times(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The moment before which half of the plans were used last. */
static uint64_t median_use(te_sdpa_plans *plans)
{
    uint64_t times[2 * MAX_PLANS];
    int count = 0;
    (void)pthread_mutex_lock(&plans->lock);
    for (int i = 0; i < BUCKETS; i++) {
        for (entry *at = plans->buckets[i]; at != NULL && count < 2 * MAX_PLANS; at = at->next) {
            times[count++] = at->used;
        }
    }
    (void)pthread_mutex_unlock(&plans->lock);
    qsort(times, (size_t)count, sizeof *times, compare_times);
    return count > 0 ? times[count / 2] : 0;
}

/* Puts entries (NULL: none) back into the table, and says at how many to look again. */
static void put_back(te_sdpa_plans *plans, entry *entries)
{
    (void)pthread_mutex_lock(&plans->lock);
    while (entries != NULL) {
        entry *this = entries, **bucket = bucket_of(plans, &this->key);
        entries = this->next;
        this->next = *bucket;
        *bucket = this;
        plans->count++;
    }
    plans->limit = plans->count < MAX_PLANS - MORE_PLANS ? MAX_PLANS : plans->count + MORE_PLANS;
    (void)pthread_mutex_unlock(&plans->lock);
}

/* Frees what was not used for long, where there are many. What was launched must have run before
 * its code goes; that can not be waited for while a thread captures, and then all stay for a while.
 */
static void make_space(te_sdpa_plans *plans)
{
    te_cuda_relaxed relaxed;
    entry *old = NULL;
    int is_full, waited;
    (void)pthread_mutex_lock(&plans->lock);
    is_full = plans->count >= plans->limit;
    (void)pthread_mutex_unlock(&plans->lock);
    if (!is_full) return;
    (void)pthread_mutex_lock(&plans->making);
    old = take_old(plans, median_use(plans));
    waited = te_cuda_relax_capture(&relaxed) == TE_OK;
    if (waited) {
        waited = TE_CU(cuCtxSynchronize, ) == TE_OK;
        te_cuda_restore_capture(&relaxed);
    }
    while (waited && old != NULL) {
        entry *next = old->next;
        free_entry(old);
        old = next;
    }
    put_back(plans, old);
    (void)pthread_mutex_unlock(&plans->making);
}

/* All that a plan depends on. */
static te_cache_key key_on_disk(const te_sdpa_plans *plans, const te_sdpa_key *key)
{
    const uint64_t library[] = {FORMAT, te_cudnn.cudnnGetVersion()};
    te_cache_key on_disk = te_cache_key_of("attention");
    te_cache_key_add(&on_disk, library, sizeof library);
    te_cache_key_add(&on_disk, plans->device, sizeof plans->device);
    te_cache_key_add(&on_disk, key, sizeof *key);
    return on_disk;
}

/* From the disk, or made and kept there. */
static te_status make_plan(const te_sdpa_plans *plans, const te_sdpa_key *key, cudnnHandle_t handle,
                           te_cudnn_plan *plan)
{
    const te_cudnn_target target = {handle, NULL};
    const te_cache_key on_disk = key_on_disk(plans, key);
    te_cudnn_graph *graph = calloc(1, sizeof *graph);
    void *text = NULL;
    size_t size = 0;
    te_cuda_relaxed relaxed = {0};
    te_status st;
    TE_FAIL_IF(graph == NULL, TE_ERROR_MEMORY, "no memory for a graph of attention");
    TE_TRY_DONE(te_cuda_relax_capture(&relaxed));
    te_sdpa_write(graph, key);
    if (te_cache_read(&on_disk, &text, &size) &&
        te_cudnn_plan_restore(graph, handle, text, size, plan) == TE_OK) {
        goto done;
    }
    free(text);
    text = NULL;
    TE_TRY_DONE(te_cudnn_plan_make(graph, &target, plan));
    text = te_cudnn_plan_text(plan, &size);
    if (text != NULL) te_cache_write(&on_disk, text, size);
done:
    te_cuda_restore_capture(&relaxed);
    free(text);
    te_cudnn_graph_clear(graph);
    free(graph);
    return st;
}

/* The entry of a problem, found or made, for one user more. */
static te_status find(te_sdpa_plans *plans, const te_sdpa_key *key, cudnnHandle_t handle,
                      int captures, entry **out)
{
    te_status st = TE_OK;
    entry *made = NULL, **bucket;
    *out = look_up(plans, key, captures);
    if (*out != NULL) return TE_OK;
    (void)pthread_mutex_lock(&plans->making);
    *out = look_up(plans, key, captures); /* another thread may have been first */
    if (*out != NULL) goto done;
    made = calloc(1, sizeof *made);
    if (made == NULL) {
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan of attention");
        goto done;
    }
    TE_TRY_DONE(make_plan(plans, key, handle, &made->plan));
    made->key = *key;
    made->users = 1;
    made->captured = captures;
    (void)pthread_mutex_lock(&plans->lock);
    bucket = bucket_of(plans, key);
    made->next = *bucket;
    made->used = ++plans->calls;
    *bucket = *out = made;
    plans->count++;
    (void)pthread_mutex_unlock(&plans->lock);
    made = NULL;
done:
    (void)pthread_mutex_unlock(&plans->making);
    free(made);
    return st;
}

te_status te_sdpa_workspace(te_sdpa_plans *plans, const te_sdpa_key *key, size_t *bytes)
{
    te_status st = TE_OK;
    held_handle held;
    entry *found = look_up(plans, key, 0);
    if (found == NULL) {
        TE_TRY(take_handle(plans, NULL, &held));
        st = find(plans, key, held.handle, 0, &found);
        give_handle(plans, &held);
    }
    if (st != TE_OK) return st;
    *bytes = found->plan.workspace;
    leave(plans, found);
    return TE_OK;
}

te_status te_sdpa_run(te_sdpa_plans *plans, const te_sdpa_key *key, void *const *places,
                      void *workspace, size_t size, void *stream)
{
    te_status st;
    held_handle held;
    entry *found;
    const int captures = te_cuda_is_capturing(plans->cuda, stream);
    if (!captures) make_space(plans);
    TE_TRY(take_handle(plans, stream, &held));
    st = find(plans, key, held.handle, captures, &found);
    if (st == TE_OK) {
        st = te_check_workspace(key->backward ? TE_OP_ATTENTION_BACKWARD : TE_OP_ATTENTION,
                                workspace, size, found->plan.workspace);
        if (st == TE_OK) {
            st = te_cudnn_plan_run(&found->plan, held.handle, places, workspace);
        }
        leave(plans, found);
    }
    give_handle(plans, &held);
    return st;
}
