/* SPDX-License-Identifier: Apache-2.0
 *
 * node_heads.c - attention and the rotary embedding as nodes. They read heads of matrices where
 * they lie, queries, keys and values of one projection say, and write gradients to the same places.
 */
#include "core/status.h"
#include "layer/build.h"

/* ---- attention ------------------------------------------------------------------------------ */

enum { QUERY, KEY, VALUE, MASK, BIAS, QUERY_LENGTHS, KEY_LENGTHS, INPUTS };

static int is_external(const te_build *build, int32_t n)
{
    return te_node(build, n)->external != 0;
}

/* The heads of an input, in high precision. */
static int32_t heads_of_input(te_build *build, int32_t n, int i)
{
    const te_node_desc *node = te_node(build, n);
    int32_t matrix = te_wide(build, node->inputs[i], node->name, "attention_input");
    return te_heads_of(build, n, matrix, &node->slices[i]);
}

static int32_t heads_of_output(te_build *build, int32_t n, int32_t matrix)
{
    const te_node_desc *node = te_node(build, n);
    te_slice dense = te_dense_heads(node->slices[QUERY].heads, node->slices[VALUE].channels);
    return te_heads_of(build, n, matrix, &dense);
}

/* [batch, heads, queries], dense. */
static int32_t statistics_of(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int first = (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    int32_t rows = te_value(build, node->output)->shape[0].symbol;
    int32_t batch = rows + 1 + first, length = rows + 2 - first;
    int64_t heads = node->slices[QUERY].heads;
    te_buffer_info view = {.name = "statistics", .ndim = 3};
    view.base = build->direction == TE_DIRECTION_FORWARD ? te_get(build, TE_LINK_STATISTICS, n)
                                                         : te_need(build, TE_LINK_STATISTICS, n);
    view.shape[0] = te_multiple(batch, 1);
    view.shape[1] = te_constant(heads);
    view.shape[2] = te_multiple(length, 1);
    view.strides[0] = te_multiple(length, heads);
    view.strides[1] = te_multiple(length, 1);
    view.strides[2] = te_constant(1);
    return te_view(build, &view);
}

/* A stage with what forward and backward read. */
static te_stage *add_attention(te_build *build, int32_t n, te_op op, const char *name, int32_t rng)
{
    static const char *const fields[] = {"query", "key", "value"};
    const te_node_desc *node = te_node(build, n);
    int32_t heads[VALUE + 1];
    te_stage *stage;
    for (int i = QUERY; i <= VALUE; i++) heads[i] = heads_of_input(build, n, i);
    stage = te_add(build, n, node->name, name, op);
    stage->external = is_external(build, n);
    for (int i = QUERY; i <= VALUE; i++) te_use_as(build, stage, fields[i], heads[i]);
    te_use_value(build, stage, "mask", node->inputs[MASK]);
    te_use_value(build, stage, "bias", node->inputs[BIAS]);
    te_use_value(build, stage, "query_lengths", node->inputs[QUERY_LENGTHS]);
    te_use_value(build, stage, "key_lengths", node->inputs[KEY_LENGTHS]);
    te_use_as(build, stage, "rng", rng);
    te_set_number(build, stage, "scale", node->numbers[0]);
    te_set_number(build, stage, "dropout", node->numbers[1]);
    te_set_number(build, stage, "window_left", node->numbers[2]);
    te_set_number(build, stage, "window_right", node->numbers[3]);
    te_set_number(build, stage, "bottom_right", (node->flags & TE_NODE_BOTTOM_RIGHT) != 0);
    return stage;
}

static int32_t pair_of(te_build *build, int32_t n)
{
    int drops = te_node(build, n)->numbers[1] > 0.0 && !is_external(build, n);
    return drops ? te_draw(build, n) : TE_NO_BUFFER;
}

static void forward_attention(te_build *build, int32_t n)
{
    int32_t rng = pair_of(build, n);
    te_stage *stage = add_attention(build, n, TE_OP_ATTENTION, "attention", rng);
    int32_t output = te_get(build, TE_LINK_VALUE, te_node(build, n)->output);
    if (is_external(build, n)) {
        te_use_as(build, stage, "output", output);
        return;
    }
    te_use_as(build, stage, "output", heads_of_output(build, n, output));
    if (te_links_has(&build->saved, TE_LINK_STATISTICS, n)) {
        te_use_as(build, stage, "statistics", statistics_of(build, n));
    }
}

static void backward_attention(te_build *build, int32_t n)
{
    static const char *const fields[] = {"grad_query", "grad_key", "grad_value"};
    const te_node_desc *node = te_node(build, n);
    int32_t bias = node->inputs[BIAS];
    int32_t grad, output, statistics = TE_NO_BUFFER;
    te_stage *stage;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    grad = te_grad(build, node->output);
    output = te_wide(build, node->output, node->name, "attention_output");
    if (!is_external(build, n)) {
        grad = heads_of_output(build, n, grad);
        output = heads_of_output(build, n, output);
        statistics = statistics_of(build, n);
    }
    stage =
        add_attention(build, n, TE_OP_ATTENTION_BACKWARD, "attention_backward", pair_of(build, n));
    te_set_number(build, stage, "deterministic", (node->flags & TE_NODE_DETERMINISTIC) != 0);
    te_use_as(build, stage, "grad_output", grad);
    te_use_as(build, stage, "output", output);
    te_use_as(build, stage, "statistics", statistics);
    for (int i = QUERY; i <= VALUE; i++) {
        if (!build->values[node->inputs[i]].needs_grad) continue;
        te_use_as(build, stage, fields[i],
                  te_grad_heads(build, n, node->inputs[i], &node->slices[i]));
    }
    if (bias >= 0 && build->values[bias].needs_grad) {
        te_use_as(build, stage, "grad_bias", te_grad_target(build, bias));
    }
}

/* Tokens to one side of the diagonal; below 0: all of them. */
static int is_window(double number)
{
    return number >= -1.0 && number <= (double)INT32_MAX && number == (double)(int64_t)number;
}

/* A mask (u8) or a bias of 4 dims, or lengths (i32), whichever the input is. */
static int is_limit(const te_value_desc *value, int input)
{
    int lengths = input >= QUERY_LENGTHS;
    for (int32_t d = 0; d < value->ndim; d++) {
        if (value->shape[d].symbol == TE_SYMBOL_NONE && value->shape[d].add == TE_ANY_LENGTH) {
            return 0;
        }
    }
    return value->ndim == (lengths ? 1 : 4) && (value->flags & TE_VALUE_INPUT) != 0 &&
           (value->dtype == TE_DTYPE_U8) == (input == MASK) &&
           (value->dtype == TE_DTYPE_I32) == lengths;
}

static te_status check_attention(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_slice *q = &node->slices[QUERY], *k = &node->slices[KEY], *v = &node->slices[VALUE];
    const te_value_desc *x, *y = &graph->values[node->output];
    if (node->inputs[KEY] < 0 || node->inputs[VALUE] < 0 ||
        !(node->numbers[1] >= 0.0 && node->numbers[1] <= 1.0) || !is_window(node->numbers[2]) ||
        !is_window(node->numbers[3])) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "attention: inputs %d, %d, %d, dropout %g, window %g and %g",
                       node->inputs[QUERY], node->inputs[KEY], node->inputs[VALUE],
                       node->numbers[1], node->numbers[2], node->numbers[3]);
    }
    for (int i = QUERY; i <= VALUE; i++) TE_TRY(te_check_slice(graph, n, i));
    x = &graph->values[node->inputs[QUERY]];
    for (int i = KEY; i <= VALUE; i++) {
        if (graph->values[node->inputs[i]].dtype == x->dtype) continue;
        return TE_FAIL(TE_ERROR_TYPE, "attention: %s and %s of different dtypes", x->name,
                       graph->values[node->inputs[i]].name);
    }
    if (q->heads % k->heads != 0 || k->heads != v->heads || q->channels != k->channels ||
        graph->values[node->inputs[KEY]].shape[0].symbol !=
            graph->values[node->inputs[VALUE]].shape[0].symbol) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "attention: query of %d heads of %d channels, key of %d of %d, value of %d",
                       q->heads, q->channels, k->heads, k->channels, v->heads);
    }
    if (y->ndim != 2 || y->dtype != x->dtype || y->shape[0].symbol != x->shape[0].symbol ||
        y->shape[0].multiply != 1 || y->shape[0].align != 1 ||
        y->shape[1].add != (int64_t)q->heads * v->channels) {
        return TE_FAIL(TE_ERROR_INVALID, "attention: %s is no matrix of %d heads of %d channels",
                       y->name, q->heads, v->channels);
    }
    for (int i = MASK; i < INPUTS; i++) {
        if (node->inputs[i] < 0 || is_limit(&graph->values[node->inputs[i]], i)) continue;
        return TE_FAIL(TE_ERROR_INVALID,
                       "attention: %s is no mask (u8) or bias of 4 dims and no lengths (i32)",
                       graph->values[node->inputs[i]].name);
    }
    return TE_OK;
}

const te_node_rules te_attention_rules = {.name = "attention",
                                          .inputs = INPUTS,
                                          .numbers = 4,
                                          .slices = 3,
                                          .flags = TE_NODE_SEQUENCE_FIRST | TE_NODE_BOTTOM_RIGHT |
                                                   TE_NODE_DETERMINISTIC,
                                          .external = 1,
                                          .check = check_attention,
                                          .forward = forward_attention,
                                          .backward = backward_attention};

/* ---- rotary embedding ----------------------------------------------------------------------- */

static void rotate(te_build *build, int32_t n, int32_t from, int32_t to, int backward)
{
    const te_node_desc *node = te_node(build, n);
    te_stage *stage = te_add(build, n, node->name, backward ? "rope_backward" : "rope", TE_OP_ROPE);
    te_use_as(build, stage, "input", from);
    te_use_as(build, stage, "output", to);
    te_use_value(build, stage, "freqs", node->inputs[1]);
    te_set_number(build, stage, "interleaved", (node->flags & TE_NODE_INTERLEAVED) != 0);
    te_set_number(build, stage, "backward", backward);
}

static int32_t dense_heads(te_build *build, int32_t n, int32_t matrix)
{
    const te_slice *slice = &te_node(build, n)->slices[0];
    te_slice dense = te_dense_heads(slice->heads, slice->channels);
    return te_heads_of(build, n, matrix, &dense);
}

static void forward_rope(te_build *build, int32_t n)
{
    int32_t input = heads_of_input(build, n, 0);
    rotate(build, n, input,
           dense_heads(build, n, te_get(build, TE_LINK_VALUE, te_node(build, n)->output)), 0);
}

static void backward_rope(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t grad;
    if (!build->values[node->inputs[0]].needs_grad || !te_has_grad(build, node->output)) return;
    grad = dense_heads(build, n, te_grad(build, node->output));
    rotate(build, n, grad, te_grad_heads(build, n, node->inputs[0], &node->slices[0]), 1);
}

static te_status check_rope(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    const te_value_desc *angles = node->inputs[1] < 0 ? NULL : &graph->values[node->inputs[1]];
    int64_t columns = (int64_t)node->slices[0].heads * node->slices[0].channels;
    TE_TRY(te_check_slice(graph, n, 0));
    if (angles == NULL || angles->ndim != 2 || angles->dtype != TE_DTYPE_F32 ||
        angles->flags != TE_VALUE_INPUT) {
        return TE_FAIL(TE_ERROR_INVALID, "rope: %s is no input [positions, channels] of f32",
                       angles == NULL ? "nothing" : angles->name);
    }
    if (y->ndim == 2 && y->dtype == x->dtype && y->shape[0].symbol == x->shape[0].symbol &&
        y->shape[0].multiply == 1 && y->shape[0].align == 1 && y->shape[1].add == columns) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "rope: %s is no matrix of %d heads of %d channels", y->name,
                   node->slices[0].heads, node->slices[0].channels);
}

const te_node_rules te_rope_rules = {.name = "rope",
                                     .inputs = 2,
                                     .slices = 1,
                                     .flags = TE_NODE_SEQUENCE_FIRST | TE_NODE_INTERLEAVED,
                                     .check = check_rope,
                                     .forward = forward_rope,
                                     .backward = backward_rope};
