/* SPDX-License-Identifier: Apache-2.0
 *
 * test_backends.c - how long a registered backend lives: it is released once, and only when no call
 * can reach it any more.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu_device.h"

enum { CHANGES = 200, WORKERS = 2, TOO_MANY = 100, MANY = 50, SHORT_LIVED = 20 };

static atomic_int released, used_after_release;

/* What a slot and its backend share. */
typedef struct plugin {
    atomic_int runs, is_released;
    te_status (*during)(struct plugin *self, te_context *context); /* NULL: nothing */
    int depth, deepest;
} plugin;

static void release(void *opaque)
{
    plugin *self = opaque;
    released++;
    if (self->is_released++) used_after_release++;
}

static te_status run_amax(void *opaque, te_context *context, const void *args, void *stream)
{
    plugin *self = opaque;
    te_status st = TE_OK;
    (void)args, (void)stream;
    self->runs++;
    if (self->is_released) used_after_release++;
    if (self->during != NULL) st = self->during(self, context);
    if (self->is_released) used_after_release++;
    return st;
}

static te_status install(plugin *self)
{
    te_backend backend = {.size = sizeof backend,
                          .name = "mine",
                          .device = TE_DEVICE_CPU,
                          .priority = 1,
                          .release = release,
                          .self = self};
    backend.slots[TE_OP_AMAX] = (te_op_slot){.function = run_amax, .self = self};
    return te_backend_register(&backend);
}

static te_status call_amax(te_context *context)
{
    static _Thread_local float partials[TE_AMAX_PARTIALS];
    float input[4] = {1.0F, -3.0F, 2.0F, 0.0F};
    te_amax_args args = {.size = sizeof args,
                         .input = {.data = input,
                                   .dtype = TE_DTYPE_F32,
                                   .ndim = 2,
                                   .shape = {1, 4},
                                   .strides = {4, 1}},
                         .partials = partials};
    return te_amax(context, &args, NULL);
}

/* ---- one thread ---- */

static void check_idle(test_device *t)
{
    plugin self = {0};
    t->running = "a backend that no call uses";
    released = 0;
    TEST_OK(t, install(&self));
    TEST_CHECK(t, install(&self) == TE_ERROR_INVALID && released == 0, "the name is taken");
    TEST_OK(t, call_amax(t->context));
    TEST_CHECK(t, self.runs == 1 && released == 0, "%d runs", self.runs);
    TEST_OK(t, te_backend_unregister("mine"));
    TEST_CHECK(t, released == 1, "released %d times", released);
    TEST_OK(t, call_amax(t->context));
    TEST_CHECK(t, self.runs == 1, "%d runs", self.runs);
}

static te_status unregister_during(plugin *self, te_context *context)
{
    te_status st = te_backend_unregister("mine");
    if (st != TE_OK || self->is_released) return TE_ERROR_STATE;
    return call_amax(context); /* the built-in one */
}

static void check_unregistered_in_flight(test_device *t)
{
    plugin self = {.during = unregister_during};
    t->running = "a backend that unregisters itself";
    released = 0;
    TEST_OK(t, install(&self));
    TEST_OK(t, call_amax(t->context));
    TEST_CHECK(t, self.runs == 1 && released == 1, "%d runs, released %d times", self.runs,
               released);
}

/* Each call changes the table and calls again, so that all of them are held; ends where no more
 * can be. */
static te_status nest(plugin *self, te_context *context)
{
    te_status st = TE_OK;
    if (++self->depth > self->deepest) self->deepest = self->depth;
    if (self->depth < TOO_MANY) {
        te_backend other = {
            .size = sizeof other, .name = "other", .device = TE_DEVICE_CPU, .priority = 0};
        st = self->depth % 2 ? te_backend_register(&other) : te_backend_unregister("other");
        if (st == TE_OK) st = call_amax(context);
    }
    self->depth--;
    return st;
}

static te_status fail(plugin *self, te_context *context)
{
    (void)context;
    return TE_FAIL(TE_ERROR_INVALID, "run %d of mine", self->runs);
}

static void check_failure(test_device *t)
{
    plugin self = {.during = fail};
    t->running = "a failure of a backend's function";
    TEST_OK(t, install(&self));
    TEST_CHECK(t, call_amax(t->context) == TE_ERROR_INVALID, "not its own kind");
    TEST_CHECK(t, strstr(te_last_error(), "test_backends.c:") != NULL, "%s", te_last_error());
    TEST_CHECK(t, strstr(te_last_error(), ": run 1 of mine") != NULL, "%s", te_last_error());
    TEST_OK(t, te_backend_unregister("mine"));
}

static void check_bound(test_device *t)
{
    plugin self = {.during = nest};
    t->running = "tables of calls within calls";
    TEST_OK(t, install(&self));
    TEST_CHECK(t, call_amax(t->context) == TE_ERROR_STATE, "%d tables", self.deepest);
    TEST_CHECK(t, strstr(te_last_error(), "in flight") != NULL, "%s", te_last_error());
    TEST_CHECK(t, self.deepest > 8 && self.deepest < TOO_MANY, "%d tables", self.deepest);
    (void)te_backend_unregister("other"); /* as the last call left it: there, or not */
    self.during = NULL;
    TEST_OK(t, call_amax(t->context));
    for (int i = 0; i < TOO_MANY; i++) { /* all tables came back */
        TEST_OK(t, te_backend_unregister("mine"));
        TEST_OK(t, install(&self));
        self.is_released = 0;
    }
    TEST_OK(t, te_backend_unregister("mine"));
}

/* ---- several threads ---- */

typedef struct worker {
    te_context *context;
    atomic_int *stop;
    int calls, failures;
    pthread_t thread;
} worker;

static void *keep_calling(void *opaque)
{
    worker *self = opaque;
    for (; !*self->stop; self->calls++) self->failures += call_amax(self->context) != TE_OK;
    return NULL;
}

static void check_threads(test_device *t)
{
    static plugin plugins[CHANGES];
    atomic_int stop = 0;
    worker workers[WORKERS];
    t->running = "backends come and go while threads call";
    released = 0;
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.context = t->context, .stop = &stop};
        TEST_CHECK(t, pthread_create(&workers[i].thread, NULL, keep_calling, &workers[i]) == 0,
                   "thread");
    }
    for (int i = 0; i < CHANGES; i++) {
        TEST_OK(t, install(&plugins[i]));
        while (plugins[i].runs == 0 && t->failures == 0) (void)sched_yield();
        TEST_OK(t, te_backend_unregister("mine")); /* while it may be running */
    }
    stop = 1;
    for (int i = 0; i < WORKERS; i++) {
        (void)pthread_join(workers[i].thread, NULL);
        TEST_CHECK(t, workers[i].failures == 0, "%d calls failed", workers[i].failures);
    }
    TEST_CHECK(t, released == CHANGES, "released %d of %d", released, CHANGES);
}

static void *call_once(void *opaque)
{
    worker *self = opaque;
    self->failures += call_amax(self->context) != TE_OK;
    return NULL;
}

static int64_t amax_count(void)
{
    te_counter found[64];
    size_t count = 0;
    (void)te_counters_read(found, 64, &count);
    for (size_t i = 0; i < count && i < 64; i++) {
        if (strcmp(found[i].name, "op.cpu.amax") == 0) return found[i].value;
    }
    return 0;
}

/* What threads ran is counted when they are gone, and a reset forgets it. */
static void check_counted(test_device *t)
{
    worker one = {.context = t->context};
    t->running = "calls of threads that have ended";
    TEST_OK(t, call_amax(t->context));
    te_counters_reset();
    TEST_CHECK(t, amax_count() == 0, "%lld after the reset", (long long)amax_count());
    for (int i = 0; i < SHORT_LIVED; i++) {
        TEST_CHECK(t, pthread_create(&one.thread, NULL, call_once, &one) == 0, "thread");
        (void)pthread_join(one.thread, NULL);
    }
    TEST_CHECK(t, one.failures == 0, "%d calls failed", one.failures);
    TEST_CHECK(t, amax_count() == SHORT_LIVED, "%lld", (long long)amax_count());
    te_counters_reset();
    TEST_CHECK(t, amax_count() == 0, "%lld after the reset", (long long)amax_count());
}

static atomic_int is_inside, may_leave;

static te_status stay(plugin *self, te_context *context)
{
    (void)self, (void)context;
    is_inside = 1;
    while (!may_leave) (void)sched_yield();
    return TE_OK;
}

/* A child has no thread that could end the calls of its parent. */
static void check_forked(test_device *t)
{
    plugin self = {.during = stay};
    worker one = {.context = t->context};
    int status = -1;
    pid_t child;
    t->running = "a backend that runs in another thread during a fork";
    released = 0;
    TEST_OK(t, install(&self));
    TEST_CHECK(t, pthread_create(&one.thread, NULL, call_once, &one) == 0, "thread");
    while (!is_inside) (void)sched_yield();
    child = fork();
    if (child == 0) {
        const te_status st = te_backend_unregister("mine");
        _exit(st == TE_OK && released == 1 ? 0 : 1);
    }
    (void)waitpid(child, &status, 0);
    TEST_CHECK(t, status == 0, "the child ended with %d", status);
    TEST_OK(t, te_backend_unregister("mine"));
    TEST_CHECK(t, released == 0, "released while it runs");
    may_leave = 1;
    (void)pthread_join(one.thread, NULL);
    TEST_CHECK(t, one.failures == 0 && released == 1, "released %d times", released);
}

static te_status decline(plugin *self, te_context *context)
{
    (void)context;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "run %d declines", self->runs);
}

/* A call goes through all that have the operator, by priority, to the built-in one. */
static void check_many(test_device *t)
{
    static plugin plugins[MANY];
    static char names[MANY][16];
    t->running = "many backends";
    released = 0;
    for (int i = 0; i < MANY; i++) {
        te_backend backend = {.size = sizeof backend,
                              .name = names[i],
                              .device = TE_DEVICE_CPU,
                              .priority = 1 + i * 7 % MANY,
                              .release = release,
                              .self = &plugins[i]};
        (void)snprintf(names[i], sizeof names[i], "many %d", i);
        plugins[i].during = decline;
        if (i % 5 != 0) {
            backend.slots[TE_OP_AMAX] = (te_op_slot){.function = run_amax, .self = &plugins[i]};
        }
        TEST_OK(t, te_backend_register(&backend));
    }
    TEST_OK(t, call_amax(t->context));
    for (int i = 0; i < MANY; i++) {
        TEST_CHECK(t, plugins[i].runs == (i % 5 != 0), "%d: %d runs", i, plugins[i].runs);
    }
    for (int i = 0; i < MANY; i++) TEST_OK(t, te_backend_unregister(names[i * 3 % MANY]));
    TEST_CHECK(t, released == MANY, "released %d", released);
    TEST_OK(t, call_amax(t->context));
    TEST_CHECK(t, plugins[1].runs == 1, "%d runs", plugins[1].runs);
}

static void checks(test_device *t)
{
    check_many(t);
    check_idle(t);
    check_failure(t);
    check_unregistered_in_flight(t);
    check_bound(t);
    check_threads(t);
    check_counted(t);
    check_forked(t);
    TEST_CHECK(t, used_after_release == 0, "%d uses after the release", used_after_release);
}

int main(void)
{
    return test_on_cpu("backends", checks);
}
