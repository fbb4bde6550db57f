/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_check.c - whether a linear node can be.
 */
#include "core/status.h"
#include "layer/build.h"
#include "layer/recipe.h"

static te_status check_dtypes(const te_graph_desc *graph, const te_node_desc *node)
{
    const te_value_desc *x = &graph->values[node->inputs[0]], *w = &graph->values[node->inputs[1]];
    const te_value_desc *y = &graph->values[node->output];
    const te_value_desc *b = node->inputs[2] < 0 ? NULL : &graph->values[node->inputs[2]];
    const te_quantization *q = &node->quantization;
    if (!te_is_quantized(q)) {
        if (x->dtype == w->dtype && x->dtype == y->dtype && (b == NULL || b->dtype == x->dtype)) {
            return TE_OK;
        }
        return TE_FAIL(TE_ERROR_TYPE,
                       "linear: input %s, weight %s, bias %s, output %s: without a recipe all are "
                       "one dtype",
                       te_dtype_name((te_dtype)x->dtype), te_dtype_name((te_dtype)w->dtype),
                       b == NULL ? "none" : te_dtype_name((te_dtype)b->dtype),
                       te_dtype_name((te_dtype)y->dtype));
    }
    for (int role = 0; role < TE_OPERAND_ROLES; role++) {
        const te_recipe_rule *rule = te_recipe_rule_of(q, (te_operand_role)role);
        te_dtype dtype = te_role_dtype(q, (te_operand_role)role);
        if ((uint32_t)dtype < 32 && (rule->dtypes >> dtype & 1U) != 0) continue;
        return TE_FAIL(
            TE_ERROR_TYPE, "linear: FP8 dtypes %s and %s, expected e4m3 and then e4m3 or e5m2",
            te_dtype_name((te_dtype)q->forward_fp8), te_dtype_name((te_dtype)q->backward_fp8));
    }
    return TE_OK;
}

static te_status check_weight(const te_graph_desc *graph, const te_node_desc *node)
{
    const te_value_desc *w = &graph->values[node->inputs[1]];
    uint32_t main_grad = w->flags & (TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE);
    if (main_grad == (TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE) ||
        ((main_grad & TE_VALUE_ACCUMULATE) != 0 && w->grad_dtype == TE_DTYPE_F16)) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: weight: flags 0x%x with a gradient of %s: it is overwritten, or "
                       "accumulated in f32 or bf16",
                       w->flags, te_dtype_name((te_dtype)w->grad_dtype));
    }
    return TE_OK;
}

static te_status check_numbers(const te_node_desc *node)
{
    const te_quantization *q = &node->quantization;
    int negative = 0;
    for (int role = 0; role < TE_OPERAND_ROLES; role++) negative |= !(q->amax_epsilon[role] >= 0);
    if (negative || q->power_2 >> TE_OPERAND_ROLES != 0 || node->owner < 0 ||
        node->owner >= TE_GRAPH_NODES) {
        return TE_FAIL(TE_ERROR_INVALID, "linear: amax_epsilon, power_2 = 0x%x or owner %d",
                       q->power_2, node->owner);
    }
    for (int i = 0; i < 2; i++) {
        if (node->slots[i] >= 0 && node->slots[i] <= INT16_MAX) continue;
        return TE_FAIL(TE_ERROR_INVALID, "linear: slots[%d] = %d, expected 0 to %d", i,
                       node->slots[i], INT16_MAX);
    }
    if (node->gather < 1 || node->gather > INT16_MAX ||
        (node->gather > 1 &&
         (!te_is_quantized(q) || (node->external >> TE_LINEAR_STAGE_GATHER_INPUT & 1U) == 0))) {
        return TE_FAIL(
            TE_ERROR_INVALID,
            "linear: gather = %d: at least 1; more needs a recipe and the external stage "
            "gather_input",
            node->gather);
    }
    return TE_OK;
}

te_status te_check_linear(const te_graph_desc *graph, int32_t k)
{
    const te_node_desc *node = &graph->nodes[k];
    int64_t in = graph->values[node->inputs[0]].shape[1].add;
    int64_t out = graph->values[node->output].shape[1].add;
    if (node->inputs[1] < 0) return TE_FAIL(TE_ERROR_INVALID, "linear: it has no weight");
    TE_TRY(check_numbers(node));
    TE_TRY(te_check_rows(graph, k, "linear", node->gather));
    TE_TRY(te_check_parameter(graph, node->inputs[1], "linear: weight", out, in));
    TE_TRY(te_check_parameter(graph, node->inputs[2], "linear: bias", 0, out));
    TE_TRY(check_dtypes(graph, node));
    if ((graph->values[node->output].flags & TE_VALUE_QUANTIZED) != 0 && node->inputs[2] >= 0 &&
        (graph->values[node->inputs[2]].flags & TE_VALUE_GRADIENT) != 0) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: the gradient of %s arrives quantized, of which %s has no gradient: "
                       "whoever casts it sums it (te_cast_request.bias_grad)",
                       graph->values[node->output].name, graph->values[node->inputs[2]].name);
    }
    return check_weight(graph, node);
}
