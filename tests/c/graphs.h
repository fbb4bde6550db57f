/* SPDX-License-Identifier: Apache-2.0
 *
 * graphs.h - what a graph computes in double, node by node, and what its plans have to agree with.
 */
#ifndef TE_TESTS_GRAPHS_H
#define TE_TESTS_GRAPHS_H

#include "graph_heads.h"

static inline void graph_refer_node(graph *g, const te_node_desc *node, int backward)
{
    static void (*const by_rows[])(graph *, const te_node_desc *, int64_t, int) = {
        [TE_NODE_NORM] = graph_norm_row,           [TE_NODE_ACTIVATION] = graph_activation_row,
        [TE_NODE_SOFTCAP] = graph_softcap_row,     [TE_NODE_DROPOUT_ADD] = graph_dropout_add_row,
        [TE_NODE_HEAD_NORM] = graph_head_norm_row, [TE_NODE_CONVERT] = graph_convert_row,
        [TE_NODE_COLLECTIVE] = graph_convert_row, /* of one rank */
    };
    int64_t rows = te_extent_value(&g->values[node->inputs[0]].shape[0], &g->sizes);
    if (node->kind == TE_NODE_LINEAR) {
        (backward ? graph_linear_backward : graph_linear_forward)(g, node, rows);
    } else if (node->kind == TE_NODE_ATTENTION) {
        graph_attend(g, node, backward);
    } else if (node->kind == TE_NODE_ROPE) {
        graph_rotate(g, node, backward);
    } else {
        for (int64_t r = 0; r < rows; r++) by_rows[node->kind](g, node, r, backward);
    }
}

/* Values and gradients of everything, from what the memory has of inputs, parameters and the
 * gradients of results. */
static inline void graph_refer(graph *g, plan_memory *memory)
{
    g->sizes = memory->sizes;
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        int64_t count = g->values[v].dtype == TE_DTYPE_I64 ? 0 : graph_count(g, v, &g->sizes);
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
    for (int32_t n = 0; n < g->desc.node_count; n++) graph_refer_node(g, &g->nodes[n], 0);
    for (int32_t n = g->desc.node_count - 1; n >= 0; n--) {
        graph_refer_node(g, &g->nodes[n], 1);
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

/* The normalized mean square of the difference is at most that; 0: equal numbers. */
static inline void graph_compare(graph *g, plan_memory *memory, te_link link, int32_t value,
                                 double most)
{
    const double *exact = link == TE_LINK_VALUE ? g->value[value] : g->grad[value];
    int64_t count = graph_count(g, value, &memory->sizes);
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        double found = graph_get(g, memory, link, value, i);
        EXPECT(most > 0 || found == exact[i], "%s%s[%d]: %g, expected %g",
               link == TE_LINK_VALUE ? "" : "gradient of ", g->values[value].name, (int)i, found,
               exact[i]);
        difference += (found - exact[i]) * (found - exact[i]);
        size += exact[i] * exact[i];
    }
    /* Where everything cancels, as in the softmax of one key, no rounding is small in proportion.
     */
    if (most > 0 && size <= 1e-20 * (double)count) size = 1e-2 * (double)count;
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
            for (int i = 0; i < GRAPH_INPUTS; i++) read |= g->inputs[n][i] == v;
        }
        if (graph_has(g, v, TE_VALUE_RESULT)) graph_compare(g, memory, TE_LINK_VALUE, v, most);
        if (graph_has(g, v, TE_VALUE_GRADIENT) && read) {
            graph_compare(g, memory, TE_LINK_GRADIENT, v, most);
        }
    }
}

static inline void graph_run(te_context *context, const graph *g, plan_memory *memory)
{
    te_plan_info later;
    OK(te_plan_describe(g->plans[TE_DIRECTION_DEFERRED], &later));
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        int last = later.stage_count > 0 ? TE_DIRECTION_DEFERRED : TE_DIRECTION_BACKWARD;
        memory->consumes = memory->consuming && d == last;
        plan_run(context, g->plans[d], memory);
    }
    memory->consumes = 0;
}

#endif
