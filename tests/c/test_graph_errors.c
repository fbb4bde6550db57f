/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graph_errors.c - graphs that can not be are refused, whatever is wrong with them; and what
 * is no part of a graph changes none.
 */
#include <stddef.h>

#include "graph_ways.h"

static void make_small(graph *g)
{
    int32_t x, a, b, y;
    graph_start(g, TE_RECIPE_DELAYED, 0);
    x = graph_input(g, "x", WIDTH);
    a = rows_of(g, "a", 0, WIDTH);
    b = rows_of(g, "b", 0, WIDTH);
    y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_linear(g, "", x, a, 0);
    graph_activation(g, TE_ACTIVATION_GELU, a, b);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "last_", b, y);
}

/* The same with a value in bf16 in the place of the activation's. */
static void make_converted(graph *g)
{
    make_small(g);
    g->nodes[1].kind = TE_NODE_CONVERT;
    g->nodes[1].number_count = 0;
    g->values[2].dtype = TE_DTYPE_BF16;
}

static void refuse(const graph *g, te_status status, const char *text)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        te_plan *plan = NULL;
        EXPECT(te_plan_make(&g->desc, (te_direction)d, &plan) == status, "%s: %s", text,
               te_last_error());
        EXPECT(strstr(te_last_error(), text) != NULL, "%s: %s", text, te_last_error());
    }
}

/* One field of a graph. */
#define REFUSE_OF(make, field, wrong, status, text)                                                \
    do {                                                                                           \
        make(&g);                                                                                  \
        g.field = wrong;                                                                           \
        refuse(&g, TE_ERROR_##status, text);                                                       \
    } while (0)
/* Of the small one (x, a, b, y, weight, bias, gamma, beta; linear, GELU, norm). */
#define REFUSE(field, wrong, status, text) REFUSE_OF(make_small, field, wrong, status, text)
/* Of its node n, with these external steps. */
#define REFUSE_STEPS(n, count, first, second, text)                                                \
    do {                                                                                           \
        static const int32_t steps[] = {first, second};                                            \
        make_small(&g);                                                                            \
        g.nodes[n].external = steps;                                                               \
        g.nodes[n].external_count = count;                                                         \
        refuse(&g, TE_ERROR_INVALID, text);                                                        \
    } while (0)

/* These in two halves, all of which are external. */
#define REFUSE_HALVES(n, count, first, second, text)                                               \
    do {                                                                                           \
        static const int32_t steps[] = {first, second}, external[] = {2, 3, 4};                    \
        make_small(&g);                                                                            \
        g.nodes[0].external = external;                                                            \
        g.nodes[0].external_count = 3;                                                             \
        g.nodes[n].halves = steps;                                                                 \
        g.nodes[n].halves_count = count;                                                           \
        refuse(&g, TE_ERROR_INVALID, text);                                                        \
    } while (0)

static void check_refusals(void)
{
    static graph g;
    te_plan *plan = NULL;
    REFUSE(desc.size, 8, INVALID, "graph: size");
    REFUSE(desc.values, NULL, INVALID, "graph: 8 values at NULL");
    REFUSE(desc.nodes, NULL, INVALID, "graph: 3 nodes at NULL");
    REFUSE(desc.value_count, 0, INVALID, "graph: it has no values");
    REFUSE(desc.node_count, 0, INVALID, "graph: it has no nodes");
    REFUSE(desc.value_count, -1, INVALID, "graph: -1 values, expected 1 to 8192");
    REFUSE(desc.value_count, TE_GRAPH_VALUES + 1, INVALID, "graph: 8193 values");
    REFUSE(desc.node_count, TE_GRAPH_NODES + 1, INVALID, "graph: 1025 nodes");
    REFUSE(desc.flags, 2, INVALID, "or flags = 0x2");
    REFUSE(values[0].ndim, 0, INVALID, "value 0: ndim = 0");
    REFUSE(values[0].ndim, TE_MAX_DIMS + 1, INVALID, "value 0: ndim = 5");
    REFUSE(values[0].ndim, 1, INVALID, "linear: from x of 1 dims");
    REFUSE(values[0].dtype, 99, TYPE, "x: dtype invalid");
    REFUSE(values[0].dtype, TE_DTYPE_E4M3, TYPE, "x: dtype e4m3");
    REFUSE(values[0].shape[1].symbol, 7, INVALID, "x: dim 1");
    REFUSE(values[0].shape[1].symbol, TE_SYMBOL_ROWS, INVALID, "x: dim 1");
    REFUSE(values[0].shape[0].align, 0, INVALID, "x: dim 0");
    REFUSE(values[0].shape[0].align, 16, INVALID, "x: TE_VALUE_LEADING");
    REFUSE(values[0].shape[0].multiply, INT64_MAX, INVALID, "x: dim 0");
    REFUSE(values[0].shape[0].multiply, (int64_t)1 << 26, INVALID, "x: too large");
    REFUSE(values[0].shape[0].multiply, 3, INVALID,
           "linear: x and a have different numbers of rows");
    REFUSE(values[0].flags, TE_VALUE_INPUT | TE_VALUE_RESULT, INVALID, "flags = 0x5");
    REFUSE(values[0].flags, TE_VALUE_INPUT | TE_VALUE_ROUNDED, INVALID, "flags = 0x2001");
    REFUSE(values[0].flags, 0, INVALID, "node 0 reads x, which no earlier node makes");
    REFUSE(values[1].flags, TE_VALUE_INPUT, INVALID,
           "node 0 makes a, which is given or made by another node");
    REFUSE(values[4].flags, TE_VALUE_INPUT, INVALID, "linear: weight: weight is no parameter");
    REFUSE(values[4].shape[0].add, 7, INVALID, "linear: weight: weight is no parameter of 16 x 16");
    REFUSE(values[5].flags, TE_VALUE_PARAMETER | TE_VALUE_DEFER, INVALID, "only a linear's weight");
    REFUSE(values[6].shape[0].add, 7, INVALID, "norm: gamma: last_gamma is no parameter of 1 x 16");
    REFUSE(values[7].dtype, TE_DTYPE_BF16, TYPE, "norm: gamma f32, beta bf16");
    REFUSE(nodes[0].kind, TE_NODE_KINDS, INVALID, "node 0: kind 11 does not exist");
    REFUSE(nodes[0].kind, -1, INVALID, "node 0: kind -1 does not exist");
    REFUSE(inputs[0][0], 1, INVALID, "node 0 reads a, which no earlier node makes");
    REFUSE(inputs[0][0], 2, INVALID, "node 0 reads b, which no earlier node makes");
    REFUSE(inputs[0][1], 8, INVALID, "node 0: there is no value 8");
    REFUSE(inputs[0][1], -2, INVALID, "node 0: there is no value -2");
    REFUSE(nodes[0].input_count, 6, INVALID,
           "node 0 (gemm): 6 inputs, 0 numbers, 0 slices and 0 external steps, expected at most "
           "5, 0, 0 and 30");
    REFUSE(nodes[0].input_count, -1, INVALID, "node 0 (gemm): -1 inputs");
    REFUSE(nodes[0].input_count, INT32_MAX, INVALID, "2147483647 inputs");
    REFUSE(nodes[0].input_count, 0, INVALID, "node 0: input 0 = -1");
    REFUSE(nodes[0].input_count, 1, INVALID, "linear: it has no weight");
    REFUSE(nodes[0].inputs, NULL, INVALID, "node 0 (gemm): a list is NULL");
    REFUSE(nodes[2].number_count, 2, INVALID, "node 2 (norm): 3 inputs, 2 numbers");
    REFUSE(nodes[2].number_count, -1, INVALID, "-1 numbers");
    REFUSE(nodes[2].quantization.casts[0].recipe, 1, INVALID,
           "recipe 1, of which it knows 0x40 and none");
    REFUSE(nodes[2].numbers, NULL, INVALID, "node 2 (norm): a list is NULL");
    REFUSE(nodes[1].slice_count, 1, INVALID,
           "1 slices and 0 external steps, expected at most 1, 3, 0 and 0");
    REFUSE(nodes[1].slice_count, -1, INVALID, "-1 slices");
    REFUSE(nodes[0].output, 8, INVALID, "output = 8");
    REFUSE(nodes[0].output, 3, INVALID, "reads a, which no earlier node makes");
    REFUSE(nodes[1].output, 1, INVALID, "node 1 makes a, which is given or made by another node");
    REFUSE(nodes[0].external_count, 1, INVALID, "node 0 (gemm): a list is NULL");
    REFUSE(nodes[0].external_count, TE_LINEAR_STAGE_COUNT + 1, INVALID, "external steps, expected");
    REFUSE(nodes[0].external_count, -1, INVALID, "-1 external steps");
    REFUSE_STEPS(0, 1, TE_LINEAR_STAGE_COUNT, 0, "step 30 is external, expected");
    REFUSE_STEPS(0, 1, -1, 0, "step -1 is external");
    REFUSE_STEPS(0, 2, 3, 3, "step 3 is external, expected steps below 30 in asc");
    REFUSE(nodes[1].external_count, 1, INVALID, "1 external steps, expected at most 1, 3, 0 and 0");
    REFUSE(nodes[0].halves_count, 1, INVALID, "node 0 (gemm): a list is NULL");
    REFUSE(nodes[0].halves_count, -1, INVALID, "-1 steps in two halves");
    REFUSE_HALVES(1, 1, 0, 0, "node 1 (activation): 1 steps in two halves, expected at most 0");
    REFUSE_HALVES(0, 2, 2, 2, "step 2 is in two halves, expected external steps in asc");
    REFUSE_HALVES(0, 2, 3, 2, "step 2 is in two halves");
    REFUSE_HALVES(0, 1, 5, 0, "step 5 is in two halves");
    REFUSE_HALVES(0, 1, -1, 0, "step -1 is in two halves");
    REFUSE(nodes[0].ranks, 2, INVALID, "2 ranks, which only a collective has");
    REFUSE(nodes[0].ranks, 0, INVALID, "0 ranks, which only a collective has");
    REFUSE(nodes[0].slots[1], INT32_MAX, INVALID, "slots[1] = 2147483647");
    REFUSE(nodes[0].quantization.casts[0].recipe, 9, INVALID, "recipe = 9");
    REFUSE(nodes[0].quantization.casts[0].dtype, TE_DTYPE_F32, TYPE,
           "input: recipe 1 does not cast to f32");
    REFUSE(nodes[0].quantization.casts[1].amax_epsilon, (float)NAN, INVALID, "amax_epsilon");
    REFUSE(numbers[2][0], (float)NAN, INVALID, "eps = ");
    make_small(&g);
    memset(g.values[0].name, 'x', TE_NAME_BYTES);
    refuse(&g, TE_ERROR_INVALID, "or its name has no end");
    make_small(&g);
    memset(g.nodes[0].name, 'x', TE_NAME_BYTES);
    refuse(&g, TE_ERROR_INVALID, "or its name has no end");
    make_small(&g);
    (void)rows_of(&g, "nothing", TE_VALUE_RESULT, WIDTH);
    refuse(&g, TE_ERROR_INVALID, "no node makes the result nothing");
    make_small(&g);
    graph_activation(&g, TE_ACTIVATION_RELU, 0, rows_of(&g, "dead", 0, WIDTH));
    refuse(&g, TE_ERROR_INVALID, "node 3 makes dead, which is no result and which nobody reads");
    make_small(&g);
    (void)graph_linear(&g, "two_", 0, rows_of(&g, "z", TE_VALUE_RESULT, WIDTH), 0);
    g.inputs[3][1] = 4;
    refuse(&g, TE_ERROR_UNSUPPORTED, "node 3: weight has a gradient and is read twice");
    EXPECT(te_plan_make(NULL, TE_DIRECTION_FORWARD, &plan) == TE_ERROR_INVALID, "no graph");
    make_small(&g);
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_COUNT, &plan) == TE_ERROR_INVALID, "direction 3");
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &plan) == TE_OK, "%s", te_last_error());
}

/* ---- heads, dropout ------------------------------------------------------------------------- */

/* qkv, angles, turned, attended, mask, bias, y, bias of the sum; rope, attention, dropout + add. */
static void make_attention(graph *g)
{
    const te_slice slices[3] = {{4, 4, 0, 4, 1}, {2, 4, 16, 8, 1}, {2, 4, 20, 8, 1}};
    const te_extent angles[2] = {graph_constant(TE_ANY_LENGTH), graph_constant(4)};
    const te_extent scores[4] = {graph_constant(1), graph_constant(4),
                                 graph_symbol(TE_SYMBOL_DIM_1), graph_symbol(TE_SYMBOL_DIM_1)};
    const uint32_t wanted = TE_VALUE_INPUT | TE_VALUE_GRADIENT;
    int32_t x, turned, attended;
    te_node_desc *node;
    graph_start(g, TE_RECIPE_DELAYED, 0);
    x = graph_input(g, "x", 32);
    (void)graph_tensor(g, "angles", TE_VALUE_INPUT, TE_DTYPE_F32, 2, angles);
    turned = rows_of(g, "turned", 0, WIDTH);
    attended = rows_of(g, "attended", 0, WIDTH);
    (void)graph_tensor(g, "mask", TE_VALUE_INPUT, TE_DTYPE_U8, 4, scores);
    (void)graph_tensor(g, "bias", wanted, TE_DTYPE_F32, 4, scores);
    (void)graph_rope(g, "", x, slices[0], 1, turned);
    node = graph_attention(g, "", (const int32_t[]){turned, x, x},
                           (const te_slice[]){graph_dense(4, 4), slices[1], slices[2]}, attended);
    node->input_count = GRAPH_SLOPES + 1;
    inputs_of(g, node)[GRAPH_MASK] = 4;
    inputs_of(g, node)[GRAPH_BIAS] = 5;
    (void)graph_dropout_add(g, "add_", attended, attended, rows_of(g, "y", TE_VALUE_RESULT, WIDTH),
                            1);
}

/* The same with a norm of the heads that were turned; the angles, a matrix, are its gamma. */
static void make_head_norm(graph *g)
{
    make_attention(g);
    g->nodes[0].kind = TE_NODE_HEAD_NORM;
    g->nodes[0].variant = TE_NORM_RMSNORM;
    g->nodes[0].input_count = 3;
    g->inputs[0][1] = -1;
    g->values[1].flags = TE_VALUE_PARAMETER;
    g->values[1].ndim = 1;
    g->values[1].shape[0] = graph_constant(4);
}

#define REFUSE_NORM(field, wrong, status, text)                                                    \
    REFUSE_OF(make_head_norm, field, wrong, status, text)
#define REFUSE_HEADS(field, wrong, status, text)                                                   \
    REFUSE_OF(make_attention, field, wrong, status, text)

static void check_heads(void)
{
    static graph g;
    te_plan *plan = NULL;
    make_attention(&g);
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &plan));
    REFUSE_HEADS(nodes[1].slice_count, 2, INVALID, ": 0 heads of 0 channels");
    REFUSE_HEADS(nodes[1].slices, NULL, INVALID, "node 1 (attention): a list is NULL");
    REFUSE_HEADS(desc.flags, TE_GRAPH_RECOMPUTE, UNSUPPORTED,
                 "node 0 (rope) can not be repeated, which TE_GRAPH_RECOMPUTE asks for");
    for (int n = 0; n < 2; n++) {
        for (int i = 0; i <= 2 * n; i++) {
            REFUSE_HEADS(slices[n][i].heads, 0, INVALID, ": 0 heads of 4 channels");
            REFUSE_HEADS(slices[n][i].heads, -1, INVALID, "-1 heads of 4 channels");
            REFUSE_HEADS(slices[n][i].heads, INT32_MAX, INVALID, "2147483647 heads");
            REFUSE_HEADS(slices[n][i].channels, 0, INVALID, "heads of 0 channels");
            REFUSE_HEADS(slices[n][i].channels, INT32_MAX, INVALID, "of 2147483647 channels");
            REFUSE_HEADS(slices[n][i].offset, -1, INVALID, "channels at -1 + ");
            REFUSE_HEADS(slices[n][i].offset, 32, INVALID, "h in the ");
            REFUSE_HEADS(slices[n][i].offset, INT64_MAX, INVALID, "h in the ");
            REFUSE_HEADS(slices[n][i].stride, 3, INVALID, " + 3 h in the ");
            REFUSE_HEADS(slices[n][i].stride, INT64_MAX, INVALID, "h in the ");
            REFUSE_HEADS(slices[n][i].stride, INT64_MIN, INVALID, "h in the ");
            REFUSE_HEADS(slices[n][i].together, -1, INVALID, "h in the ");
            REFUSE_HEADS(slices[n][i].together, 3, INVALID, "h in the ");
            REFUSE_HEADS(slices[n][i].together, INT64_MAX, INVALID, "h in the ");
        }
    }
    /* Each column once: an overlap, columns that nobody reads, another reader. */
    REFUSE_HEADS(slices[0][0].offset, 4, UNSUPPORTED, "node 0: x is read by slices");
    REFUSE_HEADS(slices[1][1].offset, 20, UNSUPPORTED, "node 1: x is read by slices");
    REFUSE_HEADS(values[2].flags, TE_VALUE_RESULT | TE_VALUE_LEADING, UNSUPPORTED,
                 "node 1: turned is read by slices");
    REFUSE_HEADS(inputs[2][2], 2, UNSUPPORTED, "node 1: turned is read by slices");
    REFUSE_HEADS(values[0].shape[1].add, 36, UNSUPPORTED, "node 0: x is read by slices");
    REFUSE_HEADS(values[0].ndim, 3, INVALID, "x: dim 2");
    REFUSE_HEADS(values[0].shape[0].multiply, 2, INVALID, "heads of x, rows of 2 ranks behind the");
    REFUSE_HEADS(values[0].dtype, TE_DTYPE_U8, TYPE, "x: dtype u8");
    /* rope */
    REFUSE_HEADS(inputs[0][1], 5, INVALID, "rope: bias is no input");
    REFUSE_HEADS(values[1].dtype, TE_DTYPE_BF16, INVALID, "rope: angles is no input");
    REFUSE_HEADS(values[1].flags, TE_VALUE_PARAMETER, INVALID, "angles: dim 0 is");
    REFUSE_HEADS(values[2].shape[1].add, 12, INVALID, "rope: turned is no matrix of 4 heads of 4");
    REFUSE_HEADS(values[2].dtype, TE_DTYPE_BF16, INVALID, "rope: turned is no matrix");
    /* attention */
    REFUSE_HEADS(inputs[1][1], -1, INVALID, "attention: inputs 2, -1, 0");
    REFUSE_HEADS(inputs[1][2], -1, INVALID, "attention: inputs 2, 0, -1");
    REFUSE_HEADS(numbers[1][4], -1, INVALID, "attention: inputs 2, 0, 0, dropout 0, window -1");
    REFUSE_HEADS(numbers[1][4], INFINITY, INVALID, "softcap inf");
    REFUSE_HEADS(numbers[1][4], 1e-60, INVALID, "softcap 1e-60");
    REFUSE_HEADS(nodes[1].external_count, 1, INVALID, "node 1 (attention): 11 inputs");
    REFUSE_HEADS(numbers[1][1], 1.5, INVALID, "dropout 1.5,");
    REFUSE_HEADS(numbers[1][1], -0.1, INVALID, "dropout -0.1,");
    REFUSE_HEADS(numbers[1][1], (double)NAN, INVALID, "dropout ");
    REFUSE_HEADS(numbers[1][2], (double)NAN, INVALID, "window ");
    REFUSE_HEADS(numbers[1][2], -2, INVALID, "window -2 and -1");
    REFUSE_HEADS(numbers[1][3], 0.5, INVALID, "window -1 and 0.5");
    REFUSE_HEADS(numbers[1][3], 1e300, INVALID, "window -1 and 1e+300");
    REFUSE_HEADS(slices[1][0].channels, 2, INVALID, "key of 2 of 4");
    REFUSE_HEADS(slices[1][2].heads, 1, INVALID, "value of 1");
    REFUSE_HEADS(slices[1][0].heads, 3, INVALID, "query of 3 heads");
    REFUSE_HEADS(values[3].shape[1].add, 12, INVALID,
                 "attention: attended is no matrix of 4 heads");
    REFUSE_HEADS(values[3].shape[0].symbol, TE_SYMBOL_SOURCE_ROWS, INVALID,
                 "attended is no matrix");
    REFUSE_HEADS(values[4].dtype, TE_DTYPE_I32, INVALID, "attention: mask is no mask");
    REFUSE_HEADS(values[4].ndim, 3, INVALID, "attention: mask is no mask");
    REFUSE_HEADS(values[4].shape[0].add, TE_ANY_LENGTH, INVALID, "attention: mask is no mask");
    REFUSE_HEADS(inputs[1][4], 4, INVALID, "attention: mask is no mask");
    REFUSE_HEADS(inputs[1][3], 5, INVALID, "attention: bias is no mask");
    REFUSE_HEADS(inputs[1][5], 4, INVALID, "attention: mask is no mask");
    REFUSE_HEADS(inputs[1][GRAPH_SINK], 4, INVALID, "attention: mask is no sink and no slopes");
    REFUSE_HEADS(inputs[1][GRAPH_SLOPES], 5, INVALID, "attention: bias is no sink and no slopes");
    REFUSE_HEADS(slices[1][1].together, 2, UNSUPPORTED, "attention: heads of x that lie together");
    /* norm of heads */
    make_head_norm(&g);
    g.inputs[0][1] = 1;
    te_plan_release(plan);
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &plan));
    REFUSE_NORM(desc.flags, TE_GRAPH_RECOMPUTE, UNSUPPORTED,
                "node 0 (norm) can not be repeated, which TE_GRAPH_RECOMPUTE asks for");
    REFUSE_NORM(nodes[0].variant, 3, INVALID, "norm: kind = 3 does not exist");
    REFUSE_NORM(inputs[0][1], 4, INVALID, "norm: gamma: mask is no parameter of 1 x 4");
    REFUSE_NORM(inputs[0][2], 1, INVALID, "norm: kind 1 with a beta");
    REFUSE_NORM(values[2].shape[1].add, 12, INVALID, "norm of heads: turned is no matrix of 4");
    REFUSE_NORM(slices[0][0].channels, 0, INVALID, "heads of 0 channels");
    /* packed sequences */
    REFUSE_HEADS(nodes[0].flags, TE_NODE_PACKED, INVALID, "rope: no offsets for sequences that");
    REFUSE_HEADS(nodes[1].flags, TE_NODE_PACKED, INVALID, "attention: values -1, -1 as offsets of");
    make_attention(&g);
    g.nodes[1].input_count = 12;
    g.inputs[1][11] = 0; /* bounds */
    refuse(&g, TE_ERROR_INVALID, "attention: bounds x, of sequences that are not packed");
    /* dropout + add; random pairs */
    REFUSE_HEADS(numbers[2][0], 0.5, INVALID, "node 2: inputs[3] = -1, expected an input i64 [2]");
    REFUSE_HEADS(numbers[2][1], 0.5, INVALID, "node 2: inputs[3] = -1, expected an input i64 [2]");
    REFUSE_HEADS(numbers[1][1], 0.5, INVALID, "node 1: inputs[12] = -1, expected an input i64 [2]");
    REFUSE_HEADS(inputs[2][3], 1, INVALID, "node 2: inputs[3] = 1, expected none");
    make_attention(&g);
    g.numbers[2][0] = 0.5;
    g.inputs[2][3] = 1;
    refuse(&g, TE_ERROR_INVALID, "node 2: inputs[3] = 1, expected an input i64 [2]");
    REFUSE_HEADS(numbers[2][0], 1.5, INVALID, "dropout + add: probability = 1.5, expected 0 to 1");
    REFUSE_HEADS(numbers[2][1], (double)NAN, INVALID, "dropout + add: probability = ");
    REFUSE_HEADS(inputs[2][1], 5, INVALID, "dropout + add: bias: bias is no parameter");
    REFUSE_HEADS(inputs[2][2], 0, INVALID, "dropout + add: attended, x and y of different");
    REFUSE_HEADS(values[6].dtype, TE_DTYPE_BF16, INVALID, "attended, attended and y of different");
    make_attention(&g); /* the gradient of a bias is written as a whole */
    (void)graph_attention(&g, "two_", (const int32_t[]){6, 6, 6},
                          (const te_slice[]){{1, 4, 0, 4, 1}, {1, 4, 4, 4, 1}, {1, 8, 8, 8, 1}},
                          rows_of(&g, "z", TE_VALUE_RESULT, 8));
    g.values[6].flags &= ~(uint32_t)TE_VALUE_RESULT;
    g.inputs[3][GRAPH_BIAS] = 5;
    refuse(&g, TE_ERROR_UNSUPPORTED, "node 3: bias has a gradient and is read twice");
    make_attention(&g);
    graph_softcap(&g, 0, 6, rows_of(&g, "z", TE_VALUE_RESULT, WIDTH));
    refuse(&g, TE_ERROR_INVALID, "softcap: cap = 0");
    make_attention(&g);
    g.values[0].shape[0] = g.values[2].shape[0] = graph_symbol(TE_SYMBOL_DIM_0);
    g.values[0].flags &= ~(uint32_t)TE_VALUE_LEADING;
    g.values[2].flags = 0;
    refuse(&g, TE_ERROR_INVALID, "heads of x, which is no matrix of rows");
    make_small(&g);
    for (int v = 0; v < 4; v++) {
        g.values[v].shape[0].symbol = TE_SYMBOL_DIM_0;
        g.values[v].flags &= ~(uint32_t)TE_VALUE_LEADING;
    }
    refuse(&g, TE_ERROR_INVALID, "linear: x and a have different numbers of rows");
    make_small(&g);
    g.nodes[0].owner = -1;
    refuse(&g, TE_ERROR_INVALID, "owner -1, expected 0 to");
    g.nodes[0].owner = TE_GRAPH_NODES;
    refuse(&g, TE_ERROR_INVALID, "owner 1024, expected 0 to");
}

/* A node is refused with each flag that its kind does not know. */
static void check_flags(void (*make)(graph *g))
{
    static const uint32_t linear = (TE_NODE_ZERO_CENTERED - 1) | TE_LINEAR_MEASURE_OPERANDS |
                                   TE_LINEAR_MEASURE_GRAD | TE_LINEAR_MEASURE_RETURNED |
                                   TE_LINEAR_WEIGHT_TRANSPOSED;
    static const uint32_t attention = TE_NODE_SEQUENCE_FIRST | TE_NODE_BOTTOM_RIGHT |
                                      TE_NODE_DETERMINISTIC | TE_LINEAR_NO_AMAX |
                                      TE_NODE_MAX_SCORES;
    static const uint32_t rope = TE_NODE_SEQUENCE_FIRST | TE_NODE_INTERLEAVED;
    static const uint32_t known[TE_NODE_KINDS] = {[TE_NODE_LINEAR] = linear,
                                                  [TE_NODE_NORM] = TE_NODE_ZERO_CENTERED,
                                                  [TE_NODE_ATTENTION] = attention,
                                                  [TE_NODE_ROPE] = rope};
    static graph g;
    for (int32_t n = 0; n < 3; n++) {
        for (int bit = 0; bit < 32; bit++) {
            te_plan *plan = NULL;
            uint32_t of;
            make(&g);
            of = known[g.nodes[n].kind];
            g.nodes[n].flags = 1U << bit;
            if (1U << bit == TE_NODE_PACKED && (of & TE_NODE_SEQUENCE_FIRST) != 0) {
                refuse(&g, TE_ERROR_INVALID, "offsets"); /* it knows them, beside offsets */
            } else if (1U << bit == TE_NODE_FP8_GRADIENT && (of & TE_NODE_DETERMINISTIC) != 0) {
                refuse(&g, TE_ERROR_INVALID, "without a recipe");
            } else if ((of & g.nodes[n].flags) == 0) {
                refuse(&g, TE_ERROR_INVALID, ", of which it knows ");
            } else {
                OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &plan));
                te_plan_release(plan);
            }
        }
    }
}

/* What the caller's structs hold behind names, dims and fields is no part of a graph, nor are the
 * places of lists, and what is not there or 0 at their ends. */
static void check_identity(void)
{
    static graph g;
    static double numbers[2];
    const size_t end = offsetof(te_node_desc, rank) + sizeof g.nodes[0].rank;
    te_plan *first = NULL, *second = NULL;
    make_small(&g);
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &first));
    for (int i = 0; i < g.desc.value_count; i++) {
        te_value_desc *value = &g.values[i];
        value->name[TE_NAME_BYTES - 1] = 'x';
        value->shape[TE_MAX_DIMS - 1].add = 7;
    }
    for (int i = 0; i < g.desc.node_count; i++) {
        g.nodes[i].name[TE_NAME_BYTES - 1] = 'x';
        memset((char *)&g.nodes[i] + end, 0xa5, sizeof g.nodes[i] - end);
    }
    g.nodes[1].number_count = 2;
    g.nodes[1].numbers = numbers;
    g.nodes[1].slices = NULL;
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &second));
    EXPECT(first == second, "two plans of one graph");
}

static void check_converted(void)
{
    static graph g;
    te_plan *plan = NULL;
    make_converted(&g);
    OK(te_plan_make(&g.desc, TE_DIRECTION_BACKWARD, &plan));
    te_plan_release(plan);
    REFUSE_OF(make_converted, values[2].shape[1].add, WIDTH + 1, INVALID,
              "convert: from 16 f32 columns to 17 of bf16");
    REFUSE_OF(make_converted, values[2].shape[0].multiply, 2, INVALID, "different numbers of rows");
    REFUSE_OF(make_converted, desc.flags, TE_GRAPH_RECOMPUTE, UNSUPPORTED,
              "node 1 (convert) can not be repeated");
}

int main(void)
{
    check_identity();
    check_converted();
    check_refusals();
    check_heads();
    check_flags(make_small);
    check_flags(make_attention);
    (void)puts("graph errors: ok");
    return 0;
}
