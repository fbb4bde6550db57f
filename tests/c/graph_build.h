/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_build.h - graphs for the tests, and the memory of their values.
 */
#ifndef TE_TESTS_GRAPH_BUILD_H
#define TE_TESTS_GRAPH_BUILD_H

#include "numbers.h"
#include "plans.h"

enum { GRAPH_VALUES = 256, GRAPH_NODES = 64, GRAPH_INPUTS = 13 };

typedef struct graph {
    te_value_desc values[GRAPH_VALUES];
    te_node_desc nodes[GRAPH_NODES];
    int32_t inputs[GRAPH_NODES][GRAPH_INPUTS]; /* the lists of the nodes */
    double numbers[GRAPH_NODES][GRAPH_INPUTS];
    te_slice slices[GRAPH_NODES][GRAPH_INPUTS];
    te_graph_desc desc;
    te_dtype dtype;   /* of the next value */
    te_recipe recipe; /* of the next linear node */
    int32_t owner;    /* likewise */
    te_plan *plans[TE_DIRECTION_COUNT];
    double *value[GRAPH_VALUES], *grad[GRAPH_VALUES]; /* the reference, and its sizes */
    te_sizes sizes;
} graph;

enum { GRAPH_ROWS = 0, GRAPH_VECTOR = -1, GRAPH_SOURCE = -2 }; /* in place of a number of rows */

/* ---- building ------------------------------------------------------------------------------ */

static inline void graph_start(graph *g, te_recipe recipe, uint32_t flags)
{
    memset(g, 0, sizeof *g);
    g->desc = (te_graph_desc){
        .size = sizeof g->desc, .values = g->values, .nodes = g->nodes, .flags = flags};
    g->recipe = recipe;
}

static inline te_extent graph_constant(int64_t length)
{
    return (te_extent){.align = 1, .add = length};
}

static inline te_extent graph_symbol(int32_t symbol)
{
    return (te_extent){.symbol = symbol, .align = 1, .multiply = 1};
}

/* A value of so many rows; of those of a call, of its source; a vector. */
static inline int32_t graph_value(graph *g, const char *name, uint32_t flags, int64_t rows,
                                  int64_t columns)
{
    te_value_desc *value = &g->values[g->desc.value_count];
    int last = rows != GRAPH_VECTOR;
    EXPECT(g->desc.value_count < GRAPH_VALUES, "too many values");
    (void)snprintf(value->name, sizeof value->name, "%.*s", TE_NAME_BYTES - 1, name);
    value->flags = flags;
    value->dtype = value->grad_dtype = (int32_t)g->dtype;
    value->ndim = 1 + last;
    value->shape[0] = graph_constant(rows);
    if (rows == GRAPH_ROWS || rows == GRAPH_SOURCE) {
        value->shape[0] = graph_symbol(rows == GRAPH_ROWS ? TE_SYMBOL_ROWS : TE_SYMBOL_SOURCE_ROWS);
        value->flags |= TE_VALUE_LEADING;
    }
    value->shape[last] = graph_constant(columns);
    return g->desc.value_count++;
}

static inline int32_t graph_input(graph *g, const char *name, int64_t columns)
{
    return graph_value(g, name, TE_VALUE_INPUT | TE_VALUE_GRADIENT, 0, columns);
}

/* Of any shape. */
static inline int32_t graph_tensor(graph *g, const char *name, uint32_t flags, te_dtype dtype,
                                   int32_t ndim, const te_extent *shape)
{
    int32_t value = graph_value(g, name, flags, GRAPH_VECTOR, 1);
    g->values[value].dtype = (int32_t)dtype;
    g->values[value].ndim = ndim;
    memcpy(g->values[value].shape, shape, (size_t)ndim * sizeof *shape);
    return value;
}

static inline int32_t graph_parameter(graph *g, const char *prefix, const char *name,
                                      uint32_t flags, int64_t rows, int64_t columns)
{
    char whole[2 * TE_NAME_BYTES];
    (void)snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return graph_value(g, whole, flags | TE_VALUE_PARAMETER | TE_VALUE_GRADIENT, rows, columns);
}

/* Lists of a node, to write to. */
static inline int32_t *inputs_of(graph *g, const te_node_desc *node)
{
    return g->inputs[node - g->nodes];
}
static inline double *numbers_of(graph *g, const te_node_desc *node)
{
    return g->numbers[node - g->nodes];
}
static inline te_slice *slices_of(graph *g, const te_node_desc *node)
{
    return g->slices[node - g->nodes];
}

/* What the kinds read. */
static const struct graph_counts {
    int32_t inputs, numbers, slices;
} graph_counts[TE_NODE_KINDS] = {[TE_NODE_LINEAR] = {3, 0, 0},      [TE_NODE_NORM] = {3, 1, 0},
                                 [TE_NODE_ACTIVATION] = {1, 3, 0},  [TE_NODE_SOFTCAP] = {1, 3, 0},
                                 [TE_NODE_ATTENTION] = {13, 5, 3},  [TE_NODE_ROPE] = {2, 0, 1},
                                 [TE_NODE_DROPOUT_ADD] = {4, 2, 0}, [TE_NODE_HEAD_NORM] = {3, 1, 1},
                                 [TE_NODE_FUNCTION] = {4, 0, 0},    [TE_NODE_CONVERT] = {1, 0, 0},
                                 [TE_NODE_COLLECTIVE] = {1, 0, 0}};

static inline te_node_desc *graph_node(graph *g, te_node_kind kind, const char *name, int32_t x,
                                       int32_t y)
{
    int32_t n = g->desc.node_count++;
    te_node_desc *node = &g->nodes[n];
    EXPECT(g->desc.node_count <= GRAPH_NODES, "too many nodes");
    (void)snprintf(node->name, sizeof node->name, "%s", name);
    node->kind = (int32_t)kind;
    node->ranks = 1;
    for (int i = 0; i < GRAPH_INPUTS; i++) g->inputs[n][i] = i == 0 ? x : -1;
    node->inputs = g->inputs[n];
    node->numbers = g->numbers[n];
    node->slices = g->slices[n];
    node->input_count = graph_counts[kind].inputs;
    node->number_count = graph_counts[kind].numbers;
    node->slice_count = graph_counts[kind].slices;
    node->output = y;
    return node;
}

/* All operands of a linear node are cast as a recipe has it. */
static inline void graph_cast(te_node_desc *node, te_recipe recipe)
{
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        int32_t dtype = recipe == TE_RECIPE_NVFP4 ? TE_DTYPE_U8
                        : role == TE_GRAD_OPERAND ? TE_DTYPE_E5M2
                                                  : TE_DTYPE_E4M3;
        node->quantization.casts[role] =
            (te_operand_cast){.recipe = (int32_t)recipe, .dtype = dtype};
    }
}

/* y = x W^T + b with a weight and a bias of its own; slots 3 k and 2 k of the owner's k-th one. */
static inline te_node_desc *graph_linear(graph *g, const char *name, int32_t x, int32_t y,
                                         uint32_t weight_flags)
{
    int64_t in = g->values[x].shape[1].add, out = g->values[y].shape[1].add;
    int32_t before = 0;
    te_node_desc *node;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        before += g->nodes[n].kind == TE_NODE_LINEAR && g->nodes[n].owner == g->owner;
    }
    node = graph_node(g, TE_NODE_LINEAR, name, x, y);
    inputs_of(g, node)[1] = graph_parameter(g, name, "weight", weight_flags, out, in);
    inputs_of(g, node)[2] = graph_parameter(g, name, "bias", 0, -1, out);
    graph_cast(node, g->recipe);
    node->owner = g->owner;
    node->slots[0] = 3 * before;
    node->slots[1] = 2 * before;
    return node;
}

/* One of two ranks. */
static inline te_node_desc *graph_collective(graph *g, te_collective_kind kind, const char *name,
                                             int32_t x, int32_t y)
{
    te_node_desc *node = graph_node(g, TE_NODE_COLLECTIVE, name, x, y);
    node->variant = (int32_t)kind;
    node->ranks = 2;
    return node;
}

/* The linear node that was added last loses its bias. */
static inline void graph_drop_bias(graph *g)
{
    inputs_of(g, &g->nodes[g->desc.node_count - 1])[2] = -1;
    g->desc.value_count--;
}

static inline te_node_desc *graph_norm(graph *g, te_norm_kind kind, const char *name, int32_t x,
                                       int32_t y)
{
    int64_t columns = g->values[x].shape[1].add;
    te_node_desc *node = graph_node(g, TE_NODE_NORM, name, x, y);
    node->variant = (int32_t)kind;
    inputs_of(g, node)[1] = graph_parameter(g, name, "gamma", 0, -1, columns);
    if (kind == TE_NORM_LAYERNORM) {
        inputs_of(g, node)[2] = graph_parameter(g, name, "beta", 0, -1, columns);
        numbers_of(g, node)[0] = 1e-5F;
    }
    return node;
}

static inline void graph_activation(graph *g, te_activation_kind kind, int32_t x, int32_t y)
{
    graph_node(g, TE_NODE_ACTIVATION, "", x, y)->variant = (int32_t)kind;
}

static inline void graph_softcap(graph *g, double cap, int32_t x, int32_t y)
{
    *numbers_of(g, graph_node(g, TE_NODE_SOFTCAP, "", x, y)) = cap;
}

/* y = residual + drop_path(dropout(x + bias)), with a bias of its own where it has one. */
static inline te_node_desc *graph_dropout_add(graph *g, const char *name, int32_t x,
                                              int32_t residual, int32_t y, int bias)
{
    te_node_desc *node = graph_node(g, TE_NODE_DROPOUT_ADD, name, x, y);
    int64_t columns = g->values[x].shape[1].add;
    if (bias) inputs_of(g, node)[1] = graph_parameter(g, name, "bias", 0, GRAPH_VECTOR, columns);
    inputs_of(g, node)[2] = residual;
    return node;
}

static inline te_node_desc *graph_attention(graph *g, const char *name, const int32_t x[3],
                                            const te_slice slices[3], int32_t y)
{
    te_node_desc *node = graph_node(g, TE_NODE_ATTENTION, name, x[0], y);
    for (int i = 0; i < 3; i++) {
        inputs_of(g, node)[i] = x[i];
        slices_of(g, node)[i] = slices[i];
    }
    numbers_of(g, node)[0] = 0.5;
    numbers_of(g, node)[2] = numbers_of(g, node)[3] = -1;
    return node;
}

static inline te_node_desc *graph_rope(graph *g, const char *name, int32_t x, te_slice slice,
                                       int32_t angles, int32_t y)
{
    te_node_desc *node = graph_node(g, TE_NODE_ROPE, name, x, y);
    inputs_of(g, node)[1] = angles;
    slices_of(g, node)[0] = slice;
    return node;
}

static inline te_node_desc *graph_head_norm(graph *g, te_norm_kind kind, const char *name,
                                            int32_t x, te_slice slice, int32_t y)
{
    te_node_desc *node = graph_node(g, TE_NODE_HEAD_NORM, name, x, y);
    node->variant = (int32_t)kind;
    slices_of(g, node)[0] = slice;
    numbers_of(g, node)[0] = 0.01; /* heads are short: few numbers may be nearly the same */
    inputs_of(g, node)[1] = graph_parameter(g, name, "gamma", 0, -1, slice.channels);
    if (kind == TE_NORM_LAYERNORM) {
        inputs_of(g, node)[2] = graph_parameter(g, name, "beta", 0, -1, slice.channels);
    }
    return node;
}

/* The heads of a matrix that has nothing else. */
static inline te_slice graph_dense(int32_t heads, int32_t channels)
{
    return (te_slice){heads, channels, 0, channels, 1};
}

/* Where a node has its random pair; -1: it is none that drops. */
static inline int graph_pair_at(const te_node_desc *node)
{
    if (node->kind == TE_NODE_ATTENTION) return node->numbers[1] > 0 ? 12 : -1;
    if (node->kind != TE_NODE_DROPOUT_ADD) return -1;
    return node->numbers[0] > 0 || node->numbers[1] > 0 ? 3 : -1;
}

/* Adds the random pairs of nodes that drop, where they are not there. */
static inline void graph_draw(graph *g)
{
    const te_extent two = {.align = 1, .add = 2};
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        int at = graph_pair_at(&g->nodes[n]);
        if (at < 0 || g->nodes[n].inputs[at] >= 0) continue;
        g->inputs[n][at] = graph_tensor(g, "rng", TE_VALUE_INPUT, TE_DTYPE_I64, 1, &two);
    }
}

static inline void graph_make(graph *g)
{
    graph_draw(g);
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        OK(te_plan_make(&g->desc, (te_direction)d, &g->plans[d]));
    }
}

static inline void graph_drop(graph *g)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) te_plan_release(g->plans[d]);
}

/* ---- memory -------------------------------------------------------------------------------- */

static inline int64_t graph_columns(const graph *g, int32_t value)
{
    return g->values[value].shape[g->values[value].ndim - 1].add;
}

static inline int64_t graph_count(const graph *g, int32_t value, const te_sizes *sizes)
{
    const te_value_desc *desc = &g->values[value];
    int64_t count = 1;
    for (int32_t d = 0; d < desc->ndim; d++) count *= plan_length(&desc->shape[d], sizes);
    return count;
}

static inline te_dtype graph_dtype(const graph *g, te_link link, int32_t value)
{
    const te_value_desc *desc = &g->values[value];
    int own = link == TE_LINK_GRADIENT && (desc->flags & TE_VALUE_PARAMETER) != 0;
    return (te_dtype)(own ? desc->grad_dtype : desc->dtype);
}

/* Element of a value or gradient in the memory. */
static inline void *graph_element(const graph *g, plan_memory *memory, te_link link, int32_t value,
                                  int64_t i)
{
    size_t size = te_dtype_bytes(graph_dtype(g, link, value));
    size_t count = (size_t)graph_count(g, value, &memory->sizes);
    return (char *)plan_data(memory, link, value, count * size) + (size_t)i * size;
}

static inline void graph_set(const graph *g, plan_memory *memory, te_link link, int32_t value,
                             int64_t i, double to)
{
    test_store(graph_dtype(g, link, value), graph_element(g, memory, link, value, i), to);
}

static inline double graph_get(const graph *g, plan_memory *memory, te_link link, int32_t value,
                               int64_t i)
{
    return test_load(graph_dtype(g, link, value), graph_element(g, memory, link, value, i));
}

static inline int graph_has(const graph *g, int32_t value, uint32_t flags)
{
    return (g->values[value].flags & flags) != 0;
}

/* Small integers, or numbers of that size. */
static inline void graph_fill_integers(const graph *g, plan_memory *memory, te_link link,
                                       int32_t value, int largest)
{
    (void)graph_element(g, memory, link, value, 0); /* there, if without elements */
    for (int64_t i = 0; i < graph_count(g, value, &memory->sizes); i++) {
        int number = (int)(test_random() % (2U * (unsigned)largest + 1)) - largest;
        graph_set(g, memory, link, value, i, number);
    }
}

static inline void graph_fill_uniform(const graph *g, plan_memory *memory, te_link link,
                                      int32_t value, double size)
{
    (void)graph_element(g, memory, link, value, 0);
    for (int64_t i = 0; i < graph_count(g, value, &memory->sizes); i++) {
        graph_set(g, memory, link, value, i, test_uniform() * size);
    }
}

/* Of a mask: a third is masked out. */
static inline void graph_fill_mask(const graph *g, plan_memory *memory, int32_t value)
{
    (void)graph_element(g, memory, TE_LINK_VALUE, value, 0);
    for (int64_t i = 0; i < graph_count(g, value, &memory->sizes); i++) {
        graph_set(g, memory, TE_LINK_VALUE, value, i, test_random() % 3 == 0 ? 1.0 : 0.0);
    }
}

/* Lengths of sequences, from 0 to what there is of queries or keys. */
/* The pair that a node is given, (seed, offset). */
static inline void graph_pair(int32_t node, int64_t pair[2])
{
    pair[0] = (int64_t)(0x9e3779b97f4a7c15U * (uint64_t)(node + 1));
    pair[1] = 1000000007 * (int64_t)(node % 5);
}

static inline void graph_fill_pair(const graph *g, plan_memory *memory, int32_t value)
{
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        int at = graph_pair_at(&g->nodes[n]);
        int64_t pair[2];
        if (at < 0 || g->nodes[n].inputs[at] != value) continue;
        graph_pair(n, pair);
        for (int i = 0; i < 2; i++) {
            memcpy(graph_element(g, memory, TE_LINK_VALUE, value, i), &pair[i], sizeof pair[i]);
        }
    }
}

static inline void graph_fill_lengths(const graph *g, plan_memory *memory, int32_t value)
{
    int64_t most = 0;
    for (int32_t n = 0; n < g->desc.node_count; n++) {
        const te_node_desc *node = &g->nodes[n];
        int first = (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
        for (int i = 5; i < GRAPH_INPUTS; i++) {
            if (node->inputs[i] != value) continue;
            most = memory->sizes.of[g->values[node->inputs[i - 5]].shape[0].symbol + 2 - first];
        }
    }
    (void)graph_element(g, memory, TE_LINK_VALUE, value, 0);
    for (int64_t i = 0; i < graph_count(g, value, &memory->sizes); i++) {
        int32_t length = (int32_t)(test_random() % (uint32_t)(most + 1));
        memcpy(graph_element(g, memory, TE_LINK_VALUE, value, i), &length, sizeof length);
    }
}

#endif
