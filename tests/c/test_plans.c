/* SPDX-License-Identifier: Apache-2.0
 *
 * test_plans.c - how long plans live: as long as somebody holds them, in threads and forked
 * children too.
 */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "graph_build.h"

enum { ROWS = 3, IN = 8, SHAPES = 4, MANY = 500, THREADS = 4, TURNS = 3000, FORKS = 20 };
enum { LISTS = 1024 }; /* plans whose ids leave one remainder are looked for in one list */

static te_context *context;

/* A linear layer of so many outputs, in high precision. */
typedef struct shape {
    graph g;
    int32_t x, y;
    int64_t out;
} shape;

static void describe(shape *s, int64_t out)
{
    graph_start(&s->g, TE_RECIPE_NONE, 0);
    s->out = out;
    s->x = graph_input(&s->g, "x", IN);
    s->y = graph_value(&s->g, "y", TE_VALUE_RESULT, 0, out);
    (void)graph_linear(&s->g, "", s->x, s->y, 0);
}

static te_plan *make(const shape *s, te_direction direction)
{
    te_plan *plan = NULL;
    OK(te_plan_make(&s->g.desc, direction, &plan));
    return plan;
}

static int64_t id_of(const te_plan *plan)
{
    te_plan_info info;
    OK(te_plan_describe(plan, &info));
    return info.id;
}

static int is_there(int64_t id)
{
    te_plan *plan = NULL;
    te_status status = te_plan_find(id, &plan);
    EXPECT(status == TE_OK || (status == TE_ERROR_INVALID && plan == NULL), "%s", te_last_error());
    te_plan_release(plan);
    return status == TE_OK;
}

/* Integers, so that there is one right sum. */
static double number(int64_t i)
{
    return (double)(i % 7 - 3);
}

static void run_and_check(te_context *on, const shape *s, const te_plan *plan)
{
    static _Thread_local plan_memory memory;
    const te_sizes rows = te_sizes_of_rows(ROWS);
    const int32_t read[] = {s->x, s->g.inputs[0][1], s->g.inputs[0][2]};
    plan_memory_start(&memory, &rows);
    for (int r = 0; r < 3; r++) {
        for (int64_t i = 0; i < graph_count(&s->g, read[r], &rows); i++) {
            graph_set(&s->g, &memory, TE_LINK_VALUE, read[r], i, number(i));
        }
    }
    plan_run(on, plan, &memory);
    for (int64_t i = 0; i < ROWS * s->out; i++) {
        int64_t row = i / s->out, column = i % s->out;
        double sum = number(column);
        for (int64_t k = 0; k < IN; k++) sum += number(row * IN + k) * number(column * IN + k);
        EXPECT(graph_get(&s->g, &memory, TE_LINK_VALUE, s->y, i) == sum, "%d: not %g", (int)i, sum);
    }
    plan_memory_end(&memory);
}

/* ---- one thread ---------------------------------------------------------------------------- */

static void check_holders(void)
{
    static shape s;
    te_plan *first, *second, *backward, *found = NULL;
    int64_t id;
    describe(&s, IN);
    first = make(&s, TE_DIRECTION_FORWARD);
    second = make(&s, TE_DIRECTION_FORWARD);
    backward = make(&s, TE_DIRECTION_BACKWARD);
    id = id_of(first);
    EXPECT(first == second && first != backward && id != id_of(backward), "two plans of a kind");
    EXPECT(te_plan_count() == 2, "%d plans", (int)te_plan_count());
    te_plan_release(first);
    te_plan_release(backward);
    OK(te_plan_find(id, &found));
    EXPECT(found == second && te_plan_count() == 1, "%d plans", (int)te_plan_count());
    te_plan_release(second);
    te_plan_retain(found);
    te_plan_release(found);
    run_and_check(context, &s, found);
    te_plan_release(found);
    EXPECT(!is_there(id) && te_plan_count() == 0, "%d plans", (int)te_plan_count());
    found = make(&s, TE_DIRECTION_FORWARD);
    EXPECT(id_of(found) == id, "another id");
    run_and_check(context, &s, found);
    te_plan_release(found);
}

static void check_null(void)
{
    static shape s;
    const te_sizes rows = te_sizes_of_rows(ROWS);
    const te_tensor none = {.data = NULL};
    te_plan_call call = {.size = sizeof call, .sizes = rows, .buffers = &none};
    te_plan_info info;
    te_plan_sizes sizes;
    size_t bytes;
    describe(&s, IN);
    te_plan_retain(NULL);
    te_plan_release(NULL);
    EXPECT(te_plan_make(&s.g.desc, TE_DIRECTION_FORWARD, NULL) == TE_ERROR_INVALID, "make");
    EXPECT(te_plan_find(1, NULL) == TE_ERROR_INVALID, "find");
    EXPECT(te_plan_describe(NULL, &info) == TE_ERROR_INVALID, "describe");
    EXPECT(te_plan_infer(NULL, &rows, &sizes, NULL) == TE_ERROR_INVALID, "infer");
    EXPECT(te_plan_scratch(context, NULL, &rows, &bytes) == TE_ERROR_INVALID, "scratch");
    EXPECT(te_plan_scratch_for(context, &call, &bytes) == TE_ERROR_INVALID, "scratch_for");
    EXPECT(te_plan_run(context, &call, NULL) == TE_ERROR_INVALID, "run");
    EXPECT(strstr(te_last_error(), "plan is NULL") != NULL, "%s", te_last_error());
}

/* ---- scratch -------------------------------------------------------------------------------- */

static int questions; /* to the backend below */

static int is_usual(const te_tensor *x)
{
    return ((uintptr_t)x->data & 15U) == 0 && (x->shape[0] < 2 || x->strides[0] == x->shape[1]);
}

/* A backend that wants more where the input is not dense or not aligned. */
static te_status ask_for_more(void *self, te_context *on, const void *args, size_t *bytes)
{
    (void)self, (void)on;
    questions++;
    *bytes = is_usual(&((const te_gemm_args *)args)->a.wide) ? 1000000 : 5000000;
    return TE_OK;
}

static te_status decline(void *self, te_context *on, const void *args, void *stream)
{
    (void)self, (void)on, (void)args, (void)stream;
    return TE_ERROR_UNSUPPORTED;
}

/* What dense, aligned buffers take is remembered; for others it is asked with each call. */
static void check_scratch(void)
{
    static shape s;
    te_backend backend = {
        .size = sizeof backend, .name = "scratch", .device = TE_DEVICE_CPU, .priority = 1};
    te_plan_info info;
    te_tensor buffers[4] = {{.data = NULL}};
    te_plan_call call = {.size = sizeof call, .buffers = buffers};
    size_t usual = 0, found = 0;
    te_plan *plan;
    describe(&s, IN);
    plan = make(&s, TE_DIRECTION_FORWARD);
    OK(te_plan_describe(plan, &info));
    EXPECT(info.buffer_count == 4 && info.buffers[0].of == s.x, "%d buffers", info.buffer_count);
    call.plan = plan;
    call.sizes = te_sizes_of_rows(ROWS);
    for (int i = 0; i < 3; i++) {
        te_tensor *t = &buffers[i];
        *t = (te_tensor){.dtype = TE_DTYPE_F32, .device = plan_cpu, .ndim = info.buffers[i].ndim};
        t->data = plan_allocate(256);
        for (int d = 0; d < t->ndim; d++) {
            t->shape[d] = te_extent_value(&info.buffers[i].shape[d], &call.sizes);
            t->strides[d] = d == t->ndim - 1 ? 1 : IN;
        }
    }
    backend.slots[TE_OP_GEMM] = (te_op_slot){.function = decline, .workspace = ask_for_more};
    OK(te_backend_register(&backend));
    OK(te_plan_scratch(context, plan, &call.sizes, &usual));
    EXPECT(questions == 1 && usual >= 1000000 && usual < 5000000, "%d, %zu", questions, usual);
    OK(te_plan_scratch_for(context, &call, &found));
    EXPECT(questions == 1 && found == usual, "%d, %zu", questions, found);
    buffers[0].strides[0] = IN + 1;
    OK(te_plan_scratch_for(context, &call, &found));
    EXPECT(questions == 2 && found == usual + 4000000, "strided: %d, %zu", questions, found);
    buffers[0].strides[0] = IN;
    buffers[0].data = (float *)buffers[0].data + 1;
    OK(te_plan_scratch_for(context, &call, &found));
    EXPECT(questions == 3 && found == usual + 4000000, "misaligned: %d, %zu", questions, found);
    buffers[0].data = (float *)buffers[0].data - 1;
    call.sizes = te_sizes_of_rows(1); /* the stride of one row says nothing */
    buffers[0].shape[0] = 1;
    buffers[0].strides[0] = 77;
    OK(te_plan_scratch(context, plan, &call.sizes, &usual));
    OK(te_plan_scratch_for(context, &call, &found));
    EXPECT(questions == 4 && found == usual, "one row: %d, %zu", questions, found);
    OK(te_backend_unregister("scratch"));
    for (int i = 0; i < 3; i++) free(buffers[i].data);
    te_plan_release(plan);
}

/* However many come and go, there are those that are held, and these stay what they are. */
static void check_many(void)
{
    static shape kept, s;
    te_plan *plan;
    describe(&kept, IN);
    plan = make(&kept, TE_DIRECTION_FORWARD);
    for (int i = 1; i <= MANY; i++) {
        te_plan *other;
        describe(&s, IN + i);
        other = make(&s, TE_DIRECTION_FORWARD);
        if (i % 100 == 0) run_and_check(context, &s, other);
        EXPECT(te_plan_count() == 2, "%d plans", (int)te_plan_count());
        te_plan_release(other);
    }
    run_and_check(context, &kept, plan);
    te_plan_release(plan);
    EXPECT(te_plan_count() == 0, "%d plans", (int)te_plan_count());
}

/* ---- threads ------------------------------------------------------------------------------- */

static shape shapes[SHAPES];
static te_plan *held; /* of shapes[0], by the main thread */
static int64_t ids[SHAPES];
static atomic_int stop, turns;

/* Makes, finds, runs and releases; each plan comes and goes all the time but the held one. */
static void *work(void *opaque)
{
    unsigned seed = *(const unsigned *)opaque;
    for (int turn = 0; turn < TURNS || !stop; turn++) {
        int of = (int)((seed = seed * 1103515245U + 12345U) >> 16) % SHAPES;
        te_plan *plan = NULL;
        if (turn % 3 == 0 && te_plan_find(ids[of], &plan) != TE_OK) continue;
        if (turn % 3 != 0) plan = make(&shapes[of], TE_DIRECTION_FORWARD);
        te_plan_retain(held);
        EXPECT(id_of(plan) == ids[of], "another plan");
        if (turn % 31 == 0) run_and_check(context, &shapes[of], plan);
        if (turn % 37 == 0) run_and_check(context, &shapes[0], held);
        te_plan_release(held);
        te_plan_release(plan);
        turns++;
    }
    return NULL;
}

static int in_child(void)
{
    te_context *own = NULL;
    te_plan *plans[SHAPES];
    (void)alarm(60); /* a hang ends by a signal */
    OK(te_context_create(plan_cpu, &own));
    run_and_check(own, &shapes[0], held);
    for (int i = 0; i < SHAPES; i++) {
        plans[i] = make(&shapes[i], TE_DIRECTION_FORWARD);
        EXPECT(id_of(plans[i]) == ids[i] && is_there(ids[i]), "another plan");
        run_and_check(own, &shapes[i], plans[i]);
    }
    for (int i = 0; i < SHAPES; i++) te_plan_release(plans[i]);
    return 0;
}

/* Shapes whose plans are neighbours in the table. */
static void find_neighbours(void)
{
    static int64_t outs[LISTS][SHAPES];
    static int counts[LISTS];
    int64_t list = -1;
    for (int64_t out = 1; list < 0; out++) {
        te_plan *plan;
        describe(&shapes[0], out);
        plan = make(&shapes[0], TE_DIRECTION_FORWARD);
        list = id_of(plan) % LISTS;
        te_plan_release(plan);
        outs[list][counts[list]++] = out;
        if (counts[list] < SHAPES) list = -1;
    }
    for (int i = 0; i < SHAPES; i++) {
        te_plan *plan;
        describe(&shapes[i], outs[list][i]);
        plan = make(&shapes[i], TE_DIRECTION_FORWARD);
        ids[i] = id_of(plan);
        te_plan_release(plan);
    }
}

static void check_threads(int forks)
{
    static const unsigned seeds[THREADS] = {1, 2, 3, 4};
    pthread_t threads[THREADS];
    stop = turns = 0;
    held = make(&shapes[0], TE_DIRECTION_FORWARD);
    for (int i = 0; i < THREADS; i++) {
        EXPECT(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)&seeds[i]) == 0,
               "thread");
    }
    for (int i = 0; i < forks; i++) { /* at any moment of the threads' work */
        int status = -1;
        pid_t child = fork();
        EXPECT(child >= 0, "fork");
        if (child == 0) _exit(in_child());
        EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
               "child: %d", status);
    }
    stop = 1;
    for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
    EXPECT(turns > TURNS && te_plan_count() == 1, "%d turns, %d plans", turns,
           (int)te_plan_count());
    te_plan_release(held);
    EXPECT(te_plan_count() == 0, "%d plans", (int)te_plan_count());
}

int main(void)
{
    OK(te_context_create(plan_cpu, &context));
    check_holders();
    check_null();
    check_scratch();
    check_many();
    find_neighbours();
    check_threads(0);
    /* In a child the sanitizer's allocator stays locked by the malloc of another thread. */
#ifndef __SANITIZE_ADDRESS__
    check_threads(FORKS);
#endif
    te_context_destroy(context);
    (void)puts("plans: ok");
    return 0;
}
