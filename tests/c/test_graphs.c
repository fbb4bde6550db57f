/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graphs.c - graphs that no module has, under every recipe and every way, and stages of theirs
 * that the caller runs.
 */
#include "graph_ways.h"

static void two_norms(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t b = rows_of(g, "b", 0, WIDTH), y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "first_", x, a);
    (void)graph_norm(g, TE_NORM_RMSNORM, "second_", a, b);
    (void)graph_linear(g, "", b, y, 0);
}

static void norm_behind_a_linear(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t b = rows_of(g, "b", 0, WIDTH), y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_linear(g, "", x, a, 0);
    graph_activation(g, TE_ACTIVATION_GELU, a, b);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "last_", b, y);
}

static void one_feeds_two(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    int32_t z = rows_of(g, "z", TE_VALUE_RESULT, 2 * WIDTH);
    (void)graph_linear(g, "shared_", x, a, 0);
    (void)graph_linear(g, "left_", a, y, 0);
    (void)graph_linear(g, "right_", a, z, 0);
}

static void input_feeds_three(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", TE_VALUE_RESULT, WIDTH);
    int32_t b = rows_of(g, "b", TE_VALUE_RESULT, WIDTH);
    int32_t c = rows_of(g, "c", TE_VALUE_RESULT, WIDTH);
    (void)graph_linear(g, "first_", x, a, 0);
    graph_activation(g, TE_ACTIVATION_RELU, x, b);
    (void)graph_norm(g, TE_NORM_RMSNORM, "third_", x, c);
}

static void result_in_the_middle(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", TE_VALUE_RESULT, WIDTH);
    int32_t b = rows_of(g, "b", TE_VALUE_RESULT, WIDTH);
    int32_t c = rows_of(g, "c", TE_VALUE_RESULT, WIDTH);
    int32_t y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "", x, a);
    (void)graph_linear(g, "first_", a, b, 0);
    graph_activation(g, TE_ACTIVATION_GELU, b, c);
    (void)graph_linear(g, "second_", c, y, 0);
}

static void activations_of_one(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t b = rows_of(g, "b", 0, WIDTH), c = rows_of(g, "c", TE_VALUE_RESULT, WIDTH);
    int32_t y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_linear(g, "first_", x, a, 0);
    graph_activation(g, TE_ACTIVATION_GELU, a, b);
    graph_activation(g, TE_ACTIVATION_RELU, a, c);
    (void)graph_linear(g, "second_", b, y, 0);
}

/* So many linear nodes in a row, with an activation behind every one but the last. */
static void chain(graph *g, int depth)
{
    int32_t x = graph_input(g, "x", WIDTH);
    for (int i = 0; i < depth; i++) {
        char name[TE_NAME_BYTES];
        int last = i == depth - 1, gated = i % 3 == 2;
        int32_t a = rows_of(g, last ? "y" : "a", last ? TE_VALUE_RESULT : 0,
                            WIDTH * (1 + (gated && !last)));
        (void)snprintf(name, sizeof name, "n%d_", i);
        (void)graph_linear(g, name, x, a, 0);
        if (last) break;
        x = rows_of(g, "b", 0, WIDTH);
        graph_activation(g, gated ? TE_ACTIVATION_REGLU : TE_ACTIVATION_GELU, a, x);
    }
}

static void chain_of_three(graph *g)
{
    chain(g, 3);
}

static void chain_of_twelve(graph *g)
{
    te_plan_info info;
    chain(g, 12);
    if (g->recipe == TE_RECIPE_NONE) return;
    graph_make(g);
    OK(te_plan_describe(g->plans[TE_DIRECTION_BACKWARD], &info));
    EXPECT(info.buffer_count > 56 && info.stage_count > 40, "%d buffers, %d stages",
           info.buffer_count, info.stage_count);
}

static void check_chosen(void)
{
    static void (*const chosen[])(graph *) = {
        two_norms,         norm_behind_a_linear, one_feeds_two,
        input_feeds_three, result_in_the_middle, activations_of_one,
        chain_of_three,    chain_of_twelve,
    };
    const te_sizes some = te_sizes_of_rows(17), none = te_sizes_of_rows(0);
    static graph g;
    for (unsigned i = 0; i < sizeof chosen / sizeof chosen[0]; i++) {
        for (int recipe = TE_RECIPE_NONE; recipe <= TE_RECIPE_CURRENT; recipe++) {
            for (int narrow = 0; narrow < 2; narrow++) {
                graph_start(&g, (te_recipe)recipe, 0);
                g.dtype = narrow ? TE_DTYPE_BF16 : TE_DTYPE_F32;
                chosen[i](&g);
                check_every_way(&g, &some);
                check_every_way(&g, &none);
            }
        }
    }
}

/* ---- stages of the caller -------------------------------------------------------------------- */

static int events[3];

/* A collective between two ranks that have the same: their sum, and their rows in a row. */
static te_status act(void *self, int32_t stage, te_stage_event event, te_tensor *buffers)
{
    plan_memory *memory = self;
    te_plan_info info;
    const te_stage_info *what;
    const te_tensor *first, *last;
    OK(te_plan_describe(memory->running, &info));
    what = &info.stages[stage];
    events[event]++;
    if (event != TE_STAGE_RUN) return TE_OK;
    first = &buffers[what->buffers[0]];
    last = &buffers[what->buffers[what->buffer_count - 1]];
    if (strstr(what->name, "gather") != NULL) {
        size_t bytes = (size_t)(first->shape[0] * first->shape[1]) * te_dtype_bytes(first->dtype);
        EXPECT(what->buffer_count == 2 && last->shape[0] == 2 * first->shape[0], "%s", what->name);
        memcpy(last->data, first->data, bytes);
        memcpy((char *)last->data + bytes, first->data, bytes);
        return TE_OK;
    }
    EXPECT(what->external && what->buffer_count == 1, "%s", what->name);
    for (int64_t i = 0; i < last->shape[0] * last->shape[1]; i++) ((float *)last->data)[i] *= 2;
    return TE_OK;
}

static void check_reductions(void)
{
    static graph g;
    static plan_memory memory;
    te_plan_info info[2];
    const te_sizes five = te_sizes_of_rows(5);
    int32_t x, y, copied, made;
    graph_start(&g, TE_RECIPE_DELAYED, 0);
    x = graph_input(&g, "x", WIDTH);
    y = rows_of(&g, "y", TE_VALUE_RESULT, WIDTH);
    copied = rows_of(&g, "copied", 0, WIDTH);
    made = rows_of(&g, "made", 0, WIDTH);
    (void)graph_collective(&g, TE_COLLECTIVE_COPY, "x_", x, copied);
    (void)graph_linear(&g, "", copied, made, 0);
    graph_drop_bias(&g);
    (void)graph_collective(&g, TE_COLLECTIVE_ALL_REDUCE, "y_", made, y);
    graph_make(&g);
    start_memory(&memory, &g, &five);
    fill(&g, &memory);
    graph_refer(&g, &memory);
    memory.stage = act;
    memory.observed = 1;
    graph_run(context, &g, &memory);
    for (int64_t i = 0; i < 5 * WIDTH; i++) {
        g.value[y][i] *= 2;
        g.grad[x][i] *= 2;
    }
    graph_check(&g, &memory, 1e-3);
    for (int d = 0; d < 2; d++) OK(te_plan_describe(g.plans[d], &info[d]));
    EXPECT(events[TE_STAGE_RUN] == 2, "%d stages", events[TE_STAGE_RUN]);
    EXPECT(events[TE_STAGE_BEFORE] == info[0].stage_count + info[1].stage_count &&
               events[TE_STAGE_AFTER] == events[TE_STAGE_BEFORE],
           "%d and %d events", events[TE_STAGE_BEFORE], events[TE_STAGE_AFTER]);
    graph_forget(&g);
    plan_memory_end(&memory);
}

static void check_gather(void)
{
    static graph g;
    static plan_memory memory;
    const te_sizes five = te_sizes_of_rows(5);
    int32_t x, y, whole;
    graph_start(&g, TE_RECIPE_DELAYED, 0);
    x = graph_value(&g, "x", TE_VALUE_INPUT, 0, WIDTH);
    y = rows_of(&g, "y", TE_VALUE_RESULT, WIDTH);
    whole = rows_of(&g, "whole", 0, WIDTH);
    for (int i = 0; i < 2; i++) g.values[i == 0 ? y : whole].shape[0].multiply = 2;
    graph_collective(&g, TE_COLLECTIVE_GATHER, "", x, whole)->flags = TE_COLLECTIVE_FORMS;
    (void)graph_linear(&g, "", whole, y, 0);
    graph_make(&g);
    start_memory(&memory, &g, &five);
    fill(&g, &memory);
    memory.stage = act;
    plan_run(context, g.plans[0], &memory);
    for (int64_t i = 0; i < 5 * WIDTH; i++) {
        double both[2] = {graph_get(&g, &memory, TE_LINK_VALUE, y, i),
                          graph_get(&g, &memory, TE_LINK_VALUE, y, 5 * WIDTH + i)};
        EXPECT(both[0] == both[1], "%g and %g", both[0], both[1]);
    }
    plan_memory_end(&memory);
}

int main(void)
{
    OK(te_context_create(plan_cpu, &context));
    check_reductions();
    check_gather();
    check_chosen();
    te_context_destroy(context);
    (void)puts("graphs: ok");
    return 0;
}
