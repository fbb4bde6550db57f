/* SPDX-License-Identifier: Apache-2.0
 *
 * node_convert.c - a matrix in another high-precision dtype, as a node: what a module reads in the
 * dtype of a region that computes in 16 bits. Its gradient is converted back.
 */
#include "core/status.h"
#include "layer/build.h"

static void forward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t input = te_wide(build, node->inputs[0], node->name, "convert_input");
    te_convert(build, n, "convert", input, te_get(build, TE_LINK_VALUE, node->output));
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t x = node->inputs[0], grad;
    if (!build->values[x].needs_grad || !te_has_grad(build, node->output)) return;
    grad = te_grad(build, node->output);
    te_convert(build, n, "convert_grad", grad, te_grad_target(build, x));
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    TE_TRY(te_check_rows(graph, n, "convert", 1));
    if (x->shape[1].add == y->shape[1].add && te_dtype_is_high_precision((te_dtype)x->dtype) &&
        te_dtype_is_high_precision((te_dtype)y->dtype)) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "convert: from %lld %s columns to %lld of %s",
                   (long long)x->shape[1].add, te_dtype_name((te_dtype)x->dtype),
                   (long long)y->shape[1].add, te_dtype_name((te_dtype)y->dtype));
}

const te_node_rules te_convert_rules = {
    .name = "convert",
    .inputs = 1,
    .check = check,
    .forward = forward,
    .backward = backward,
};
