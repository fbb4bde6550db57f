/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/heads_place.h"

const char *te_heads_name(te_heads_role role)
{
    static const char *const names[TE_HEADS_ROLES] = {
#define X(NAME, name) [TE_HEADS_##NAME] = #name,
        TE_HEADS(X)
#undef X
    };
    return names[role];
}

te_scale_source te_heads_scales_of(const te_node_desc *node)
{
    return te_recipe_rule_of(&node->quantization, TE_INPUT_OPERAND)->scale;
}

te_heads_place te_heads_place_of(const te_graph_desc *graph, const te_node_desc *node,
                                 te_heads_role role)
{
    const int i = te_heads_input(role), apart = te_heads_scales_of(node) != TE_SCALE_STATE;
    te_heads_place at = {.matrix = role, .value = node->output, .whole = 1};
    int64_t read = 0;
    int first = i;
    if (role == TE_HEADS_OUTPUT || role == TE_HEADS_GRAD_OUTPUT) {
        const te_slice *slices = node->slices;
        at.slice = (te_slice){slices[TE_HEADS_QUERY].heads, slices[TE_HEADS_VALUE].channels, 0,
                              slices[TE_HEADS_VALUE].channels, 1};
        return at;
    }
    at.value = node->inputs[i];
    at.slice = node->slices[i];
    for (int k = TE_HEADS_INPUTS - 1; k >= 0; k--) {
        if (node->inputs[k] != at.value || (k != i && apart)) continue;
        read += (int64_t)node->slices[k].heads * node->slices[k].channels;
        first = k;
    }
    at.whole = read == graph->values[at.value].shape[1].add;
    if (at.whole) {
        at.matrix = (te_heads_role)((int)role - i + first);
    } else {
        at.slice.offset = 0;
        at.slice.stride = at.slice.channels;
    }
    return at;
}

void te_heads_describe(const te_graph_desc *graph, const te_node_desc *node, te_link link,
                       te_heads_role role, te_buffer_info *info)
{
    const te_heads_place at = te_heads_place_of(graph, node, role);
    const te_value_desc *value = &graph->values[at.value];
    const te_quantization *q = &node->quantization;
    if (link == TE_LINK_HEADS_SCALES) {
        info->shape[0] = te_constant(TE_TENSOR_SCALES);
        return;
    }
    info->dtype =
        te_role_dtype(q, role < TE_HEADS_GRAD_OUTPUT ? TE_INPUT_OPERAND : TE_GRAD_OPERAND);
    if (link == TE_LINK_HEADS_WIDE) info->dtype = (te_dtype)value->dtype;
    info->ndim = 2;
    info->shape[0] = value->shape[0];
    info->shape[1] =
        at.whole ? value->shape[1] : te_constant((int64_t)at.slice.heads * at.slice.channels);
}
