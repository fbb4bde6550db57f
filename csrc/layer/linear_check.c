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

te_status te_check_quantization(const te_node_desc *node, const char *what)
{
    const te_quantization *q = &node->quantization;
    int negative = 0;
    for (int role = 0; te_is_quantized(q) && role < TE_GEMM_OPERANDS; role++) {
        const te_recipe_rule *rule = te_recipe_rule_of(q, (te_operand_role)role);
        te_dtype dtype = te_role_dtype(q, (te_operand_role)role);
        if ((uint32_t)dtype < 32 && (rule->dtypes >> dtype & 1U) != 0) continue;
        return TE_FAIL(TE_ERROR_TYPE, "%s: FP8 dtypes %s and %s, expected %s", what,
                       te_dtype_name((te_dtype)q->forward_fp8),
                       te_dtype_name((te_dtype)q->backward_fp8),
                       te_recipe_is_fp4(q->recipe) ? "u8, of which each is two e2m1"
                                                   : "e4m3 and then e4m3 or e5m2");
    }
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) negative |= !(q->amax_epsilon[role] >= 0);
    if (negative || q->power_2 >> TE_GEMM_OPERANDS != 0 || node->owner < 0 ||
        node->owner >= TE_GRAPH_NODES) {
        return TE_FAIL(TE_ERROR_INVALID, "%s: amax_epsilon, power_2 = 0x%x or owner %d", what,
                       q->power_2, node->owner);
    }
    if (q->backward < TE_BACKWARD_QUANTIZED || q->backward > TE_BACKWARD_DEQUANTIZED ||
        (q->backward != TE_BACKWARD_QUANTIZED && !te_is_quantized(q))) {
        return TE_FAIL(TE_ERROR_INVALID, "%s: backward = %d with recipe %d: 0, or with one to 2",
                       what, q->backward, q->recipe);
    }
    if ((q->tiles_2d & ~te_recipe_tiles_2d(q->recipe)) != 0) {
        return TE_FAIL(TE_ERROR_INVALID, "%s: tiles_2d = 0x%x, expected bits of 0x%x", what,
                       q->tiles_2d, te_recipe_tiles_2d(q->recipe));
    }
    for (int i = 0; i < 2; i++) {
        if (node->slots[i] >= 0 && node->slots[i] <= INT16_MAX) continue;
        return TE_FAIL(TE_ERROR_INVALID, "%s: slots[%d] = %d, expected 0 to %d", what, i,
                       node->slots[i], INT16_MAX);
    }
    return TE_OK;
}

static te_status check_gather(const te_node_desc *node)
{
    const te_quantization *q = &node->quantization;
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

/* What NVFP4 alone has. */
static te_status check_fp4(const te_graph_desc *graph, const te_node_desc *node)
{
    const uint32_t both = 1U << TE_INPUT_OPERAND | 1U << TE_GRAD_OPERAND;
    const uint32_t gradient = 1U << TE_GRAD_OPERAND;
    const te_quantization *q = &node->quantization;
    const te_value_desc *pair = node->inputs[3] < 0 ? NULL : &graph->values[node->inputs[3]];
    const int fp4 = te_recipe_is_fp4(q->recipe);
    if ((q->hadamard != 0 && (!fp4 || q->hadamard != both || (q->tiles_2d & both) != 0)) ||
        (q->stochastic != 0 && (!fp4 || q->stochastic != gradient))) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: hadamard = 0x%x, stochastic = 0x%x, tiles_2d = 0x%x: nvfp4 "
                       "transforms input and gradient (0x%x), without tiles, or none, and rounds "
                       "the gradient (0x%x) stochastically",
                       q->hadamard, q->stochastic, q->tiles_2d, both, gradient);
    }
    if ((q->stochastic != 0) != (pair != NULL) ||
        (pair != NULL && (pair->flags != TE_VALUE_INPUT || pair->dtype != TE_DTYPE_I64 ||
                          pair->ndim != 1 || pair->shape[0].add != 2))) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: inputs[3] = %d, expected an input i64 [2] where gradients are "
                       "rounded stochastically, and else none",
                       node->inputs[3]);
    }
    if (fp4 && graph->values[node->output].dtype == TE_DTYPE_F16) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "linear: nvfp4 has no f16 output: use bf16 or f32");
    }
    return TE_OK;
}

/* What scales of tiles do not have. */
static te_status check_tiles(const te_graph_desc *graph, const te_node_desc *node)
{
    const te_extent *rows = &graph->values[node->inputs[0]].shape[0];
    const te_recipe_rule *rule = te_recipe_rule_of(&node->quantization, TE_INPUT_OPERAND);
    if (rule->scale != TE_SCALE_OWN && !rule->separate) return TE_OK;
    if (node->gather > 1) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "linear: gather = %d: the scales of rows and tiles are not gathered",
                       node->gather);
    }
    if (rows->symbol == TE_SYMBOL_NONE || (rows->multiply == 1 && rows->align == 1)) return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "linear: scales of tiles of %lld * roundup(rows, %d) rows",
                   (long long)rows->multiply, rows->align);
}

/* An operand that arrives row-wise alone is transposed as it is. */
static te_status check_row_wise(const te_graph_desc *graph, const te_node_desc *node, int role)
{
    const uint32_t flags = TE_VALUE_QUANTIZED | TE_VALUE_ROW_WISE;
    const te_value_desc *value =
        &graph->values[role == TE_GRAD_OPERAND ? node->output : node->inputs[role]];
    const te_recipe_rule *rule = te_recipe_rule_of(&node->quantization, (te_operand_role)role);
    if ((value->flags & flags) != flags ||
        (rule->mode == TE_SCALING_TENSOR && value->shape[1].add % 16 == 0)) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID,
                   "linear: %s arrives row-wise alone: that takes one scale for the tensor, and "
                   "columns (%lld) in a multiple of 16",
                   value->name, (long long)value->shape[1].add);
}

te_status te_check_linear(const te_graph_desc *graph, int32_t k)
{
    const te_node_desc *node = &graph->nodes[k];
    int64_t in = graph->values[node->inputs[0]].shape[1].add;
    int64_t out = graph->values[node->output].shape[1].add;
    if (node->inputs[1] < 0) return TE_FAIL(TE_ERROR_INVALID, "linear: it has no weight");
    TE_TRY(te_check_quantization(node, "linear"));
    TE_TRY(check_gather(node));
    TE_TRY(check_fp4(graph, node));
    TE_TRY(check_tiles(graph, node));
    TE_TRY(te_check_rows(graph, k, "linear", node->gather));
    TE_TRY(te_check_parameter(graph, node->inputs[1], "linear: weight", out, in));
    TE_TRY(te_check_parameter(graph, node->inputs[2], "linear: bias", 0, out));
    TE_TRY(check_dtypes(graph, node));
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) TE_TRY(check_row_wise(graph, node, role));
    return check_weight(graph, node);
}
