/* SPDX-License-Identifier: Apache-2.0
 *
 * make.c - makes the plans of a graph: has it checked, walks its nodes, and interns what comes out.
 */
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"
#include "layer/linear_cast.h"

/* ---- what is read of a graph ------------------------------------------------------------------
 */

/* A graph whose nodes have all entries of the lists that their kinds read, in one block with them;
 * what the caller does not give is not there, or 0. */
typedef struct graph_copy {
    te_graph_desc graph;
    te_node_desc *nodes;
} graph_copy;

static te_status check_lists(const te_node_desc *node, int32_t n)
{
    const te_node_rules *of;
    int inputs, steps;
    TE_FAIL_IF(node->kind < 0 || node->kind >= TE_NODE_KINDS, TE_ERROR_INVALID,
               "graph: node %d: kind %d does not exist", n, node->kind);
    of = te_rules[node->kind];
    inputs = of->many ? TE_GRAPH_VALUES : of->inputs;
    steps = of->outside ? 0 : of->steps;
    TE_FAIL_IF(node->input_count < 0 || node->input_count > inputs || node->number_count < 0 ||
                   node->number_count > of->numbers || node->slice_count < 0 ||
                   node->slice_count > of->slices || node->external_count < 0 ||
                   node->external_count > steps,
               TE_ERROR_INVALID,
               "graph: node %d (%s): %d inputs, %d numbers, %d slices and %d external "
               "steps, expected at most %d, %d, %d and %d",
               n, of->name, node->input_count, node->number_count, node->slice_count,
               node->external_count, inputs, of->numbers, of->slices, steps);
    TE_FAIL_IF(node->halves_count < 0 || node->halves_count > of->steps, TE_ERROR_INVALID,
               "graph: node %d (%s): %d steps in two halves, expected at most %d", n, of->name,
               node->halves_count, of->steps);
    TE_FAIL_IF((node->input_count > 0 && node->inputs == NULL) ||
                   (node->number_count > 0 && node->numbers == NULL) ||
                   (node->slice_count > 0 && node->slices == NULL) ||
                   (node->external_count > 0 && node->external == NULL) ||
                   (node->halves_count > 0 && node->halves == NULL),
               TE_ERROR_INVALID, "graph: node %d (%s): a list is NULL", n, of->name);
    return TE_OK;
}

/* Entries of the list of inputs. */
static int32_t inputs_of(const te_node_desc *node)
{
    const int32_t least = te_rules[node->kind]->inputs;
    return node->input_count > least ? node->input_count : least;
}

/* `count` of `size` bytes each to *at, which moves behind them. */
static void *append(char **at, const void *from, int32_t count, int32_t entries, size_t size)
{
    char *to = *at;
    if (count > 0) memcpy(to, from, (size_t)count * size);
    *at += (size_t)entries * size;
    return to;
}

static te_status copy_nodes(const te_graph_desc *graph, graph_copy *copy)
{
    size_t nodes = (size_t)graph->node_count * sizeof *copy->nodes, bytes = nodes;
    int32_t *inputs;
    char *at;
    for (int32_t n = 0; n < graph->node_count; n++) {
        const te_node_rules *of;
        TE_TRY(check_lists(&graph->nodes[n], n));
        of = te_rules[graph->nodes[n].kind];
        bytes += (size_t)of->numbers * sizeof(double) + (size_t)of->slices * sizeof(te_slice) +
                 (size_t)te_round_up(inputs_of(&graph->nodes[n]), 2) * sizeof *inputs +
                 (size_t)te_round_up(graph->nodes[n].external_count, 2) * sizeof *inputs +
                 (size_t)te_round_up(graph->nodes[n].halves_count, 2) * sizeof *inputs;
    }
    copy->nodes = calloc(1, bytes);
    TE_FAIL_IF(copy->nodes == NULL, TE_ERROR_MEMORY, "no memory for a graph");
    at = (char *)copy->nodes + nodes;
    for (int32_t n = 0; n < graph->node_count; n++) {
        const te_node_desc *from = &graph->nodes[n];
        const te_node_rules *of = te_rules[from->kind];
        te_node_desc *node = &copy->nodes[n];
        int32_t even = (int32_t)te_round_up(inputs_of(from), 2); /* what follows is aligned */
        *node = *from;
        node->numbers = append(&at, from->numbers, from->number_count, of->numbers, sizeof(double));
        node->slices = append(&at, from->slices, from->slice_count, of->slices, sizeof(te_slice));
        inputs = append(&at, from->inputs, from->input_count, even, sizeof *inputs);
        for (int32_t i = from->input_count; i < even; i++) inputs[i] = -1;
        node->inputs = inputs;
        even = (int32_t)te_round_up(from->external_count, 2);
        node->external = append(&at, from->external, from->external_count, even, sizeof *inputs);
        even = (int32_t)te_round_up(from->halves_count, 2);
        node->halves = append(&at, from->halves, from->halves_count, even, sizeof *inputs);
        node->input_count = inputs_of(from);
        node->number_count = of->numbers;
        node->slice_count = of->slices;
    }
    copy->graph = *graph;
    copy->graph.nodes = copy->nodes;
    return TE_OK;
}

/* ---- walks -------------------------------------------------------------------------------- */

/* Empties the plan, and begins one in a direction; the sets of links stay. */
static void start(te_build *build, te_direction direction)
{
    const te_graph_desc *graph = build->graph;
    te_status status = build->plan.status;
    te_plan_clear(&build->plan);
    memset(&build->plan, 0, sizeof build->plan);
    build->plan.direction = build->direction = direction;
    build->plan.status = status;
    for (int32_t v = 0; v < graph->value_count; v++) {
        uint32_t flags = graph->values[v].flags;
        build->values[v] = (te_value_state){.producer = TE_NOBODY,
                                            .pending = TE_NOBODY,
                                            .grad_pending = TE_NOBODY,
                                            .grad_alias = TE_NO_BUFFER,
                                            .needs_grad = (flags & TE_VALUE_GRADIENT) != 0,
                                            .grads = (flags & TE_VALUE_RESULT) != 0};
    }
    for (int32_t n = 0; n < graph->node_count; n++) {
        const te_node_desc *node = &graph->nodes[n];
        te_value_state *made = &build->values[node->output];
        made->producer = n;
        for (int i = 0; i < node->input_count; i++) {
            if (node->inputs[i] < 0) continue;
            made->needs_grad |= build->values[node->inputs[i]].needs_grad;
            build->values[node->inputs[i]].readers++;
        }
    }
}

static void walk_deferred(te_build *build)
{
    start(build, TE_DIRECTION_DEFERRED);
    for (int32_t n = build->graph->node_count - 1; n >= 0; n--) {
        const te_node_rules *rules = te_rules_of(build, n);
        if (rules->deferred != NULL) rules->deferred(build, n);
    }
}

/* Whether what holds the gradient of an input is the buffer of something else. */
static int is_passed_on(const te_build *build, int32_t value)
{
    const te_buffer_info *info = &te_buffer_of(build, build->values[value].grad_alias)->info;
    return info->link != TE_LINK_GRADIENT || info->of != value;
}

/* Lets a plan be given the value whose shape tells the sizes of a source, or a form of it. */
static void need_source(te_build *build, int32_t v)
{
    if ((te_value(build, v)->flags & TE_VALUE_QUANTIZED) == 0) {
        (void)te_need(build, TE_LINK_VALUE, v);
        return;
    }
    for (int32_t n = 0; n < build->graph->node_count; n++) {
        if (te_node(build, n)->inputs[0] != v) continue;
        (void)te_need(build, TE_LINK_ROW, te_operand_of(n, TE_INPUT_OPERAND));
        return;
    }
}

static void walk_backward(te_build *build)
{
    start(build, TE_DIRECTION_BACKWARD);
    for (int32_t n = build->graph->node_count - 1; n >= 0; n--) {
        te_rules_of(build, n)->backward(build, n);
    }
    for (int32_t v = 0; v < build->graph->value_count; v++) { /* an input that several nodes read */
        te_value_state *state = &build->values[v];
        if (state->producer != TE_NOBODY) continue;
        if ((te_value(build, v)->flags & TE_VALUE_LEADING) != 0 &&
            te_rows_symbol(te_value(build, v)) == TE_SYMBOL_SOURCE_ROWS) {
            need_source(build, v);
        }
        if (state->grads > 0 && (te_value(build, v)->flags & TE_VALUE_RETURN_QUANTIZED) != 0) {
            te_linear_return(build, te_caster_of(build->graph, v), TE_GRAD_INPUT_OPERAND, v,
                             te_grad(build, v));
            continue;
        }
        if (state->grads > 1) (void)te_grad(build, v);
        if (state->grads == 1 && state->grad_alias != TE_NO_BUFFER && is_passed_on(build, v)) {
            int32_t grad = state->grad_alias;
            state->grad_alias = TE_NO_BUFFER;
            te_sum(build, grad, TE_NO_BUFFER, te_get(build, TE_LINK_GRADIENT, v));
        }
    }
}

static void walk_forward(te_build *build)
{
    start(build, TE_DIRECTION_FORWARD);
    for (int32_t n = 0; n < build->graph->node_count; n++) {
        te_rules_of(build, n)->forward(build, n);
        if (te_is_rounded(build, te_node(build, n)->output)) {
            te_write_pending(build, te_node(build, n)->output);
        }
    }
    for (int32_t v = 0; v < build->graph->value_count; v++) {
        if ((te_value(build, v)->flags & TE_VALUE_RESULT) != 0) te_write_pending(build, v);
    }
}

/* The later plans first: they say what the earlier ones have to keep. */
static te_status build_plan(te_build *build, te_direction direction)
{
    walk_deferred(build);
    if (direction == TE_DIRECTION_DEFERRED) { /* what the backward saves lies before, or behind */
        walk_backward(build);
        walk_deferred(build);
    } else {
        walk_backward(build);
        if (direction == TE_DIRECTION_FORWARD) walk_forward(build);
    }
    if (direction != TE_DIRECTION_FORWARD) { /* all of the saved buffer, to lie as it was written */
        for (int32_t i = 0; i < build->saved.count; i++) {
            (void)te_need(build, build->saved.items[i].link, build->saved.items[i].of);
        }
    }
    return te_plan_finish(&build->plan);
}

/* ---- identity ----------------------------------------------------------------------------- */

/* The text of a graph, by which its plan is known: new memory. */
static te_status describe(const te_graph_desc *graph, te_direction direction, char **text,
                          size_t *bytes)
{
    TE_TRY(te_graph_write(graph, direction, NULL, 0, bytes));
    *text = malloc(*bytes + 1);
    TE_FAIL_IF(*text == NULL, TE_ERROR_MEMORY, "no memory for a plan");
    return te_graph_write(graph, direction, *text, *bytes + 1, bytes);
}

te_status te_plan_make(const te_graph_desc *graph, te_direction direction, te_plan **plan)
{
    graph_copy copy;
    te_build build;
    size_t bytes = 0;
    char *desc = NULL;
    te_status st;
    TE_FAIL_IF(plan == NULL, TE_ERROR_INVALID, "plan is NULL");
    *plan = NULL;
    TE_TRY(te_check_head(graph, direction));
    TE_TRY(copy_nodes(graph, &copy));
    memset(&build, 0, sizeof build);
    build.graph = &copy.graph;
    build.rules = te_rules;
    build.values = calloc((size_t)graph->value_count, sizeof *build.values);
    if (build.values == NULL) {
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for a plan");
        goto done;
    }
    st = te_check_graph(&copy.graph, build.values);
    if (st != TE_OK) goto done;
    st = describe(&copy.graph, direction, &desc, &bytes);
    if (st != TE_OK) goto done;
    st = te_plan_find_desc(desc, bytes, plan);
    if (st != TE_OK || *plan != NULL) goto done;
    st = build_plan(&build, direction);
    if (st == TE_OK) st = te_plan_intern(&build.plan, desc, bytes, plan);
done:
    te_plan_clear(&build.plan);
    free(build.saved.items);
    free(build.deferred.items);
    free(build.values);
    free(copy.nodes);
    free(desc);
    return st;
}
