/* SPDX-License-Identifier: Apache-2.0
 *
 * node_norm.c - LayerNorm, RMSNorm or L2 norm as a node: of rows, where who reads the output lets
 * it cast, or of each head of a slice, where it lies.
 */
#include <stdio.h>

#include "core/status.h"
#include "layer/build.h"
#include "layer/collective.h"
#include "layer/recipe.h"

static int has_mean(const te_node_desc *node)
{
    return node->variant == TE_NORM_LAYERNORM;
}

static int is_of_heads(const te_node_desc *node)
{
    return node->kind == TE_NODE_HEAD_NORM;
}

/* The heads of a slice one by one, row by row: [rows, heads, channels], or [rows, blocks, together,
 * channels]. */
static int32_t heads_by_row(te_build *build, int32_t matrix, const te_slice *slice)
{
    const te_buffer *base = te_buffer_of(build, matrix);
    const int64_t together = te_slice_together(slice);
    const int last = together > 1 ? 3 : 2;
    te_buffer_info view = {
        .ndim = last + 1,
        .base = matrix,
        .offset = te_constant(slice->offset),
        .shape = {base->info.shape[0], te_constant(te_slice_blocks(slice)), te_constant(together)},
        .strides = {te_constant(base->info.shape[1].add), te_constant(slice->stride),
                    te_constant(slice->channels)}};
    view.shape[last] = te_constant(slice->channels);
    view.strides[last] = te_constant(1);
    return te_view(build, &view, "%.24s_heads_%lld", base->name, (long long)slice->offset);
}

static int32_t dense_rows(te_build *build, int32_t n, int32_t matrix)
{
    char name[2 * TE_NAME_BYTES];
    (void)snprintf(name, sizeof name, "%.24s_rows", te_buffer_of(build, matrix)->name);
    return te_rows_of_heads(build, matrix, &te_node(build, n)->slices[0], name);
}

/* A stage with what forward and backward read. */
static te_stage *add(te_build *build, int32_t n, const char *prefix, const char *name, te_op op)
{
    const te_node_desc *node = te_node(build, n);
    int32_t input = te_wide(build, node->inputs[0], node->name, "norm_input");
    te_stage *stage;
    if (is_of_heads(node)) input = heads_by_row(build, input, &node->slices[0]);
    stage = te_add(build, n, prefix, name, op);
    te_set_number(build, stage, "kind", node->variant);
    te_set_number(build, stage, "zero_centered", (node->flags & TE_NODE_ZERO_CENTERED) != 0);
    te_use_as(build, stage, "input", input);
    te_use_value(build, stage, "gamma", node->inputs[1]);
    return stage;
}

static void use_statistics(te_build *build, te_stage *stage, int32_t n)
{
    if (has_mean(te_node(build, n))) {
        te_use_as(build, stage, "mean", te_need(build, TE_LINK_MEAN, n));
    }
    te_use_as(build, stage, "rsigma", te_need(build, TE_LINK_RSIGMA, n));
}

/* Statistics are kept where a backward or a second pass reads them. */
static int keeps_statistics(const te_build *build, int32_t n)
{
    const int32_t output = te_node(build, n)->output;
    if (te_links_has(&build->saved, TE_LINK_RSIGMA, n)) return 1;
    if (is_of_heads(te_node(build, n))) return 0;
    for (int32_t k = n + 1; k < build->graph->node_count; k++) {
        const te_node_desc *reader = te_node(build, k);
        if (te_linear_value(build->graph, k, TE_INPUT_OPERAND) == output &&
            !te_is_rounded(build, output) && te_is_measured(reader, TE_INPUT_OPERAND)) {
            return 1;
        }
    }
    return 0;
}

static te_stage *produce(te_build *build, int32_t n, const char *prefix, const char *name,
                         int again)
{
    const te_node_desc *node = te_node(build, n);
    te_stage *stage = add(build, n, prefix, name, TE_OP_NORM);
    te_set_number(build, stage, "eps", node->numbers[0]);
    te_set_number(build, stage, "statistics_given", again != 0);
    te_use_value(build, stage, "beta", node->inputs[2]);
    if (build->direction != TE_DIRECTION_FORWARD || keeps_statistics(build, n)) {
        use_statistics(build, stage, n);
    }
    return stage;
}

static void forward(te_build *build, int32_t n)
{
    build->values[te_node(build, n)->output].pending = n;
}

static void forward_heads(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    te_stage *stage = produce(build, n, node->name, "norm", 0);
    int32_t output = te_get(build, TE_LINK_VALUE, node->output);
    te_use_as(build, stage, "wide", dense_rows(build, n, output));
}

static void again(te_build *build, int32_t n)
{
    te_value_state *state = &build->values[te_node(build, n)->output];
    state->pending = n;
    state->again = 1;
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    const int heads = is_of_heads(node);
    int32_t x = node->inputs[0];
    int32_t pair[2] = {TE_NO_BUFFER, TE_NO_BUFFER}, gamma, beta;
    te_stage *stage;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    if (heads) {
        pair[0] = dense_rows(build, n, te_grad(build, node->output));
    } else {
        te_grad_pair(build, node->output, pair);
    }
    gamma = te_parameter_grad(build, node->inputs[1]);
    beta = te_parameter_grad(build, node->inputs[2]);
    stage = add(build, n, node->name, "norm_backward", TE_OP_NORM_BACKWARD);
    te_use_as(build, stage, "grad_output", pair[0]);
    te_use_as(build, stage, "grad_add", pair[1]);
    use_statistics(build, stage, n);
    te_use_as(build, stage, "gamma_grad", gamma);
    te_use_as(build, stage, "beta_grad", beta);
    if (!build->values[x].needs_grad) return;
    if (heads) {
        int32_t grad = te_grad_matrix(build, x);
        te_use_as(build, stage, "grad_input", heads_by_row(build, grad, &node->slices[0]));
    } else {
        int32_t residual, grad = te_grad_joined(build, x, &residual);
        te_use_as(build, stage, "grad_residual", residual);
        te_use_as(build, stage, "grad_input", grad);
    }
}

/* Kind, eps, gamma and beta of a norm over so many columns. */
static te_status check_affine(const te_graph_desc *graph, int32_t n, int64_t columns)
{
    const te_node_desc *node = &graph->nodes[n];
    int32_t gamma = node->inputs[1], beta = node->inputs[2];
    TE_FAIL_IF(!(node->numbers[0] >= 0.0), TE_ERROR_INVALID, "norm: eps = %g, expected 0 or more",
               node->numbers[0]);
    TE_TRY(te_check_parameter(graph, gamma, "norm: gamma", 0, columns));
    TE_TRY(te_check_parameter(graph, beta, "norm: beta", 0, columns));
    TE_FAIL_IF(node->variant < TE_NORM_LAYERNORM || node->variant > TE_NORM_L2, TE_ERROR_INVALID,
               "norm: kind = %d does not exist", node->variant);
    TE_FAIL_IF((beta >= 0 && (gamma < 0 || !has_mean(node))) ||
                   (gamma >= 0 && node->variant == TE_NORM_L2),
               TE_ERROR_INVALID,
               "norm: kind %d with %s: only layernorm (0) has a beta, and l2 (2) has neither",
               node->variant, beta >= 0 ? "a beta" : "a gamma");
    TE_FAIL_IF(beta >= 0 && graph->values[gamma].dtype != graph->values[beta].dtype, TE_ERROR_TYPE,
               "norm: gamma %s, beta %s, expected one dtype",
               te_dtype_name((te_dtype)graph->values[gamma].dtype),
               te_dtype_name((te_dtype)graph->values[beta].dtype));
    return TE_OK;
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    int64_t columns = graph->values[node->output].shape[1].add;
    TE_TRY(te_check_rows(graph, n, "norm", 1));
    TE_FAIL_IF(graph->values[node->inputs[0]].shape[1].add != columns, TE_ERROR_INVALID,
               "norm: input of %lld columns, output of %lld, expected the same",
               (long long)graph->values[node->inputs[0]].shape[1].add, (long long)columns);
    return check_affine(graph, n, columns);
}

static te_status check_heads(const te_graph_desc *graph, int32_t n)
{
    TE_TRY(te_check_heads(graph, n, "norm of heads"));
    return check_affine(graph, n, graph->nodes[n].slices[0].channels);
}

const te_node_rules te_norm_rules = {.name = "norm",
                                     .inputs = 3,
                                     .numbers = 1,
                                     .flags = TE_NODE_ZERO_CENTERED,
                                     .check = check,
                                     .forward = forward,
                                     .backward = backward,
                                     .again = again,
                                     .produce = produce};

const te_node_rules te_head_norm_rules = {.name = "norm",
                                          .inputs = 3,
                                          .numbers = 1,
                                          .slices = 1,
                                          .flags = TE_NODE_ZERO_CENTERED,
                                          .check = check_heads,
                                          .forward = forward_heads,
                                          .backward = backward};
