/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_check.c - whether a linear node can be.
 */
#include "core/scales.h"
#include "core/status.h"
#include "layer/build.h"
#include "layer/linear_cast.h"
#include "layer/recipe.h"

static te_status check_dtypes(const te_graph_desc *graph, const te_node_desc *node)
{
    const te_value_desc *x = &graph->values[node->inputs[0]], *w = &graph->values[node->inputs[1]];
    const te_value_desc *y = &graph->values[node->output];
    const te_value_desc *b = node->inputs[2] < 0 ? NULL : &graph->values[node->inputs[2]];
    int one = x->dtype == w->dtype && x->dtype == y->dtype && (b == NULL || b->dtype == x->dtype);
    TE_FAIL_IF(
        !one && !te_is_quantized(&node->quantization), TE_ERROR_TYPE,
        "linear: input %s, weight %s, bias %s, output %s: without a recipe all are one dtype",
        te_dtype_name((te_dtype)x->dtype), te_dtype_name((te_dtype)w->dtype),
        b == NULL ? "none" : te_dtype_name((te_dtype)b->dtype), te_dtype_name((te_dtype)y->dtype));
    return TE_OK;
}

static te_status check_weight(const te_graph_desc *graph, const te_node_desc *node)
{
    const uint32_t flags = graph->values[node->inputs[1]].flags;
    TE_FAIL_IF(
        (flags & TE_VALUE_ACCUMULATE) != 0 && (flags & TE_VALUE_OVERWRITE) != 0, TE_ERROR_INVALID,
        "linear: weight: flags 0x%x: TE_VALUE_ACCUMULATE or TE_VALUE_OVERWRITE, not both", flags);
    return TE_OK;
}

/* Options that a recipe has: those of scales that it finds, of tiles, and of NVFP4. */
static uint32_t options_of(const te_quantization *q, te_operand_role role)
{
    const int32_t recipe = q->casts[role].recipe;
    const te_scale_source scale = te_recipe_rule_of(q, role)->scale;
    uint32_t options = scale == TE_SCALE_NONE ? 0 : TE_CAST_POWER_2;
    if (te_recipe_has_tiles_2d(recipe)) options |= TE_CAST_TILES_2D;
    if (!te_is_fp4(q, role)) return options;
    return TE_CAST_OPTIONS & ~(uint32_t)(role == TE_GRAD_OPERAND ? 0 : TE_CAST_STOCHASTIC);
}

static te_status check_cast(const te_node_desc *node, te_operand_role role, const char *what)
{
    static const char *const names[] = {"input", "weight", "gradient"};
    const te_quantization *q = &node->quantization;
    const te_operand_cast *cast = te_cast_of(q, role);
    const te_recipe_rule *rule = te_recipe_rule_of(q, role);
    TE_FAIL_IF(rule->dtypes != 0 &&
                   ((uint32_t)cast->dtype >= 32 || (rule->dtypes >> cast->dtype & 1U) == 0),
               TE_ERROR_TYPE, "%s: %s: recipe %d does not cast to %s", what, names[role],
               cast->recipe, te_dtype_name((te_dtype)cast->dtype));
    TE_FAIL_IF(!(cast->amax_epsilon >= 0) || (cast->options & ~options_of(q, role)) != 0,
               TE_ERROR_INVALID,
               "%s: %s: amax_epsilon is negative, or options 0x%x, of which recipe %d has 0x%x",
               what, names[role], cast->options, cast->recipe, options_of(q, role));
    TE_FAIL_IF(cast->margin != 0 &&
                   (cast->recipe != TE_RECIPE_MXFP8 || cast->margin < -126 || cast->margin > 126),
               TE_ERROR_INVALID,
               "%s: %s: margin = %d of recipe %d: only MXFP8 (5) has one, -126 to 126", what,
               names[role], cast->margin, cast->recipe);
    return TE_OK;
}

te_status te_check_quantization(const te_node_desc *node, const char *what)
{
    const te_quantization *q = &node->quantization;
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        TE_TRY(check_cast(node, (te_operand_role)role, what));
    }
    TE_FAIL_IF(node->owner < 0 || node->owner >= TE_GRAPH_NODES, TE_ERROR_INVALID,
               "%s: owner %d, expected 0 to %d", what, node->owner, TE_GRAPH_NODES - 1);
    TE_FAIL_IF(q->backward < TE_BACKWARD_QUANTIZED || q->backward > TE_BACKWARD_DEQUANTIZED ||
                   (q->backward != TE_BACKWARD_QUANTIZED && !te_is_quantized(q)),
               TE_ERROR_INVALID, "%s: backward = %d with recipe %d: 0, or with one to 2", what,
               q->backward, q->casts[0].recipe);
    for (int i = 0; i < 2; i++) {
        if (node->slots[i] >= 0 && node->slots[i] <= INT16_MAX) continue;
        return TE_FAIL(TE_ERROR_INVALID, "%s: slots[%d] = %d, expected 0 to %d", what, i,
                       node->slots[i], INT16_MAX);
    }
    return TE_OK;
}

/* Whether the gradient of what comes to a node first is returned quantized. */
static int returns_gradient(const te_graph_desc *graph, const te_node_desc *node)
{
    for (int32_t v = 0; v < graph->value_count; v++) {
        const uint32_t flags = graph->values[v].flags;
        if ((flags & TE_VALUE_RETURN_QUANTIZED) == 0 || (flags & TE_VALUE_RESULT) != 0) continue;
        if (te_caster_of(graph, v) == (int32_t)(node - graph->nodes)) return 1;
    }
    return 0;
}

/* What NVFP4 alone has, as far as operands have it together. */
static te_status check_fp4(const te_graph_desc *graph, const te_node_desc *node)
{
    const te_quantization *q = &node->quantization;
    const uint32_t way = TE_CAST_HADAMARD | TE_CAST_UNSIGNED;
    const uint32_t transforms = q->casts[TE_INPUT_OPERAND].options & way;
    const int stochastic = te_cast_has(q, TE_GRAD_OPERAND, TE_CAST_STOCHASTIC);
    int fp4 = 0;
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        const uint32_t options = q->casts[role].options;
        const uint32_t plain = TE_CAST_TILES_2D | TE_CAST_FOUR_OVER_SIX;
        const uint32_t turned = options & way, alike = role == TE_WEIGHT_OPERAND ? 0 : transforms;
        fp4 |= te_is_fp4(q, (te_operand_role)role);
        if (turned == alike && turned != TE_CAST_UNSIGNED &&
            (turned == 0 || ((options & plain) == 0)) &&
            ((options & TE_CAST_FOUR_OVER_SIX) == 0 || (options & TE_CAST_STOCHASTIC) == 0) &&
            ((options & TE_CAST_ROW_SCALED) == 0 || (options & TE_CAST_TILES_2D) == 0)) {
            continue;
        }
        return TE_FAIL(
            TE_ERROR_INVALID,
            "linear: options 0x%x, 0x%x, 0x%x: nvfp4 transforms input and gradient "
            "alike or none, without tiles or 4 over 6; 4 over 6 is not stochastic, scaled "
            "rows have no tiles",
            q->casts[0].options, q->casts[1].options, q->casts[2].options);
    }
    TE_FAIL_IF(
        !te_pair_fits(graph, node->inputs[3], stochastic) ||
            !te_pair_fits(graph, node->inputs[4], stochastic && returns_gradient(graph, node)),
        TE_ERROR_INVALID,
        "linear: inputs[3] = %d, inputs[4] = %d, expected an input i64 [2] where "
        "gradients are rounded stochastically, another one where that of the input "
        "is returned quantized besides, and else none",
        node->inputs[3], node->inputs[4]);
    TE_FAIL_IF(fp4 && graph->values[node->output].dtype == TE_DTYPE_F16, TE_ERROR_UNSUPPORTED,
               "linear: nvfp4 has no f16 output: use bf16 or f32");
    return TE_OK;
}

/* The caller's quantizers: their stages are the caller's, and make the dtype of the output. */
static te_status check_outside(const te_graph_desc *graph, const te_node_desc *node)
{
    static const te_linear_stage stages[] = {TE_LINEAR_STAGE_QUANTIZE_INPUT,
                                             TE_LINEAR_STAGE_QUANTIZE_WEIGHT,
                                             TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT};
    const te_quantization *q = &node->quantization;
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        if (!te_is_made_outside(q, (te_operand_role)role)) continue;
        if (te_is_external(node, (int32_t)stages[role]) &&
            q->casts[role].dtype == graph->values[node->output].dtype) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: operand %d is the caller's: its stage must be external, its dtype "
                       "%s that of the output",
                       role, te_dtype_name((te_dtype)q->casts[role].dtype));
    }
    return TE_OK;
}

/* What scales of tiles do not have. */
static te_status check_tiles(const te_graph_desc *graph, const te_node_desc *node)
{
    const te_extent *rows = &graph->values[node->inputs[0]].shape[0];
    int own = 0;
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        const te_recipe_rule *rule = te_recipe_rule_of(&node->quantization, (te_operand_role)role);
        own |= rule->scale == TE_SCALE_OWN || te_scales_micro(rule->mode) ||
               te_is_made_outside(&node->quantization, (te_operand_role)role);
    }
    if (!own) return TE_OK;
    if (rows->symbol == TE_SYMBOL_NONE || rows->align == 1) return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED,
                   "linear: roundup(%lld * rows, %lld) rows with scales of tiles or rows, which "
                   "need the rows as they are",
                   (long long)rows->multiply, (long long)rows->align);
}

/* Whether what ranks cast of an operand can be put together. */
static te_status check_gathered(const te_graph_desc *graph, int32_t k, te_operand_role role)
{
    const te_node_desc *node = &graph->nodes[k];
    const te_linear_stage reduce = role == TE_GRAD_OPERAND ? TE_LINEAR_STAGE_REDUCE_AMAX_GRAD_OUTPUT
                                                           : TE_LINEAR_STAGE_REDUCE_AMAX_INPUT;
    const int grad_weight = (graph->values[node->inputs[1]].flags & TE_VALUE_GRADIENT) != 0;
    const int32_t n = te_linear_gatherer(graph, k, role);
    if (n == TE_NOBODY || graph->nodes[n].ranks == 1) return TE_OK;
    TE_FAIL_IF(te_is_measured(node, role) && !te_is_external(node, (int32_t)reduce),
               TE_ERROR_INVALID,
               "linear: operand %d is gathered in FP8 of a scale that each rank measures: its amax "
               "has to be reduced, by an external stage",
               role);
    TE_FAIL_IF(te_recipe_rule_of(&node->quantization, role)->mode == TE_SCALING_ROW &&
                   grad_weight &&
                   te_usage_of(&node->quantization, role, TE_GEMM_GRAD_WEIGHT) == TE_LINK_COLUMN,
               TE_ERROR_UNSUPPORTED,
               "linear: operand %d: scales of columns over the rows of one rank are not those of "
               "all: gather it in high precision",
               role);
    return TE_OK;
}

static int is_transposed(const te_node_desc *node)
{
    return (node->flags & TE_LINEAR_WEIGHT_TRANSPOSED) != 0;
}

/* An operand that arrives row-wise alone is transposed as it is; by the backward, so not a weight
 * whose forward reads it column-wise. */
static te_status check_row_wise(const te_graph_desc *graph, const te_node_desc *node, int role)
{
    const uint32_t flags = TE_VALUE_QUANTIZED | TE_VALUE_ROW_WISE;
    const te_value_desc *value =
        &graph->values[role == TE_GRAD_OPERAND ? node->output : node->inputs[role]];
    const te_recipe_rule *rule = te_recipe_rule_of(&node->quantization, (te_operand_role)role);
    if ((value->flags & flags) != flags ||
        (rule->mode == TE_SCALING_TENSOR && value->shape[1].add % 16 == 0 &&
         (role != TE_WEIGHT_OPERAND || !is_transposed(node)))) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID,
                   "linear: %s arrives row-wise alone: that takes one scale for the tensor, "
                   "columns (%lld) in a multiple of 16, and a weight that is not transposed",
                   value->name, (long long)value->shape[1].add);
}

te_status te_check_linear(const te_graph_desc *graph, int32_t k)
{
    const te_node_desc *node = &graph->nodes[k];
    int64_t in = graph->values[node->inputs[0]].shape[1].add;
    int64_t out = graph->values[node->output].shape[1].add;
    TE_FAIL_IF(node->inputs[1] < 0, TE_ERROR_INVALID, "linear: it has no weight");
    TE_TRY(te_check_quantization(node, "linear"));
    TE_TRY(check_fp4(graph, node));
    TE_TRY(check_outside(graph, node));
    TE_TRY(check_tiles(graph, node));
    TE_TRY(te_check_rows(graph, k, "linear", 1));
    TE_TRY(is_transposed(node)
               ? te_check_parameter(graph, node->inputs[1], "linear: weight", in, out)
               : te_check_parameter(graph, node->inputs[1], "linear: weight", out, in));
    TE_TRY(te_check_parameter(graph, node->inputs[2], "linear: bias", 0, out));
    TE_TRY(check_dtypes(graph, node));
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) TE_TRY(check_row_wise(graph, node, role));
    TE_TRY(check_gathered(graph, k, TE_INPUT_OPERAND));
    TE_TRY(check_gathered(graph, k, TE_GRAD_OPERAND));
    return check_weight(graph, node);
}
