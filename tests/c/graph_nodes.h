/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_nodes.h - what nodes over rows compute, in double: FP8 operands are rounded by numbers.h,
 * everything else is not rounded at all.
 */
#ifndef TE_TESTS_GRAPH_NODES_H
#define TE_TESTS_GRAPH_NODES_H

#include "graph_build.h"
#include "philox_reference.h"

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
    te_recipe recipe = (te_recipe)node->quantization.casts[0].recipe;
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
    te_recipe recipe = (te_recipe)node->quantization.casts[0].recipe;
    int32_t backward = node->quantization.backward;
    te_recipe saved = backward == TE_BACKWARD_HIGH_PRECISION ? TE_RECIPE_NONE : recipe;
    te_recipe of_grad = backward != TE_BACKWARD_QUANTIZED ? TE_RECIPE_NONE : recipe;
    const double *wide = g->grad[node->output];
    double *x = graph_rounded(g->value[node->inputs[0]], rows * in, saved, TE_DTYPE_E4M3);
    double *w = graph_rounded(g->value[node->inputs[1]], out * in, saved, TE_DTYPE_E4M3);
    double *dy = graph_rounded(wide, rows * out, of_grad, TE_DTYPE_E5M2);
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

/* n elements from `from` on of the input, and `to` of the output. */
static inline void graph_norm_line(graph *g, const te_node_desc *node, int64_t from, int64_t to,
                                   int64_t n, int backward)
{
    const double *gamma = g->value[node->inputs[1]];
    int centered = node->variant == TE_NORM_LAYERNORM;
    double xhat[GRAPH_VALUES], rsigma, mean = 0, along = 0;
    EXPECT(n <= GRAPH_VALUES, "%d columns", (int)n);
    rsigma = graph_normalize(node, g->value[node->inputs[0]] + from, n, xhat);
    for (int64_t i = 0; i < n; i++) {
        double dy = g->grad[node->output][to + i], dz = dy * gamma[i];
        if (!backward) {
            g->value[node->output][to + i] =
                xhat[i] * gamma[i] + (node->inputs[2] < 0 ? 0 : g->value[node->inputs[2]][i]);
            continue;
        }
        g->grad[node->inputs[1]][i] += dy * xhat[i];
        if (node->inputs[2] >= 0) g->grad[node->inputs[2]][i] += dy;
        if (centered) mean += dz / (double)n;
        along += dz * xhat[i] / (double)n;
    }
    for (int64_t i = 0; i < n && backward; i++) {
        double dz = g->grad[node->output][to + i] * gamma[i];
        g->grad[node->inputs[0]][from + i] += rsigma * (dz - mean - xhat[i] * along);
    }
}

static inline void graph_norm_row(graph *g, const te_node_desc *node, int64_t row, int backward)
{
    int64_t n = graph_columns(g, node->output);
    graph_norm_line(g, node, row * n, row * n, n, backward);
}

/* Where a head begins in its row. */
static inline int64_t graph_place(const te_slice *slice, int64_t head)
{
    int64_t together = slice->together > 1 ? slice->together : 1;
    return slice->offset + head / together * slice->stride + head % together * slice->channels;
}

static inline void graph_head_norm_row(graph *g, const te_node_desc *node, int64_t row,
                                       int backward)
{
    const te_slice *slice = &node->slices[0];
    for (int64_t h = 0; h < slice->heads; h++) {
        graph_norm_line(g, node, row * graph_columns(g, node->inputs[0]) + graph_place(slice, h),
                        (row * slice->heads + h) * slice->channels, slice->channels, backward);
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

static inline void graph_softcap_row(graph *g, const te_node_desc *node, int64_t row, int backward)
{
    int64_t n = graph_columns(g, node->output);
    double cap = node->numbers[0];
    for (int64_t i = row * n; i < (row + 1) * n; i++) {
        double slope = tanh(g->value[node->inputs[0]][i] / cap);
        if (backward) {
            g->grad[node->inputs[0]][i] += g->grad[node->output][i] * (1 - slope * slope);
        } else {
            g->value[node->output][i] = cap * slope;
        }
    }
}

/* In another dtype, which is none in double. */
static inline void graph_convert_row(graph *g, const te_node_desc *node, int64_t row, int backward)
{
    int64_t n = graph_columns(g, node->output);
    for (int64_t i = row * n; i < (row + 1) * n; i++) {
        if (backward) {
            g->grad[node->inputs[0]][i] += g->grad[node->output][i];
        } else {
            g->value[node->output][i] = g->value[node->inputs[0]][i];
        }
    }
}

/* What dropout and drop path multiply an element by. */
static inline double graph_kept(const graph *g, const te_node_desc *node, int64_t row, int64_t i)
{
    int64_t n = graph_columns(g, node->output);
    const te_extent *extent = &g->values[node->output].shape[0];
    int64_t rows = te_extent_value(extent, &g->sizes);
    int64_t samples = node->numbers[1] > 0 ? g->sizes.of[extent->symbol + 1] : 1;
    int64_t pair[2], path[2];
    graph_pair((int32_t)(node - g->nodes), pair);
    path[0] = pair[0];
    path[1] = pair[1] + (rows * n + 3) / 4;
    return philox_factor(pair, row * n + i, (float)node->numbers[0]) *
           philox_factor(path, row / (rows / samples), (float)node->numbers[1]);
}

static inline void graph_dropout_add_row(graph *g, const te_node_desc *node, int64_t row,
                                         int backward)
{
    int64_t n = graph_columns(g, node->output);
    int32_t x = node->inputs[0], bias = node->inputs[1], residual = node->inputs[2];
    for (int64_t i = 0; i < n; i++) {
        double kept = graph_kept(g, node, row, i), grad = g->grad[node->output][row * n + i];
        if (!backward) {
            g->value[node->output][row * n + i] =
                kept * (g->value[x][row * n + i] + (bias < 0 ? 0 : g->value[bias][i])) +
                (residual < 0 ? 0 : g->value[residual][row * n + i]);
            continue;
        }
        if (residual >= 0) g->grad[residual][row * n + i] += grad;
        if (bias >= 0) g->grad[bias][i] += kept * grad;
        g->grad[x][row * n + i] += kept * grad;
    }
}

#endif
