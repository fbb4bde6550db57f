/* SPDX-License-Identifier: Apache-2.0
 *
 * node_dropout.c - output = residual + drop_path(dropout(x + bias)) as a node. The gradient of the
 * residual is that of the output, and so is that of x where nothing is dropped: no copy is made.
 * An output in fp32 may be that of 16-bit terms (what a branch adds to a residual in fp32): the
 * operator has one dtype, so these are converted before it, and their gradients behind it.
 */
#include "core/status.h"
#include "layer/build.h"

enum { PAIR = 3 }; /* behind input, bias and residual */

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

static int is_converted(const te_build *build, const te_node_desc *node, int32_t value)
{
    return te_value(build, value)->dtype != te_value(build, node->output)->dtype;
}

/* Scratch in the dtype of the output. */
static int32_t converted(te_build *build, int32_t n, te_operand_role role)
{
    return te_get(build, TE_LINK_WIDE, te_operand_of(n, role));
}

/* A value that is added, in the dtype of the output. */
static int32_t term(te_build *build, int32_t n, int32_t value, te_operand_role role,
                    const char *name)
{
    const te_node_desc *node = te_node(build, n);
    int32_t given, wide;
    if (value < 0) return TE_NO_BUFFER;
    given = te_wide(build, value, node->name, name);
    if (!is_converted(build, node, value)) return given;
    wide = converted(build, n, role);
    te_convert(build, n, role == TE_INPUT_OPERAND ? "convert_input" : "convert_residual", given,
               wide);
    return wide;
}

/* The gradient of a value that is `grad`, but for its dtype. */
static void pass(te_build *build, int32_t n, int32_t value, int32_t grad, const char *name)
{
    if (is_converted(build, te_node(build, n), value))
        te_convert(build, n, name, grad, te_grad_target(build, value));
    else
        te_grad_pass(build, value, grad);
}

static void forward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t input = term(build, n, node->inputs[0], TE_INPUT_OPERAND, "dropout_input"), residual;
    te_stage *stage;
    residual = term(build, n, node->inputs[2], TE_OUTPUT_OPERAND, "residual");
    stage = te_add(build, n, node->name, "dropout_add", TE_OP_DROPOUT_ADD);
    te_use_as(build, stage, "input", input);
    te_use_value(build, stage, "bias", node->inputs[1]);
    te_use_as(build, stage, "residual", residual);
    te_use_value(build, stage, "rng", node->inputs[PAIR]);
    te_use_as(build, stage, "output", te_get(build, TE_LINK_VALUE, node->output));
    set_numbers(build, stage, node);
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t x = node->inputs[0], residual = node->inputs[2];
    int32_t grad, bias_grad, dropped = TE_NO_BUFFER;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    grad = te_grad(build, node->output);
    bias_grad = te_parameter_grad(build, node->inputs[1]);
    if (residual >= 0 && build->values[residual].needs_grad)
        pass(build, n, residual, grad, "convert_grad_residual");
    if (bias_grad != TE_NO_BUFFER || (drops(node) && build->values[x].needs_grad)) {
        te_stage *stage = te_add(build, n, node->name, "dropout_backward", TE_OP_DROPOUT_BACKWARD);
        te_use_as(build, stage, "grad_output", grad);
        te_use_value(build, stage, "rng", node->inputs[PAIR]);
        te_use_as(build, stage, "bias_grad", bias_grad);
        if (drops(node) && build->values[x].needs_grad) {
            dropped = is_converted(build, node, x) ? converted(build, n, TE_INPUT_OPERAND)
                                                   : te_grad_target(build, x);
            te_use_as(build, stage, "grad_input", dropped);
        }
        set_numbers(build, stage, node);
    }
    if (!build->values[x].needs_grad) return;
    if (!drops(node))
        pass(build, n, x, grad, "convert_grad_input");
    else if (is_converted(build, node, x))
        te_convert(build, n, "convert_grad_input", dropped, te_grad_target(build, x));
}

/* Whether all values of a term are some of the output. */
static int holds(const te_value_desc *y, const te_value_desc *term)
{
    return term->dtype == y->dtype ||
           (y->dtype == TE_DTYPE_F32 && te_dtype_is_high_precision((te_dtype)term->dtype));
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
        return TE_FAIL(TE_ERROR_INVALID, "dropout + add: probability = %g, expected 0 to 1",
                       node->numbers[i]);
    }
    TE_TRY(te_check_pair(graph, n, PAIR, drops(node)));
    TE_FAIL_IF(node->numbers[1] > 0.0 && ((y->shape[0].symbol != TE_SYMBOL_ROWS &&
                                           y->shape[0].symbol != TE_SYMBOL_SOURCE_ROWS) ||
                                          y->shape[0].multiply != 1),
               TE_ERROR_INVALID,
               "dropout + add: drop path drops samples, but the rows of %s are no tokens", y->name);
    if (x->shape[1].add == y->shape[1].add && holds(y, x) && holds(y, r) && r->ndim == 2 &&
        r->shape[1].add == y->shape[1].add && te_is_alike(&r->shape[0], &y->shape[0])) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "dropout + add: %s, %s and %s of different shapes or dtypes",
                   x->name, r->name, y->name);
}

const te_node_rules te_dropout_add_rules = {
    .name = "dropout_add",
    .inputs = 4,
    .numbers = 2,
    .check = check,
    .forward = forward,
    .backward = backward,
};
