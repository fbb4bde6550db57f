/* SPDX-License-Identifier: Apache-2.0
 *
 * node_dropout.c - output = residual + drop_path(dropout(x + bias)) as a node. The gradient of the
 * residual is that of the output, and so is that of x where nothing is dropped: no copy is made.
 */
#include "core/status.h"
#include "layer/build.h"

static int drops(const te_node_desc *node)
{
    return node->numbers[0] > 0.0 || node->numbers[1] > 0.0;
}

static void set_numbers(te_build *build, te_stage *stage, const te_node_desc *node)
{
    te_set_number(build, stage, "dropout", node->numbers[0]);
    te_set_number(build, stage, "drop_path", node->numbers[1]);
    if (node->numbers[1] > 0.0) { /* samples are the first leading dim */
        te_use_size(build, stage, "samples", te_value(build, node->output)->shape[0].symbol + 1);
    }
}

static void forward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t rng = drops(node) ? te_draw(build, n) : TE_NO_BUFFER;
    int32_t input = te_wide(build, node->inputs[0], node->name, "dropout_input"), residual;
    te_stage *stage;
    residual = node->inputs[2] < 0 ? TE_NO_BUFFER
                                   : te_wide(build, node->inputs[2], node->name, "residual");
    stage = te_add(build, n, node->name, "dropout_add", TE_OP_DROPOUT_ADD);
    te_use_as(build, stage, "input", input);
    te_use_value(build, stage, "bias", node->inputs[1]);
    te_use_as(build, stage, "residual", residual);
    te_use_as(build, stage, "rng", rng);
    te_use_as(build, stage, "output", te_get(build, TE_LINK_VALUE, node->output));
    set_numbers(build, stage, node);
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t x = node->inputs[0], residual = node->inputs[2];
    int32_t grad, bias_grad;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    grad = te_grad(build, node->output);
    bias_grad = te_parameter_grad(build, node->inputs[1]);
    if (residual >= 0 && build->values[residual].needs_grad) te_grad_pass(build, residual, grad);
    if (bias_grad != TE_NO_BUFFER || (drops(node) && build->values[x].needs_grad)) {
        int32_t rng = drops(node) ? te_draw(build, n) : TE_NO_BUFFER;
        te_stage *stage = te_add(build, n, node->name, "dropout_backward", TE_OP_DROPOUT_BACKWARD);
        te_use_as(build, stage, "grad_output", grad);
        te_use_as(build, stage, "rng", rng);
        te_use_as(build, stage, "bias_grad", bias_grad);
        if (drops(node) && build->values[x].needs_grad) {
            int32_t target = te_grad_target(build, x);
            te_use_as(build, stage, "grad_input", target);
        }
        set_numbers(build, stage, node);
    }
    if (!drops(node) && build->values[x].needs_grad) te_grad_pass(build, x, grad);
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    const te_value_desc *r = node->inputs[2] < 0 ? y : &graph->values[node->inputs[2]];
    TE_TRY(te_check_rows(graph, n, "dropout + add", 1));
    TE_TRY(te_check_parameter(graph, node->inputs[1], "dropout + add: bias", 0, y->shape[1].add));
    for (int i = 0; i < 2; i++) {
        if (node->numbers[i] >= 0.0 && node->numbers[i] <= 1.0) continue;
        return TE_FAIL(TE_ERROR_INVALID, "dropout + add: probability %g", node->numbers[i]);
    }
    if (node->numbers[1] > 0.0 &&
        ((y->shape[0].symbol != TE_SYMBOL_ROWS && y->shape[0].symbol != TE_SYMBOL_SOURCE_ROWS) ||
         y->shape[0].multiply != 1)) {
        return TE_FAIL(TE_ERROR_INVALID, "dropout + add: drop path, but %s has no leading dims",
                       y->name);
    }
    if (x->shape[1].add == y->shape[1].add && x->dtype == y->dtype && r->dtype == y->dtype &&
        r->ndim == 2 && r->shape[1].add == y->shape[1].add &&
        r->shape[0].symbol == y->shape[0].symbol && r->shape[0].add == y->shape[0].add &&
        r->shape[0].multiply == y->shape[0].multiply && r->shape[0].align == y->shape[0].align) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "dropout + add: %s, %s and %s of different shapes or dtypes",
                   x->name, r->name, y->name);
}

const te_node_rules te_dropout_add_rules = {
    .name = "dropout_add",
    .inputs = 3,
    .numbers = 2,
    .check = check,
    .forward = forward,
    .backward = backward,
};
