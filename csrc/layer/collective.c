/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/collective.h"

te_collective_op te_collective_does(const te_graph_desc *graph, int32_t n, te_collective_step step)
{
    static const te_collective_op ops[][TE_COLLECTIVE_STEPS] = {
        [TE_COLLECTIVE_GATHER] = {TE_DOES_GATHER, TE_DOES_REDUCE_SCATTER},
        [TE_COLLECTIVE_REDUCE_SCATTER] = {TE_DOES_REDUCE_SCATTER, TE_DOES_GATHER},
        [TE_COLLECTIVE_ALL_REDUCE] = {TE_DOES_ALL_REDUCE, TE_DOES_NOTHING},
        [TE_COLLECTIVE_COPY] = {TE_DOES_NOTHING, TE_DOES_ALL_REDUCE},
    };
    if (n < 0 || graph->nodes[n].kind != TE_NODE_COLLECTIVE) return TE_DOES_NOTHING;
    return ops[graph->nodes[n].variant][step];
}

int te_collective_gathers_forms(const te_graph_desc *graph, int32_t n, te_collective_step step)
{
    return te_collective_does(graph, n, step) == TE_DOES_GATHER &&
           (graph->nodes[n].flags & TE_COLLECTIVE_FORMS) != 0;
}

int te_collective_is_copy(const te_graph_desc *graph, int32_t n)
{
    return n >= 0 && graph->nodes[n].kind == TE_NODE_COLLECTIVE &&
           graph->nodes[n].variant == TE_COLLECTIVE_COPY;
}

int te_collective_sums_gradient(const te_graph_desc *graph, int32_t n)
{
    const te_collective_op op = te_collective_does(graph, n, TE_COLLECTIVE_BACKWARD);
    return op == TE_DOES_REDUCE_SCATTER || op == TE_DOES_ALL_REDUCE;
}

int te_collective_in_pieces(const te_graph_desc *graph, int32_t n, te_collective_step step)
{
    const uint32_t flag = step == TE_COLLECTIVE_FORWARD ? TE_COLLECTIVE_PIECES_FORWARD
                                                        : TE_COLLECTIVE_PIECES_BACKWARD;
    return n >= 0 && graph->nodes[n].kind == TE_NODE_COLLECTIVE &&
           (graph->nodes[n].flags & flag) != 0;
}

int32_t te_maker_of(const te_graph_desc *graph, int32_t value)
{
    for (int32_t n = 0; n < graph->node_count; n++) {
        if (graph->nodes[n].output == value) return n;
    }
    return TE_NOBODY;
}

int32_t te_only_reader_of(const te_graph_desc *graph, int32_t value)
{
    int32_t found = TE_NOBODY;
    if ((graph->values[value].flags & TE_VALUE_RESULT) != 0) return TE_NOBODY;
    for (int32_t n = 0; n < graph->node_count; n++) {
        for (int32_t i = 0; i < graph->nodes[n].input_count; i++) {
            if (graph->nodes[n].inputs[i] != value) continue;
            if (found != TE_NOBODY) return TE_NOBODY;
            found = n;
        }
    }
    return found;
}

int32_t te_collective_before(const te_graph_desc *graph, int32_t k)
{
    const int32_t n = te_maker_of(graph, graph->nodes[k].inputs[0]);
    return n >= 0 && graph->nodes[n].kind == TE_NODE_COLLECTIVE ? n : TE_NOBODY;
}

int32_t te_collective_target(const te_graph_desc *graph, int32_t value)
{
    const int32_t n = te_only_reader_of(graph, value);
    return te_collective_does(graph, n, TE_COLLECTIVE_FORWARD) == TE_DOES_ALL_REDUCE
               ? graph->nodes[n].output
               : value;
}

int32_t te_collective_copied(const te_graph_desc *graph, int32_t value)
{
    const int32_t n = te_maker_of(graph, value);
    if (!te_collective_is_copy(graph, n) || te_only_reader_of(graph, value) == TE_NOBODY ||
        te_only_reader_of(graph, graph->nodes[n].inputs[0]) == TE_NOBODY) {
        return TE_NOBODY;
    }
    return graph->nodes[n].inputs[0];
}

int32_t te_linear_gatherer(const te_graph_desc *graph, int32_t k, te_operand_role role)
{
    const te_node_desc *node = &graph->nodes[k];
    const int gradient = role == TE_GRAD_OPERAND;
    int32_t n;
    if (node->kind != TE_NODE_LINEAR || (!gradient && role != TE_INPUT_OPERAND) ||
        !te_has_forms(&node->quantization, role) || te_is_made_outside(&node->quantization, role)) {
        return TE_NOBODY;
    }
    n = gradient ? te_only_reader_of(graph, node->output) : te_collective_before(graph, k);
    return te_collective_gathers_forms(graph, n,
                                       gradient ? TE_COLLECTIVE_BACKWARD : TE_COLLECTIVE_FORWARD)
               ? n
               : TE_NOBODY;
}

int32_t te_linear_value(const te_graph_desc *graph, int32_t k, te_operand_role role)
{
    const te_node_desc *node = &graph->nodes[k];
    int32_t n = te_linear_gatherer(graph, k, role);
    if (role == TE_GRAD_OPERAND) return n == TE_NOBODY ? node->output : graph->nodes[n].output;
    if (n == TE_NOBODY && role == TE_INPUT_OPERAND && node->kind == TE_NODE_LINEAR) {
        n = te_collective_before(graph, k);
        if (!te_collective_is_copy(graph, n)) n = TE_NOBODY;
    }
    return n == TE_NOBODY ? node->inputs[role] : graph->nodes[n].inputs[0];
}
