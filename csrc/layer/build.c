/* SPDX-License-Identifier: Apache-2.0
 *
 * build.c - what the nodes of a graph are built with: pending values and gradients, stages by the
 * names of their fields. Their buffers are buffers.c's, parts of these views.c's.
 */
#include "layer/build.h"

#include <string.h>

#include "core/fields.h"
#include "core/status.h"
#include "layer/collective.h"
#include "layer/recipe.h"

/* ---- values ------------------------------------------------------------------------------- */

/* Whether a node casts this input of its, so that it need not be there in high precision. */
static int reads_forms(const te_node_desc *node, int input)
{
    const te_quantization *q = &node->quantization;
    if (node->kind != TE_NODE_LINEAR || input != TE_INPUT_OPERAND) return te_is_quantized(q);
    return te_recipe_rule_of(q, TE_INPUT_OPERAND)->mode != TE_SCALING_NONE;
}

int te_is_read(const te_build *build, int32_t value, int quantized)
{
    for (int32_t n = 0; n < build->graph->node_count; n++) {
        const te_node_desc *node = te_node(build, n);
        const int passes = te_collective_is_copy(build->graph, n) ||
                           te_collective_gathers_forms(build->graph, n, TE_COLLECTIVE_FORWARD);
        for (int i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != value) continue;
            if (passes ? te_is_read(build, node->output, quantized)
                       : reads_forms(node, i) == quantized) {
                return 1;
            }
        }
    }
    return 0;
}

/* Whether a later plan repeats the node that makes a value rather than read what was saved. */
static int is_repeated(const te_build *build, int32_t value)
{
    return (build->graph->flags & TE_GRAPH_RECOMPUTE) != 0 ||
           te_collective_does(build->graph, build->values[value].producer, TE_COLLECTIVE_FORWARD) ==
               TE_DOES_GATHER;
}

void te_make_again(te_build *build, int32_t value)
{
    te_value_state *state = &build->values[value];
    const te_node_rules *rules;
    int there;
    if (state->producer == TE_NOBODY || state->pending != TE_NOBODY) return;
    rules = te_rules_of(build, state->producer);
    there = (te_value(build, value)->flags & TE_VALUE_RESULT) != 0 ||
            te_find(build, TE_LINK_VALUE, value) != TE_NO_BUFFER;
    /* What can not be had again for one pass is given or saved, unless nothing is. What can be is,
     * though it be there: cast from high precision it would have other bits than the forward's,
     * which a rounded one has been cast from. */
    if ((rules->produce == NULL || te_is_rounded(build, value)) &&
        (there || !is_repeated(build, value))) {
        return;
    }
    rules->again(build, state->producer);
    if (te_is_rounded(build, value)) te_write_pending(build, value);
}

void te_write_pending(te_build *build, int32_t value)
{
    te_value_state *state = &build->values[value];
    const int32_t n = state->pending;
    if (n == TE_NOBODY) return;
    (void)te_wide(build, value, te_node(build, n)->name, te_rules_of(build, n)->name);
    state->pending = TE_NOBODY;
}

int32_t te_wide(te_build *build, int32_t value, const char *prefix, const char *name)
{
    te_value_state *state = &build->values[value];
    int forward = build->direction == TE_DIRECTION_FORWARD;
    int given = !forward && ((te_value(build, value)->flags & TE_VALUE_RESULT) != 0 ||
                             te_links_has(&build->saved, TE_LINK_VALUE, value));
    const te_node_rules *rules;
    te_cast_to cast = te_cast_nothing();
    te_stage *stage;
    if (given || te_find(build, TE_LINK_VALUE, value) != TE_NO_BUFFER) {
        return te_get(build, TE_LINK_VALUE, value);
    }
    if (!forward && state->pending == TE_NOBODY && state->producer != TE_NOBODY) {
        if (!is_repeated(build, value)) return te_need(build, TE_LINK_VALUE, value);
        te_make_again(build, value);
    }
    if (state->pending == TE_NOBODY || te_find(build, TE_LINK_VALUE, value) != TE_NO_BUFFER) {
        return te_get(build, TE_LINK_VALUE, value);
    }
    rules = te_rules_of(build, state->pending);
    stage = rules->produce(build, state->pending, prefix, name, state->again);
    cast.wide = te_get(build, TE_LINK_VALUE, value);
    te_ask_cast(build, stage, &cast);
    return cast.wide;
}

/* ---- gradients ---------------------------------------------------------------------------- */

/* Link of a contribution: the first is the gradient's own buffer. */
static int32_t contribution(te_build *build, int32_t value, int32_t number)
{
    if (number == 0) return te_get(build, TE_LINK_GRADIENT, value);
    return te_get(build, TE_LINK_PART, value + number * build->graph->value_count);
}

int te_has_grad(const te_build *build, int32_t value)
{
    return build->values[value].grads > 0;
}

int32_t te_grad_target(te_build *build, int32_t value)
{
    te_value_state *state = &build->values[value];
    const int32_t copied = te_collective_copied(build->graph, value);
    if (copied == TE_NOBODY) return contribution(build, value, state->grads++);
    state->grads = 1;
    state->grad_alias = te_grad_target(build, copied);
    return state->grad_alias;
}

void te_grad_pass(te_build *build, int32_t value, int32_t grad)
{
    te_value_state *state = &build->values[value];
    if (state->grads == 0 && !te_links_has(&build->deferred, TE_LINK_GRADIENT, value)) {
        state->grad_alias = grad;
        state->grads = 1;
        return;
    }
    te_sum(build, grad, TE_NO_BUFFER, te_grad_target(build, value));
}

int32_t te_grad_matrix(te_build *build, int32_t value)
{
    return te_has_grad(build, value) ? te_get(build, TE_LINK_GRADIENT, value)
                                     : te_grad_target(build, value);
}

int32_t te_grad_heads(te_build *build, int32_t node, int32_t value, const te_slice *slice)
{
    return te_heads_of(build, node, te_grad_matrix(build, value), slice);
}

int te_grad_is_own(const te_build *build, int32_t value, int32_t buffer)
{
    const te_buffer_info *info = &te_buffer_of(build, buffer)->info;
    if (info->role != TE_ROLE_SCRATCH || info->link != TE_LINK_GRADIENT || info->of != value) {
        return 0;
    }
    for (int32_t v = 0; v < build->graph->value_count; v++) {
        if (v != value && build->values[v].grad_alias == buffer) return 0;
    }
    return 1;
}

static void contributions(te_build *build, int32_t value, int32_t pair[2])
{
    const te_value_state *state = &build->values[value];
    pair[0] = contribution(build, value, 0);
    pair[1] = state->grads > 1 ? contribution(build, value, 1) : TE_NO_BUFFER;
    for (int32_t n = 2; n < state->grads;
         n++) { /* as autograd does: in their dtype, as they came */
        te_sum(build, pair[1], pair[0], pair[1]);
        pair[0] = pair[1];
        pair[1] = contribution(build, value, n);
    }
}

void te_grad_pair(te_build *build, int32_t value, int32_t pair[2])
{
    if (build->values[value].grad_pending == TE_NOBODY && !te_is_rounded(build, value)) {
        contributions(build, value, pair);
        return;
    }
    pair[0] = te_grad(build, value);
    pair[1] = TE_NO_BUFFER;
}

int32_t te_grad(te_build *build, int32_t value)
{
    te_value_state *state = &build->values[value];
    int32_t pair[2], sum;
    if (state->grad_pending != TE_NOBODY) {
        const te_node_desc *node = te_node(build, state->grad_pending);
        te_cast_to cast = te_cast_nothing();
        te_stage *stage = te_rules_of(build, state->grad_pending)
                              ->produce_grad(build, state->grad_pending, node->name,
                                             te_rules_of(build, state->grad_pending)->name);
        cast.wide = te_get(build, TE_LINK_GRADIENT, value);
        te_ask_cast(build, stage, &cast);
        state->grad_pending = TE_NOBODY;
        return cast.wide;
    }
    contributions(build, value, pair);
    if (pair[1] == TE_NO_BUFFER) return pair[0];
    state->grad_alias = TE_NO_BUFFER;
    sum = te_get(build, te_grad_link(build, value), value);
    te_sum(build, pair[1], pair[0], sum);
    state->grads = 1;
    state->grad_alias = sum;
    return sum;
}

int32_t te_grad_joined(te_build *build, int32_t value, int32_t *other)
{
    te_value_state *state = &build->values[value];
    int paired = /* its maker adds two contributions without rounding, see te_grad_pair */
        state->producer != TE_NOBODY && te_node(build, state->producer)->kind == TE_NODE_NORM &&
        !te_is_rounded(build, value);
    *other = TE_NO_BUFFER;
    if (state->grads != 1 || state->grad_pending != TE_NOBODY || paired) {
        return te_grad_target(build, value);
    }
    *other = contribution(build, value, 0);
    state->grad_alias = TE_NO_BUFFER;
    state->grad_alias = te_get(build, te_grad_link(build, value), value);
    return state->grad_alias;
}

te_link te_grad_link(const te_build *build, int32_t value)
{
    int given = (te_value(build, value)->flags & TE_VALUE_RESULT) != 0;
    return given && build->values[value].readers > 0 ? TE_LINK_PART : TE_LINK_GRADIENT;
}

int32_t te_parameter_grad(te_build *build, int32_t value)
{
    uint32_t flags = value < 0 ? 0 : te_value(build, value)->flags;
    int put_off = (flags & TE_VALUE_DEFER) != 0;
    if ((flags & TE_VALUE_GRADIENT) == 0) return TE_NO_BUFFER;
    if (put_off != (build->direction == TE_DIRECTION_DEFERRED)) return TE_NO_BUFFER;
    return te_get(build, TE_LINK_GRADIENT, value);
}

/* ---- stages ------------------------------------------------------------------------------- */

te_stage *te_add(te_build *build, int32_t node, const char *prefix, const char *name, te_op op)
{
    te_stage *stage = te_plan_add_stage(&build->plan, prefix, name, op);
    stage->node = node;
    return stage;
}

te_stage *te_add_outside(te_build *build, int32_t node, const char *prefix, const char *name,
                         int32_t step)
{
    te_stage *stage = te_add(build, node, prefix, name, TE_OP_FILL);
    stage->external = 1;
    stage->step = step;
    stage->halved = te_is_halved(te_node(build, node), step);
    return stage;
}

static int field_number(te_build *build, const te_stage *stage, const char *name)
{
    const te_op_info *info = te_op_describe(stage->op);
    for (int32_t f = 0; f < info->field_count; f++) {
        if (strcmp(info->fields[f].name, name) == 0) return f;
    }
    build->plan.status = TE_FAIL(TE_ERROR_STATE, "stage %s: operator %s has no field %s",
                                 stage->name, te_op_name(stage->op), name);
    return 0;
}

void te_use_as(te_build *build, te_stage *stage, const char *field, int32_t buffer)
{
    if (buffer == TE_NO_BUFFER) return;
    te_stage_use_at(&build->plan, stage, field_number(build, stage, field), buffer, 0, 0);
}

void te_use_value(te_build *build, te_stage *stage, const char *field, int32_t value)
{
    if (value >= 0) te_use_as(build, stage, field, te_get(build, TE_LINK_VALUE, value));
}

void te_use_slot(te_build *build, te_stage *stage, const char *field, int32_t buffer, int32_t chunk,
                 int32_t slot)
{
    te_stage_use_at(&build->plan, stage, field_number(build, stage, field), buffer, slot,
                    1 + chunk);
}

void te_use_size(te_build *build, te_stage *stage, const char *field, int32_t symbol)
{
    te_stage_use_at(&build->plan, stage, field_number(build, stage, field), TE_NO_BUFFER, symbol,
                    0);
}

void te_convert(te_build *build, int32_t n, const char *name, int32_t input, int32_t output)
{
    te_stage *stage = te_add(build, n, te_node(build, n)->name, name, TE_OP_CAST);
    te_use_as(build, stage, "input", input);
    te_use_as(build, stage, "output", output);
}

void te_sum(te_build *build, int32_t input, int32_t residual, int32_t output)
{
    const char *name = residual == TE_NO_BUFFER ? "copy_gradient" : "add_gradients";
    te_stage *stage = te_add(build, TE_NOBODY, "", name, TE_OP_DROPOUT_ADD);
    te_use_as(build, stage, "input", input);
    te_use_as(build, stage, "residual", residual);
    te_use_as(build, stage, "output", output);
}

void te_set_number(te_build *build, te_stage *stage, const char *field, double value)
{
    int f = field_number(build, stage, field);
    te_field_set_number(&te_op_describe(stage->op)->fields[f], stage->args, value);
}

te_cast_to te_cast_nothing(void)
{
    return (te_cast_to){
#define X(name) .name = TE_NO_BUFFER,
        TE_CAST_BUFFERS(X)
#undef X
            .scale = TE_NO_BUFFER,
        .history = TE_NO_BUFFER, .given = TE_NO_BUFFER};
}

static int has(const te_cast_to *cast, uint32_t option)
{
    return (cast->options & option) != 0;
}

void te_ask_cast(te_build *build, te_stage *stage, const te_cast_to *cast)
{
#define X(name) te_use_as(build, stage, #name, cast->name);
    TE_CAST_BUFFERS(X)
#undef X
    if (cast->mode == TE_SCALING_NONE) return;
    te_set_number(build, stage, "mode", cast->mode);
    te_set_number(build, stage, "amax_epsilon", (double)cast->amax_epsilon);
    te_set_number(build, stage, "power_2_scale", has(cast, TE_CAST_POWER_2));
    te_set_number(build, stage, "square", cast->square);
    te_set_number(build, stage, "hadamard", te_hadamard_of(cast->options));
    te_set_number(build, stage, "margin", cast->margin);
    te_set_number(build, stage, "four_over_six",
                  !has(cast, TE_CAST_FOUR_OVER_SIX) ? TE_FOUR_OVER_SIX_NONE
                  : has(cast, TE_CAST_SQUARED)      ? TE_FOUR_OVER_SIX_MSE
                                                    : TE_FOUR_OVER_SIX_MAE);
    te_set_number(build, stage, "scales_to_256", has(cast, TE_CAST_TO_256));
    te_set_number(build, stage, "row_scaled", has(cast, TE_CAST_ROW_SCALED));
    if (cast->given != TE_NO_BUFFER) {
        te_stage_use_at(&build->plan, stage, field_number(build, stage, "scale"), cast->given,
                        TE_SCALES_SCALE, 0);
    } else if (cast->scale != TE_NO_BUFFER) {
        te_use_slot(build, stage, "scale", cast->scale, cast->chunk, cast->slot);
    }
    if (cast->history == TE_NO_BUFFER) return;
    te_use_slot(build, stage, "amax", cast->history, cast->chunk, cast->slot);
}
