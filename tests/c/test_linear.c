/* SPDX-License-Identifier: Apache-2.0
 *
 * test_linear.c - an FP8 linear layer from C alone: plans for forward and backward, the memory that
 * they ask for, and the update of the scales. Inputs are small integers, which FP8 holds exactly at
 * scale 1, so every result must be exact.
 */
#include "graphs.h"

enum { TOKENS = 9, IN = 40, OUT = 24, FORWARD_SLOT = 5, BACKWARD_SLOT = 7 };

static float amax_of(const graph *g, plan_memory *m, te_link link, int32_t value)
{
    double amax = 0;
    for (int64_t i = 0; i < graph_count(g, value, &m->sizes); i++) {
        amax = fmax(amax, fabs(graph_get(g, m, link, value, i)));
    }
    return (float)amax;
}

static void update(te_context *context, float *scale, float *history, float fp8_max)
{
    te_scaling_update_args args = {.size = sizeof args, .fp8_max = fp8_max, .algo = TE_AMAX_MAX};
    args.scale = (te_tensor){scale, TE_DTYPE_F32, plan_cpu, 1, {PLAN_SLOTS}, {1}};
    args.history = (te_tensor){
        history, TE_DTYPE_F32, plan_cpu, 2, {PLAN_HISTORY, PLAN_SLOTS}, {PLAN_SLOTS, 1}};
    OK(te_scaling_update(context, &args, NULL));
}

static void check_scaling(te_context *context, const graph *g, plan_memory *m, int32_t x, int32_t y)
{
    const float amax[3] = {amax_of(g, m, TE_LINK_VALUE, x),
                           amax_of(g, m, TE_LINK_VALUE, g->inputs[0][1]),
                           amax_of(g, m, TE_LINK_GRADIENT, y)};
    EXPECT(m->history[0][0][FORWARD_SLOT] == amax[0], "amax of the input");
    EXPECT(m->history[0][0][FORWARD_SLOT + 1] == amax[1], "amax of the weight");
    EXPECT(m->history[0][1][BACKWARD_SLOT] == amax[2], "amax of the gradient");
    update(context, m->scale[0][0], m->history[0][0], 448.0F);
    update(context, m->scale[0][1], m->history[0][1], 57344.0F);
    EXPECT(m->scale[0][0][FORWARD_SLOT] == 448.0F / amax[0], "scale of the input");
    EXPECT(m->scale[0][0][FORWARD_SLOT + 1] == 448.0F / amax[1], "scale of the weight");
    EXPECT(m->scale[0][1][BACKWARD_SLOT] == 57344.0F / amax[2], "scale of the gradient");
    EXPECT(m->scale[0][0][0] == 1.0F, "an unused slot");
}

int main(void)
{
    static graph g, other;
    static plan_memory m;
    const te_sizes tokens = te_sizes_of_rows(TOKENS);
    te_context *context = NULL;
    te_plan *again = NULL;
    int32_t x, y;
    graph_start(&g, TE_RECIPE_DELAYED, 0);
    x = graph_input(&g, "input", IN);
    y = graph_value(&g, "output", TE_VALUE_RESULT, 0, OUT);
    (void)graph_linear(&g, "", x, y, 0);
    graph_make(&g);
    memcpy(&other, &g, sizeof other); /* the same graph elsewhere */
    other.desc.values = other.values;
    other.desc.nodes = other.nodes;
    OK(te_plan_make(&other.desc, TE_DIRECTION_FORWARD, &again));
    EXPECT(g.plans[0] == again && g.plans[0] != g.plans[1], "one description, two plans");

    plan_memory_start(&m, &tokens);
    m.slots[0] = FORWARD_SLOT;
    m.slots[1] = BACKWARD_SLOT;
    graph_fill_integers(&g, &m, TE_LINK_VALUE, x, 4);
    graph_fill_integers(&g, &m, TE_LINK_VALUE, g.inputs[0][1], 2);
    graph_fill_integers(&g, &m, TE_LINK_VALUE, g.inputs[0][2], 8);
    graph_fill_integers(&g, &m, TE_LINK_GRADIENT, y, 3);
    OK(te_context_create(plan_cpu, &context));
    graph_refer(&g, &m);
    graph_run(context, &g, &m);
    graph_check(&g, &m, 0);
    check_scaling(context, &g, &m, x, y);
    EXPECT(plan_count("gemm.cpu.e4m3.e4m3") == 1, "forward GEMMs");
    EXPECT(plan_count("gemm.cpu.e5m2.e4m3") == 2, "backward GEMMs");
    graph_forget(&g);
    plan_memory_end(&m);
    te_context_destroy(context);
    te_context_destroy(NULL);
    (void)puts("linear: ok");
    return 0;
}
