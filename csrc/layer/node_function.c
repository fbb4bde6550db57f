/* SPDX-License-Identifier: Apache-2.0
 *
 * node_function.c - a function of the caller's as a node: of the rows of any number of matrices, to
 * as many rows of one, or so many times as many. Its forward and its backward are external stages,
 * whose buffers are, in this order: the inputs and the output; the gradient of the output, the
 * inputs, and the gradients of those inputs that have one.
 */
#include "core/status.h"
#include "layer/build.h"

/* Its inputs; behind them none is there. */
static int32_t count_of(const te_node_desc *node)
{
    int32_t count = 0;
    while (count < node->input_count && node->inputs[count] >= 0) count++;
    return count;
}

/* Makes all values that it reads, in high precision, before its stage is added. */
static void make_inputs(te_build *build, const te_node_desc *node)
{
    for (int32_t i = 0; i < count_of(node); i++) {
        (void)te_wide(build, node->inputs[i], node->name, "function_input");
    }
}

static void use_inputs(te_build *build, te_stage *stage, const te_node_desc *node)
{
    for (int32_t i = 0; i < count_of(node); i++) {
        int32_t x = te_wide(build, node->inputs[i], node->name, "function_input");
        te_stage_hand(&build->plan, stage, x, 0);
    }
}

static void forward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    te_stage *stage;
    make_inputs(build, node);
    stage = te_add_outside(build, n, node->name, "function", TE_FUNCTION_FORWARD);
    use_inputs(build, stage, node);
    te_stage_hand(&build->plan, stage, te_get(build, TE_LINK_VALUE, node->output), 1);
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    te_stage *stage;
    int32_t grad;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    grad = te_grad(build, node->output);
    make_inputs(build, node);
    stage = te_add_outside(build, n, node->name, "function_backward", TE_FUNCTION_BACKWARD);
    te_stage_hand(&build->plan, stage, grad, 0);
    use_inputs(build, stage, node);
    for (int32_t i = 0; i < count_of(node); i++) {
        if (!build->values[node->inputs[i]].needs_grad) continue;
        te_stage_hand(&build->plan, stage, te_grad_target(build, node->inputs[i]), 1);
    }
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *first = &graph->values[node->inputs[0]];
    TE_TRY(te_check_rows(graph, n, "function", TE_ANY_RANKS));
    for (int32_t i = 1; i < node->input_count; i++) {
        const te_value_desc *x;
        if (node->inputs[i] < 0) continue;
        x = &graph->values[node->inputs[i]];
        for (int32_t j = 0; j < i; j++) {
            if (node->inputs[j] != node->inputs[i] && node->inputs[j] >= 0) continue;
            return TE_FAIL(
                TE_ERROR_INVALID,
                "function: input %d is the same value as input %d, or stands behind a missing one",
                i, j);
        }
        if (x->ndim == 2 && te_dtype_is_high_precision((te_dtype)x->dtype) &&
            (x->flags & TE_VALUE_PARAMETER) == 0 && x->shape[1].symbol == TE_SYMBOL_NONE &&
            te_is_alike(&x->shape[0], &first->shape[0])) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID, "function: %s is no matrix with the rows of %s", x->name,
                       first->name);
    }
    return TE_OK;
}

const te_node_rules te_function_rules = {
    .name = "function",
    .inputs = 1,
    .many = 1,
    .steps = TE_FUNCTION_STEPS,
    .outside = 1,
    .check = check,
    .forward = forward,
    .backward = backward,
};
