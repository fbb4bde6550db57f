/* SPDX-License-Identifier: Apache-2.0
 *
 * node_heads.c - attention and the rotary embedding as nodes. They read heads of matrices where
 * they lie, queries, keys and values of one projection say, and write gradients to the same places.
 */
#include <float.h>

#include "core/status.h"
#include "layer/build.h"
#include "layer/heads_fp8.h"

/* ---- attention ------------------------------------------------------------------------------ */

enum {
#define X(NAME, name) NAME,
    TE_ATTENTION_INPUTS(X)
#undef X
        INPUTS
};

enum {
#define X(NAME, name) NAME,
    TE_ATTENTION_NUMBERS(X)
#undef X
        NUMBERS
};

static int is_packed(const te_node_desc *node)
{
    return (node->flags & TE_NODE_PACKED) != 0;
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
    const int32_t channels = node->slices[VALUE].channels;
    const te_slice dense = {node->slices[QUERY].heads, channels, 0, channels, 1};
    return te_heads_of(build, n, matrix, &dense);
}

/* [batch, heads, queries], packed: [1, tokens, heads]; dense. */
static int32_t statistics_of(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    const int first = (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    const int32_t rows = te_value(build, node->output)->shape[0].symbol;
    const int64_t ranks = te_value(build, node->output)->shape[0].multiply;
    const int32_t batch = rows + 1 + first, length = rows + 2 - first;
    const int32_t base = te_need(build, TE_LINK_STATISTICS, n);
    const te_extent heads = te_constant(node->slices[QUERY].heads), one = te_constant(1);
    const te_buffer_info packed = {.ndim = 3,
                                   .base = base,
                                   .shape = {one, te_multiple(rows, ranks), heads},
                                   .strides = {te_multiple(rows, ranks * heads.add), heads, one}};
    const te_buffer_info apart = {
        .ndim = 3,
        .base = base,
        .shape = {te_multiple(batch, 1), heads, te_multiple(length, ranks)},
        .strides = {te_multiple(length, ranks * heads.add), te_multiple(length, ranks), one}};
    return te_view(build, is_packed(node) ? &packed : &apart, "statistics");
}

/* What an attention reads: heads where they lie, or with a recipe those that were cast. */
static int32_t attended(te_build *build, int32_t n, int i, te_op op)
{
    if (!te_fp8_is_cast(build, n)) return heads_of_input(build, n, i);
    if (op == TE_OP_ATTENTION || te_fp8_has_gradient(build, n)) {
        return te_fp8_heads(build, n, (te_heads_role)i);
    }
    return te_fp8_heads_again(build, n, (te_heads_role)i);
}

/* A stage with what forward and backward read. */
static te_stage *add_attention(te_build *build, int32_t n, te_op op, const char *name)
{
    static const char *const inputs[] = {
#define X(NAME, name) #name,
        TE_ATTENTION_INPUTS(X)
#undef X
    };
    static const char *const numbers[] = {
#define X(NAME, name) #name,
        TE_ATTENTION_NUMBERS(X)
#undef X
    };
    const te_node_desc *node = te_node(build, n);
    int32_t heads[VALUE + 1];
    te_stage *stage;
    for (int i = QUERY; i <= VALUE; i++) heads[i] = attended(build, n, i, op);
    stage = te_add(build, n, node->name, name, op);
    for (int i = QUERY; i <= VALUE; i++) te_use_as(build, stage, inputs[i], heads[i]);
    for (int i = MASK; i < INPUTS; i++) {
        if (i != BOUNDS) te_use_value(build, stage, inputs[i], node->inputs[i]);
    }
    for (int i = 0; i < NUMBERS; i++) te_set_number(build, stage, numbers[i], node->numbers[i]);
    te_set_number(build, stage, "bottom_right", (node->flags & TE_NODE_BOTTOM_RIGHT) != 0);
    if (!is_packed(node)) return stage;
    (void)te_get(build, TE_LINK_VALUE, node->inputs[BOUNDS]); /* whose shape says the next two */
    te_use_size(build, stage, "max_queries", TE_SYMBOL_MAX_QUERIES);
    te_use_size(build, stage, "max_keys", TE_SYMBOL_MAX_KEYS);
    return stage;
}

static void forward_attention(te_build *build, int32_t n)
{
    const int fp8 = te_fp8_is_cast(build, n);
    int32_t output;
    te_stage *stage;
    if (fp8) te_fp8_cast_inputs(build, n);
    stage = add_attention(build, n, TE_OP_ATTENTION, "attention");
    if (fp8) {
        te_fp8_use_scales(build, n, stage);
        output = te_fp8_heads(build, n, TE_HEADS_OUTPUT);
    } else {
        output = te_get(build, TE_LINK_VALUE, te_node(build, n)->output);
        output = heads_of_output(build, n, output);
    }
    te_use_as(build, stage, "output", output);
    if (te_links_has(&build->saved, TE_LINK_STATISTICS, n)) {
        te_use_as(build, stage, "statistics", statistics_of(build, n));
    }
    if ((te_node(build, n)->flags & TE_NODE_MAX_SCORES) != 0) {
        te_use_as(build, stage, "top", te_get(build, TE_LINK_MAX_SCORES, n));
    }
    if (fp8) te_fp8_read_output(build, n);
}

/* What the gradient reads of the output: its heads, and those of its gradient. */
static void find_outputs(te_build *build, int32_t n, int32_t *output, int32_t *grad)
{
    const te_node_desc *node = te_node(build, n);
    *grad = te_grad(build, node->output);
    if (te_fp8_has_gradient(build, n)) {
        te_fp8_cast_grad(build, n, *grad);
        *grad = te_fp8_heads(build, n, TE_HEADS_GRAD_OUTPUT);
        *output = te_fp8_heads(build, n, TE_HEADS_OUTPUT);
        return;
    }
    if (te_fp8_is_cast(build, n)) {
        *output = te_fp8_heads_again(build, n, TE_HEADS_OUTPUT);
    } else {
        *output = te_wide(build, node->output, node->name, "attention_output");
        *output = heads_of_output(build, n, *output);
    }
    *grad = heads_of_output(build, n, *grad);
}

static void backward_attention(te_build *build, int32_t n)
{
    static const char *const fields[] = {"grad_query", "grad_key", "grad_value"};
    const te_node_desc *node = te_node(build, n);
    int32_t bias = node->inputs[BIAS], sink = node->inputs[SINK];
    const int fp8 = te_fp8_has_gradient(build, n);
    int32_t grad, output, statistics;
    te_stage *stage;
    if (!build->values[node->output].needs_grad || !te_has_grad(build, node->output)) return;
    find_outputs(build, n, &output, &grad);
    statistics = statistics_of(build, n);
    stage = add_attention(build, n, TE_OP_ATTENTION_BACKWARD, "attention_backward");
    te_set_number(build, stage, "deterministic", (node->flags & TE_NODE_DETERMINISTIC) != 0);
    te_use_as(build, stage, "grad_output", grad);
    te_use_as(build, stage, "output", output);
    te_use_as(build, stage, "statistics", statistics);
    for (int i = QUERY; i <= VALUE; i++) {
        if (!build->values[node->inputs[i]].needs_grad) continue;
        te_use_as(build, stage, fields[i],
                  fp8 ? te_fp8_heads(build, n, (te_heads_role)(TE_HEADS_GRAD_QUERY + i))
                      : te_grad_heads(build, n, node->inputs[i], &node->slices[i]));
    }
    if (fp8) {
        te_fp8_use_scales(build, n, stage);
        te_fp8_read_grads(build, n);
    }
    if (bias >= 0 && build->values[bias].needs_grad) {
        te_use_as(build, stage, "grad_bias", te_grad_target(build, bias));
    }
    if (sink >= 0 && build->values[sink].needs_grad) {
        te_use_as(build, stage, "grad_sink", te_grad_target(build, sink));
    }
}

/* Tokens to one side of the diagonal; below 0: all of them. */
static int is_window(double number)
{
    return number >= -1.0 && number <= (double)INT32_MAX && number == (double)(int64_t)number;
}

/* 0 is none; what fp32 rounds to 0 is not. */
static int is_cap(double number)
{
    return number == 0.0 || (number <= (double)FLT_MAX && (float)number > 0.0F);
}

/* Numbers of the heads, which slopes may have for each batch entry. */
static int is_of_heads(const te_value_desc *value, int input, int32_t heads)
{
    const te_extent *last = &value->shape[value->ndim - 1];
    return value->ndim <= (input == SINK ? 1 : 2) && value->dtype == TE_DTYPE_F32 &&
           (value->flags & TE_VALUE_INPUT) != 0 && last->symbol == TE_SYMBOL_NONE &&
           last->add == heads;
}

/* A mask (u8) or a bias of 4 dims, or lengths or offsets (i32), whichever the input is. */
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

/* Whether a value has no elements and the shape [max queries, max keys, 0]. */
static int is_bounds(const te_value_desc *value)
{
    const te_extent *shape = value->shape;
    return value->flags == TE_VALUE_INPUT && value->dtype == TE_DTYPE_I32 && value->ndim == 3 &&
           shape[0].symbol == TE_SYMBOL_MAX_QUERIES && shape[1].symbol == TE_SYMBOL_MAX_KEYS &&
           shape[0].multiply == 1 && shape[1].multiply == 1 && shape[0].align == 1 &&
           shape[1].align == 1 && shape[2].symbol == TE_SYMBOL_NONE && shape[2].add == 0;
}

/* What goes with packed sequences: offsets, bounds, no mask, no bias, no other tokens' lengths. */
static te_status check_packed(const te_graph_desc *graph, const te_node_desc *node)
{
    const int packed = is_packed(node), bounds = node->inputs[BOUNDS];
    TE_FAIL_IF(
        (node->inputs[QUERY_OFFSETS] >= 0) != packed || (node->inputs[KEY_OFFSETS] >= 0) != packed,
        TE_ERROR_INVALID, "attention: values %d, %d as offsets of sequences that are %spacked",
        node->inputs[QUERY_OFFSETS], node->inputs[KEY_OFFSETS], packed ? "" : "not ");
    TE_FAIL_IF((bounds >= 0) != packed || (packed && !is_bounds(&graph->values[bounds])),
               TE_ERROR_INVALID,
               "attention: bounds %s, of sequences that are %spacked: expected %s",
               bounds < 0 ? "none" : graph->values[bounds].name, packed ? "" : "not ",
               packed ? "an input i32 [max queries, max keys, 0]" : "none");
    TE_FAIL_IF(packed && (node->inputs[MASK] >= 0 || node->inputs[BIAS] >= 0), TE_ERROR_INVALID,
               "attention: packed sequences with mask %d, bias %d", node->inputs[MASK],
               node->inputs[BIAS]);
    return TE_OK;
}

static te_status check_attention(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_slice *q = &node->slices[QUERY], *k = &node->slices[KEY], *v = &node->slices[VALUE];
    const te_value_desc *x;
    TE_FAIL_IF(node->inputs[KEY] < 0 || node->inputs[VALUE] < 0 ||
                   !(node->numbers[DROPOUT] >= 0.0 && node->numbers[DROPOUT] <= 1.0) ||
                   !is_window(node->numbers[WINDOW_LEFT]) ||
                   !is_window(node->numbers[WINDOW_RIGHT]) || !is_cap(node->numbers[SOFTCAP]),
               TE_ERROR_INVALID,
               "attention: inputs %d, %d, %d, dropout %g, window %g and %g, softcap %g",
               node->inputs[QUERY], node->inputs[KEY], node->inputs[VALUE], node->numbers[DROPOUT],
               node->numbers[WINDOW_LEFT], node->numbers[WINDOW_RIGHT], node->numbers[SOFTCAP]);
    TE_TRY(check_packed(graph, node));
    for (int i = QUERY; i <= VALUE; i++) {
        TE_TRY(te_check_slice(graph, n, i));
        x = &graph->values[node->inputs[i]];
        TE_FAIL_IF(te_is_of_heads(x) && (x->ndim == 3) != is_packed(node), TE_ERROR_INVALID,
                   "attention: %s has %d dims, of sequences that are %spacked", x->name, x->ndim,
                   is_packed(node) ? "" : "not ");
        if (te_slice_together(&node->slices[i]) == 1) continue;
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "attention: heads of %s that lie together: let a rotary embedding or a norm "
                       "of heads read them",
                       graph->values[node->inputs[i]].name);
    }
    x = &graph->values[node->inputs[QUERY]];
    for (int i = KEY; i <= VALUE; i++) {
        if (graph->values[node->inputs[i]].dtype == x->dtype) continue;
        return TE_FAIL(TE_ERROR_TYPE, "attention: %s and %s of different dtypes", x->name,
                       graph->values[node->inputs[i]].name);
    }
    TE_FAIL_IF(q->heads % k->heads != 0 || k->heads != v->heads || q->channels != k->channels ||
                   te_rows_symbol(&graph->values[node->inputs[KEY]]) !=
                       te_rows_symbol(&graph->values[node->inputs[VALUE]]),
               TE_ERROR_INVALID,
               "attention: query of %d heads of %d channels, key of %d of %d, value of %d",
               q->heads, q->channels, k->heads, k->channels, v->heads);
    TE_TRY(te_check_output(graph, n, "attention", q->heads, v->channels));
    for (int i = SINK; i <= SLOPES; i++) {
        if (node->inputs[i] < 0 || is_of_heads(&graph->values[node->inputs[i]], i, q->heads)) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID, "attention: %s is no sink and no slopes (f32) of %d heads",
                       graph->values[node->inputs[i]].name, q->heads);
    }
    TE_TRY(te_check_pair(graph, n, RNG, node->numbers[DROPOUT] > 0.0));
    TE_TRY(te_fp8_check(graph, n));
    for (int i = MASK; i < SINK; i++) {
        if (node->inputs[i] < 0 || is_limit(&graph->values[node->inputs[i]], i)) continue;
        return TE_FAIL(TE_ERROR_INVALID,
                       "attention: %s is no mask (u8) or bias of 4 dims, no lengths or offsets "
                       "(i32)",
                       graph->values[node->inputs[i]].name);
    }
    return TE_OK;
}

const te_node_rules te_attention_rules = {
    .name = "attention",
    .inputs = INPUTS,
    .numbers = NUMBERS,
    .slices = 3,
    .flags = TE_NODE_SEQUENCE_FIRST | TE_NODE_BOTTOM_RIGHT | TE_NODE_DETERMINISTIC |
             TE_NODE_PACKED | TE_NODE_FP8_GRADIENT | TE_LINEAR_NO_AMAX | TE_NODE_MAX_SCORES,
    .casts = 1,
    .check = check_attention,
    .forward = forward_attention,
    .backward = backward_attention};

/* ---- rotary embedding ----------------------------------------------------------------------- */

/* Whether the stage of the node before turns this one's heads too: both turn the same tokens of
 * what is there before either. */
static int is_joined(const te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n), *before;
    const te_value_desc *x, *y;
    if (n == 0 || node->kind != TE_NODE_ROPE) return 0;
    before = te_node(build, n - 1);
    if (before->kind != TE_NODE_ROPE) return 0;
    x = te_value(build, node->inputs[0]);
    y = te_value(build, before->inputs[0]);
    return node->inputs[0] != before->output && node->inputs[2] == before->inputs[2] &&
           node->flags == before->flags && x->dtype == y->dtype &&
           x->shape[0].symbol == y->shape[0].symbol &&
           node->slices[0].channels == before->slices[0].channels;
}

enum { PAIR = 2 };

/* The nodes of a stage that begins with node n; their number, 0 where another one begins it. */
static int joined_nodes(const te_build *build, int32_t n, int32_t nodes[PAIR])
{
    int behind = 0; /* those before it in a row */
    while (is_joined(build, n - behind)) behind++;
    if (behind % PAIR != 0) return 0;
    nodes[0] = n;
    nodes[1] = n + 1;
    return n + 1 < build->graph->node_count && is_joined(build, n + 1) ? PAIR : 1;
}

/* A stage that turns heads from some buffers to others, as the nodes say. */
static void rotate(te_build *build, const int32_t *nodes, int count, int32_t (*heads)[2],
                   int backward)
{
    static const char *const fields[PAIR][3] = {{"input", "output", "freqs"},
                                                {"key", "key_output", "key_freqs"}};
    const te_node_desc *node = te_node(build, nodes[0]);
    te_stage *stage =
        te_add(build, nodes[0], node->name, backward ? "rope_backward" : "rope", TE_OP_ROPE);
    for (int i = 0; i < count; i++) {
        te_use_as(build, stage, fields[i][0], heads[i][0]);
        te_use_as(build, stage, fields[i][1], heads[i][1]);
        te_use_value(build, stage, fields[i][2], te_node(build, nodes[i])->inputs[1]);
    }
    te_use_value(build, stage, "cu_seqlens", node->inputs[2]);
    te_set_number(build, stage, "channels", node->slices[0].channels);
    te_set_number(build, stage, "interleaved", (node->flags & TE_NODE_INTERLEAVED) != 0);
    te_set_number(build, stage, "backward", backward);
}

static int32_t dense_heads(te_build *build, int32_t n, int32_t matrix)
{
    te_slice dense = te_node(build, n)->slices[0]; /* as many lie together as in the input */
    dense.offset = 0;
    dense.stride = te_slice_width(&dense);
    return te_heads_of(build, n, matrix, &dense);
}

static void forward_rope(te_build *build, int32_t n)
{
    int32_t nodes[PAIR], heads[PAIR][2];
    const int count = joined_nodes(build, n, nodes);
    for (int i = 0; i < count; i++) {
        int32_t output = te_node(build, nodes[i])->output;
        heads[i][0] = heads_of_input(build, nodes[i], 0);
        heads[i][1] = dense_heads(build, nodes[i], te_get(build, TE_LINK_VALUE, output));
    }
    if (count > 0) rotate(build, nodes, count, heads, 0);
}

static void backward_rope(te_build *build, int32_t n)
{
    int32_t nodes[PAIR], heads[PAIR][2];
    const int joined = joined_nodes(build, n, nodes);
    int count = 0;
    for (int i = 0; i < joined; i++) {
        const te_node_desc *node = te_node(build, nodes[i]);
        if (!build->values[node->inputs[0]].needs_grad || !te_has_grad(build, node->output)) {
            continue;
        }
        heads[count][0] = dense_heads(build, nodes[i], te_grad(build, node->output));
        heads[count][1] = te_grad_heads(build, nodes[i], node->inputs[0], &node->slices[0]);
        nodes[count++] = nodes[i];
    }
    if (count > 0) rotate(build, nodes, count, heads, 1);
}

static te_status check_rope(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *angles = node->inputs[1] < 0 ? NULL : &graph->values[node->inputs[1]];
    const te_value_desc *offsets = node->inputs[2] < 0 ? NULL : &graph->values[node->inputs[2]];
    TE_TRY(te_check_heads(graph, n, "rope"));
    TE_FAIL_IF((offsets != NULL) != is_packed(node) ||
                   (offsets != NULL && !is_limit(offsets, QUERY_OFFSETS)),
               TE_ERROR_INVALID, "rope: %s for sequences that are %spacked",
               offsets == NULL ? "no offsets" : offsets->name, is_packed(node) ? "" : "not ");
    if (angles == NULL ||
        (angles->ndim == 2 && angles->dtype == TE_DTYPE_F32 && angles->flags == TE_VALUE_INPUT)) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "rope: %s is no input [positions, channels] of f32",
                   angles->name);
}

const te_node_rules te_rope_rules = {.name = "rope",
                                     .inputs = 3,
                                     .slices = 1,
                                     .flags = TE_NODE_SEQUENCE_FIRST | TE_NODE_INTERLEAVED |
                                              TE_NODE_PACKED,
                                     .check = check_rope,
                                     .forward = forward_rope,
                                     .backward = backward_rope};
