/* SPDX-License-Identifier: Apache-2.0
 *
 * node_collective.c - what ranks make together, as a node: rows of all ranks, or sums over them.
 * Its stages are external. One that gathers, or that keeps a rank's rows of a sum, has pairs of
 * buffers, what is sent and what comes of it; one that sums a whole matrix has that alone, in
 * place.
 *
 * What a linear node reads of gathered rows is not saved: the backward gathers once more. Where
 * forms travel (TE_COLLECTIVE_FORMS) the linear node casts what the rank has, and adds the stage
 * that gathers its forms (linear_cast.c).
 *
 * A sum in pieces (TE_COLLECTIVE_PIECES_FORWARD) is made of the rank's own term, and of what the
 * exchange that the linear node has begun receives of the others (node_linear.c).
 */
#include "layer/collective.h"

#include <stdio.h>

#include "core/status.h"

static const char *const op_names[] = {[TE_DOES_GATHER] = "gather",
                                       [TE_DOES_REDUCE_SCATTER] = "reduce_scatter",
                                       [TE_DOES_ALL_REDUCE] = "all_reduce"};

static int forms_travel(const te_node_desc *node)
{
    return (node->flags & TE_COLLECTIVE_FORMS) != 0;
}

/* ---- stages ------------------------------------------------------------------------------- */

static void add(te_build *build, int32_t n, te_collective_step step, int32_t from, int32_t to)
{
    const te_node_desc *node = te_node(build, n);
    const te_collective_op op = te_collective_does(build->graph, n, step);
    char name[TE_NAME_BYTES];
    te_stage *stage;
    (void)snprintf(name, sizeof name, "%s%s", op_names[op],
                   step == TE_COLLECTIVE_BACKWARD             ? "_grad"
                   : build->direction != TE_DIRECTION_FORWARD ? "_again"
                                                              : "");
    stage = te_add_outside(build, n, node->name, name, (int32_t)step);
    if (op != TE_DOES_ALL_REDUCE) te_stage_hand(&build->plan, stage, from, 0);
    te_stage_hand(&build->plan, stage, to, 1);
}

/* ---- the node ----------------------------------------------------------------------------- */

/* Whether somebody reads what is gathered in high precision, in a forward. */
static int is_read_wide(const te_build *build, int32_t n)
{
    return !forms_travel(te_node(build, n)) || te_is_read(build, te_node(build, n)->output, 0);
}

static void run(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    const int32_t x = node->inputs[0], y = node->output;
    const int in_place =
        te_collective_does(build->graph, n, TE_COLLECTIVE_FORWARD) == TE_DOES_ALL_REDUCE;
    int32_t from;
    /* Who makes x writes it to y, see te_collective_target, in a repetition too. */
    if (in_place && build->direction != TE_DIRECTION_FORWARD) te_make_again(build, x);
    if (in_place && te_find(build, TE_LINK_VALUE, x) == TE_NO_BUFFER &&
        te_find(build, TE_LINK_VALUE, y) != TE_NO_BUFFER) {
        add(build, n, TE_COLLECTIVE_FORWARD, TE_NO_BUFFER, te_get(build, TE_LINK_VALUE, y));
        return;
    }
    from = te_wide(build, x, node->name, "collective_input");
    if (in_place) te_sum(build, from, TE_NO_BUFFER, te_get(build, TE_LINK_VALUE, y));
    add(build, n, TE_COLLECTIVE_FORWARD, from, te_get(build, TE_LINK_VALUE, y));
}

void te_collective_exchange(te_build *build, int32_t n)
{
    te_stage *stage = te_add_outside(build, n, te_node(build, n)->name, "exchange",
                                     (int32_t)TE_COLLECTIVE_EXCHANGE);
    te_stage_hand(&build->plan, stage, te_get(build, TE_LINK_SENT, n), 0);
    te_stage_hand(&build->plan, stage, te_get(build, TE_LINK_RECEIVED, n), 1);
}

/* Adds what the others have sent to the rank's own term. */
static void add_received(te_build *build, int32_t n)
{
    const int32_t others = te_node(build, n)->ranks - 1;
    const int32_t y = te_get(build, TE_LINK_VALUE, te_node(build, n)->output);
    const int32_t received = te_get(build, TE_LINK_RECEIVED, n);
    for (int32_t i = 0; i < others; i++) {
        te_sum(build, te_rows_of_ranks(build, received, others, i, 1), y, y);
    }
}

static void forward(te_build *build, int32_t n)
{
    const te_collective_op op = te_collective_does(build->graph, n, TE_COLLECTIVE_FORWARD);
    if (op == TE_DOES_NOTHING || (op == TE_DOES_GATHER && !is_read_wide(build, n))) return;
    if (te_find(build, TE_LINK_RECEIVED, n) != TE_NO_BUFFER) {
        add_received(build, n);
    } else {
        run(build, n);
    }
}

static void again(te_build *build, int32_t n)
{
    if (te_collective_is_copy(build->graph, n)) return;
    if (te_find(build, TE_LINK_VALUE, te_node(build, n)->output) == TE_NO_BUFFER) run(build, n);
}

/* Whether the linear node that makes x casts the gradient before it is gathered. */
static int is_gradient_cast(const te_build *build, int32_t n)
{
    const int32_t k = te_maker_of(build->graph, te_node(build, n)->inputs[0]);
    return k != TE_NOBODY && te_linear_gatherer(build->graph, k, TE_GRAD_OPERAND) == n;
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    const int32_t x = node->inputs[0], y = node->output;
    int32_t grad;
    if (!build->values[x].needs_grad || !te_has_grad(build, y) || is_gradient_cast(build, n)) {
        return;
    }
    grad = te_grad(build, y);
    build->values[y].grads = 0; /* it is read: a linear node may have had it summed early */
    switch (te_collective_does(build->graph, n, TE_COLLECTIVE_BACKWARD)) {
    case TE_DOES_NOTHING:
        te_grad_pass(build, x, grad);
        return;
    case TE_DOES_ALL_REDUCE:
        add(build, n, TE_COLLECTIVE_BACKWARD, TE_NO_BUFFER, grad);
        if (te_find(build, TE_LINK_GRADIENT, x) != grad) te_grad_pass(build, x, grad);
        return;
    default:
        add(build, n, TE_COLLECTIVE_BACKWARD, grad, te_grad_target(build, x));
    }
}

void te_collective_sum_gradient(te_build *build, int32_t n)
{
    if (!te_collective_sums_gradient(build->graph, n)) return;
    if (build->values[te_node(build, n)->output].readers == 1) backward(build, n);
}

/* ---- checks ------------------------------------------------------------------------------- */

static te_status check_readers(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const int32_t y = node->output;
    const int linear_alone = te_collective_is_copy(graph, n) ||
                             te_collective_gathers_forms(graph, n, TE_COLLECTIVE_FORWARD);
    int fits = !linear_alone ||
               (graph->values[y].flags & (uint32_t)(TE_VALUE_RESULT | TE_VALUE_ROUNDED)) == 0;
    for (int32_t k = 0; linear_alone && k < graph->node_count; k++) {
        for (int32_t i = 0; i < graph->nodes[k].input_count; i++) {
            if (graph->nodes[k].inputs[i] != y) continue;
            fits &= graph->nodes[k].kind == TE_NODE_LINEAR && i == TE_INPUT_OPERAND;
        }
    }
    if (fits) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID,
                   "collective: %s is a copy, or gathered in quantized forms: only linear nodes "
                   "read it, as their input, and it is not rounded",
                   graph->values[y].name);
}

/* Who makes what is summed: the sum has its bias once. */
static te_status check_maker(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const int32_t k = te_maker_of(graph, node->inputs[0]);
    const int linear = k >= 0 && graph->nodes[k].kind == TE_NODE_LINEAR;
    const te_collective_op op = te_collective_does(graph, n, TE_COLLECTIVE_FORWARD);
    TE_FAIL_IF(
        (op == TE_DOES_REDUCE_SCATTER || op == TE_DOES_ALL_REDUCE) && linear &&
            graph->nodes[k].inputs[2] >= 0,
        TE_ERROR_INVALID,
        "collective: %s has a bias, which a sum over ranks would have of each: add it behind",
        graph->values[node->inputs[0]].name);
    TE_FAIL_IF(te_collective_gathers_forms(graph, n, TE_COLLECTIVE_BACKWARD) &&
                   (!linear || te_only_reader_of(graph, node->inputs[0]) != n),
               TE_ERROR_INVALID,
               "collective: the gradient of %s is gathered in quantized forms: expected a linear "
               "node that makes it, and no other reader",
               graph->values[node->inputs[0]].name);
    return TE_OK;
}

static int has_pieces(const te_node_desc *node)
{
    return (node->flags &
            (uint32_t)(TE_COLLECTIVE_PIECES_FORWARD | TE_COLLECTIVE_PIECES_BACKWARD)) != 0;
}

/* Whether GEMMs are in pieces nowhere but beside rows that travel. */
static int can_have_pieces(const te_graph_desc *graph, int32_t n, te_collective_step step)
{
    const te_collective_op op = te_collective_does(graph, n, step);
    return !te_collective_in_pieces(graph, n, step) || op == TE_DOES_GATHER ||
           (op == TE_DOES_REDUCE_SCATTER && step == TE_COLLECTIVE_FORWARD);
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    const te_extent *in = x->shape, *out = y->shape;
    int64_t from = 1, to = 1;
    TE_FAIL_IF(node->variant < 0 || node->variant >= TE_COLLECTIVE_KINDS || node->ranks < 1 ||
                   node->ranks > INT16_MAX,
               TE_ERROR_INVALID, "collective: kind %d of %d ranks, expected 0 to %d, of 1 to %d",
               node->variant, node->ranks, TE_COLLECTIVE_KINDS - 1, INT16_MAX);
    TE_TRY(te_check_rows(graph, n, "collective", TE_ANY_RANKS));
    if (node->variant == TE_COLLECTIVE_GATHER) from = node->ranks;
    if (node->variant == TE_COLLECTIVE_REDUCE_SCATTER) to = node->ranks;
    TE_FAIL_IF(x->dtype != y->dtype || in[1].add != out[1].add ||
                   from * (in->symbol == TE_SYMBOL_NONE ? in->add : in->multiply) !=
                       to * (in->symbol == TE_SYMBOL_NONE ? out->add : out->multiply),
               TE_ERROR_INVALID,
               "collective: %s of kind %d over %d ranks: %s is of another dtype or shape", x->name,
               node->variant, node->ranks, y->name);
    TE_FAIL_IF(in->align != 1, TE_ERROR_INVALID,
               "collective: %s has roundup(rows, %lld) rows, which ranks do not join", x->name,
               (long long)in->align);
    TE_FAIL_IF(forms_travel(node) && node->variant != TE_COLLECTIVE_GATHER &&
                   node->variant != TE_COLLECTIVE_REDUCE_SCATTER,
               TE_ERROR_INVALID, "collective: kind %d gathers nothing, so no forms", node->variant);
    TE_FAIL_IF(!can_have_pieces(graph, n, TE_COLLECTIVE_FORWARD) ||
                   !can_have_pieces(graph, n, TE_COLLECTIVE_BACKWARD) || node->rank < 0 ||
                   node->rank >= node->ranks || (node->rank > 0 && !has_pieces(node)),
               TE_ERROR_INVALID, "collective: kind %d in pieces (flags 0x%x), by rank %d of %d",
               node->variant, node->flags, node->rank, node->ranks);
    TE_TRY(check_readers(graph, n));
    return check_maker(graph, n);
}

const te_node_rules te_collective_rules = {
    .name = "collective",
    .inputs = 1,
    .flags = TE_COLLECTIVE_FORMS | TE_COLLECTIVE_PIECES_FORWARD | TE_COLLECTIVE_PIECES_BACKWARD,
    .steps = TE_COLLECTIVE_STEPS,
    .outside = 1,
    .check = check,
    .forward = forward,
    .backward = backward,
    .again = again,
};
