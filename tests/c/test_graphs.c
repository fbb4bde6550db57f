/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graphs.c - graphs that no module has, against a reference in double: chosen ones and random
 * ones, under every recipe. What is saved, repeated, put off or kept in FP8 changes no bit of the
 * results. Graphs that can not be are refused, whatever is wrong with them.
 */
#include "graphs.h"

enum { WIDTH = 16, RANDOM_GRAPHS = 400, DAMAGED_GRAPHS = 2000 };

static te_context *context;

/* ---- one graph, every way ------------------------------------------------------------------ */

static void fill(const graph *g, plan_memory *memory)
{
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        double size = g->values[v].ndim == 2 && graph_has(g, v, TE_VALUE_PARAMETER) ? 0.5 : 1;
        if (graph_has(g, v, TE_VALUE_INPUT | TE_VALUE_PARAMETER)) {
            graph_fill_uniform(g, memory, TE_LINK_VALUE, v, size);
        }
        if (graph_has(g, v, TE_VALUE_RESULT | TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE)) {
            graph_fill_uniform(g, memory, TE_LINK_GRADIENT, v, 1);
        }
    }
}

/* A set of flags that may not change the results. */
typedef struct variant {
    uint32_t graph, weight, node;
} variant;

static void apply(graph *g, const variant *how)
{
    g->desc.values = g->values; /* it may be a copy */
    g->desc.nodes = g->nodes;
    g->desc.flags |= how->graph;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        te_node_desc *node = &g->nodes[n];
        if (node->kind != TE_NODE_LINEAR) continue;
        if (node->quantization.recipe != TE_RECIPE_NONE) {
            node->flags |= how->node;
        } else if ((how->weight & (TE_VALUE_KEEP_QUANTIZED | TE_VALUE_QUANTIZED)) != 0) {
            continue;
        }
        g->values[node->inputs[1]].flags |= how->weight;
    }
    graph_make(g);
}

static void compare_bits(const graph *g, plan_memory *found, plan_memory *expected)
{
    for (int i = 0; i < expected->count; i++) {
        const plan_member *e = &expected->members[i];
        const plan_member *f = plan_find(found, e->link, e->of);
        int32_t v = e->of;
        int given = e->link == TE_LINK_GRADIENT && graph_has(g, v, TE_VALUE_RESULT);
        if (e->link != TE_LINK_VALUE && e->link != TE_LINK_GRADIENT) continue;
        if (given || (e->link == TE_LINK_VALUE && !graph_has(g, v, TE_VALUE_RESULT))) continue;
        EXPECT(f != NULL && f->bytes == e->bytes && memcmp(f->data, e->data, e->bytes) == 0,
               "other bits of %s%s", e->link == TE_LINK_GRADIENT ? "gradient of " : "",
               g->values[v].name);
    }
}

/* A weight that arrives in FP8 is not read in high precision. */
static void check_no_wide_weight(const graph *g)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        te_plan_info info;
        OK(te_plan_describe(g->plans[d], &info));
        for (int i = 0; i < info.buffer_count; i++) {
            const te_buffer_info *buffer = &info.buffers[i];
            EXPECT(buffer->link != TE_LINK_VALUE || !graph_has(g, buffer->of, TE_VALUE_QUANTIZED),
                   "the plan reads %s", buffer->name);
        }
    }
}

static double tolerance(const graph *g)
{
    int fp8 = 0, kinks = 0, narrow = g->dtype != TE_DTYPE_F32;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        const te_node_desc *node = &g->nodes[n];
        fp8 += node->quantization.recipe != TE_RECIPE_NONE;
        kinks += node->kind == TE_NODE_ACTIVATION && node->variant != TE_ACTIVATION_GELU;
    }
    /* Rounding errors of fp32 are 1e-7, of bf16 2e-3. They take an element across a boundary of FP8
     * now and then, where it changes by up to an eighth, and so the next ones; in bf16 across the
     * kink of a ReLU too, where a whole gradient comes or goes. After a few of these a comparison
     * says nothing any more; the other ways still have to give the same bits. */
    if (narrow) return fp8 > 2 || kinks > 0 ? (double)INFINITY : 0.05;
    return fp8 > 0 ? 1e-3 : 1e-8;
}

static void check_every_way(const graph *described, int64_t rows)
{
    static const variant variants[] = {
        {0, 0, 0},
        {TE_GRAPH_RECOMPUTE, 0, 0},
        {0, TE_VALUE_DEFER, 0},
        {TE_GRAPH_RECOMPUTE, TE_VALUE_DEFER, 0},
        {0, 0, TE_LINEAR_SAVE_INPUT},
        {0, TE_VALUE_DEFER, TE_LINEAR_SAVE_INPUT},
        {0, TE_VALUE_KEEP_QUANTIZED, 0},
        {TE_GRAPH_RECOMPUTE, TE_VALUE_KEEP_QUANTIZED, 0},
    };
    static plan_memory memory[2];
    static graph g;
    uint64_t seed = test_seed;
    for (unsigned i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        plan_memory *now = &memory[i > 0];
        g = *described;
        apply(&g, &variants[i]);
        plan_memory_start(now, rows);
        test_seed = seed;
        fill(&g, now);
        if (i == 0) graph_refer(&g, now);
        graph_run(context, &g, now);
        if (i == 0) {
            graph_check(&g, now, tolerance(&g));
            graph_forget(&g);
            continue;
        }
        compare_bits(&g, now, &memory[0]);
        if ((variants[i].weight & TE_VALUE_KEEP_QUANTIZED) != 0) { /* and once more, from FP8 */
            const variant given = {variants[i].graph, TE_VALUE_QUANTIZED, 0};
            g = *described;
            apply(&g, &given);
            test_seed = seed;
            fill(&g, now);
            graph_run(context, &g, now);
            compare_bits(&g, now, &memory[0]);
            check_no_wide_weight(&g);
        }
        plan_memory_end(now);
    }
    plan_memory_end(&memory[0]);
}

/* ---- chosen graphs ------------------------------------------------------------------------- */

static int32_t rows_of(graph *g, const char *name, uint32_t flags, int64_t columns)
{
    return graph_value(g, name, flags, 0, columns);
}

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
    static graph g;
    for (unsigned i = 0; i < sizeof chosen / sizeof chosen[0]; i++) {
        for (int recipe = TE_RECIPE_NONE; recipe <= TE_RECIPE_CURRENT; recipe++) {
            for (int narrow = 0; narrow < 2; narrow++) {
                graph_start(&g, (te_recipe)recipe, 0);
                g.dtype = narrow ? TE_DTYPE_BF16 : TE_DTYPE_F32;
                chosen[i](&g);
                check_every_way(&g, 17);
                check_every_way(&g, 0);
            }
        }
    }
}

/* ---- random graphs -------------------------------------------------------------------------- */

static uint32_t one_in(uint32_t count)
{
    return test_random() % count == 0;
}

/* A value that is read now, the latest ones most of all. */
static int32_t pick(const int32_t *values, int count)
{
    int back = (int)(test_random() % 3 * test_random() % (uint32_t)count);
    return values[count - 1 - back % count];
}

static void add_random_node(graph *g, const char *name, int32_t x, int32_t y)
{
    uint32_t kind = test_random() % 3;
    int64_t in = graph_columns(g, x), out = graph_columns(g, y);
    if (in == 2 * out && kind == 0) {
        graph_activation(g, TE_ACTIVATION_REGLU, x, y);
    } else if (in != out || kind == 0) {
        static const uint32_t flags[] = {0,
                                         0,
                                         0,
                                         TE_VALUE_DEFER,
                                         TE_VALUE_ACCUMULATE,
                                         TE_VALUE_OVERWRITE,
                                         TE_VALUE_ACCUMULATE | TE_VALUE_DEFER};
        te_node_desc *node = graph_linear(g, name, x, y, flags[test_random() % 7]);
        g->values[node->inputs[1]].grad_dtype = TE_DTYPE_F32;
        if (one_in(3)) node->inputs[2] = -1;
        if (one_in(4)) node->quantization.recipe = (int32_t)(test_random() % 3);
    } else if (kind == 1) {
        (void)graph_norm(g, one_in(2) ? TE_NORM_LAYERNORM : TE_NORM_RMSNORM, name, x, y);
    } else {
        graph_activation(g, one_in(2) ? TE_ACTIVATION_RELU : TE_ACTIVATION_GELU, x, y);
    }
}

static void make_random(graph *g)
{
    int32_t values[GRAPH_NODES];
    int count = 0, inputs = 1 + (int)one_in(3), nodes = 1 + (int)(test_random() % 9);
    graph_start(g, (te_recipe)(test_random() % 3), one_in(4) ? TE_GRAPH_RECOMPUTE : 0);
    g->dtype = one_in(4) ? TE_DTYPE_BF16 : TE_DTYPE_F32;
    for (int i = 0; i < inputs; i++) {
        values[count++] = graph_input(g, i == 0 ? "x" : "z", WIDTH * (1 + one_in(3)));
    }
    for (int i = 0; i < nodes; i++) {
        char name[TE_NAME_BYTES];
        int32_t y;
        (void)snprintf(name, sizeof name, "y%d", i);
        y = graph_value(g, name, one_in(5) ? TE_VALUE_RESULT : 0, 0, WIDTH * (1 + one_in(3)));
        (void)snprintf(name, sizeof name, "n%d_", i);
        add_random_node(g, name, pick(values, count), y);
        values[count++] = y;
    }
    for (int i = inputs; i < count; i++) {
        int read = 0;
        for (int32_t n = 0; n < g->desc.node_count; n++) read |= g->nodes[n].inputs[0] == values[i];
        if (!read) g->values[values[i]].flags |= TE_VALUE_RESULT;
    }
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        if (one_in(6)) g->values[v].flags &= ~(uint32_t)TE_VALUE_GRADIENT;
    }
}

static void check_random(void)
{
    static const int64_t rows[] = {0, 1, 5, 17, 33};
    static graph g;
    for (int i = 0; i < RANDOM_GRAPHS; i++) {
        test_seed = (uint64_t)i + 1;
        make_random(&g);
        if (getenv("GRAPHS_SAY") != NULL) (void)fprintf(stderr, "graph %d\n", i);
        check_every_way(&g, rows[test_random() % 5]);
    }
}

/* ---- stages of the caller -------------------------------------------------------------------- */

static int events[3];

/* A collective between two ranks that have the same: their sum, and their rows in a row. */
static te_status act(void *self, int32_t stage, te_stage_event event, const te_tensor *buffers)
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
    if (strcmp(what->name, "gather_input") == 0) {
        size_t bytes = (size_t)(first->shape[0] * first->shape[1]);
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
    const uint32_t reduces =
        1U << TE_LINEAR_STAGE_REDUCE_OUTPUT | 1U << TE_LINEAR_STAGE_REDUCE_GRAD_INPUT;
    te_plan_info info[2];
    int32_t x, y;
    graph_start(&g, TE_RECIPE_DELAYED, 0);
    x = graph_input(&g, "x", WIDTH);
    y = rows_of(&g, "y", TE_VALUE_RESULT, WIDTH);
    graph_linear(&g, "", x, y, 0)->external = reduces;
    graph_make(&g);
    plan_memory_start(&memory, 5);
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
    te_node_desc *node;
    int64_t id = 0;
    int32_t x, y;
    graph_start(&g, TE_RECIPE_DELAYED, 0);
    x = graph_value(&g, "x", TE_VALUE_INPUT, 0, WIDTH);
    y = rows_of(&g, "y", TE_VALUE_RESULT, WIDTH);
    g.values[y].shape[0].multiply = 2;
    node = graph_linear(&g, "", x, y, 0);
    node->gather = 2;
    node->external = 1U << TE_LINEAR_STAGE_GATHER_INPUT;
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &id) == TE_ERROR_UNSUPPORTED &&
               strstr(te_last_error(), "gradients of a gathered input") != NULL,
           "%s", te_last_error());
    for (int i = 1; i < 3; i++) g.values[node->inputs[i]].flags &= ~(uint32_t)TE_VALUE_GRADIENT;
    graph_make(&g);
    plan_memory_start(&memory, 5);
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

/* ---- graphs that can not be ------------------------------------------------------------------ */

static void make_small(graph *g)
{
    graph_start(g, TE_RECIPE_DELAYED, 0);
    norm_behind_a_linear(g);
}

static void refuse(const graph *g, te_status status, const char *text)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        int64_t id = 0;
        EXPECT(te_plan_make(&g->desc, (te_direction)d, &id) == status, "%s: %s", text,
               te_last_error());
        EXPECT(strstr(te_last_error(), text) != NULL, "%s: %s", text, te_last_error());
    }
}

/* One field of the small graph (x, a, b, y, weight, bias, gamma, beta; linear, GELU, norm). */
#define REFUSE(field, wrong, status, text)                                                         \
    do {                                                                                           \
        make_small(&g);                                                                            \
        g.field = wrong;                                                                           \
        refuse(&g, TE_ERROR_##status, text);                                                       \
    } while (0)

static void check_refusals(void)
{
    static graph g;
    int64_t id = 0;
    REFUSE(desc.size, 8, INVALID, "graph: size");
    REFUSE(desc.values, NULL, INVALID, "graph: size, counts");
    REFUSE(desc.nodes, NULL, INVALID, "graph: size, counts");
    REFUSE(desc.value_count, 0, INVALID, "graph: size, counts");
    REFUSE(desc.value_count, -1, INVALID, "graph: size, counts");
    REFUSE(desc.value_count, TE_GRAPH_VALUES + 1, INVALID, "graph: size, counts");
    REFUSE(desc.node_count, TE_GRAPH_NODES + 1, INVALID, "graph: size, counts");
    REFUSE(desc.flags, 2, INVALID, "graph: size, counts or flags");
    REFUSE(values[0].ndim, 0, INVALID, "value 0: name, ndim = 0");
    REFUSE(values[0].ndim, TE_MAX_DIMS + 1, INVALID, "value 0: name, ndim = 5");
    REFUSE(values[0].ndim, 1, INVALID, "linear: from x of 1 dims");
    REFUSE(values[0].dtype, 99, TYPE, "x: dtype invalid");
    REFUSE(values[0].dtype, TE_DTYPE_E4M3, TYPE, "x: dtype e4m3");
    REFUSE(values[0].shape[1].symbol, 7, INVALID, "x: dim 1");
    REFUSE(values[0].shape[1].symbol, TE_SYMBOL_ROWS, INVALID, "x: dim 1");
    REFUSE(values[0].shape[0].align, 0, INVALID, "x: dim 0");
    REFUSE(values[0].shape[0].align, 16, INVALID, "x: leading dims");
    REFUSE(values[0].shape[0].multiply, INT64_MAX, INVALID, "x: dim 0");
    REFUSE(values[0].shape[0].multiply, (int64_t)1 << 26, INVALID, "x: too large");
    REFUSE(values[0].shape[0].multiply, 3, INVALID, "linear: from x to a: other rows");
    REFUSE(values[0].flags, TE_VALUE_INPUT | TE_VALUE_RESULT, INVALID, "flags = 0x5");
    REFUSE(values[0].flags, 0, INVALID, "node 0 reads x, which nobody has made");
    REFUSE(values[1].flags, TE_VALUE_INPUT, INVALID, "node 0 makes a, which is there already");
    REFUSE(values[4].flags, TE_VALUE_INPUT, INVALID, "linear: weight: weight is no parameter");
    REFUSE(values[4].shape[0].add, 7, INVALID, "linear: weight: weight is no parameter of 16 x 16");
    REFUSE(values[5].flags, TE_VALUE_PARAMETER | TE_VALUE_DEFER, INVALID, "only a linear's weight");
    REFUSE(values[6].shape[0].add, 7, INVALID, "norm: gamma: last_gamma is no parameter of 1 x 16");
    REFUSE(values[7].dtype, TE_DTYPE_BF16, TYPE, "norm: gamma f32, beta bf16");
    REFUSE(nodes[0].kind, TE_NODE_KINDS, INVALID, "node 0: name, kind 3");
    REFUSE(nodes[0].kind, -1, INVALID, "node 0: name, kind -1");
    REFUSE(nodes[0].inputs[0], 1, INVALID, "node 0 reads a, which nobody has made");
    REFUSE(nodes[0].inputs[0], 2, INVALID, "node 0 reads b, which nobody has made");
    REFUSE(nodes[0].inputs[1], 8, INVALID, "node 0: there is no value 8");
    REFUSE(nodes[0].inputs[1], -2, INVALID, "node 0: there is no value -2");
    REFUSE(nodes[0].inputs[3], 0, INVALID, "a fourth input 0");
    REFUSE(nodes[0].output, 8, INVALID, "output 8");
    REFUSE(nodes[0].output, 3, INVALID, "reads a, which nobody has made");
    REFUSE(nodes[1].output, 1, INVALID, "node 1 makes a, which is there already");
    REFUSE(nodes[1].inputs[1], 0, INVALID, "activation: gelu of 16");
    REFUSE(nodes[0].external, 1U << 31, INVALID, "external = 0x80000000");
    REFUSE(nodes[0].gather, 2, INVALID, "gather = 2");
    REFUSE(nodes[0].gather, 0, INVALID, "gather = 0");
    REFUSE(nodes[0].slots[1], INT32_MAX, INVALID, "slots[1] = 2147483647");
    REFUSE(nodes[0].quantization.recipe, 3, INVALID, "recipe = 3");
    REFUSE(nodes[0].quantization.forward_fp8, TE_DTYPE_E5M2, TYPE, "FP8 dtypes e5m2 and e5m2");
    REFUSE(nodes[0].quantization.amax_epsilon[1], (float)NAN, INVALID, "amax_epsilon");
    REFUSE(nodes[2].numbers[0], (float)NAN, INVALID, "eps = ");
    make_small(&g);
    memset(g.values[0].name, 'x', TE_NAME_BYTES);
    refuse(&g, TE_ERROR_INVALID, "value 0: name");
    make_small(&g);
    memset(g.nodes[0].name, 'x', TE_NAME_BYTES);
    refuse(&g, TE_ERROR_INVALID, "node 0: name");
    make_small(&g);
    (void)rows_of(&g, "nothing", TE_VALUE_RESULT, WIDTH);
    refuse(&g, TE_ERROR_INVALID, "no node makes the result nothing");
    make_small(&g);
    graph_activation(&g, TE_ACTIVATION_RELU, 0, rows_of(&g, "dead", 0, WIDTH));
    refuse(&g, TE_ERROR_INVALID, "node 3 makes dead, which is no result and which nobody reads");
    make_small(&g);
    graph_linear(&g, "two_", 0, rows_of(&g, "z", TE_VALUE_RESULT, WIDTH), 0)->inputs[1] = 4;
    refuse(&g, TE_ERROR_UNSUPPORTED, "node 3: the gradient of weight, which is read twice");
    EXPECT(te_plan_make(NULL, TE_DIRECTION_FORWARD, &id) == TE_ERROR_INVALID, "no graph");
    make_small(&g);
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_COUNT, &id) == TE_ERROR_INVALID, "direction 3");
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &id) == TE_OK, "%s", te_last_error());
}

/* A word of a random graph is another one. */
static void damage(graph *g)
{
    static const uint32_t words[] = {0,          1,          2,          3,          7,
                                     16,         32,         255,        0x7fffffff, 0x80000000,
                                     0xffffffff, 0xfffffffe, 0x7fc00000, 0x7f800000, 0x10000000};
    uint32_t word = words[test_random() % (sizeof words / sizeof words[0])];
    int values = (int)one_in(2);
    size_t bytes = values ? (size_t)g->desc.value_count * sizeof g->values[0]
                          : (size_t)g->desc.node_count * sizeof g->nodes[0];
    size_t at = test_random() % (bytes / sizeof word) * sizeof word;
    memcpy((values ? (char *)g->values : (char *)g->nodes) + at, &word, sizeof word);
}

/* What is taken all the same has sizes, or none that fits. */
static void check_taken(int64_t plan)
{
    te_plan_sizes sizes;
    size_t scratch;
    for (int64_t rows = 1; rows <= INT32_MAX; rows = rows * 46341 + 1) {
        (void)te_plan_infer(plan, rows, &sizes, NULL);
    }
    EXPECT(te_plan_infer(plan, (int64_t)INT32_MAX + 1, &sizes, NULL) == TE_ERROR_INVALID, "rows");
    (void)te_plan_scratch(context, plan, 5, &scratch);
}

static void check_damage(void)
{
    static graph g;
    int taken = 0, refused = 0;
    for (int i = 0; i < DAMAGED_GRAPHS; i++) {
        test_seed = (uint64_t)i + 1;
        make_random(&g);
        for (int k = 0; k < 3; k++) damage(&g);
        for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
            int64_t id = 0;
            te_status st = te_plan_make(&g.desc, (te_direction)d, &id);
            if (st == TE_OK) {
                taken++;
                check_taken(id);
                continue;
            }
            refused++;
            EXPECT(st == TE_ERROR_INVALID || st == TE_ERROR_TYPE || st == TE_ERROR_UNSUPPORTED,
                   "%d: %s", (int)st, te_last_error());
        }
    }
    EXPECT(taken > DAMAGED_GRAPHS / 10 && refused > DAMAGED_GRAPHS / 10, "%d taken, %d refused",
           taken, refused);
}

/* What the caller's structs hold behind names and dims is no part of a graph. */
static void check_identity(void)
{
    graph g;
    int64_t first = 0, second = 0;
    make_small(&g);
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &first));
    for (int i = 0; i < g.desc.value_count; i++) {
        te_value_desc *value = &g.values[i];
        value->name[TE_NAME_BYTES - 1] = 'x';
        value->shape[TE_MAX_DIMS - 1].add = 7;
    }
    for (int i = 0; i < g.desc.node_count; i++) g.nodes[i].name[TE_NAME_BYTES - 1] = 'x';
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &second));
    EXPECT(first == second, "%lld and %lld", (long long)first, (long long)second);
    graph_forget(&g);
}

int main(void)
{
    OK(te_context_create(plan_cpu, &context));
    check_identity();
    check_refusals();
    check_reductions();
    check_gather();
    check_chosen();
    check_random();
    check_damage();
    te_context_destroy(context);
    (void)puts("graphs: ok");
    return 0;
}
