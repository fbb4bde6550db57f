/* SPDX-License-Identifier: Apache-2.0
 *
 * test_threads.c - threads that share a slot of delayed scaling: none loses what another recorded.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "cpu_device.h"

enum { COLUMNS = 16, RECORDS = 100000, ROUNDS = 200, LENGTH = 1024 };

/* One chunk of one slot, and who works on it. */
typedef struct shared_slot {
    te_context *context;
    float history[LENGTH]; /* [LENGTH, 1]: the first one is live */
    float scale;
    atomic_int stop, failures;
    atomic_long updates;
} shared_slot;

static float read_float(const float *from)
{
    float value;
    __atomic_load(from, &value, __ATOMIC_SEQ_CST);
    return value;
}

/* An FP8 cast's share in delayed scaling. */
static void record(shared_slot *slot, float amax)
{
    float input[COLUMNS] = {-1.0F, amax};
    te_quantize_args args = {.size = sizeof args,
                             .input = {.data = input,
                                       .dtype = TE_DTYPE_F32,
                                       .ndim = 2,
                                       .shape = {1, COLUMNS},
                                       .strides = {COLUMNS, 1}},
                             .cast = {.amax = slot->history}};
    if (te_quantize(slot->context, &args, NULL) != TE_OK) slot->failures++;
}

static void update(shared_slot *slot)
{
    te_scaling_update_args args = {.size = sizeof args,
                                   .scale = {.data = &slot->scale,
                                             .dtype = TE_DTYPE_F32,
                                             .ndim = 1,
                                             .shape = {1},
                                             .strides = {1}},
                                   .history = {.data = slot->history,
                                               .dtype = TE_DTYPE_F32,
                                               .ndim = 2,
                                               .shape = {LENGTH, 1},
                                               .strides = {1, 1}},
                                   .fp8_max = 448.0F};
    if (te_scaling_update(slot->context, &args, NULL) != TE_OK) slot->failures++;
    slot->updates++;
}

/* Records growing numbers; each stays until a larger one comes. */
static void *record_growing(void *opaque)
{
    shared_slot *slot = opaque;
    for (int i = 1; i <= RECORDS; i++) {
        record(slot, (float)i);
        if (read_float(slot->history) < (float)i) slot->failures++;
    }
    return NULL;
}

static void check_records(test_device *t)
{
    static shared_slot slot;
    pthread_t threads[2];
    slot.context = t->context;
    t->running = "two threads record into one slot";
    for (int i = 0; i < 2; i++) {
        TEST_CHECK(t, pthread_create(&threads[i], NULL, record_growing, &slot) == 0, "thread");
    }
    for (int i = 0; i < 2; i++) (void)pthread_join(threads[i], NULL);
    TEST_CHECK(t, slot.failures == 0, "%d of %d records were lost", slot.failures, 2 * RECORDS);
    TEST_CHECK(t, slot.history[0] == (float)RECORDS, "%g", (double)slot.history[0]);
}

static void *keep_updating(void *opaque)
{
    shared_slot *slot = opaque;
    while (!slot->stop) update(slot);
    return NULL;
}

/* Two records, the larger one last, while another thread updates: it is the newest of the window
 * once an update that began after it has ended, whether the other one went before or with it. */
static void check_updates(test_device *t)
{
    static shared_slot slot;
    pthread_t updater;
    int lost = 0;
    slot.context = t->context;
    slot.scale = 1.0F;
    t->running = "an update while a thread records";
    TEST_CHECK(t, pthread_create(&updater, NULL, keep_updating, &slot) == 0, "thread");
    for (int i = 1; i <= ROUNDS; i++) {
        long seen;
        record(&slot, (float)(2 * i));
        record(&slot, (float)(2 * i + 1));
        for (seen = slot.updates; slot.updates < seen + 2;) (void)sched_yield();
        if (read_float(&slot.history[LENGTH - 1]) != (float)(2 * i + 1)) lost++;
    }
    slot.stop = 1;
    (void)pthread_join(updater, NULL);
    TEST_CHECK(t, lost == 0, "%d of %d records were lost", lost, ROUNDS);
    TEST_CHECK(t, slot.failures == 0, "%s", te_last_error());
}

static void checks(test_device *t)
{
    check_records(t);
    check_updates(t);
}

int main(void)
{
    return test_on_cpu("threads", checks);
}
