/* SPDX-License-Identifier: Apache-2.0
 *
 * node_function.c - a function of the caller's as a node: rows of up to four matrices become
 * rows of one. Its forward and its backward are external stages, whose buffers are, in this
 * order: the inputs and the output; the gradient of the output, the inputs, and the gradients of
 * those inputs that have one.
 */
#include "core/status.h"
#include "layer/build.h"

enum { INPUTS = 4 };

/* The values that it reads, in high precision; their count. */
static int inputs_of(te_build *build, int32_t n, int32_t buffers[INPUTS])
{
    const te_node_desc *node = te_node(build, n);
    int count = 0;
    for (int i = 0; i < INPUTS && node->inputs[i] >= 0; i++) {
        buffers[count++] = te_wide(build, node->inputs[i], node->name, "function_input");
    }
    return count;
}

static void use(te_build *build, te_stage *stage, const int32_t *buffers, int count)
{
    for (int i = 0; i < count; i++) te_stage_use(&build->plan, stage, 0, buffers[i]);
}

static te_stage *add(te_build *build, int32_t n, const char *name)
{
    te_stage *stage = te_add(build, n, te_node(build, n)->name, name, TE_OP_FILL);
    stage->external = 1;
    return stage;
}

static void forward(te_build *build, int32_t n)
{
    int32_t inputs[INPUTS], output;
    int count = inputs_of(build, n, inputs);
    te_stage *stage;
    output = te_get(build, TE_LINK_VALUE, te_node(build, n)->output);
    stage = add(build, n, "function");
    use(build, stage, inputs, count);
    use(build, stage, &output, 1);
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t inputs[INPUTS], grads[INPUTS], grad;
    int count, wanted = 0;
    te_stage *stage;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    grad = te_grad(build, node->output);
    count = inputs_of(build, n, inputs);
    for (int i = 0; i < count; i++) {
        if (!build->values[node->inputs[i]].needs_grad) continue;
        grads[wanted++] = te_grad_target(build, node->inputs[i]);
    }
    stage = add(build, n, "function_backward");
    use(build, stage, &grad, 1);
    use(build, stage, inputs, count);
    use(build, stage, grads, wanted);
}

static int is_row_alike(const te_extent *a, const te_extent *b)
{
    return a->symbol == b->symbol && a->align == b->align && a->multiply == b->multiply &&
           a->add == b->add;
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *first = &graph->values[node->inputs[0]];
    TE_TRY(te_check_rows(graph, n, "function", 1));
    for (int i = 1; i < INPUTS; i++) {
        const te_value_desc *x;
        if (node->inputs[i] < 0) continue;
        x = &graph->values[node->inputs[i]];
        for (int j = 0; j < i; j++) {
            if (node->inputs[j] != node->inputs[i] && node->inputs[j] >= 0) continue;
            return TE_FAIL(TE_ERROR_INVALID, "function: input %d is input %d, or there is none", i,
                           j);
        }
        if (x->ndim == 2 && te_dtype_is_high_precision((te_dtype)x->dtype) &&
            (x->flags & TE_VALUE_PARAMETER) == 0 && x->shape[1].symbol == TE_SYMBOL_NONE &&
            is_row_alike(&x->shape[0], &first->shape[0])) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID, "function: %s is no matrix with the rows of %s", x->name,
                       first->name);
    }
    return TE_OK;
}

const te_node_rules te_function_rules = {
    .name = "function",
    .inputs = INPUTS,
    .check = check,
    .forward = forward,
    .backward = backward,
};
