/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_heads.h - what attention and the rotary embedding compute, in double, over heads wherever
 * they lie in their matrices.
 */
#ifndef TE_TESTS_GRAPH_HEADS_H
#define TE_TESTS_GRAPH_HEADS_H

#include "graph_nodes.h"

enum { GRAPH_QUERY, GRAPH_KEY, GRAPH_VALUE, GRAPH_MASK, GRAPH_BIAS, GRAPH_QUERIES, GRAPH_KEYS };
enum { GRAPH_SINK = GRAPH_KEYS + 3, GRAPH_SLOPES }; /* behind the offsets of packed sequences */

/* Heads of a matrix: of its elements, and of its gradient's. */
typedef struct graph_matrix {
    double *value, *grad;
    te_slice slice;
    int64_t columns, batch, length, of_batch, of_token; /* row of (b, s) */
} graph_matrix;

static inline graph_matrix graph_matrix_of(const graph *g, const te_node_desc *node, int32_t value,
                                           te_slice slice)
{
    int32_t rows = g->values[value].shape[0].symbol;
    int first = (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    graph_matrix m = {g->value[value], g->grad[value], slice, graph_columns(g, value), 0, 0, 0, 0};
    m.batch = g->sizes.of[rows + 1 + first];
    m.length = g->sizes.of[rows + 2 - first];
    m.of_batch = first ? 1 : m.length;
    m.of_token = first ? m.batch : 1;
    return m;
}

/* First channel of a head. */
static inline int64_t graph_head(const graph_matrix *m, int64_t b, int64_t s, int64_t h)
{
    return (b * m->of_batch + s * m->of_token) * m->columns + graph_place(&m->slice, h);
}

/* ---- rotary embedding ------------------------------------------------------------------------ */

static inline void graph_rotate(graph *g, const te_node_desc *node, int backward)
{
    te_slice dense = graph_dense(node->slices[0].heads, node->slices[0].channels);
    graph_matrix x = graph_matrix_of(g, node, node->inputs[0], node->slices[0]);
    graph_matrix y = graph_matrix_of(g, node, node->output, dense);
    const double *angles = node->inputs[1] < 0 ? NULL : g->value[node->inputs[1]];
    int64_t n = node->inputs[1] < 0 ? 0 : graph_columns(g, node->inputs[1]);
    int pairs = (node->flags & TE_NODE_INTERLEAVED) != 0;
    for (int64_t i = 0; i < x.batch * x.length * dense.heads; i++) {
        int64_t b = i / dense.heads / x.length, s = i / dense.heads % x.length;
        int64_t from = graph_head(&x, b, s, i % dense.heads);
        int64_t to = graph_head(&y, b, s, i % dense.heads);
        for (int64_t c = 0; c < dense.channels; c++) {
            int second = pairs ? (int)(c % 2) : c >= n / 2;
            int64_t other = c + (second ? -1 : 1) * (pairs ? 1 : n / 2);
            double angle = c < n ? angles[s * n + c] : 0;
            double sine = second ? sin(angle) : -sin(angle);
            if (c >= n) other = c; /* channels that do not turn */
            if (backward) {
                x.grad[from + c] += y.grad[to + c] * cos(angle);
                x.grad[from + other] += y.grad[to + c] * sine;
            } else {
                y.value[to + c] = x.value[from + c] * cos(angle) + x.value[from + other] * sine;
            }
        }
    }
}

/* ---- attention --------------------------------------------------------------------------------
 */

typedef struct graph_attention_state {
    graph *g;
    const te_node_desc *node;
    graph_matrix query, key, value, output;
    int64_t pair[2];
    double *p, *dp; /* of one query, by key */
} graph_attention_state;

/* Index of a score in a mask or bias whose dims may be 1. */
static inline int64_t graph_broadcast(const graph_attention_state *a, int32_t value,
                                      const int64_t at[4])
{
    int64_t index = 0;
    for (int d = 0; d < 4; d++) {
        int64_t length = plan_length(&a->g->values[value].shape[d], &a->g->sizes);
        index = index * length + (length == 1 ? 0 : at[d]);
    }
    return index;
}

static inline int64_t graph_limit(const graph_attention_state *a, int input, int64_t b,
                                  int64_t length)
{
    int32_t lengths = a->node->inputs[input];
    return lengths < 0 ? length : (int64_t)a->g->value[lengths][b];
}

/* A score, and by which its gradient is that of the scaled product. */
static inline double graph_score(const graph_attention_state *a, const int64_t at[4], double *slope)
{
    const te_node_desc *node = a->node;
    int64_t queries = graph_limit(a, GRAPH_QUERIES, at[0], a->query.length);
    int64_t keys = graph_limit(a, GRAPH_KEYS, at[0], a->key.length);
    int64_t middle = at[2] + ((node->flags & TE_NODE_BOTTOM_RIGHT) != 0 ? keys - queries : 0);
    int64_t left = (int64_t)node->numbers[2], right = (int64_t)node->numbers[3];
    int64_t q = graph_head(&a->query, at[0], at[2], at[1]);
    int64_t k =
        graph_head(&a->key, at[0], at[3], at[1] * a->key.slice.heads / a->query.slice.heads);
    int32_t mask = node->inputs[GRAPH_MASK], bias = node->inputs[GRAPH_BIAS];
    double score = 0;
    if (at[2] >= queries || at[3] >= keys || (left >= 0 && at[3] < middle - left) ||
        (right >= 0 && at[3] > middle + right) ||
        (mask >= 0 && a->g->value[mask][graph_broadcast(a, mask, at)] != 0)) {
        return -(double)INFINITY;
    }
    for (int32_t c = 0; c < a->query.slice.channels; c++) {
        score += a->query.value[q + c] * a->key.value[k + c];
    }
    score *= node->numbers[0];
    *slope = 1;
    if (node->numbers[4] > 0) {
        double share = tanh(score / node->numbers[4]);
        score = node->numbers[4] * share;
        *slope = 1 - share * share;
    }
    return bias < 0 ? score : score + a->g->value[bias][graph_broadcast(a, bias, at)];
}

static inline void graph_query_backward(const graph_attention_state *a, int64_t at[4], double mean)
{
    int32_t bias = a->node->inputs[GRAPH_BIAS];
    int64_t head = at[1] * a->key.slice.heads / a->query.slice.heads;
    int64_t q = graph_head(&a->query, at[0], at[2], at[1]);
    for (at[3] = 0; at[3] < a->key.length; at[3]++) {
        double ds = a->p[at[3]] * (a->dp[at[3]] - mean), slope = 1, of_product;
        int64_t k = graph_head(&a->key, at[0], at[3], head);
        if (a->p[at[3]] > 0) (void)graph_score(a, at, &slope);
        of_product = a->node->numbers[0] * slope * ds;
        for (int32_t c = 0; c < a->query.slice.channels; c++) {
            a->query.grad[q + c] += of_product * a->key.value[k + c];
            a->key.grad[k + c] += of_product * a->query.value[q + c];
        }
        if (bias >= 0) a->g->grad[bias][graph_broadcast(a, bias, at)] += ds;
    }
}

/* One query of one head: its output, or what it adds to the gradients. */
static inline void graph_attend_query(const graph_attention_state *a, int64_t at[4], int backward)
{
    int64_t head = at[1] * a->key.slice.heads / a->query.slice.heads, keys = a->key.length;
    int64_t row = (at[0] * a->query.slice.heads + at[1]) * a->query.length + at[2];
    int64_t y = graph_head(&a->output, at[0], at[2], at[1]);
    double top = -(double)INFINITY, sum = 0, mean = 0, slope;
    for (at[3] = 0; at[3] < keys; at[3]++) {
        a->p[at[3]] = graph_score(a, at, &slope);
        top = fmax(top, a->p[at[3]]);
    }
    if (isinf(top)) return; /* it attends nothing */
    for (int64_t k = 0; k < keys; k++) sum += a->p[k] = exp(a->p[k] - top);
    for (int64_t k = 0; k < keys; k++) {
        double kept = philox_factor(a->pair, row * keys + k, (float)a->node->numbers[1]);
        int64_t v = graph_head(&a->value, at[0], k, head);
        a->p[k] /= sum;
        a->dp[k] = 0;
        for (int32_t c = 0; c < a->value.slice.channels; c++) {
            if (!backward) {
                a->output.value[y + c] += kept * a->p[k] * a->value.value[v + c];
                continue;
            }
            a->dp[k] += kept * a->output.grad[y + c] * a->value.value[v + c];
            a->value.grad[v + c] += kept * a->p[k] * a->output.grad[y + c];
        }
        mean += a->p[k] * a->dp[k];
    }
    if (backward) graph_query_backward(a, at, mean);
}

static inline void graph_attend(graph *g, const te_node_desc *node, int backward)
{
    const te_slice *slices = node->slices;
    te_slice dense = graph_dense(slices[GRAPH_QUERY].heads, slices[GRAPH_VALUE].channels);
    graph_attention_state a = {.g = g, .node = node};
    a.query = graph_matrix_of(g, node, node->inputs[GRAPH_QUERY], slices[GRAPH_QUERY]);
    a.key = graph_matrix_of(g, node, node->inputs[GRAPH_KEY], slices[GRAPH_KEY]);
    a.value = graph_matrix_of(g, node, node->inputs[GRAPH_VALUE], slices[GRAPH_VALUE]);
    a.output = graph_matrix_of(g, node, node->output, dense);
    a.p = calloc(2 * (size_t)a.key.length + 1, sizeof *a.p);
    EXPECT(a.p != NULL, "no memory");
    a.dp = a.p + a.key.length;
    graph_pair((int32_t)(node - g->nodes), a.pair);
    for (int64_t i = 0; i < a.query.batch * dense.heads * a.query.length; i++) {
        int64_t at[4] = {i / a.query.length / dense.heads, i / a.query.length % dense.heads,
                         i % a.query.length};
        graph_attend_query(&a, at, backward);
    }
    free(a.p);
}

#endif
