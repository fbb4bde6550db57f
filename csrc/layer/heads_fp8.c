/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/heads_fp8.h"

#include <stdio.h>

#include "core/status.h"
#include "layer/recipe.h"

/* Slots of the scaling state, behind the node's first one. Programs know them by these numbers. */
enum { SLOT_HEADS = 2, SLOT_OUTPUT = 3, SLOT_WEIGHTS = 8 }; /* of the forward */
enum { SLOT_GRADS = 0, SLOT_GRAD_OUTPUT = 3, SLOT_GRAD_SCORES = 5 };

int te_fp8_is_cast(const te_build *build, int32_t n)
{
    return te_is_quantized(&te_node(build, n)->quantization);
}

int te_fp8_has_gradient(const te_build *build, int32_t n)
{
    return te_fp8_is_cast(build, n) && (te_node(build, n)->flags & TE_NODE_FP8_GRADIENT) != 0;
}

/* Of the input that a role is of, or is the gradient of. */
static const te_slice *slice_of(const te_build *build, int32_t n, te_heads_role role)
{
    return &te_node(build, n)->slices[te_heads_input(role)];
}

static te_heads_place place_in(const te_build *build, int32_t n, te_heads_role role)
{
    return te_heads_place_of(build->graph, te_node(build, n), role);
}

static int is_delayed(const te_node_desc *node)
{
    return te_heads_scales_of(node) == TE_SCALE_STATE;
}

/* ---- buffers ------------------------------------------------------------------------------ */

static int32_t number_of(int32_t n, te_heads_role role)
{
    return n * TE_HEADS_ROLES + (int32_t)role;
}

/* The operand that the output is, row-wise, where it is handed over; TE_NOBODY where it is not. */
static int32_t operand_of_output(const te_build *build, int32_t n)
{
    const int32_t y = te_node(build, n)->output;
    if ((te_value(build, y)->flags & TE_VALUE_QUANTIZED) == 0) return TE_NOBODY;
    for (int32_t k = n + 1; k < build->graph->node_count; k++) {
        if (te_node(build, k)->inputs[0] == y) return te_operand_of(k, TE_INPUT_OPERAND);
    }
    return TE_NOBODY;
}

/* A buffer of the node, or of the one that reads its output as it is; one of the forward is saved
 * for the backward. */
static int32_t buffer_of(te_build *build, int32_t n, te_link link, te_heads_role role)
{
    const int of_forward = role <= TE_HEADS_OUTPUT && link != TE_LINK_HEADS_WIDE;
    int32_t number = number_of(n, role), operand = TE_NOBODY;
    if (role == TE_HEADS_OUTPUT && of_forward) operand = operand_of_output(build, n);
    if (operand != TE_NOBODY) {
        number = operand;
        link = link == TE_LINK_HEADS ? TE_LINK_ROW : TE_LINK_SCALES;
    }
    return of_forward ? te_need(build, link, number) : te_get(build, link, number);
}

/* Of one cast: gradients have one for all. */
static int32_t scales_of(te_build *build, int32_t n, te_heads_role role)
{
    if (role >= TE_HEADS_GRAD_QUERY) role = TE_HEADS_GRAD_QUERY;
    return buffer_of(build, n, TE_LINK_HEADS_SCALES, place_in(build, n, role).matrix);
}

/* The heads of a role in a buffer of its value, as a matrix: their columns, or a row for each. */
static int32_t columns_of(te_build *build, int32_t n, te_heads_role role, int32_t buffer)
{
    const te_slice *slice = slice_of(build, n, role);
    const te_buffer *base = te_buffer_of(build, buffer);
    const te_extent *shape = base->info.shape;
    te_buffer_info view = {.ndim = 2,
                           .base = buffer,
                           .offset = te_constant(slice->offset),
                           .shape = {te_multiple(shape[0].symbol, shape[0].multiply * slice->heads),
                                     te_constant(slice->channels)},
                           .strides = {te_constant(slice->stride), te_constant(1)}};
    if (slice->stride == slice->channels) {
        view.shape[0] = shape[0];
        view.shape[1] = te_constant((int64_t)slice->heads * slice->channels);
        view.strides[0] = te_constant(shape[1].add);
    }
    return te_view(build, &view, "%.24s_of_%.16s", base->name, te_heads_name(role));
}

/* The FP8 matrix of a role as columns_of gives the wide one. */
static int32_t narrow_of(te_build *build, int32_t n, const te_heads_place *at)
{
    const te_slice *slice = slice_of(build, n, at->matrix);
    const int32_t buffer = buffer_of(build, n, TE_LINK_HEADS, at->matrix);
    if (at->whole || slice->stride == slice->channels) return buffer;
    return te_rows_of_heads(build, buffer, slice, te_heads_name(at->matrix));
}

int32_t te_fp8_heads(te_build *build, int32_t n, te_heads_role role)
{
    const te_heads_place at = place_in(build, n, role);
    return te_heads_of(build, n, buffer_of(build, n, TE_LINK_HEADS, at.matrix), &at.slice);
}

/* ---- stages ------------------------------------------------------------------------------- */

static te_stage *add_stage(te_build *build, int32_t n, const char *what, te_heads_role role,
                           te_op op)
{
    char name[2 * TE_NAME_BYTES];
    (void)snprintf(name, sizeof name, "%s_%s", what, te_heads_name(role));
    return te_add(build, n, te_node(build, n)->name, name, op);
}

/* Casts a matrix of a role: with a scale of the state, or one that is measured before. */
static void cast(te_build *build, int32_t n, const te_heads_place *at, int32_t wide, int slot)
{
    const te_node_desc *node = te_node(build, n);
    const int backward = at->matrix == TE_HEADS_GRAD_OUTPUT;
    const te_operand_role role = backward ? TE_GRAD_OPERAND : TE_INPUT_OPERAND;
    te_cast_to to = te_cast_nothing();
    te_stage *stage;
    to.mode = te_recipe_rule_of(&node->quantization, role)->mode;
    if (is_delayed(node)) {
        to.scale = te_get(build, TE_LINK_SCALE, node->owner);
        if (backward || (node->flags & TE_LINEAR_NO_AMAX) == 0) {
            to.history = te_get(build, TE_LINK_HISTORY, node->owner);
        }
        to.chunk = 2 * node->owner + backward;
        to.slot = node->slots[backward] + slot;
    } else {
        to.partials = te_get(build, TE_LINK_PARTIALS, 0);
        stage = add_stage(build, n, "amax", at->matrix, TE_OP_AMAX);
        te_use_as(build, stage, "input", wide);
        te_use_as(build, stage, "partials", to.partials);
        to.amax_epsilon = node->quantization.casts[role].amax_epsilon;
        to.options = node->quantization.casts[role].options;
    }
    to.row = narrow_of(build, n, at);
    to.row_scales = scales_of(build, n, at->matrix);
    stage = add_stage(build, n, "quantize", at->matrix, TE_OP_QUANTIZE);
    te_use_as(build, stage, "input", wide);
    te_ask_cast(build, stage, &to);
}

void te_fp8_cast_inputs(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    for (int i = 0; i < TE_HEADS_INPUTS; i++) {
        const te_heads_place at = place_in(build, n, (te_heads_role)i);
        int32_t wide;
        if ((int)at.matrix != i) continue;
        wide = te_wide(build, at.value, node->name, "attention_input");
        if (!at.whole) wide = columns_of(build, n, at.matrix, wide);
        cast(build, n, &at, wide, SLOT_HEADS);
    }
}

void te_fp8_cast_grad(te_build *build, int32_t n, int32_t grad)
{
    const te_heads_place at = place_in(build, n, TE_HEADS_GRAD_OUTPUT);
    cast(build, n, &at, grad, SLOT_GRAD_OUTPUT);
}

/* Lets a slot of the state fill fields; "" where there is none. */
static void use_slot(te_build *build, int32_t n, te_stage *stage, const char *scale,
                     const char *amax, int slot)
{
    const te_node_desc *node = te_node(build, n);
    const int backward = build->direction != TE_DIRECTION_FORWARD;
    const int32_t chunk = 2 * node->owner + backward, at = node->slots[backward] + slot;
    if (scale[0] != '\0') {
        te_use_slot(build, stage, scale, te_get(build, TE_LINK_SCALE, node->owner), chunk, at);
    }
    if (!backward && (node->flags & TE_LINEAR_NO_AMAX) != 0) return;
    te_use_slot(build, stage, amax, te_get(build, TE_LINK_HISTORY, node->owner), chunk, at);
}

void te_fp8_use_scales(te_build *build, int32_t n, te_stage *stage)
{
    te_use_as(build, stage, "query_scales", scales_of(build, n, TE_HEADS_QUERY));
    te_use_as(build, stage, "key_scales", scales_of(build, n, TE_HEADS_KEY));
    te_use_as(build, stage, "value_scales", scales_of(build, n, TE_HEADS_VALUE));
    te_use_as(build, stage, "output_scales", scales_of(build, n, TE_HEADS_OUTPUT));
    if (build->direction == TE_DIRECTION_FORWARD) {
        if (!is_delayed(te_node(build, n))) return;
        use_slot(build, n, stage, "output_scale", "output_amax", SLOT_OUTPUT);
        use_slot(build, n, stage, "", "weights_amax", SLOT_WEIGHTS);
        return;
    }
    te_use_as(build, stage, "grad_output_scales", scales_of(build, n, TE_HEADS_GRAD_OUTPUT));
    te_use_as(build, stage, "grads_scales", scales_of(build, n, TE_HEADS_GRAD_QUERY));
    use_slot(build, n, stage, "grad_scores_scale", "grad_scores_amax", SLOT_GRAD_SCORES);
    use_slot(build, n, stage, "grads_scale", "grads_amax", SLOT_GRADS);
}

/* ---- high precision again ----------------------------------------------------------------- */

static void read_again(te_build *build, int32_t n, const te_heads_place *at, int32_t wide)
{
    te_stage *stage = add_stage(build, n, "dequantize", at->matrix, TE_OP_DEQUANTIZE);
    te_use_as(build, stage, "output", wide);
    te_set_number(build, stage, "mode", TE_SCALING_TENSOR);
    te_use_as(build, stage, "row", narrow_of(build, n, at));
    te_use_as(build, stage, "row_scales", scales_of(build, n, at->matrix));
}

int32_t te_fp8_heads_again(te_build *build, int32_t n, te_heads_role role)
{
    const te_heads_place at = place_in(build, n, role);
    const int32_t number = number_of(n, at.matrix);
    int32_t wide = te_find(build, TE_LINK_HEADS_WIDE, number);
    if (wide == TE_NO_BUFFER) {
        wide = te_get(build, TE_LINK_HEADS_WIDE, number);
        read_again(build, n, &(te_heads_place){at.matrix, at.value, 1, at.slice}, wide);
    }
    return te_heads_of(build, n, wide, &at.slice);
}

void te_fp8_read_output(te_build *build, int32_t n)
{
    const te_heads_place at = place_in(build, n, TE_HEADS_OUTPUT);
    const uint32_t in_fp8 = TE_VALUE_QUANTIZED | TE_VALUE_RETURN_QUANTIZED;
    if ((te_value(build, at.value)->flags & in_fp8) != 0) return;
    read_again(build, n, &at, te_get(build, TE_LINK_VALUE, te_node(build, n)->output));
}

void te_fp8_read_grads(te_build *build, int32_t n)
{
    for (int i = 0; i < TE_HEADS_INPUTS; i++) {
        const te_heads_role role = (te_heads_role)(TE_HEADS_GRAD_QUERY + i);
        const te_heads_place at = place_in(build, n, role);
        int32_t grad;
        if (at.matrix != role || !build->values[at.value].needs_grad) continue;
        grad = te_grad_matrix(build, at.value);
        if (!at.whole) grad = columns_of(build, n, role, grad);
        read_again(build, n, &at, grad);
    }
}

/* Whether heads are the rows of a matrix: side by side in a row, or all that there is of it. */
static int are_rows(const te_slice *slice, int64_t columns)
{
    return slice->stride == slice->channels || slice->heads * slice->stride == columns;
}

/* ---- checks ------------------------------------------------------------------------------- */

te_status te_fp8_check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_quantization *q = &node->quantization;
    const int fp8_gradient = (node->flags & TE_NODE_FP8_GRADIENT) != 0;
    if (!te_is_quantized(q)) {
        if (!fp8_gradient) return TE_OK;
        return TE_FAIL(TE_ERROR_INVALID, "attention: TE_NODE_FP8_GRADIENT without a recipe");
    }
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        int32_t recipe = q->casts[role].recipe;
        if (te_recipe_rule_of(q, (te_operand_role)role)->mode == TE_SCALING_TENSOR &&
            recipe == q->casts[0].recipe) {
            continue;
        }
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "attention: recipes %d and %d, expected one with a scale of a whole tensor",
                       q->casts[0].recipe, recipe);
    }
    TE_TRY(te_check_quantization(node, "attention"));
    TE_FAIL_IF(q->backward != TE_BACKWARD_QUANTIZED, TE_ERROR_INVALID,
               "attention: backward = %d, expected 0: TE_NODE_FP8_GRADIENT chooses its backward",
               q->backward);
    for (int i = TE_HEADS_INPUTS; i < node->input_count; i++) {
        const char *limit = node->inputs[i] < 0 ? NULL : graph->values[node->inputs[i]].name;
        const te_value_desc *value = limit == NULL ? NULL : &graph->values[node->inputs[i]];
        if (value == NULL || value->dtype == TE_DTYPE_I32 || value->dtype == TE_DTYPE_I64) continue;
        return TE_FAIL(TE_ERROR_INVALID, "attention: %s does not go with FP8", limit);
    }
    for (int i = 0; i < TE_HEADS_INPUTS; i++) {
        const te_value_desc *value = &graph->values[node->inputs[i]];
        const te_heads_place at = te_heads_place_of(graph, node, (te_heads_role)i);
        if (value->ndim == 2 && (at.whole || are_rows(&node->slices[i], value->shape[1].add))) {
            continue;
        }
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "attention: heads of %s, which FP8 can not cast as one matrix", value->name);
    }
    if (!fp8_gradient || (is_delayed(node) && node->numbers[1] == 0.0)) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID,
                   "attention: recipe %d, dropout %g with TE_NODE_FP8_GRADIENT, expected delayed "
                   "scaling (1) and no dropout",
                   q->casts[0].recipe, node->numbers[1]);
}
