/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_ways.h - one graph, every way: against a reference in double, and with what is saved,
 * repeated, put off, kept in FP8 or left to the caller otherwise, which changes no bit of the
 * results.
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
        } else if (graph_has(g, v, TE_VALUE_INPUT | TE_VALUE_PARAMETER)) {
            graph_fill_uniform(g, memory, TE_LINK_VALUE, v, size);
        }
        if (graph_has(g, v, TE_VALUE_RESULT | TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE)) {
            graph_fill_uniform(g, memory, TE_LINK_GRADIENT, v, 1);
        }
    }
}

/* ---- stages of the caller ---- */

/* Memory for a late output: what the plans that come find under its link. */
static te_tensor make_late(plan_memory *memory, const te_buffer_info *info)
{
    te_tensor made = plan_dense(memory, info);
    size_t bytes = te_dtype_bytes(info->dtype) * (size_t)made.shape[0] * (size_t)made.shape[1];
    made.data = plan_data(memory, info->link, info->of, bytes);
    return made;
}

/* [batch, heads, queries] like an operator's, of the caller. */
static te_tensor make_statistics(plan_memory *memory, int32_t node, const te_tensor *query)
{
    int64_t batch = query->shape[0], queries = query->shape[1], heads = query->shape[2];
    return (te_tensor){.data =
                           plan_floats(memory, TE_LINK_STATISTICS, node, batch * queries * heads),
                       .dtype = TE_DTYPE_F32,
                       .device = plan_cpu,
                       .ndim = 3,
                       .shape = {batch, heads, queries},
                       .strides = {heads * queries, queries, 1}};
}

/* A matrix as [batch, sequence, heads, channels], dense heads, where `like` says the rest. */
static te_tensor heads_like(te_tensor matrix, const te_tensor *like, int first)
{
    int64_t columns = matrix.shape[1];
    te_tensor heads = matrix;
    heads.ndim = 4;
    memcpy(heads.shape, like->shape, sizeof heads.shape);
    heads.shape[3] = columns / like->shape[2];
    heads.strides[0] = first ? columns : like->shape[1] * columns;
    heads.strides[1] = first ? like->shape[0] * columns : columns;
    heads.strides[2] = heads.shape[3];
    heads.strides[3] = 1;
    return heads;
}

/* The attention of an external stage: the operator, by the caller. Its buffers are in the order of
 * the operator's fields: what is there of the node's inputs, then in a forward the output, in a
 * backward its gradient, the output, and the gradients that are wanted. */
typedef struct attention_stage {
    const te_node_desc *node;
    const te_stage_info *info;
    te_tensor *buffers;
    int32_t next; /* of the stage's buffers */
    te_attention_problem problem;
    int64_t pair[2];
} attention_stage;

static te_tensor *next_buffer(attention_stage *s)
{
    EXPECT(s->next < s->info->buffer_count, "too few buffers");
    return &s->buffers[s->info->buffers[s->next++]];
}

/* [batch, heads, length, channels] as the operator takes it. */
static te_tensor heads_last(te_tensor heads)
{
    te_tensor swapped = heads;
    for (int i = 1; i < 3; i++) {
        swapped.shape[i] = heads.shape[3 - i];
        swapped.strides[i] = heads.strides[3 - i];
    }
    return swapped;
}

static void take_problem(attention_stage *s)
{
    te_attention_problem *p = &s->problem;
    te_tensor *const inputs[] = {&p->query, &p->key,           &p->value,      &p->mask,
                                 &p->bias,  &p->query_lengths, &p->key_lengths};
    for (int i = 0; i < s->node->input_count; i++) {
        if (s->node->inputs[i] < 0) continue;
        *inputs[i] = i < 3 ? heads_last(*next_buffer(s)) : *next_buffer(s);
    }
    p->scale = (float)s->node->numbers[0];
    p->dropout = (float)s->node->numbers[1];
    p->window_left = (int64_t)s->node->numbers[2];
    p->window_right = (int64_t)s->node->numbers[3];
    p->bottom_right = (s->node->flags & TE_NODE_BOTTOM_RIGHT) != 0;
    if (p->dropout > 0) p->rng = s->pair;
}

static te_status attend(plan_memory *memory, attention_stage *s)
{
    te_attention_args args = {.size = sizeof args, .problem = s->problem};
    int first = (s->node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    int32_t late = s->info->buffers[s->next];
    te_plan_info info;
    te_status st;
    OK(te_plan_describe(memory->running, &info));
    EXPECT(info.buffers[late].late, "%s is not late", info.buffers[late].name);
    *next_buffer(s) = make_late(memory, &info.buffers[late]);
    args.output = heads_like(s->buffers[late], &s->problem.query, first);
    args.statistics = make_statistics(memory, s->info->node, &s->problem.query);
    OK(te_op_workspace(context, TE_OP_ATTENTION, &args, &args.workspace_size));
    args.workspace = plan_allocate(args.workspace_size);
    st = te_attention(context, &args, NULL);
    free(args.workspace);
    return st;
}

/* Whether the stage's next buffer is, or is part of, the gradient of a value. */
static int is_gradient(const plan_memory *memory, const attention_stage *s, int32_t value)
{
    te_plan_info info;
    const te_buffer_info *next;
    if (s->next == s->info->buffer_count) return 0;
    OK(te_plan_describe(memory->running, &info));
    next = &info.buffers[s->info->buffers[s->next]];
    return (next->link == TE_LINK_GRADIENT || next->link == TE_LINK_PART) && next->of == value;
}

static te_status attend_backward(plan_memory *memory, attention_stage *s)
{
    te_attention_backward_args args = {.size = sizeof args, .problem = s->problem};
    int first = (s->node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    te_tensor *const grads[] = {&args.grad_query, &args.grad_key, &args.grad_value,
                                &args.grad_bias};
    te_status st;
    args.grad_output = heads_like(*next_buffer(s), &s->problem.query, first);
    args.output = heads_like(*next_buffer(s), &s->problem.query, first);
    args.statistics = make_statistics(memory, s->info->node, &s->problem.query);
    for (int i = 0; i < 4; i++) {
        int32_t value = s->node->inputs[i < 3 ? i : GRAPH_BIAS];
        if (value < 0 || !is_gradient(memory, s, value)) continue;
        *grads[i] = i < 3 ? heads_last(*next_buffer(s)) : *next_buffer(s);
    }
    EXPECT(s->next == s->info->buffer_count, "%d buffers", s->info->buffer_count);
    OK(te_op_workspace(context, TE_OP_ATTENTION_BACKWARD, &args, &args.workspace_size));
    args.workspace = plan_allocate(args.workspace_size);
    st = te_attention_backward(context, &args, NULL);
    free(args.workspace);
    return st;
}

/* What the graphs here ask of their caller: pairs of random numbers, and attention. */
static te_status serve(void *self, int32_t stage, te_stage_event event, te_tensor *buffers)
{
    plan_memory *memory = self;
    te_plan_info info;
    attention_stage attention = {.buffers = buffers};
    OK(te_plan_describe(memory->running, &info));
    EXPECT(event == TE_STAGE_RUN && info.stages[stage].external, "event %d", (int)event);
    attention.info = &info.stages[stage];
    attention.node = &memory->graph->nodes[attention.info->node];
    graph_pair(attention.info->node, attention.pair);
    if (attention.info->op == TE_OP_FILL) {
        const te_tensor *pair = next_buffer(&attention);
        EXPECT(pair->dtype == TE_DTYPE_I64 && pair->shape[0] == 2, "no pair");
        EXPECT(info.direction == TE_DIRECTION_FORWARD, "drawn in a backward");
        memcpy(pair->data, attention.pair, sizeof attention.pair);
        return TE_OK;
    }
    take_problem(&attention);
    return attention.info->op == TE_OP_ATTENTION ? attend(memory, &attention)
                                                 : attend_backward(memory, &attention);
}

/* ---- every way ---- */

/* A set of flags that may not change the results. */
typedef struct variant {
    uint32_t graph, weight, node, attention;
} variant;

/* Whether every node of it can be repeated. */
static int repeats(const graph *g)
{
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        int32_t kind = g->nodes[n].kind;
        if (kind == TE_NODE_ATTENTION || kind == TE_NODE_ROPE || kind == TE_NODE_DROPOUT_ADD ||
            kind == TE_NODE_HEAD_NORM) {
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
            if (i > 0 || node->quantization.recipe == TE_RECIPE_NONE) return 0;
            found++;
        }
    }
    return found;
}

static int quantized_inputs, quantized_gradients; /* that were given */

/* Input and gradient of a linear node with a recipe, where they are given to the graph. */
static void apply_to_data(graph *g, const te_node_desc *node, uint32_t flags)
{
    int32_t x = node->inputs[0], y = node->output, bias = node->inputs[2];
    int sums = bias >= 0 && graph_has(g, bias, TE_VALUE_GRADIENT);
    if (graph_has(g, x, TE_VALUE_INPUT) && casts_of(g, x) > 0) {
        g->values[x].flags |= flags;
        quantized_inputs += (flags & TE_VALUE_QUANTIZED) != 0;
    }
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        for (int i = 0; i < g->nodes[n].input_count; i++) {
            if (g->nodes[n].inputs[i] == y) return;
        }
    }
    if (!graph_has(g, y, TE_VALUE_RESULT) || (sums && (flags & TE_VALUE_QUANTIZED) != 0)) return;
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
        if (node->kind == TE_NODE_ATTENTION) node->external |= how->attention;
        if (node->kind != TE_NODE_LINEAR) continue;
        if (node->quantization.recipe != TE_RECIPE_NONE) {
            node->flags |= how->node;
            apply_to_data(g, node, how->weight & (TE_VALUE_KEEP_QUANTIZED | TE_VALUE_QUANTIZED));
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
                       graph_has(g, buffer->of, TE_VALUE_RESULT) !=
                           (buffer->link == TE_LINK_GRADIENT),
                   "the plan reads %s", buffer->name);
        }
    }
}

static double tolerance(const graph *g)
{
    int fp8 = 0, kinks = 0, scores = 0, narrow = g->dtype != TE_DTYPE_F32;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        const te_node_desc *node = &g->nodes[n];
        fp8 += node->quantization.recipe != TE_RECIPE_NONE;
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
    for (int s = TE_SYMBOL_DIM_0; first && s < TE_SYMBOL_COUNT; s += 3) {
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
    memory->stage = serve;
    for (int i = 0; i < 2 * PLAN_OWNERS; i++) memory->slots[i] = 7 * i % 5;
}

static inline void check_every_way(const graph *described, const te_sizes *sizes)
{
    static const variant variants[] = {
        {0, 0, 0, 0},
        {TE_GRAPH_RECOMPUTE, 0, 0, 0},
        {0, TE_VALUE_DEFER, 0, 1},
        {TE_GRAPH_RECOMPUTE, TE_VALUE_DEFER, 0, 0},
        {0, 0, TE_LINEAR_SAVE_INPUT, 1},
        {0, TE_VALUE_DEFER, TE_LINEAR_SAVE_INPUT, 0},
        {0, TE_VALUE_KEEP_QUANTIZED, 0, 0},
        {TE_GRAPH_RECOMPUTE, TE_VALUE_KEEP_QUANTIZED, 0, 0},
        {0, TE_VALUE_KEEP_QUANTIZED | TE_VALUE_DEFER, TE_LINEAR_SAVE_INPUT, 0},
    };
    static plan_memory memory[2];
    static graph g;
    uint64_t seed = test_seed;
    for (unsigned i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        plan_memory *now = &memory[i > 0];
        g = *described;
        if (variants[i].graph != 0 && !repeats(&g)) continue;
        apply(&g, &variants[i]);
        for (int d = 0; d < TE_DIRECTION_COUNT; d++) (void)plan_check_layout(g.plans[d], sizes);
        start_memory(now, &g, sizes);
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
                                   variants[i].node, 0};
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
