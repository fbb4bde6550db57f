/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_ways.h - one graph, every way: against a reference in double, and with what is saved,
 * repeated, put off or kept in FP8 otherwise, which changes no bit of the results.
 */
#ifndef TE_TESTS_GRAPH_WAYS_H
#define TE_TESTS_GRAPH_WAYS_H

#include "graphs.h"

enum { WIDTH = 16 };

static te_context *context;

static void fill(const graph *g, plan_memory *memory)
{
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        double size = g->values[v].ndim == 2 && graph_has(g, v, TE_VALUE_PARAMETER) ? 0.5 : 1;
        if (g->values[v].dtype == TE_DTYPE_U8) {
            graph_fill_mask(g, memory, v);
        } else if (g->values[v].dtype == TE_DTYPE_I32) {
            graph_fill_lengths(g, memory, v);
        } else if (g->values[v].dtype == TE_DTYPE_I64) {
            graph_fill_pair(g, memory, v);
        } else if (graph_has(g, v, TE_VALUE_INPUT | TE_VALUE_PARAMETER)) {
            graph_fill_uniform(g, memory, TE_LINK_VALUE, v, size);
        }
        if (graph_has(g, v, TE_VALUE_RESULT | TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE)) {
            graph_fill_uniform(g, memory, TE_LINK_GRADIENT, v, 1);
        }
    }
}

/* ---- every way ---- */

/* A set of flags that may not change the results. */
typedef struct variant {
    uint32_t graph, weight, node;
} variant;

/* Whether every node of it can be repeated. */
static int repeats(const graph *g)
{
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        int32_t kind = g->nodes[n].kind;
        if (kind == TE_NODE_ATTENTION || kind == TE_NODE_ROPE || kind == TE_NODE_DROPOUT_ADD ||
            kind == TE_NODE_HEAD_NORM || kind == TE_NODE_CONVERT) {
            return 0;
        }
    }
    return 1;
}

/* Whether nobody reads a value but linear nodes that cast it; how often they do. */
static int casts_of(const graph *g, int32_t v)
{
    int found = 0;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        const te_node_desc *node = &g->nodes[n];
        for (int i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != v) continue;
            if (i > 0 || node->quantization.casts[0].recipe == TE_RECIPE_NONE) return 0;
            found++;
        }
    }
    return found;
}

static int quantized_inputs, quantized_gradients; /* that were given */
static int dequantized, in_high_precision;        /* linear nodes whose backward is */

/* Whether a node that reads a value has a backward in high precision, which dequantizes what
 * arrives quantized. */
static int reads_wide(const graph *g, int32_t v)
{
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        const te_node_desc *node = &g->nodes[n];
        if (node->inputs[0] == v && node->quantization.backward == TE_BACKWARD_HIGH_PRECISION) {
            return 1;
        }
    }
    return 0;
}

/* Input and gradient of a linear node with a recipe, where they are given to the graph. */
static void apply_to_data(graph *g, const te_node_desc *node, uint32_t flags)
{
    int32_t x = node->inputs[0], y = node->output, bias = node->inputs[2];
    int sums = bias >= 0 && graph_has(g, bias, TE_VALUE_GRADIENT);
    if (graph_has(g, x, TE_VALUE_INPUT) && casts_of(g, x) > 0 && !reads_wide(g, x)) {
        g->values[x].flags |= flags;
        quantized_inputs += (flags & TE_VALUE_QUANTIZED) != 0;
    }
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        for (int i = 0; i < g->nodes[n].input_count; i++) {
            if (g->nodes[n].inputs[i] == y) return;
        }
    }
    if (!graph_has(g, y, TE_VALUE_RESULT) || (sums && (flags & TE_VALUE_QUANTIZED) != 0)) return;
    if (node->quantization.backward != TE_BACKWARD_QUANTIZED) return; /* it has no forms */
    g->values[y].flags |= flags;
    quantized_gradients += (flags & TE_VALUE_QUANTIZED) != 0;
}

static void apply(graph *g, const variant *how)
{
    g->desc.values = g->values; /* it may be a copy */
    g->desc.nodes = g->nodes;
    g->desc.flags |= how->graph;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        te_node_desc *node = &g->nodes[n];
        if (node->kind != TE_NODE_LINEAR) continue;
        if (node->quantization.casts[0].recipe != TE_RECIPE_NONE) {
            node->flags |= how->node;
            apply_to_data(g, node, how->weight & (TE_VALUE_KEEP_QUANTIZED | TE_VALUE_QUANTIZED));
        } else if ((how->weight & (TE_VALUE_KEEP_QUANTIZED | TE_VALUE_QUANTIZED)) != 0) {
            continue;
        }
        g->values[node->inputs[1]].flags |= how->weight;
        dequantized += node->quantization.backward == TE_BACKWARD_DEQUANTIZED;
        if (node->quantization.backward != TE_BACKWARD_HIGH_PRECISION) continue;
        in_high_precision++;
        if ((how->weight & TE_VALUE_QUANTIZED) == 0) continue;
        g->values[node->inputs[1]].flags |= TE_VALUE_ALSO_WIDE;
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

/* What arrives in FP8 is not read in high precision. */
static void check_nothing_wide(const graph *g)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        te_plan_info info;
        OK(te_plan_describe(g->plans[d], &info));
        for (int i = 0; i < info.buffer_count; i++) {
            const te_buffer_info *buffer = &info.buffers[i];
            if (buffer->link != TE_LINK_VALUE && buffer->link != TE_LINK_GRADIENT) continue;
            EXPECT(!graph_has(g, buffer->of, TE_VALUE_QUANTIZED) ||
                       graph_has(g, buffer->of, TE_VALUE_ALSO_WIDE) ||
                       graph_has(g, buffer->of, TE_VALUE_RESULT) !=
                           (buffer->link == TE_LINK_GRADIENT),
                   "the plan reads %s", buffer->name);
        }
    }
}

static int is_micro(const te_node_desc *node)
{
    const int32_t recipe = node->quantization.casts[0].recipe;
    return node->kind == TE_NODE_LINEAR && (recipe == TE_RECIPE_MXFP8 || recipe == TE_RECIPE_NVFP4);
}

static double tolerance(const graph *g)
{
    int fp8 = 0, kinks = 0, scores = 0, narrow = g->dtype != TE_DTYPE_F32;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        const te_node_desc *node = &g->nodes[n];
        if (is_micro(node)) return (double)INFINITY; /* graph_nodes.h has no scales of groups */
        fp8 += node->quantization.casts[0].recipe != TE_RECIPE_NONE;
        kinks += node->kind == TE_NODE_ACTIVATION && node->variant != TE_ACTIVATION_GELU;
        scores += node->kind == TE_NODE_ATTENTION;
        kinks += node->kind == TE_NODE_ATTENTION && node->inputs[GRAPH_BIAS] >= 0;
    }
    /* Rounding errors of fp32 are 1e-7, of bf16 2e-3. They take an element across a boundary of FP8
     * now and then, where it changes by up to an eighth, and so the next ones; in bf16 across the
     * kink of a ReLU too, where a whole gradient comes or goes; and gradients of scores are sums of
     * differences that cancel, that of their bias most of all. After a few of these a comparison
     * says nothing any more; the other ways still have to give the same bits. */
    if (narrow) return fp8 > 2 || kinks > 0 ? (double)INFINITY : scores > 0 ? 0.5 : 0.05;
    if (fp8 > 0) return scores > 0 ? 5e-3 : 1e-3;
    return scores > 0 ? 1e-6 : 1e-8;
}

/* Sizes of a batch of sequences, and of what they attend to. */
static inline te_sizes sizes_of(int64_t batch, int64_t length, int64_t source, int first)
{
    te_sizes sizes = {.of = {0, batch * length, batch, length, batch * source, batch, source}};
    for (int s = TE_SYMBOL_DIM_0; first && s < TE_SYMBOL_SEQUENCES; s += 3) {
        int64_t swap = sizes.of[s];
        sizes.of[s] = sizes.of[s + 1];
        sizes.of[s + 1] = swap;
    }
    return sizes;
}

static void start_memory(plan_memory *memory, const graph *g, const te_sizes *sizes)
{
    plan_memory_start(memory, sizes);
    memory->graph = &g->desc;
    for (int i = 0; i < 2 * PLAN_OWNERS; i++) memory->slots[i] = 7 * i % 5;
}

static inline void check_every_way(graph *described, const te_sizes *sizes)
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
        {0, TE_VALUE_KEEP_QUANTIZED | TE_VALUE_DEFER, TE_LINEAR_SAVE_INPUT},
    };
    static plan_memory memory[2];
    static graph g;
    uint64_t seed = test_seed;
    graph_draw(described);
    for (unsigned i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        plan_memory *now = &memory[i > 0];
        g = *described;
        if (variants[i].graph != 0 && !repeats(&g)) continue;
        apply(&g, &variants[i]);
        for (int d = 0; d < TE_DIRECTION_COUNT; d++) (void)plan_check_layout(g.plans[d], sizes);
        start_memory(now, &g, sizes);
        now->consuming = i > 0;
        test_seed = seed;
        fill(&g, now);
        if (i == 0) graph_refer(&g, now);
        graph_run(context, &g, now);
        if (i == 0) {
            graph_check(&g, now, tolerance(&g));
            graph_forget(&g);
            graph_drop(&g);
            continue;
        }
        compare_bits(&g, now, &memory[0]);
        graph_drop(&g);
        if ((variants[i].weight & TE_VALUE_KEEP_QUANTIZED) != 0) { /* and once more, from FP8 */
            const variant given = {variants[i].graph,
                                   variants[i].weight ^ TE_VALUE_KEEP_QUANTIZED ^
                                       TE_VALUE_QUANTIZED,
                                   variants[i].node};
            g = *described;
            apply(&g, &given);
            test_seed = seed;
            fill(&g, now);
            graph_run(context, &g, now);
            compare_bits(&g, now, &memory[0]);
            check_nothing_wide(&g);
            graph_drop(&g);
        }
        plan_memory_end(now);
    }
    plan_memory_end(&memory[0]);
}

static inline int32_t rows_of(graph *g, const char *name, uint32_t flags, int64_t columns)
{
    return graph_value(g, name, flags, GRAPH_ROWS, columns);
}

#endif
