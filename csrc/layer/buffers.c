/* SPDX-License-Identifier: Apache-2.0
 *
 * buffers.c - buffers by what they are: their names, dtypes and shapes, whether one is given,
 * returned, saved or scratch, and the sets of links that say which are saved.
 */
#include "layer/build.h"

#include <stdio.h>
#include <string.h>

#include "core/scales.h"
#include "core/status.h"
#include "layer/collective.h"
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
    struct te_link_of *grown;
    if (te_links_has(links, link, of)) return;
    grown = te_plan_grow(&build->plan, links->items, links->count, &links->capacity, sizeof *grown);
    if (grown == NULL) return;
    links->items = grown;
    grown[links->count++] = (struct te_link_of){link, of};
}

/* ---- buffers ------------------------------------------------------------------------------ */

/* The value whose quantized form an operand is, or that has its shape. */
static int32_t value_of_operand(const te_build *build, int32_t of)
{
    const int32_t k = of / TE_OPERAND_ROLES;
    const te_node_desc *node = te_node(build, k);
    switch (of % TE_OPERAND_ROLES) {
    case TE_INPUT_OPERAND:
        return te_linear_value(build->graph, k, TE_INPUT_OPERAND);
    case TE_GRAD_OPERAND:
        return te_linear_value(build->graph, k, TE_GRAD_OPERAND);
    case TE_WEIGHT_OPERAND:
        return node->inputs[TE_WEIGHT_OPERAND];
    case TE_OUTPUT_OPERAND:
    case TE_WHOLE_GRAD_OPERAND:
        return node->output;
    default:
        return node->inputs[TE_INPUT_OPERAND];
    }
}

/* TE_VALUE_QUANTIZED and TE_VALUE_KEEP_QUANTIZED are said of what a call is given: of an input or
 * parameter, or of the gradient of a result. */
static uint32_t flags_of_operand(const te_build *build, int32_t of)
{
    uint32_t flags = te_value(build, value_of_operand(build, of))->flags;
    int gradient = of % TE_OPERAND_ROLES == TE_GRAD_OPERAND;
    if (of % TE_OPERAND_ROLES >= TE_GEMM_OPERANDS) return 0;
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
static const char *const operand_names[] = {
    "input",      "weight",         "grad_output",         "output",
    "grad_input", "input_gathered", "grad_output_gathered"};
static const char *const form_names[TE_LINK_COUNT] = {[TE_LINK_ROW] = "_row",
                                                      [TE_LINK_COLUMN] = "_column",
                                                      [TE_LINK_SCALES] = "_scales",
                                                      [TE_LINK_ROW_SCALES] = "_row_scales",
                                                      [TE_LINK_COLUMN_SCALES] = "_column_scales",
                                                      [TE_LINK_ROW_AMAX] = "_row_amax",
                                                      [TE_LINK_COLUMN_AMAX] = "_column_amax",
                                                      [TE_LINK_PIECE_SCALES] = "_piece_scales"};

/* A value or a gradient. */
static void describe_value(const te_build *build, te_link link, int32_t of, te_buffer_info *info,
                           char *name, size_t size)
{
    const uint32_t into_caller = TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE;
    const te_graph_desc *graph = build->graph;
    const te_value_desc *value = &graph->values[of % graph->value_count];
    const char *prefix = "";
    if (link == TE_LINK_PART) prefix = "part_";
    if (link == TE_LINK_GRADIENT) {
        prefix = (value->flags & into_caller) != 0U ? "main_grad_" : "grad_";
    }
    info->dtype = (te_dtype)value->dtype;
    if (link == TE_LINK_GRADIENT && (value->flags & TE_VALUE_PARAMETER) != 0) {
        info->dtype = (te_dtype)value->grad_dtype;
    }
    info->leading = (value->flags & TE_VALUE_LEADING) != 0;
    info->ndim = value->ndim;
    memcpy(info->shape, value->shape, sizeof info->shape);
    (void)snprintf(name, size, "%s%s", prefix, value->name);
}

/* A form of a quantized operand, its scales or its amax. */
static void describe_form(const te_build *build, te_link link, int32_t of, te_buffer_info *info,
                          char *name, size_t size)
{
    const te_node_desc *node = te_node(build, of / TE_OPERAND_ROLES);
    const int32_t role = of % TE_OPERAND_ROLES;
    te_describe_form(&node->quantization, (te_operand_role)role,
                     link == TE_LINK_PIECE_SCALES ? TE_LINK_ROW_SCALES : link,
                     te_value(build, value_of_operand(build, of))->shape, info);
    (void)snprintf(name, size, "%s%s%s", node->name, operand_names[role], form_names[link]);
}

/* An operand in the dtype of the output. */
static void describe_wide(const te_build *build, int32_t of, te_buffer_info *info, char *name,
                          size_t size)
{
    const te_node_desc *node = te_node(build, of / TE_OPERAND_ROLES);
    info->dtype = (te_dtype)te_value(build, node->output)->dtype;
    info->ndim = 2;
    memcpy(info->shape, te_value(build, value_of_operand(build, of))->shape, sizeof info->shape);
    (void)snprintf(name, size, "%s%s_wide", node->name, operand_names[of % TE_OPERAND_ROLES]);
}

/* The same of heads that an attention has in FP8. */
static void describe_heads(const te_build *build, te_link link, int32_t of, te_buffer_info *info,
                           char *name, size_t size)
{
    const te_node_desc *node = te_node(build, of / TE_HEADS_ROLES);
    const te_heads_role role = (te_heads_role)(of % TE_HEADS_ROLES);
    te_heads_describe(build->graph, node, link, role, info);
    (void)snprintf(name, size, "%s%s%s", node->name, te_heads_name(role),
                   link == TE_LINK_HEADS          ? "_fp8"
                   : link == TE_LINK_HEADS_SCALES ? "_scales"
                                                  : "_again");
}

/* What a node makes besides its output: statistics, a converted bias. */
static void describe_own(const te_build *build, te_link link, int32_t of, te_buffer_info *info,
                         char *name, size_t size)
{
    const te_node_desc *node = te_node(build, of);
    const te_value_desc *output = te_value(build, node->output);
    const char *what = "";
    info->shape[0] = output->shape[0];
    if (link == TE_LINK_MEAN || link == TE_LINK_RSIGMA) {
        what = link == TE_LINK_MEAN ? "mean" : "rsigma";
        if (node->slice_count > 0) info->shape[0].multiply *= node->slices[0].heads;
    } else if (link == TE_LINK_BIAS_CAST) {
        what = "bias_cast";
        info->dtype = te_bias_dtype(&node->quantization, (te_dtype)output->dtype);
        info->shape[0] = output->shape[1];
    } else if (link == TE_LINK_SENT || link == TE_LINK_RECEIVED) {
        what = link == TE_LINK_SENT ? "sent" : "received";
        info->dtype = (te_dtype)output->dtype;
        info->ndim = 2;
        info->shape[0].multiply *= node->ranks - 1;
        info->shape[1] = output->shape[1];
    } else if (link == TE_LINK_MAX_SCORES) {
        what = "max_scores";
        info->shape[0] = te_constant(node->slices[0].heads);
    } else {
        what = "statistics";
        info->ndim = 2;
        info->shape[1] = te_constant(node->slices[0].heads);
    }
    (void)snprintf(name, size, "%s%s", node->name, what);
}

/* dtype, shape and name of a buffer, whatever plan it is in. `name` has room for them. */
static void describe(const te_build *build, te_link link, int32_t of, te_buffer_info *info,
                     char *name, size_t size)
{
    memset(info, 0, sizeof *info);
    info->link = link;
    info->of = of;
    info->name = name;
    info->dtype = TE_DTYPE_F32;
    info->ndim = 1;
    info->shape[0] = te_constant(TE_ANY_LENGTH);
    info->shape[1] = te_constant(1);
    if (form_names[link] != NULL) {
        describe_form(build, link, of, info, name, size);
        return;
    }
    switch (link) {
    case TE_LINK_VALUE:
    case TE_LINK_GRADIENT:
    case TE_LINK_PART:
        describe_value(build, link, of, info, name, size);
        return;
    case TE_LINK_WIDE:
        describe_wide(build, of, info, name, size);
        return;
    case TE_LINK_HEADS:
    case TE_LINK_HEADS_SCALES:
    case TE_LINK_HEADS_WIDE:
        describe_heads(build, link, of, info, name, size);
        return;
    case TE_LINK_PARTIALS:
        info->shape[0] = te_constant(TE_AMAX_PARTIALS);
        (void)snprintf(name, size, of == 0 ? "partials" : "column_partials");
        return;
    case TE_LINK_HISTORY:
        info->ndim = 2;
        info->shape[1] = te_constant(TE_ANY_LENGTH);
        info->written = 1;
        (void)snprintf(name, size, of == 0 ? "history" : "history_%d", of);
        return;
    case TE_LINK_SCALE:
        (void)snprintf(name, size, of == 0 ? "scale" : "scale_%d", of);
        return;
    default:
        describe_own(build, link, of, info, name, size);
        return;
    }
}

static te_buffer_role role_of_value(const te_build *build, int32_t of)
{
    uint32_t flags = te_value(build, of)->flags;
    if ((flags & TE_VALUE_PARAMETER) != 0) return TE_ROLE_PARAMETER;
    if ((flags & TE_VALUE_INPUT) != 0) return TE_ROLE_INPUT;
    if ((flags & TE_VALUE_RESULT) == 0) return TE_ROLE_SCRATCH;
    if (build->direction != TE_DIRECTION_FORWARD) return TE_ROLE_INPUT;
    return (flags & TE_VALUE_RETURN_QUANTIZED) != 0 ? TE_ROLE_SCRATCH : TE_ROLE_OUTPUT;
}

static te_buffer_role role_of_gradient(const te_build *build, int32_t of)
{
    uint32_t flags = te_value(build, of)->flags;
    if ((flags & (TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE)) != 0) return TE_ROLE_STATE;
    if ((flags & TE_VALUE_RESULT) == 0 && (flags & TE_VALUE_RETURN_QUANTIZED) != 0) {
        return TE_ROLE_SCRATCH;
    }
    if ((flags & (TE_VALUE_PARAMETER | TE_VALUE_INPUT)) != 0) return TE_ROLE_OUTPUT;
    return (flags & TE_VALUE_RESULT) != 0 ? TE_ROLE_INPUT : TE_ROLE_SCRATCH;
}

int te_operand_is_transposed(const te_build *build, int32_t of)
{
    const uint32_t flags = TE_VALUE_QUANTIZED | TE_VALUE_ROW_WISE;
    return (flags_of_operand(build, of) & flags) == flags;
}

/* Whether an operand is what a call is returned. */
static int is_returned(int32_t of)
{
    const int32_t role = of % TE_OPERAND_ROLES;
    return role == TE_OUTPUT_OPERAND || role == TE_GRAD_INPUT_OPERAND;
}

/* Whether the maker of an operand, a node of the graph, makes it as it is read. */
static int is_handed_over(const te_build *build, int32_t of)
{
    const uint32_t given = TE_VALUE_INPUT | TE_VALUE_PARAMETER | TE_VALUE_RESULT;
    return (te_value(build, value_of_operand(build, of))->flags & given) == 0;
}

/* Of an attention that returns its output in FP8. */
static te_buffer_role role_of_heads(const te_build *build, int32_t of)
{
    const te_node_desc *node = te_node(build, of / TE_HEADS_ROLES);
    if (of % TE_HEADS_ROLES != TE_HEADS_OUTPUT ||
        (te_value(build, node->output)->flags & TE_VALUE_RETURN_QUANTIZED) == 0) {
        return TE_ROLE_SCRATCH;
    }
    return build->direction == TE_DIRECTION_FORWARD ? TE_ROLE_OUTPUT : TE_ROLE_INPUT;
}

static te_buffer_role role_of_form(const te_build *build, te_link form, int32_t of)
{
    if (is_returned(of)) return TE_ROLE_OUTPUT;
    if (is_handed_over(build, of)) return TE_ROLE_SCRATCH;
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
    if (link == TE_LINK_MAX_SCORES) role = TE_ROLE_OUTPUT;
    if (link == TE_LINK_HEADS || link == TE_LINK_HEADS_SCALES) role = role_of_heads(build, of);
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
    if ((role == TE_ROLE_INPUT || is_returned(of)) &&
        link == TE_LINK_ROW) { /* in place of the value */
        info.leading =
            (te_value(build, value_of_operand(build, of))->flags & TE_VALUE_LEADING) != 0;
    }
    if (link == TE_LINK_HEADS && (role == TE_ROLE_INPUT || role == TE_ROLE_OUTPUT))
        info.leading = 1;
    return te_plan_add_buffer(&build->plan, &info);
}

int32_t te_get(te_build *build, te_link link, int32_t of)
{
    int32_t found = te_find(build, link, of);
    return found != TE_NO_BUFFER ? found : add(build, link, of, role_of(build, link, of));
}

int32_t te_need(te_build *build, te_link link, int32_t of)
{
    if (build->direction == TE_DIRECTION_FORWARD || role_of(build, link, of) != TE_ROLE_SCRATCH ||
        te_find(build, link, of) != TE_NO_BUFFER) {
        return te_get(build, link, of);
    }
    add_link(build, &build->saved, link, of);
    return add(build, link, of, TE_ROLE_SAVED);
}

int32_t te_defer(te_build *build, te_link link, int32_t of)
{
    add_link(build, &build->deferred, link, of);
    return te_get(build, link, of);
}
