/* SPDX-License-Identifier: Apache-2.0
 *
 * graphs.h - graphs for the tests, their plans, and what they compute in double, node by node: FP8
 * operands are rounded by numbers.h, everything else is not rounded at all.
 */
#ifndef TE_TESTS_GRAPHS_H
#define TE_TESTS_GRAPHS_H

#include "numbers.h"
#include "plans.h"

enum { GRAPH_VALUES = 256, GRAPH_NODES = 64 };

typedef struct graph {
    te_value_desc values[GRAPH_VALUES];
    te_node_desc nodes[GRAPH_NODES];
    te_graph_desc desc;
    te_dtype dtype;   /* of the next value */
    te_recipe recipe; /* of the next linear node */
    int64_t plans[TE_DIRECTION_COUNT];
    double *value[GRAPH_VALUES], *grad[GRAPH_VALUES]; /* the reference */
} graph;

/* ---- building ------------------------------------------------------------------------------ */

static inline void graph_start(graph *g, te_recipe recipe, uint32_t flags)
{
    memset(g, 0, sizeof *g);
    g->desc = (te_graph_desc){
        .size = sizeof g->desc, .values = g->values, .nodes = g->nodes, .flags = flags};
    g->recipe = recipe;
}

/* A value of so many rows, 0: as many as a call has, -1: a vector. */
static inline int32_t graph_value(graph *g, const char *name, uint32_t flags, int64_t rows,
                                  int64_t columns)
{
    te_value_desc *value = &g->values[g->desc.value_count];
    int last = rows >= 0;
    EXPECT(g->desc.value_count < GRAPH_VALUES, "too many values");
    (void)snprintf(value->name, sizeof value->name, "%s", name);
    value->flags = flags;
    value->dtype = value->grad_dtype = (int32_t)g->dtype;
    value->ndim = 1 + last;
    value->shape[0] = (te_extent){.align = 1, .add = rows};
    if (rows == 0) {
        value->shape[0] = (te_extent){.symbol = TE_SYMBOL_ROWS, .align = 1, .multiply = 1};
        value->flags |= TE_VALUE_LEADING;
    }
    value->shape[last] = (te_extent){.align = 1, .add = columns};
    return g->desc.value_count++;
}

static inline int32_t graph_input(graph *g, const char *name, int64_t columns)
{
    return graph_value(g, name, TE_VALUE_INPUT | TE_VALUE_GRADIENT, 0, columns);
}

static inline int32_t graph_parameter(graph *g, const char *prefix, const char *name,
                                      uint32_t flags, int64_t rows, int64_t columns)
{
    char whole[2 * TE_NAME_BYTES];
    (void)snprintf(whole, sizeof whole, "%s%s", prefix, name);
    return graph_value(g, whole, flags | TE_VALUE_PARAMETER | TE_VALUE_GRADIENT, rows, columns);
}

static inline te_node_desc *graph_node(graph *g, te_node_kind kind, const char *name, int32_t x,
                                       int32_t y)
{
    te_node_desc *node = &g->nodes[g->desc.node_count++];
    EXPECT(g->desc.node_count <= GRAPH_NODES, "too many nodes");
    (void)snprintf(node->name, sizeof node->name, "%s", name);
    node->kind = (int32_t)kind;
    node->gather = 1;
    node->inputs[0] = x;
    for (int i = 1; i < TE_NODE_INPUTS; i++) node->inputs[i] = -1;
    node->output = y;
    return node;
}

/* y = x W^T + b with a weight and a bias of its own; slots 3 k and 2 k of the k-th linear node. */
static inline te_node_desc *graph_linear(graph *g, const char *name, int32_t x, int32_t y,
                                         uint32_t weight_flags)
{
    int64_t in = g->values[x].shape[1].add, out = g->values[y].shape[1].add;
    int32_t before = 0;
    te_node_desc *node;
    for (int32_t n = 0; n < g->desc.node_count; n++) before += g->nodes[n].kind == TE_NODE_LINEAR;
    node = graph_node(g, TE_NODE_LINEAR, name, x, y);
    node->inputs[1] = graph_parameter(g, name, "weight", weight_flags, out, in);
    node->inputs[2] = graph_parameter(g, name, "bias", 0, -1, out);
    node->quantization = (te_quantization){
        .recipe = (int32_t)g->recipe, .forward_fp8 = TE_DTYPE_E4M3, .backward_fp8 = TE_DTYPE_E5M2};
    node->slots[0] = 3 * before;
    node->slots[1] = 2 * before;
    return node;
}

static inline te_node_desc *graph_norm(graph *g, te_norm_kind kind, const char *name, int32_t x,
                                       int32_t y)
{
    int64_t columns = g->values[x].shape[1].add;
    te_node_desc *node = graph_node(g, TE_NODE_NORM, name, x, y);
    node->variant = (int32_t)kind;
    node->inputs[1] = graph_parameter(g, name, "gamma", 0, -1, columns);
    if (kind == TE_NORM_LAYERNORM) {
        node->inputs[2] = graph_parameter(g, name, "beta", 0, -1, columns);
        node->numbers[0] = 1e-5F;
    }
    return node;
}

static inline void graph_activation(graph *g, te_activation_kind kind, int32_t x, int32_t y)
{
    graph_node(g, TE_NODE_ACTIVATION, "", x, y)->variant = (int32_t)kind;
}

static inline void graph_make(graph *g)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        OK(te_plan_make(&g->desc, (te_direction)d, &g->plans[d]));
    }
}

/* ---- memory -------------------------------------------------------------------------------- */

static inline int64_t graph_columns(const graph *g, int32_t value)
{
    return g->values[value].shape[g->values[value].ndim - 1].add;
}

static inline int64_t graph_count(const graph *g, int32_t value, int64_t rows)
{
    const te_value_desc *desc = &g->values[value];
    int64_t first = te_extent_value(&desc->shape[0], rows);
    return desc->ndim == 2 ? first * desc->shape[1].add : first;
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
    size_t count = (size_t)graph_count(g, value, memory->rows);
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
    for (int64_t i = 0; i < graph_count(g, value, memory->rows); i++) {
        int number = (int)(test_random() % (2U * (unsigned)largest + 1)) - largest;
        graph_set(g, memory, link, value, i, number);
    }
}

static inline void graph_fill_uniform(const graph *g, plan_memory *memory, te_link link,
                                      int32_t value, double size)
{
    (void)graph_element(g, memory, link, value, 0);
    for (int64_t i = 0; i < graph_count(g, value, memory->rows); i++) {
        graph_set(g, memory, link, value, i, test_uniform() * size);
    }
}

/* ---- the reference ------------------------------------------------------------------------- */

/* A copy of an operand as a recipe rounds it. */
static inline double *graph_rounded(const double *from, int64_t count, te_recipe recipe,
                                    te_dtype dtype)
{
    double *copy = malloc(((size_t)count + 1) * sizeof *copy);
    double amax = 0, scale = 1;
    EXPECT(copy != NULL, "no memory");
    for (int64_t i = 0; i < count; i++) amax = fmax(amax, fabs(from[i]));
    if (recipe == TE_RECIPE_CURRENT && amax > 0) scale = (double)te_dtype_max(dtype) / amax;
    for (int64_t i = 0; i < count; i++) {
        copy[i] = recipe == TE_RECIPE_NONE
                      ? from[i]
                      : test_decode(dtype, test_encode(dtype, from[i] * scale)) / scale;
    }
    return copy;
}

static inline void graph_linear_forward(graph *g, const te_node_desc *node, int64_t rows)
{
    int64_t in = graph_columns(g, node->inputs[0]), out = graph_columns(g, node->output);
    te_recipe recipe = (te_recipe)node->quantization.recipe;
    double *x = graph_rounded(g->value[node->inputs[0]], rows * in, recipe, TE_DTYPE_E4M3);
    double *w = graph_rounded(g->value[node->inputs[1]], out * in, recipe, TE_DTYPE_E4M3);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = 0; o < out; o++) {
            double bias = node->inputs[2] < 0 ? 0 : g->value[node->inputs[2]][o];
            if (recipe != TE_RECIPE_NONE) {
                bias = test_decode(TE_DTYPE_BF16, test_encode(TE_DTYPE_BF16, bias));
            }
            for (int64_t i = 0; i < in; i++) bias += x[r * in + i] * w[o * in + i];
            g->value[node->output][r * out + o] = bias;
        }
    }
    free(x);
    free(w);
}

static inline void graph_linear_backward(graph *g, const te_node_desc *node, int64_t rows)
{
    int64_t in = graph_columns(g, node->inputs[0]), out = graph_columns(g, node->output);
    te_recipe recipe = (te_recipe)node->quantization.recipe;
    const double *wide = g->grad[node->output];
    double *x = graph_rounded(g->value[node->inputs[0]], rows * in, recipe, TE_DTYPE_E4M3);
    double *w = graph_rounded(g->value[node->inputs[1]], out * in, recipe, TE_DTYPE_E4M3);
    double *dy = graph_rounded(wide, rows * out, recipe, TE_DTYPE_E5M2);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = 0; o < out; o++) {
            if (node->inputs[2] >= 0) g->grad[node->inputs[2]][o] += wide[r * out + o];
            for (int64_t i = 0; i < in; i++) {
                g->grad[node->inputs[0]][r * in + i] += dy[r * out + o] * w[o * in + i];
                g->grad[node->inputs[1]][o * in + i] += dy[r * out + o] * x[r * in + i];
            }
        }
    }
    free(x);
    free(w);
    free(dy);
}

/* One row: xhat and 1 / sigma. */
static inline double graph_normalize(const te_node_desc *node, const double *x, int64_t n,
                                     double *xhat)
{
    double mean = 0, square = 0, rsigma;
    for (int64_t i = 0; i < n && node->variant == TE_NORM_LAYERNORM; i++) mean += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / (double)n;
    rsigma = 1 / sqrt(square + (double)node->numbers[0]);
    for (int64_t i = 0; i < n; i++) xhat[i] = (x[i] - mean) * rsigma;
    return rsigma;
}

static inline void graph_norm_row(graph *g, const te_node_desc *node, int64_t row, int backward)
{
    int64_t n = graph_columns(g, node->output), at = row * n;
    const double *gamma = g->value[node->inputs[1]];
    int centered = node->variant == TE_NORM_LAYERNORM;
    double xhat[GRAPH_VALUES], rsigma, mean = 0, along = 0;
    EXPECT(n <= GRAPH_VALUES, "%d columns", (int)n);
    rsigma = graph_normalize(node, g->value[node->inputs[0]] + at, n, xhat);
    for (int64_t i = 0; i < n; i++) {
        double dy = g->grad[node->output][at + i], dz = dy * gamma[i];
        if (!backward) {
            g->value[node->output][at + i] =
                xhat[i] * gamma[i] + (node->inputs[2] < 0 ? 0 : g->value[node->inputs[2]][i]);
            continue;
        }
        g->grad[node->inputs[1]][i] += dy * xhat[i];
        if (node->inputs[2] >= 0) g->grad[node->inputs[2]][i] += dy;
        if (centered) mean += dz / (double)n;
        along += dz * xhat[i] / (double)n;
    }
    for (int64_t i = 0; i < n && backward; i++) {
        double dz = g->grad[node->output][at + i] * gamma[i];
        g->grad[node->inputs[0]][at + i] += rsigma * (dz - mean - xhat[i] * along);
    }
}

static inline double graph_act(int32_t kind, double x, int slope)
{
    double h = 1e-5;
    if (kind != TE_ACTIVATION_GELU) return x > 0 ? (slope ? 1 : x) : 0;
    return slope ? (test_gelu(x + h) - test_gelu(x - h)) / (2 * h) : test_gelu(x);
}

/* ReLU, GELU or ReGLU. */
static inline void graph_activation_row(graph *g, const te_node_desc *node, int64_t row,
                                        int backward)
{
    int64_t n = graph_columns(g, node->output);
    int gated = node->variant == TE_ACTIVATION_REGLU;
    const double *x = g->value[node->inputs[0]] + row * n * (1 + gated);
    double *dx = g->grad[node->inputs[0]] + row * n * (1 + gated);
    for (int64_t i = 0; i < n; i++) {
        double gate = gated ? x[n + i] : 1, dy = g->grad[node->output][row * n + i];
        if (!backward) {
            g->value[node->output][row * n + i] = graph_act(node->variant, x[i], 0) * gate;
            continue;
        }
        dx[i] += dy * gate * graph_act(node->variant, x[i], 1);
        if (gated) dx[n + i] += dy * graph_act(node->variant, x[i], 0);
    }
}

static inline void graph_refer_node(graph *g, const te_node_desc *node, int64_t rows, int backward)
{
    if (node->kind == TE_NODE_LINEAR) {
        (backward ? graph_linear_backward : graph_linear_forward)(g, node, rows);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        (node->kind == TE_NODE_NORM ? graph_norm_row : graph_activation_row)(g, node, r, backward);
    }
}

/* Values and gradients of everything, from what the memory has of inputs, parameters and the
 * gradients of results. */
static inline void graph_refer(graph *g, plan_memory *memory)
{
    int64_t rows = memory->rows;
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        int64_t count = graph_count(g, v, rows);
        g->value[v] = calloc((size_t)count + 1, sizeof(double));
        g->grad[v] = calloc((size_t)count + 1, sizeof(double));
        EXPECT(g->value[v] != NULL && g->grad[v] != NULL, "no memory");
        for (int64_t i = 0; i < count; i++) {
            if (graph_has(g, v, TE_VALUE_INPUT | TE_VALUE_PARAMETER)) {
                g->value[v][i] = graph_get(g, memory, TE_LINK_VALUE, v, i);
            }
            if (graph_has(g, v, TE_VALUE_RESULT | TE_VALUE_ACCUMULATE)) {
                g->grad[v][i] = graph_get(g, memory, TE_LINK_GRADIENT, v, i);
            }
        }
    }
    for (int32_t n = 0; n < g->desc.node_count; n++) graph_refer_node(g, &g->nodes[n], rows, 0);
    for (int32_t n = g->desc.node_count - 1; n >= 0; n--) {
        graph_refer_node(g, &g->nodes[n], rows, 1);
    }
}

static inline void graph_forget(graph *g)
{
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        free(g->value[v]);
        free(g->grad[v]);
    }
}

/* ---- comparing ------------------------------------------------------------------------------ */

/* The normalized mean square of the difference is at most that; 0: equal bits. */
static inline void graph_compare(graph *g, plan_memory *memory, te_link link, int32_t value,
                                 double most)
{
    const double *exact = link == TE_LINK_VALUE ? g->value[value] : g->grad[value];
    int64_t count = graph_count(g, value, memory->rows);
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        double found = graph_get(g, memory, link, value, i);
        EXPECT(most > 0 || found == exact[i], "%s%s[%d]: %g, expected %g",
               link == TE_LINK_VALUE ? "" : "gradient of ", g->values[value].name, (int)i, found,
               exact[i]);
        difference += (found - exact[i]) * (found - exact[i]);
        size += exact[i] * exact[i];
    }
    EXPECT(!isnan(difference) && (isinf(most) || difference <= most * size),
           "%s%s: %g, expected at most %g", link == TE_LINK_VALUE ? "" : "gradient of ",
           g->values[value].name, difference / size, most);
}

/* Results, and every gradient that is wanted of what is read. */
static inline void graph_check(graph *g, plan_memory *memory, double most)
{
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        int read = 0;
        for (int32_t n = 0; n < g->desc.node_count; n++) {
            for (int i = 0; i < TE_NODE_INPUTS; i++) read |= g->nodes[n].inputs[i] == v;
        }
        if (graph_has(g, v, TE_VALUE_RESULT)) graph_compare(g, memory, TE_LINK_VALUE, v, most);
        if (graph_has(g, v, TE_VALUE_GRADIENT) && read) {
            graph_compare(g, memory, TE_LINK_GRADIENT, v, most);
        }
    }
}

static inline void graph_run(te_context *context, const graph *g, plan_memory *memory)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) plan_run(context, g->plans[d], memory);
}

#endif
