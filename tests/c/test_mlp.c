/* SPDX-License-Identifier: Apache-2.0
 *
 * test_mlp.c - a norm and an MLP from C alone, forward, backward and late weight gradients, with
 * and without recompute. Inputs are +-1, whose RMS norm is exact, and all else small integers that
 * FP8 holds at scale 1: every result must be exact, whatever lies in the scratch memory before and
 * whichever of its buffers share their place.
 */
#include "graphs.h"

enum { MOST = 40, HIDDEN = 32, FFN = 24, FORWARD_SLOT = 5, BACKWARD_SLOT = 7 };

static const te_recipe recipes[] = {TE_RECIPE_NONE, TE_RECIPE_DELAYED, TE_RECIPE_CURRENT};

typedef struct mlp {
    graph g;
    int32_t x, y;
} mlp;

static void build(mlp *m, te_recipe recipe, uint32_t flags, uint32_t weight_flags)
{
    graph *g = &m->g;
    int32_t normed, before, after;
    graph_start(g, recipe, flags);
    m->x = graph_input(g, "input", HIDDEN);
    m->y = graph_value(g, "output", TE_VALUE_RESULT, 0, HIDDEN);
    normed = graph_value(g, "norm_output", 0, 0, HIDDEN);
    before = graph_value(g, "fc1_output", 0, 0, FFN);
    after = graph_value(g, "fc2_input", 0, 0, FFN);
    (void)graph_norm(g, TE_NORM_RMSNORM, "", m->x, normed);
    (void)graph_linear(g, "fc1_", normed, before, weight_flags);
    graph_activation(g, TE_ACTIVATION_RELU, before, after);
    (void)graph_linear(g, "fc2_", after, m->y, weight_flags);
    graph_make(g);
}

/* A quarter of the elements are not 0: no sum leaves what FP8 holds exactly. */
static void fill_sparse(const graph *g, plan_memory *memory, int32_t weight)
{
    int64_t columns = graph_columns(g, weight);
    graph_fill_integers(g, memory, TE_LINK_VALUE, weight, 1);
    for (int64_t i = 0; i < graph_count(g, weight, &memory->sizes); i++) {
        if ((i / columns + i % columns) % 4 != 0) graph_set(g, memory, TE_LINK_VALUE, weight, i, 0);
    }
}

static void fill(const mlp *m, plan_memory *memory)
{
    const graph *g = &m->g;
    graph_fill_integers(g, memory, TE_LINK_VALUE, m->x, 1);
    for (int64_t i = 0; i < memory->sizes.of[TE_SYMBOL_ROWS] * HIDDEN; i++) {
        if (graph_get(g, memory, TE_LINK_VALUE, m->x, i) == 0) {
            graph_set(g, memory, TE_LINK_VALUE, m->x, i, 1);
        }
    }
    graph_fill_integers(g, memory, TE_LINK_VALUE, g->inputs[0][1], 1);
    fill_sparse(g, memory, g->inputs[1][1]);
    graph_fill_integers(g, memory, TE_LINK_VALUE, g->inputs[1][2], 2);
    fill_sparse(g, memory, g->inputs[3][1]);
    graph_fill_integers(g, memory, TE_LINK_VALUE, g->inputs[3][2], 8);
    graph_fill_integers(g, memory, TE_LINK_GRADIENT, m->y, 1);
}

/* Every slot has the amax of its tensor; each is at least 1, and 0 where there is no tensor. */
static void check_history(const mlp *m, plan_memory *memory)
{
    static const int forward[] = {1, 1, 0, 1, 1, 0, 0};
    static const int backward[] = {1, 0, 1, 0, 0};
    double largest = 0;
    for (int64_t i = 0; i < memory->sizes.of[TE_SYMBOL_ROWS] * HIDDEN; i++) {
        largest = fmax(largest, fabs(graph_get(&m->g, memory, TE_LINK_GRADIENT, m->y, i)));
    }
    for (int i = 0; i < 7; i++) {
        float amax = memory->history[0][0][FORWARD_SLOT + i];
        EXPECT((amax >= 1) == forward[i], "forward slot %d: %g", i, (double)amax);
    }
    for (int i = 0; i < 5; i++) {
        float amax = memory->history[0][1][BACKWARD_SLOT + i];
        EXPECT((amax >= 1) == backward[i], "backward slot %d: %g", i, (double)amax);
    }
    EXPECT(memory->history[0][0][FORWARD_SLOT + 1] == 1, "amax of fc1_weight");
    EXPECT(memory->history[0][0][FORWARD_SLOT + 4] == 1, "amax of fc2_weight");
    EXPECT(memory->history[0][1][BACKWARD_SLOT + 2] == (float)largest, "amax of grad_output");
}

static void step(te_context *context, te_recipe recipe, uint32_t flags, uint32_t weight_flags,
                 int64_t rows)
{
    static mlp m;
    static plan_memory memory;
    int deferred = weight_flags != 0, again = flags != 0;
    const te_sizes sizes = te_sizes_of_rows(rows);
    int64_t gemms;
    build(&m, recipe, flags, weight_flags);
    plan_memory_start(&memory, &sizes);
    memory.slots[0] = FORWARD_SLOT;
    memory.slots[1] = BACKWARD_SLOT;
    fill(&m, &memory);
    graph_refer(&m.g, &memory);
    te_counters_reset();
    graph_run(context, &m.g, &memory);
    graph_check(&m.g, &memory, 0);
    if (recipe == TE_RECIPE_DELAYED) check_history(&m, &memory);
    gemms = recipe == TE_RECIPE_NONE
                ? plan_count("gemm.cpu.f32.f32")
                : plan_count("gemm.cpu.e4m3.e4m3") + plan_count("gemm.cpu.e5m2.e4m3");
    /* fc1 again for the activation, and once more for what is late. */
    EXPECT(gemms == 6 + again + again * deferred, "%d GEMMs", (int)gemms);
    graph_forget(&m.g);
    plan_memory_end(&memory);
}

/* The saved memory is no larger than its members with a member's alignment for each. */
static void check_layout(const te_plan *plan, int64_t rows)
{
    const te_sizes given = te_sizes_of_rows(rows);
    te_plan_info info;
    te_plan_sizes sizes;
    int64_t members = plan_check_layout(plan, &given), count = 0;
    OK(te_plan_describe(plan, &info));
    OK(te_plan_infer(plan, &given, &sizes, NULL));
    for (int i = 0; i < info.buffer_count; i++) count += info.buffers[i].role == TE_ROLE_SAVED;
    EXPECT(info.saved_bytes[1].multiply == 0 && info.saved_bytes[1].add == 0, "of no source");
    /* Every member may be rounded up to the padding of another and aligned once more. */
    EXPECT(sizes.saved_bytes <= members + count * (PLAN_ALIGN + 15 * 4 * HIDDEN), "saves %d bytes",
           (int)sizes.saved_bytes);
}

static void check_memory(void)
{
    static mlp m;
    const te_sizes most = te_sizes_of_rows(MOST);
    for (int r = 0; r < 3; r++) {
        te_plan_sizes sizes[2];
        for (uint32_t again = 0; again < 2; again++) {
            build(&m, recipes[r], again * TE_GRAPH_RECOMPUTE, 0);
            for (int64_t rows = 0; rows < 70; rows++) {
                for (int d = 0; d < TE_DIRECTION_COUNT; d++) check_layout(m.g.plans[d], rows);
            }
            OK(te_plan_infer(m.g.plans[0], &most, &sizes[again], NULL));
        }
        EXPECT(sizes[1].saved_bytes < sizes[0].saved_bytes, "recompute saves %d bytes, else %d",
               (int)sizes[1].saved_bytes, (int)sizes[0].saved_bytes);
    }
}

int main(void)
{
    static const int64_t rows[] = {1, 9, 16, 33, MOST};
    te_context *context = NULL;
    OK(te_context_create(plan_cpu, &context));
    for (unsigned i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        for (int r = 0; r < 2; r++) { /* scales that are measured are not 1 */
            step(context, recipes[r], 0, 0, rows[i]);
            step(context, recipes[r], TE_GRAPH_RECOMPUTE, 0, rows[i]);
            step(context, recipes[r], 0, TE_VALUE_DEFER, rows[i]);
            step(context, recipes[r], TE_GRAPH_RECOMPUTE, TE_VALUE_DEFER, rows[i]);
        }
    }
    check_memory();
    te_context_destroy(context);
    (void)puts("mlp: ok");
    return 0;
}
