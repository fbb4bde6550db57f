/* SPDX-License-Identifier: Apache-2.0
 *
 * sdpa_plans.c - how long plans of attention and handles of cuDNN live: csrc/cuda/sdpa_plans.c over
 * a driver, a library and graphs that only count what is made of them and what goes.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/status.h"
#include "cuda/api.h"
#include "core/disk_cache.h"
#include "cuda/sdpa_plans.h"

enum { MAX_PLANS = 1024, MORE_PLANS = 64, MAX_HANDLES = 16, WORKSPACE = 64, THREADS = 20 };

static int failures;
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)printf("line %d: %s: ", __LINE__, #condition);                                   \
            (void)printf(__VA_ARGS__);                                                             \
            (void)putchar('\n');                                                                   \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

/* ---- what stands in for driver, library and graphs ---- */

static atomic_int made, cleared, synced, streams_set, handles_made, handles_gone;
static atomic_int capturing, can_not_relax, can_not_wait, fails, is_slow;
static void (*during)(void); /* while a plan runs */
static te_cuda_state cuda;

te_cuda_api te_cuda_functions;
te_cudnn_api te_cudnn;

static CUresult get_name(char *name, int size, CUdevice device)
{
    (void)device;
    (void)snprintf(name, (size_t)size, "a device");
    return CUDA_SUCCESS;
}

static CUresult get_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)attribute, (void)device;
    *value = 132;
    return CUDA_SUCCESS;
}

static CUresult synchronize(void)
{
    synced++;
    return can_not_wait ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

static cudnnStatus_t create_handle(cudnnHandle_t *handle)
{
    *handle = (cudnnHandle_t)(uintptr_t)++handles_made;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t destroy_handle(cudnnHandle_t handle)
{
    (void)handle;
    handles_gone++;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t set_stream(cudnnHandle_t handle, cudaStream_t stream)
{
    (void)handle, (void)stream;
    streams_set++;
    return CUDNN_STATUS_SUCCESS;
}

static size_t version(void)
{
    return 91900;
}

te_status te_cudnn_load(void)
{
    te_cudnn.cudnnCreate = create_handle;
    te_cudnn.cudnnDestroy = destroy_handle;
    te_cudnn.cudnnSetStream = set_stream;
    te_cudnn.cudnnGetVersion = version;
    return TE_OK;
}

te_status te_cudnn_check(cudnnStatus_t status, const char *call, const char *file, int line)
{
    return status == CUDNN_STATUS_SUCCESS ? TE_OK
                                          : te_fail(TE_ERROR_DEVICE, file, line, "%s", call);
}

te_status te_cuda_check(CUresult result, const char *call, const char *file, int line)
{
    return result == CUDA_SUCCESS ? TE_OK : te_fail(TE_ERROR_DEVICE, file, line, "%s", call);
}

te_status te_cuda_relax_capture(te_cuda_relaxed *relaxed)
{
    (void)relaxed;
    return can_not_relax ? TE_FAIL(TE_ERROR_DEVICE, "captures") : TE_OK;
}

void te_cuda_restore_capture(te_cuda_relaxed *relaxed)
{
    (void)relaxed;
}

int te_cuda_is_capturing(te_cuda_state *state, void *stream)
{
    (void)state, (void)stream;
    return capturing;
}

te_status te_check_workspace(te_op op, const void *workspace, size_t size, size_t need)
{
    (void)op, (void)workspace;
    return size >= need ? TE_OK : TE_FAIL(TE_ERROR_INVALID, "workspace");
}

te_cache_key te_cache_key_of(const char *kind)
{
    return (te_cache_key){.kind = kind};
}

void te_cache_key_add(te_cache_key *key, const void *data, size_t size)
{
    (void)key, (void)data, (void)size;
}

int te_cache_read(const te_cache_key *key, void **data, size_t *size)
{
    (void)key, (void)data, (void)size;
    return 0;
}

void te_cache_write(const te_cache_key *key, const void *data, size_t size)
{
    (void)key, (void)data, (void)size;
}

void te_sdpa_write(te_cudnn_graph *graph, const te_sdpa_key *key)
{
    (void)graph, (void)key;
}

void te_cudnn_graph_clear(te_cudnn_graph *graph)
{
    (void)graph;
}

te_status te_cudnn_plan_make(te_cudnn_graph *graph, const te_cudnn_target *target,
                             te_cudnn_plan *plan)
{
    (void)graph, (void)target;
    if (is_slow) (void)nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    if (fails) return TE_FAIL(TE_ERROR_UNSUPPORTED, "no engine");
    plan->plan = (cudnnBackendDescriptor_t)(uintptr_t)++made;
    plan->workspace = WORKSPACE;
    return TE_OK;
}

te_status te_cudnn_plan_restore(const te_cudnn_graph *graph, cudnnHandle_t handle, const char *text,
                                size_t size, te_cudnn_plan *plan)
{
    (void)graph, (void)handle, (void)text, (void)size, (void)plan;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "nothing is kept");
}

char *te_cudnn_plan_text(const te_cudnn_plan *plan, size_t *size)
{
    (void)plan, (void)size;
    return NULL;
}

void te_cudnn_plan_clear(te_cudnn_plan *plan)
{
    CHECK(plan->plan != NULL, "cleared twice");
    plan->plan = NULL;
    cleared++;
}

te_status te_cudnn_plan_run(const te_cudnn_plan *plan, cudnnHandle_t handle, void *const *places,
                            void *workspace)
{
    (void)handle, (void)places, (void)workspace;
    if (during != NULL) during();
    CHECK(plan->plan != NULL, "a plan that runs is gone");
    return TE_OK;
}

/* ---- the checks ---- */

static te_sdpa_plans *begin(void)
{
    te_sdpa_plans *plans = NULL, *again = NULL;
    made = cleared = synced = streams_set = handles_made = handles_gone = 0;
    atomic_store(&cuda.sdpa, NULL);
    CHECK(te_sdpa_open(&cuda, &plans) == TE_OK && te_sdpa_open(&cuda, &again) == TE_OK, "open");
    CHECK(plans != NULL && plans == again, "two states of a device");
    return plans;
}

static void end(te_sdpa_plans *plans)
{
    te_sdpa_close(plans);
    CHECK(made == cleared, "%d plans made, %d cleared", made, cleared);
    CHECK(handles_made == handles_gone, "%d handles made, %d gone", handles_made, handles_gone);
}

static void ask_workspace(te_sdpa_plans *plans, int number)
{
    te_sdpa_key key;
    size_t bytes = 0;
    memset(&key, 0, sizeof key);
    key.queries = number;
    CHECK(te_sdpa_workspace(plans, &key, &bytes) == TE_OK && bytes == WORKSPACE, "%zu", bytes);
}

static te_status try_run(te_sdpa_plans *plans, int number, size_t size, void *stream)
{
    te_sdpa_key key;
    memset(&key, 0, sizeof key);
    key.queries = number;
    return te_sdpa_run(plans, &key, NULL, NULL, size, stream);
}

static void run(te_sdpa_plans *plans, int first, int end)
{
    for (int i = first; i < end; i++) {
        te_status st = try_run(plans, i, WORKSPACE, NULL);
        CHECK(st == TE_OK, "run %d: %s", i, te_last_error());
    }
}

/* Runs problems, none of which, or all of which, are made. */
static void run_made(te_sdpa_plans *plans, int first, int end, int all)
{
    int before = made, expected = all ? end - first : 0;
    run(plans, first, end);
    CHECK(made - before == expected, "%d to %d: %d plans made, expected %d", first, end,
          made - before, expected);
}

static void check_kept(void)
{
    te_sdpa_plans *plans = begin();
    ask_workspace(plans, 0);
    run_made(plans, 0, 1, 0);
    run_made(plans, 1, 5, 1);
    run_made(plans, 0, 5, 0);
    CHECK(try_run(plans, 0, WORKSPACE - 1, NULL) == TE_ERROR_INVALID, "workspace");
    fails = 1;
    CHECK(try_run(plans, 5, WORKSPACE, NULL) == TE_ERROR_UNSUPPORTED, "a plan that can not be");
    run_made(plans, 0, 5, 0);
    fails = 0;
    run_made(plans, 5, 6, 1); /* a failure is not kept */
    CHECK(handles_made == 1 && streams_set == 1, "%d handles, %d streams", handles_made,
          streams_set);
    for (int i = 0; i < 4; i++) {
        CHECK(try_run(plans, 0, WORKSPACE, plans) == TE_OK, "on a stream");
    }
    CHECK(handles_made == 1 && streams_set == 2, "%d handles, %d streams", handles_made,
          streams_set);
    end(plans);
    te_sdpa_close(NULL);
}

/* Past the bound the half goes that was not used for longest. */
static void check_eviction(void)
{
    te_sdpa_plans *plans = begin();
    for (int i = 0; i < MAX_PLANS - 1; i++) ask_workspace(plans, i);
    run_made(plans, 0, MAX_PLANS - 1, 0);
    run_made(plans, 0, MAX_PLANS / 4, 0); /* the first quarter is now the newest */
    run_made(plans, MAX_PLANS - 1, MAX_PLANS, 1);
    CHECK(cleared == 0 && synced == 0, "%d cleared, %d waits", cleared, synced);
    run_made(plans, MAX_PLANS, MAX_PLANS + 1, 1);
    CHECK(cleared == MAX_PLANS / 2 && synced == 1, "%d cleared, %d waits", cleared, synced);
    run_made(plans, 0, MAX_PLANS / 4, 0);
    run_made(plans, MAX_PLANS * 3 / 4, MAX_PLANS + 1, 0);
    run_made(plans, MAX_PLANS / 4, MAX_PLANS / 2, 1);
    end(plans);
}

/* What a CUDA graph may launch stays, however old it is. */
static void check_captured(void)
{
    te_sdpa_plans *plans = begin();
    capturing = 1;
    run_made(plans, 0, 10, 1);
    run_made(plans, 10, MAX_PLANS + 10, 1); /* a capture frees nothing */
    CHECK(cleared == 0 && synced == 0, "%d cleared, %d waits", cleared, synced);
    capturing = 0;
    run_made(plans, MAX_PLANS + 10, MAX_PLANS + 2 * MORE_PLANS, 1);
    CHECK(cleared == 0 && synced > 0, "%d cleared, %d waits", cleared, synced);
    run_made(plans, 0, MAX_PLANS + 10, 0);
    end(plans);
}

/* Where nobody can wait for what was launched, all go back, and are not looked at again soon. */
static void check_put_back(atomic_int *obstacle)
{
    te_sdpa_plans *plans = begin();
    int waits;
    run(plans, 0, MAX_PLANS);
    *obstacle = 1;
    run_made(plans, 0, 1, 0); /* at the bound, so that this tries */
    CHECK(cleared == 0, "%d cleared", cleared);
    waits = synced;
    run_made(plans, 0, MAX_PLANS, 0); /* every one is there, in a whole table */
    CHECK(synced == waits, "it waited %d times more", synced - waits);
    *obstacle = 0;
    run_made(plans, MAX_PLANS, MAX_PLANS + MORE_PLANS, 1);
    CHECK(cleared == 0, "%d cleared", cleared);
    run(plans, MAX_PLANS + MORE_PLANS, MAX_PLANS + MORE_PLANS + 1);
    CHECK(cleared == (MAX_PLANS + MORE_PLANS) / 2, "%d cleared", cleared);
    end(plans);
}

static te_sdpa_plans *nested;

static void run_many_others(void)
{
    during = NULL;
    run(nested, 1, MAX_PLANS + 2);
    CHECK(cleared > 0, "nothing was freed");
}

/* The oldest plan of all is about to be launched while others go. */
static void check_in_use(void)
{
    nested = begin();
    during = run_many_others;
    run(nested, 0, 1);
    run_made(nested, 0, 1, 0);
    end(nested);
}

static pthread_barrier_t together;

static void meet(void)
{
    (void)pthread_barrier_wait(&together);
}

static void *run_in_thread(void *plans)
{
    run(plans, 7, 8);
    return NULL;
}

/* Threads that ask for one plan at a time make it once, each with a handle of its own. */
static void check_threads(void)
{
    te_sdpa_plans *plans = begin();
    pthread_t threads[THREADS];
    (void)pthread_barrier_init(&together, NULL, THREADS);
    during = meet; /* all of them run at the same time */
    is_slow = 1;
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_in_thread, plans) == 0, "thread");
    }
    for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
    during = NULL;
    is_slow = 0;
    (void)pthread_barrier_destroy(&together);
    CHECK(made == 1, "%d plans", made);
    CHECK(handles_made == THREADS, "%d handles", handles_made);
    CHECK(handles_gone == THREADS - MAX_HANDLES, "%d handles destroyed", handles_gone);
    end(plans);
}

int main(void)
{
    te_cuda_functions.cuDeviceGetName = get_name;
    te_cuda_functions.cuDeviceGetAttribute = get_attribute;
    te_cuda_functions.cuCtxSynchronize = synchronize;
    (void)pthread_mutex_init(&cuda.lock, NULL);
    check_kept();
    check_eviction();
    check_captured();
    check_put_back(&can_not_wait);
    check_put_back(&can_not_relax);
    check_in_use();
    check_threads();
    return failures != 0;
}
