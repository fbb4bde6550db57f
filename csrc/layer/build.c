/* SPDX-License-Identifier: Apache-2.0
 *
 * build.c - what the nodes of a graph are built with: buffers by link, pending values and
 * gradients, stages by the names of their fields.
 */
#include "layer/build.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/scales.h"
#include "core/fields.h"
#include "core/status.h"
#include "core/tensor.h"
#include "layer/heads_place.h"
#include "layer/recipe.h"

int te_links_has(const te_links *links, te_link link, int32_t of)
{
    for (int32_t i = 0; i < links->count; i++) {
        if (links->items[i].link == link && links->items[i].of == of) return 1;
    }
    return 0;
}

static void add_link(te_build *build, te_links *links, te_link link, int32_t of)
{
    if (te_links_has(links, link, of)) return;
    if (links->count == links->capacity) {
        int32_t wanted = links->capacity == 0 ? 16 : 2 * links->capacity;
        void *grown = realloc(links->items, (size_t)wanted * sizeof *links->items);
        if (grown == NULL) {
            build->plan.status = TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
            return;
        }
        links->items = grown;
        links->capacity = wanted;
    }
    links->items[links->count].link = link;
    links->items[links->count++].of = of;
}

/* ---- buffers ------------------------------------------------------------------------------ */

/* The value whose quantized form an operand is. */
static int32_t value_of_operand(const te_build *build, int32_t of)
{
    const te_node_desc *node = te_node(build, of / TE_OPERAND_ROLES);
    return of % TE_OPERAND_ROLES == TE_GRAD_OPERAND ? node->output
                                                    : node->inputs[of % TE_OPERAND_ROLES];
}

/* TE_VALUE_QUANTIZED and TE_VALUE_KEEP_QUANTIZED are said of what a call is given: of an input or
 * parameter, or of the gradient of a result. */
static uint32_t flags_of_operand(const te_build *build, int32_t of)
{
    uint32_t flags = te_value(build, value_of_operand(build, of))->flags;
    int gradient = of % TE_OPERAND_ROLES == TE_GRAD_OPERAND;
    return ((flags & TE_VALUE_RESULT) != 0) == gradient ? flags : 0;
}

int te_operand_arrives(const te_build *build, int32_t of)
{
    te_direction cast =
        of % TE_OPERAND_ROLES == TE_GRAD_OPERAND ? TE_DIRECTION_BACKWARD : TE_DIRECTION_FORWARD;
    uint32_t flags = TE_VALUE_QUANTIZED;
    if (build->direction > cast) flags |= TE_VALUE_KEEP_QUANTIZED;
    return (flags_of_operand(build, of) & flags) != 0;
}

int te_operand_is_kept(const te_build *build, int32_t of)
{
    return (flags_of_operand(build, of) & TE_VALUE_KEEP_QUANTIZED) != 0 &&
           !te_operand_arrives(build, of);
}

/* A made-up name: prefix of the node, name of the operand, form. */
static const char *const operand_names[] = {"input", "weight", "grad_output"};
static const char *const form_names[TE_LINK_COUNT] = {[TE_LINK_ROW] = "_row",
                                                      [TE_LINK_COLUMN] = "_column",
                                                      [TE_LINK_SCALES] = "_scales",
                                                      [TE_LINK_ROW_SCALES] = "_row_scales",
                                                      [TE_LINK_COLUMN_SCALES] = "_column_scales",
                                                      [TE_LINK_ROW_AMAX] = "_row_amax",
                                                      [TE_LINK_COLUMN_AMAX] = "_column_amax"};

/* dtype, shape and name of a buffer, whatever plan it is in. `name` has room for them. */
static void describe(const te_build *build, te_link link, int32_t of, te_buffer_info *info,
                     char *name, size_t size)
{
    const uint32_t into_caller = TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE;
    const te_graph_desc *graph = build->graph;
    const te_value_desc *value;
    const te_node_desc *node;
    memset(info, 0, sizeof *info);
    info->link = link;
    info->of = of;
    info->name = name;
    info->dtype = TE_DTYPE_F32;
    info->ndim = 1;
    info->shape[1] = te_constant(1);
    switch (link) {
    case TE_LINK_VALUE:
    case TE_LINK_GRADIENT:
    case TE_LINK_PART:
        value = &graph->values[of % graph->value_count];
        info->dtype = (te_dtype)value->dtype;
        if (link == TE_LINK_GRADIENT && (value->flags & TE_VALUE_PARAMETER) != 0) {
            info->dtype = (te_dtype)value->grad_dtype;
        }
        info->leading = (value->flags & TE_VALUE_LEADING) != 0;
        info->ndim = value->ndim;
        memcpy(info->shape, value->shape, sizeof info->shape);
        (void)snprintf(name, size, "%s%s",
                       link == TE_LINK_VALUE                ? ""
                       : link == TE_LINK_PART               ? "part_"
                       : (value->flags & into_caller) != 0U ? "main_grad_"
                                                            : "grad_",
                       value->name);
        return;
    case TE_LINK_ROW:
    case TE_LINK_COLUMN:
    case TE_LINK_SCALES:
    case TE_LINK_ROW_SCALES:
    case TE_LINK_COLUMN_SCALES:
    case TE_LINK_ROW_AMAX:
    case TE_LINK_COLUMN_AMAX:
        node = te_node(build, of / TE_OPERAND_ROLES);
        value = te_value(build, value_of_operand(build, of));
        te_describe_form(&node->quantization, (te_operand_role)(of % TE_OPERAND_ROLES), link,
                         value->shape, info);
        (void)snprintf(name, size, "%s%s%s", node->name, operand_names[of % TE_OPERAND_ROLES],
                       form_names[link]);
        return;
    case TE_LINK_MEAN:
    case TE_LINK_RSIGMA:
        node = te_node(build, of);
        info->shape[0] = te_value(build, node->output)->shape[0];
        if (node->slice_count > 0) info->shape[0].multiply *= node->slices[0].heads;
        (void)snprintf(name, size, "%s%s", node->name, link == TE_LINK_MEAN ? "mean" : "rsigma");
        return;
    case TE_LINK_BIAS_CAST:
        node = te_node(build, of);
        value = te_value(build, node->output);
        info->dtype = te_bias_dtype(&node->quantization, (te_dtype)value->dtype);
        info->shape[0] = value->shape[1];
        (void)snprintf(name, size, "%sbias_cast", node->name);
        return;
    case TE_LINK_GATHERED:
        node = te_node(build, of);
        te_describe_form(&node->quantization, TE_INPUT_OPERAND, TE_LINK_ROW,
                         te_value(build, node->inputs[0])->shape, info);
        info->shape[0].multiply *= node->gather;
        (void)snprintf(name, size, "%sinput_gathered", node->name);
        return;
    case TE_LINK_STATISTICS:
        node = te_node(build, of);
        info->ndim = 2;
        info->shape[0] = te_value(build, node->output)->shape[0];
        info->shape[1] = te_constant(node->slices[0].heads);
        (void)snprintf(name, size, "%sstatistics", node->name);
        return;
    case TE_LINK_HEADS:
    case TE_LINK_HEADS_SCALES:
    case TE_LINK_HEADS_WIDE:
        node = te_node(build, of / TE_HEADS_ROLES);
        te_heads_describe(graph, node, link, (te_heads_role)(of % TE_HEADS_ROLES), info);
        (void)snprintf(name, size, "%s%s%s", node->name,
                       te_heads_name((te_heads_role)(of % TE_HEADS_ROLES)),
                       link == TE_LINK_HEADS          ? "_fp8"
                       : link == TE_LINK_HEADS_SCALES ? "_scales"
                                                      : "_again");
        return;
    case TE_LINK_RNG:
        info->dtype = TE_DTYPE_I64;
        info->shape[0] = te_constant(2);
        (void)snprintf(name, size, "%srng", te_node(build, of)->name);
        return;
    case TE_LINK_PARTIALS:
        info->shape[0] = te_constant(TE_AMAX_PARTIALS);
        (void)snprintf(name, size, of == 0 ? "partials" : "column_partials");
        return;
    case TE_LINK_HISTORY:
        info->ndim = 2;
        info->shape[1] = te_constant(TE_ANY_LENGTH);
        info->written = 1;
        info->shape[0] = te_constant(TE_ANY_LENGTH);
        (void)snprintf(name, size, of == 0 ? "history" : "history_%d", of);
        return;
    default:
        info->shape[0] = te_constant(TE_ANY_LENGTH);
        (void)snprintf(name, size, of == 0 ? "scale" : "scale_%d", of);
        return;
    }
}

static te_buffer_role role_of_value(const te_build *build, int32_t of)
{
    uint32_t flags = te_value(build, of)->flags;
    if ((flags & TE_VALUE_PARAMETER) != 0) return TE_ROLE_PARAMETER;
    if ((flags & TE_VALUE_INPUT) != 0) return TE_ROLE_INPUT;
    if ((flags & TE_VALUE_RESULT) == 0) return TE_ROLE_SCRATCH;
    return build->direction == TE_DIRECTION_FORWARD ? TE_ROLE_OUTPUT : TE_ROLE_INPUT;
}

static te_buffer_role role_of_gradient(const te_build *build, int32_t of)
{
    uint32_t flags = te_value(build, of)->flags;
    if ((flags & (TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE)) != 0) return TE_ROLE_STATE;
    if ((flags & (TE_VALUE_PARAMETER | TE_VALUE_INPUT)) != 0) return TE_ROLE_OUTPUT;
    return (flags & TE_VALUE_RESULT) != 0 ? TE_ROLE_INPUT : TE_ROLE_SCRATCH;
}

int te_operand_is_transposed(const te_build *build, int32_t of)
{
    return (flags_of_operand(build, of) & TE_VALUE_ROW_WISE) != 0;
}

static te_buffer_role role_of_form(const te_build *build, te_link form, int32_t of)
{
    if (form == TE_LINK_COLUMN && te_operand_is_transposed(build, of)) return TE_ROLE_SCRATCH;
    if (te_operand_is_kept(build, of)) return TE_ROLE_OUTPUT;
    if (!te_operand_arrives(build, of)) return TE_ROLE_SCRATCH;
    return of % TE_OPERAND_ROLES == TE_WEIGHT_OPERAND ? TE_ROLE_PARAMETER : TE_ROLE_INPUT;
}

static te_buffer_role role_of(const te_build *build, te_link link, int32_t of)
{
    te_buffer_role role = TE_ROLE_SCRATCH;
    if (link == TE_LINK_VALUE) role = role_of_value(build, of);
    if (link == TE_LINK_GRADIENT) role = role_of_gradient(build, of);
    if (link == TE_LINK_SCALE || link == TE_LINK_HISTORY) role = TE_ROLE_STATE;
    if (form_names[link] != NULL) role = role_of_form(build, link, of);
    if (role != TE_ROLE_SCRATCH) return role;
    if (te_links_has(&build->saved, link, of)) return TE_ROLE_SAVED;
    if (build->direction == TE_DIRECTION_FORWARD || !te_links_has(&build->deferred, link, of)) {
        return role;
    }
    return build->direction == TE_DIRECTION_BACKWARD ? TE_ROLE_OUTPUT : TE_ROLE_INPUT;
}

int32_t te_find(const te_build *build, te_link link, int32_t of)
{
    if (link == TE_LINK_GRADIENT && build->values[of].grad_alias != TE_NO_BUFFER) {
        return build->values[of].grad_alias;
    }
    for (int32_t i = 0; i < build->plan.buffer_count; i++) {
        const te_buffer_info *info = &build->plan.buffers[i].info;
        if (info->role == TE_ROLE_VIEW) continue;
        if (info->link == link && info->of == of) return i;
    }
    return TE_NO_BUFFER;
}

static int32_t add(te_build *build, te_link link, int32_t of, te_buffer_role role)
{
    char name[2 * TE_NAME_BYTES];
    te_buffer_info info;
    describe(build, link, of, &info, name, sizeof name);
    info.role = role;
    if (role == TE_ROLE_STATE && link == TE_LINK_GRADIENT) info.written = 1;
    if (role == TE_ROLE_INPUT && link == TE_LINK_ROW) { /* in place of the value */
        info.leading =
            (te_value(build, value_of_operand(build, of))->flags & TE_VALUE_LEADING) != 0;
    }
    return te_plan_add_buffer(&build->plan, &info);
}

int32_t te_get(te_build *build, te_link link, int32_t of)
{
    int32_t found = te_find(build, link, of);
    return found != TE_NO_BUFFER ? found : add(build, link, of, role_of(build, link, of));
}

int32_t te_need(te_build *build, te_link link, int32_t of)
{
    te_buffer_role role = role_of(build, link, of);
    int32_t found = te_find(build, link, of);
    if (found != TE_NO_BUFFER) return found;
    if (role != TE_ROLE_SCRATCH) return add(build, link, of, role);
    add_link(build, &build->saved, link, of);
    return add(build, link, of, TE_ROLE_SAVED);
}

int32_t te_defer(te_build *build, te_link link, int32_t of)
{
    add_link(build, &build->deferred, link, of);
    return te_get(build, link, of);
}

int32_t te_view(te_build *build, const te_buffer_info *view)
{
    te_buffer_info info = *view;
    const te_buffer_info *base;
    if (build->plan.status != TE_OK) return 0;
    base = &build->plan.buffers[view->base].info;
    info.role = TE_ROLE_VIEW;
    info.link = base->link;
    info.of = base->of;
    info.dtype = base->dtype;
    for (int32_t i = 0; i < build->plan.buffer_count; i++) {
        const te_buffer_info *known = &build->plan.buffers[i].info;
        if (known->role == TE_ROLE_VIEW && known->base == info.base && known->view == info.view &&
            known->offset == info.offset && known->ndim == info.ndim &&
            memcmp(known->shape, info.shape, sizeof info.shape) == 0 &&
            memcmp(known->strides, info.strides, sizeof info.strides) == 0) {
            return i;
        }
    }
    return te_plan_add_buffer(&build->plan, &info);
}

/* Of packed sequences: [1, tokens, heads, channels] for attention, else without the 1. */
static int32_t packed_heads_of(te_build *build, int32_t n, te_buffer_info *info,
                               const te_slice *slice)
{
    const te_buffer_info *matrix = &build->plan.buffers[info->base].info;
    const int attends = te_node(build, n)->kind == TE_NODE_ATTENTION;
    te_extent *shape = &info->shape[attends], *strides = &info->strides[attends];
    const int32_t rows = matrix->shape[0].symbol;
    const int64_t columns = matrix->shape[1].add;
    info->ndim = 3 + attends;
    info->shape[0] = te_constant(1);
    info->strides[0] = te_multiple(rows, columns);
    shape[0] = te_multiple(rows, 1);
    shape[1] = te_constant(te_slice_blocks(slice));
    shape[2] = te_constant(te_slice_width(slice));
    strides[0] = te_constant(columns);
    strides[1] = te_constant(slice->stride);
    strides[2] = te_constant(1);
    return te_view(build, info);
}

/* Of a buffer of heads: itself, or as the node's order of memory has it. */
static int32_t whole_heads_of(te_build *build, int32_t n, int32_t base)
{
    const te_buffer_info *heads = &build->plan.buffers[base].info;
    const uint32_t flags = te_node(build, n)->flags;
    te_buffer_info info = {.ndim = 4, .base = base, .view = TE_VIEW_EXCHANGED};
    char name[2 * TE_NAME_BYTES];
    (void)snprintf(name, sizeof name, "%.24s_heads", build->plan.buffers[base].name);
    info.name = name;
    if ((flags & TE_NODE_PACKED) != 0) {
        info.view = TE_VIEW_BATCH;
        info.shape[0] = te_constant(1);
        memcpy(&info.shape[1], heads->shape, 3 * sizeof info.shape[0]);
        return te_view(build, &info);
    }
    if ((flags & TE_NODE_SEQUENCE_FIRST) == 0) return base;
    memcpy(info.shape, heads->shape, sizeof info.shape);
    info.shape[0] = heads->shape[1];
    info.shape[1] = heads->shape[0];
    return te_view(build, &info);
}

int32_t te_heads_of(te_build *build, int32_t n, int32_t matrix, const te_slice *slice)
{
    te_buffer_info info = {.ndim = 4, .base = matrix, .offset = slice->offset};
    const te_node_desc *node = te_node(build, n);
    int first = (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    char name[2 * TE_NAME_BYTES];
    int64_t columns;
    int32_t rows, outer = first ? 1 : 0; /* the dim of the first leading one */
    if (build->plan.status != TE_OK) return 0;
    if (build->plan.buffers[matrix].info.ndim > 2) return whole_heads_of(build, n, matrix);
    columns = build->plan.buffers[matrix].info.shape[1].add;
    rows = build->plan.buffers[matrix].info.shape[0].symbol;
    (void)snprintf(name, sizeof name, "%.24s_at_%lld", build->plan.buffers[matrix].name,
                   (long long)slice->offset);
    info.name = name;
    if ((node->flags & TE_NODE_PACKED) != 0) return packed_heads_of(build, n, &info, slice);
    info.shape[outer] = te_multiple(rows + 1, 1);
    info.shape[1 - outer] = te_multiple(rows + 2, 1);
    info.shape[2] = te_constant(te_slice_blocks(slice));
    info.shape[3] = te_constant(te_slice_width(slice));
    info.strides[outer] = te_multiple(rows + 2, columns);
    info.strides[1 - outer] = te_constant(columns);
    info.strides[2] = te_constant(slice->stride);
    info.strides[3] = te_constant(1);
    return te_view(build, &info);
}

/* ---- values ------------------------------------------------------------------------------- */

int te_wide_wanted(const te_build *build, int32_t value)
{
    if (build->direction != TE_DIRECTION_FORWARD) return 0;
    if (te_find(build, TE_LINK_VALUE, value) != TE_NO_BUFFER) return 0;
    return (te_value(build, value)->flags & TE_VALUE_RESULT) != 0 || te_is_read(build, value, 0) ||
           te_links_has(&build->saved, TE_LINK_VALUE, value);
}

int te_is_read(const te_build *build, int32_t value, int quantized)
{
    for (int32_t n = 0; n < build->graph->node_count; n++) {
        const te_node_desc *node = te_node(build, n);
        for (int i = 0; i < node->input_count; i++) {
            if (node->inputs[i] != value) continue;
            if (te_is_quantized(&node->quantization) == quantized) return 1;
        }
    }
    return 0;
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
     * though it be there: cast from high precision it would have other bits than the forward's. */
    if (rules->produce == NULL && (there || (build->graph->flags & TE_GRAPH_RECOMPUTE) == 0)) {
        return;
    }
    rules->again(build, state->producer);
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
        if ((build->graph->flags & TE_GRAPH_RECOMPUTE) == 0) {
            return te_need(build, TE_LINK_VALUE, value);
        }
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
    return contribution(build, value, build->values[value].grads++);
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
    const te_buffer_info *info;
    if (build->plan.status != TE_OK) return 0;
    info = &build->plan.buffers[buffer].info;
    if (info->role != TE_ROLE_SCRATCH || info->link != TE_LINK_GRADIENT || info->of != value) {
        return 0;
    }
    for (int32_t v = 0; v < build->graph->value_count; v++) {
        if (v != value && build->values[v].grad_alias == buffer) return 0;
    }
    return 1;
}

void te_grad_pair(te_build *build, int32_t value, int32_t pair[2])
{
    te_value_state *state = &build->values[value];
    if (state->grad_pending != TE_NOBODY) {
        pair[0] = te_grad(build, value);
        pair[1] = TE_NO_BUFFER;
        return;
    }
    pair[0] = contribution(build, value, 0);
    pair[1] = state->grads > 1 ? contribution(build, value, 1) : TE_NO_BUFFER;
    for (int32_t n = 2; n < state->grads;
         n++) { /* as autograd does: in their dtype, as they came */
        te_sum(build, pair[1], pair[0], pair[1]);
        pair[0] = pair[1];
        pair[1] = contribution(build, value, n);
    }
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
    te_grad_pair(build, value, pair);
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
        state->producer != TE_NOBODY && te_node(build, state->producer)->kind == TE_NODE_NORM;
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
    te_stage_use(&build->plan, stage, field_number(build, stage, field), buffer);
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

void te_sum(te_build *build, int32_t input, int32_t residual, int32_t output)
{
    const char *name = residual == TE_NO_BUFFER ? "copy_gradient" : "add_gradients";
    te_stage *stage = te_add(build, TE_NOBODY, "", name, TE_OP_DROPOUT_ADD);
    te_use_as(build, stage, "input", input);
    te_use_as(build, stage, "residual", residual);
    te_use_as(build, stage, "output", output);
}

int32_t te_draw(te_build *build, int32_t n)
{
    te_stage *stage;
    int32_t pair;
    if (build->direction != TE_DIRECTION_FORWARD) return te_need(build, TE_LINK_RNG, n);
    pair = te_get(build, TE_LINK_RNG, n);
    stage = te_add(build, n, te_node(build, n)->name, "draw", TE_OP_FILL);
    stage->external = 1;
    te_stage_use(&build->plan, stage, 0, pair);
    return pair;
}

void te_set_number(te_build *build, te_stage *stage, const char *field, double value)
{
    int f = field_number(build, stage, field);
    te_field_set_number(&te_op_describe(stage->op)->fields[f], stage->args, value);
}

te_cast_to te_cast_nothing(void)
{
    te_cast_to cast = {.amax_epsilon = 0.0F};
    cast.wide = cast.row = cast.row_scales = cast.column = cast.column_scales = cast.bias_grad =
        cast.amax_partials = cast.scale = cast.history = cast.partials = cast.given =
            cast.row_amax = cast.column_amax = cast.column_partials = cast.rng = TE_NO_BUFFER;
    return cast;
}

void te_ask_cast(te_build *build, te_stage *stage, const te_cast_to *cast)
{
    te_use_as(build, stage, "wide", cast->wide);
    te_use_as(build, stage, "bias_grad", cast->bias_grad);
    te_use_as(build, stage, "amax_partials", cast->amax_partials);
    if (cast->mode == TE_SCALING_NONE) return;
    te_set_number(build, stage, "mode", cast->mode);
    te_use_as(build, stage, "row", cast->row);
    te_use_as(build, stage, "column", cast->column);
    te_use_as(build, stage, "row_scales", cast->row_scales);
    te_use_as(build, stage, "column_scales", cast->column_scales);
    te_use_as(build, stage, "partials", cast->partials);
    te_set_number(build, stage, "amax_epsilon", (double)cast->amax_epsilon);
    te_set_number(build, stage, "power_2_scale", cast->power_2);
    if (te_scales_micro(cast->mode)) {
        te_use_as(build, stage, "row_amax", cast->row_amax);
        te_use_as(build, stage, "column_amax", cast->column_amax);
        te_use_as(build, stage, "column_partials", cast->column_partials);
        te_use_as(build, stage, "rng", cast->rng);
        te_set_number(build, stage, "square", cast->square);
        te_set_number(build, stage, "hadamard", cast->hadamard);
    }
    if (cast->given != TE_NO_BUFFER) {
        te_stage_use_at(&build->plan, stage, field_number(build, stage, "scale"), cast->given,
                        TE_SCALES_SCALE, 0);
    } else if (cast->scale != TE_NO_BUFFER) {
        te_use_slot(build, stage, "scale", cast->scale, cast->chunk, cast->slot);
    }
    if (cast->history == TE_NO_BUFFER) return;
    te_use_slot(build, stage, "amax", cast->history, cast->chunk, cast->slot);
}
