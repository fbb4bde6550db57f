/* SPDX-License-Identifier: Apache-2.0
 *
 * test_halves.c - steps of the caller in two halves, which do all their work in the second one: the
 * results have the bits of whole steps, so nothing between the halves needs what they make or
 * writes over what they read; and runs that fail in between leave nothing that was started.
 */
#include "graph_ways.h"

enum { RANDOM_GRAPHS = 300, MOST_STAGES = 512 };

static int started[MOST_STAGES], finished[MOST_STAGES], abandoned[MOST_STAGES]; /* by first half */
static int fail_stage, fail_event; /* where a run fails; -1: nowhere */
static char order[1024];           /* names of the stages that were seen */

/* to[i] += factor * from[i], where the smaller one goes round. */
static void spread(const te_tensor *to, const te_tensor *from, float factor)
{
    const int64_t many = to->shape[0] * to->shape[1], others = from->shape[0] * from->shape[1];
    float *sum = to->data;
    const float *x = from->data;
    for (int64_t i = 0; i < (many > others ? many : others); i++) {
        sum[i % many] += factor * x[i % others];
    }
}

static void clear(const te_tensor *tensor, int byte)
{
    memset(tensor->data, byte, (size_t)(tensor->shape[0] * tensor->shape[1]) * sizeof(float));
}

static int is_wanted(const plan_memory *memory, int32_t value)
{
    const te_graph_desc *graph = memory->graph;
    if ((graph->values[value].flags & TE_VALUE_GRADIENT) != 0) return 1;
    for (int32_t n = 0; n < graph->node_count; n++) {
        if (graph->nodes[n].output != value) continue;
        for (int i = 0; i < graph->nodes[n].input_count; i++) {
            if (graph->nodes[n].inputs[i] < 0) continue;
            if (is_wanted(memory, graph->nodes[n].inputs[i])) return 1;
        }
    }
    return 0;
}

/* y = x_0 + 2 x_1 + ..., and its gradients; `poison`: what is made is NaN meanwhile. */
static void compute(const plan_memory *memory, const te_stage_info *what, te_tensor *buffers,
                    int poison)
{
    const te_node_desc *node = &memory->graph->nodes[what->node];
    const int32_t *of = what->buffers;
    int count = 0, made;
    while (count < node->input_count && node->inputs[count] >= 0) count++;
    if (what->step == TE_FUNCTION_FORWARD) {
        clear(&buffers[of[count]], poison ? 0xff : 0);
        for (int i = 0; !poison && i < count; i++) {
            spread(&buffers[of[count]], &buffers[of[i]], (float)(i + 1));
        }
        return;
    }
    made = 1 + count;
    for (int i = 0; i < count; i++) {
        if (!is_wanted(memory, node->inputs[i])) continue;
        clear(&buffers[of[made]], poison ? 0xff : 0);
        if (!poison) spread(&buffers[of[made]], &buffers[of[0]], (float)(i + 1));
        made++;
    }
    EXPECT(made == what->buffer_count, "%s: %d buffers", what->name, what->buffer_count);
}

static te_status act(void *self, int32_t stage, te_stage_event event, te_tensor *buffers)
{
    plan_memory *memory = self;
    te_plan_info info;
    const te_stage_info *what;
    const te_tensor *last;
    int first;
    OK(te_plan_describe(memory->running, &info));
    what = &info.stages[stage];
    first = what->half > stage;
    if (event == TE_STAGE_BEFORE) {
        (void)snprintf(order + strlen(order), sizeof order - strlen(order), "%s ", what->name);
    }
    if (event == TE_STAGE_ABANDON) {
        EXPECT(started[what->half] && !finished[what->half], "%s is not pending", what->name);
        abandoned[what->half]++;
        return te_fail(TE_ERROR_STATE, "here", 1, "nobody reads this");
    }
    if (stage == fail_stage && (int)event == fail_event) {
        return te_fail(TE_ERROR_CALLBACK, "here", 1, "stage %d fails", stage);
    }
    if (event != TE_STAGE_RUN) return TE_OK;
    EXPECT(what->external && what->half != stage, "%s", what->name);
    if (first) started[stage]++;
    if (what->half >= 0 && !first) {
        const te_stage_info *other = &info.stages[what->half];
        EXPECT(started[what->half] == 1 && finished[what->half]++ == 0, "%s", what->name);
        EXPECT(other->half == stage && other->buffer_count == what->buffer_count, "%s", what->name);
    }
    if (memory->graph->nodes[what->node].kind == TE_NODE_FUNCTION) {
        compute(memory, what, buffers, first);
    } else if (!first && strstr(what->name, "amax") == NULL) { /* a sum of two ranks */
        last = &buffers[what->buffers[0]];
        for (int64_t i = 0; i < last->shape[0] * last->shape[1]; i++) ((float *)last->data)[i] *= 2;
    }
    return TE_OK;
}

static void forget_events(void)
{
    memset(started, 0, sizeof started);
    memset(finished, 0, sizeof finished);
    memset(abandoned, 0, sizeof abandoned);
    fail_stage = fail_event = -1;
    order[0] = '\0';
}

static void start_run(plan_memory *memory, const graph *g, const te_sizes *sizes, uint64_t seed)
{
    start_memory(memory, g, sizes);
    memory->stage = act;
    test_seed = seed;
    fill(g, memory);
    forget_events();
}

static const int32_t both[] = {TE_FUNCTION_FORWARD, TE_FUNCTION_BACKWARD};

static te_node_desc *add_function(graph *g, const char *name, int32_t x, int32_t y)
{
    te_node_desc *node = graph_node(g, TE_NODE_FUNCTION, name, x, y);
    node->halves = both;
    node->halves_count = 2;
    return node;
}

static void make_whole(graph *g)
{
    for (int32_t n = 0; n < g->desc.node_count; n++) g->nodes[n].halves_count = 0;
}

/* ---- where the halves stand ---- */

/* A linear layer between the halves of one function in a forward, of the other in a backward. */
static void make_parallel(graph *g)
{
    int32_t x, a, b, c, d, y;
    graph_start(g, TE_RECIPE_NONE, 0);
    x = graph_input(g, "x", WIDTH);
    a = rows_of(g, "a", 0, WIDTH);
    b = rows_of(g, "b", 0, WIDTH);
    c = rows_of(g, "c", 0, WIDTH);
    d = rows_of(g, "d", 0, WIDTH);
    y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)add_function(g, "f_", x, a);
    (void)graph_linear(g, "side_", x, b, 0);
    (void)add_function(g, "g_", x, c);
    (void)graph_dropout_add(g, "one_", a, b, d, 0);
    (void)graph_dropout_add(g, "two_", c, d, y, 0);
}

static void check_order(void)
{
    static const char *const expected[] = {
        "f_function side_gemm_output g_function f_function_finish one_dropout_add "
        "g_function_finish two_dropout_add ",
        "g_function_backward side_gemm_grad_weight side_gemm_grad_input f_function_backward "
        "g_function_backward_finish "};
    static graph g;
    static plan_memory memory;
    const te_sizes five = te_sizes_of_rows(5);
    make_parallel(&g);
    graph_make(&g);
    start_run(&memory, &g, &five, test_seed);
    memory.observed = 1;
    for (int d = 0; d < 2; d++) {
        order[0] = '\0';
        (void)plan_check_layout(g.plans[d], &five);
        plan_run(context, g.plans[d], &memory);
        EXPECT(strncmp(order, expected[d], strlen(expected[d])) == 0, "%s", order);
        forget_events();
    }
    for (int64_t i = 0; i < 5 * WIDTH; i++) {
        EXPECT(!isnan(graph_get(&g, &memory, TE_LINK_VALUE, g.nodes[4].output, i)), "y[%d]",
               (int)i);
        EXPECT(!isnan(graph_get(&g, &memory, TE_LINK_GRADIENT, 0, i)), "gradient of x[%d]", (int)i);
    }
    graph_drop(&g);
    plan_memory_end(&memory);
}

/* ---- any graph ---- */

static void add_collective(graph *g, te_collective_kind kind, const char *name, int32_t x,
                           int32_t y)
{
    static const int32_t steps[] = {TE_COLLECTIVE_FORWARD, TE_COLLECTIVE_BACKWARD};
    te_node_desc *node = graph_collective(g, kind, name, x, y);
    node->halves = steps;
    node->halves_count = 2;
}

/* A linear layer whose output, or the gradient of whose input, may be summed. */
static void add_linear(graph *g, const char *name, int32_t x, int32_t y)
{
    static const int32_t reduces = TE_LINEAR_STAGE_REDUCE_AMAX_INPUT;
    const int copies = test_random() % 2 == 0, sums = test_random() % 2 == 0;
    const int32_t copied = copies ? rows_of(g, "copied", 0, WIDTH) : x;
    const int32_t made = sums ? rows_of(g, "made", 0, WIDTH) : y;
    te_node_desc *node;
    if (copies) add_collective(g, TE_COLLECTIVE_COPY, name, x, copied);
    node = graph_linear(g, name, copied, made, 0);
    node->external = node->halves = &reduces;
    node->external_count = node->halves_count = 1;
    if (!sums) return;
    graph_drop_bias(g);
    add_collective(g, TE_COLLECTIVE_ALL_REDUCE, name, made, y);
}

/* Functions of several inputs, linear layers whose results are summed over ranks, and sums. */
static void make_random(graph *g)
{
    static const te_recipe recipes[] = {TE_RECIPE_NONE, TE_RECIPE_DELAYED, TE_RECIPE_CURRENT};
    const int nodes = 2 + (int)(test_random() % 10);
    int32_t values[32], read[32] = {0};
    int count = 1;
    graph_start(g, recipes[test_random() % 3], 0);
    values[0] = graph_input(g, "x", WIDTH);
    for (int n = 0; n < nodes; n++) {
        char name[TE_NAME_BYTES];
        const int of = (int)(test_random() % (uint32_t)count);
        int32_t y = rows_of(g, "v", 0, WIDTH);
        te_node_desc *node;
        (void)snprintf(name, sizeof name, "%d_", n);
        read[of] = 1;
        if (test_random() % 3 == 0) {
            add_linear(g, name, values[of], y);
        } else if (test_random() % 4 == 0 && of != count - 1) {
            (void)graph_dropout_add(g, name, values[of], values[count - 1], y, 0);
            read[count - 1] = 1;
        } else {
            node = add_function(g, name, values[of], y);
            node->input_count = 1;
            for (int i = 0; i < count && node->input_count < GRAPH_INPUTS; i++) {
                if (i == of || test_random() % 3 != 0) continue;
                inputs_of(g, node)[node->input_count++] = values[i];
                read[i] = 1;
            }
        }
        values[count++] = y;
    }
    for (int i = 1; i < count; i++) {
        if (!read[i] || test_random() % 5 == 0) g->values[values[i]].flags |= TE_VALUE_RESULT;
    }
}

static int count_apart(const te_plan *plan)
{
    te_plan_info info;
    int count = 0;
    OK(te_plan_describe(plan, &info));
    EXPECT(info.stage_count < MOST_STAGES, "%d stages", info.stage_count);
    for (int32_t s = 0; s < info.stage_count; s++) count += info.stages[s].half > s + 1;
    return count;
}

static void check_random(void)
{
    static graph g, whole;
    static plan_memory memory, expected;
    const te_sizes seven = te_sizes_of_rows(7);
    int apart = 0;
    for (int i = 0; i < RANDOM_GRAPHS; i++) {
        uint64_t seed;
        make_random(&g);
        whole = g;
        whole.desc.values = whole.values;
        whole.desc.nodes = whole.nodes;
        make_whole(&whole);
        graph_make(&g);
        graph_make(&whole);
        seed = test_seed;
        start_run(&expected, &whole, &seven, seed);
        for (int d = 0; d < 2; d++) plan_run(context, whole.plans[d], &expected);
        start_run(&memory, &g, &seven, seed);
        for (int d = 0; d < 2; d++) {
            (void)plan_check_layout(g.plans[d], &seven);
            apart += count_apart(g.plans[d]);
            memory.consumes = d && i % 2;
            plan_run(context, g.plans[d], &memory);
            forget_events();
        }
        compare_bits(&g, &memory, &expected);
        graph_drop(&g);
        graph_drop(&whole);
        plan_memory_end(&memory);
        plan_memory_end(&expected);
    }
    EXPECT(apart > RANDOM_GRAPHS, "%d halves with something between them", apart);
}

/* ---- other rows ---- */

static void check_rows(void)
{
    static graph g;
    static plan_memory memory;
    const te_sizes five = te_sizes_of_rows(5);
    int32_t x, many, y;
    graph_start(&g, TE_RECIPE_NONE, 0);
    x = graph_input(&g, "x", WIDTH);
    many = rows_of(&g, "many", TE_VALUE_RESULT, WIDTH);
    g.values[many].shape[0].multiply = 3;
    y = rows_of(&g, "y", TE_VALUE_RESULT, WIDTH);
    (void)add_function(&g, "gather_", x, many);
    (void)add_function(&g, "scatter_", many, y);
    graph_make(&g);
    start_run(&memory, &g, &five, test_seed);
    for (int d = 0; d < 2; d++) {
        plan_run(context, g.plans[d], &memory);
        forget_events();
    }
    for (int64_t i = 0; i < 5 * WIDTH; i++) {
        float at = (float)graph_get(&g, &memory, TE_LINK_VALUE, x, i), grad[3], sum;
        for (int r = 0; r < 3; r++) {
            const int64_t k = r * 5 * WIDTH + i;
            EXPECT(graph_get(&g, &memory, TE_LINK_VALUE, many, k) == (double)at, "many[%d]",
                   (int)k);
            grad[r] = (float)graph_get(&g, &memory, TE_LINK_GRADIENT, many, k) +
                      (float)graph_get(&g, &memory, TE_LINK_GRADIENT, y, i);
        }
        sum = at + at + at;
        EXPECT(graph_get(&g, &memory, TE_LINK_VALUE, y, i) == (double)sum, "y[%d]", (int)i);
        sum = grad[0] + grad[1] + grad[2];
        EXPECT(fabs(graph_get(&g, &memory, TE_LINK_GRADIENT, x, i) - (double)sum) < 1e-6,
               "gradient of x[%d]", (int)i);
    }
    graph_drop(&g);
    plan_memory_end(&memory);
}

/* ---- failures ---- */

/* Where a run fails, all that was started is finished or abandoned, once. */
static void check_failure(const graph *g, int d, int32_t stage, te_stage_event event)
{
    static plan_memory memory;
    const te_sizes three = te_sizes_of_rows(3);
    te_plan_info info;
    char text[32];
    start_run(&memory, g, &three, test_seed);
    memory.observed = 1;
    if (d > 0) {
        plan_run(context, g->plans[0], &memory);
        forget_events();
    }
    OK(te_plan_describe(g->plans[d], &info));
    if (event != TE_STAGE_RUN || info.stages[stage].external) {
        fail_stage = stage;
        fail_event = (int)event;
        EXPECT(plan_try(context, g->plans[d], &memory) == TE_ERROR_CALLBACK, "stage %d", stage);
        (void)snprintf(text, sizeof text, "stage %d fails", stage);
        EXPECT(strstr(te_last_error(), text) != NULL, "%s", te_last_error());
    }
    for (int32_t s = 0; fail_stage >= 0 && s < info.stage_count; s++) {
        int tried = event == TE_STAGE_RUN && stage > s && info.stages[s].half == stage;
        /* `tried`: its second half is what has failed */
        EXPECT(abandoned[s] <= 1 && started[s] == finished[s] + abandoned[s] + tried,
               "stage %d fails: %s: started %d times, finished %d times, abandoned %d times", stage,
               info.stages[s].name, started[s], finished[s], abandoned[s]);
    }
    plan_memory_end(&memory);
}

static void check_failures(void)
{
    static graph g;
    make_parallel(&g);
    graph_make(&g);
    for (int d = 0; d < 2; d++) {
        te_plan_info info;
        OK(te_plan_describe(g.plans[d], &info));
        for (int32_t s = 0; s < info.stage_count; s++) {
            for (int event = 0; event < TE_STAGE_ABANDON; event++) {
                check_failure(&g, d, s, (te_stage_event)event);
            }
        }
    }
    graph_drop(&g);
}

int main(void)
{
    OK(te_context_create(plan_cpu, &context));
    check_order();
    check_rows();
    check_failures();
    check_random();
    te_context_destroy(context);
    (void)puts("halves: ok");
    return 0;
}
