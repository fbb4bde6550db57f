/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graph_errors.c - graphs that can not be are refused, whatever is wrong with them; and what
 * is no part of a graph changes none.
 */
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

static void refuse(const graph *g, te_status status, const char *text)
{
    for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
        int64_t id = 0;
        EXPECT(te_plan_make(&g->desc, (te_direction)d, &id) == status, "%s: %s", text,
               te_last_error());
        EXPECT(strstr(te_last_error(), text) != NULL, "%s: %s", text, te_last_error());
    }
}

/* One field of the small graph (x, a, b, y, weight, bias, gamma, beta; linear, GELU, norm). */
#define REFUSE(field, wrong, status, text)                                                         \
    do {                                                                                           \
        make_small(&g);                                                                            \
        g.field = wrong;                                                                           \
        refuse(&g, TE_ERROR_##status, text);                                                       \
    } while (0)

static void check_refusals(void)
{
    static graph g;
    int64_t id = 0;
    REFUSE(desc.size, 8, INVALID, "graph: size");
    REFUSE(desc.values, NULL, INVALID, "graph: size, counts");
    REFUSE(desc.nodes, NULL, INVALID, "graph: size, counts");
    REFUSE(desc.value_count, 0, INVALID, "graph: size, counts");
    REFUSE(desc.value_count, -1, INVALID, "graph: size, counts");
    REFUSE(desc.value_count, TE_GRAPH_VALUES + 1, INVALID, "graph: size, counts");
    REFUSE(desc.node_count, TE_GRAPH_NODES + 1, INVALID, "graph: size, counts");
    REFUSE(desc.flags, 2, INVALID, "graph: size, counts or flags");
    REFUSE(values[0].ndim, 0, INVALID, "value 0: name, ndim = 0");
    REFUSE(values[0].ndim, TE_MAX_DIMS + 1, INVALID, "value 0: name, ndim = 5");
    REFUSE(values[0].ndim, 1, INVALID, "linear: from x of 1 dims");
    REFUSE(values[0].dtype, 99, TYPE, "x: dtype invalid");
    REFUSE(values[0].dtype, TE_DTYPE_E4M3, TYPE, "x: dtype e4m3");
    REFUSE(values[0].shape[1].symbol, 7, INVALID, "x: dim 1");
    REFUSE(values[0].shape[1].symbol, TE_SYMBOL_ROWS, INVALID, "x: dim 1");
    REFUSE(values[0].shape[0].align, 0, INVALID, "x: dim 0");
    REFUSE(values[0].shape[0].align, 16, INVALID, "x: leading dims");
    REFUSE(values[0].shape[0].multiply, INT64_MAX, INVALID, "x: dim 0");
    REFUSE(values[0].shape[0].multiply, (int64_t)1 << 26, INVALID, "x: too large");
    REFUSE(values[0].shape[0].multiply, 3, INVALID, "linear: from x to a: other rows");
    REFUSE(values[0].flags, TE_VALUE_INPUT | TE_VALUE_RESULT, INVALID, "flags = 0x5");
    REFUSE(values[0].flags, 0, INVALID, "node 0 reads x, which nobody has made");
    REFUSE(values[1].flags, TE_VALUE_INPUT, INVALID, "node 0 makes a, which is there already");
    REFUSE(values[4].flags, TE_VALUE_INPUT, INVALID, "linear: weight: weight is no parameter");
    REFUSE(values[4].shape[0].add, 7, INVALID, "linear: weight: weight is no parameter of 16 x 16");
    REFUSE(values[5].flags, TE_VALUE_PARAMETER | TE_VALUE_DEFER, INVALID, "only a linear's weight");
    REFUSE(values[6].shape[0].add, 7, INVALID, "norm: gamma: last_gamma is no parameter of 1 x 16");
    REFUSE(values[7].dtype, TE_DTYPE_BF16, TYPE, "norm: gamma f32, beta bf16");
    REFUSE(nodes[0].kind, TE_NODE_KINDS, INVALID, "node 0: name, kind 7");
    REFUSE(nodes[0].kind, -1, INVALID, "node 0: name, kind -1");
    REFUSE(nodes[0].inputs[0], 1, INVALID, "node 0 reads a, which nobody has made");
    REFUSE(nodes[0].inputs[0], 2, INVALID, "node 0 reads b, which nobody has made");
    REFUSE(nodes[0].inputs[1], 8, INVALID, "node 0: there is no value 8");
    REFUSE(nodes[0].inputs[1], -2, INVALID, "node 0: there is no value -2");
    REFUSE(nodes[0].inputs[3], 0, INVALID, "node 0: there is no value 0 or input 3");
    REFUSE(nodes[0].output, 8, INVALID, "output 8");
    REFUSE(nodes[0].output, 3, INVALID, "reads a, which nobody has made");
    REFUSE(nodes[1].output, 1, INVALID, "node 1 makes a, which is there already");
    REFUSE(nodes[1].inputs[1], 0, INVALID, "node 1: there is no value 0 or input 1");
    REFUSE(nodes[0].external, 1U << 31, INVALID, "external = 0x80000000");
    REFUSE(nodes[0].gather, 2, INVALID, "gather = 2");
    REFUSE(nodes[0].gather, 0, INVALID, "gather = 0");
    REFUSE(nodes[0].slots[1], INT32_MAX, INVALID, "slots[1] = 2147483647");
    REFUSE(nodes[0].quantization.recipe, 3, INVALID, "recipe = 3");
    REFUSE(nodes[0].quantization.forward_fp8, TE_DTYPE_E5M2, TYPE, "FP8 dtypes e5m2 and e5m2");
    REFUSE(nodes[0].quantization.amax_epsilon[1], (float)NAN, INVALID, "amax_epsilon");
    REFUSE(nodes[2].numbers[0], (float)NAN, INVALID, "eps = ");
    make_small(&g);
    memset(g.values[0].name, 'x', TE_NAME_BYTES);
    refuse(&g, TE_ERROR_INVALID, "value 0: name");
    make_small(&g);
    memset(g.nodes[0].name, 'x', TE_NAME_BYTES);
    refuse(&g, TE_ERROR_INVALID, "node 0: name");
    make_small(&g);
    (void)rows_of(&g, "nothing", TE_VALUE_RESULT, WIDTH);
    refuse(&g, TE_ERROR_INVALID, "no node makes the result nothing");
    make_small(&g);
    graph_activation(&g, TE_ACTIVATION_RELU, 0, rows_of(&g, "dead", 0, WIDTH));
    refuse(&g, TE_ERROR_INVALID, "node 3 makes dead, which is no result and which nobody reads");
    make_small(&g);
    graph_linear(&g, "two_", 0, rows_of(&g, "z", TE_VALUE_RESULT, WIDTH), 0)->inputs[1] = 4;
    refuse(&g, TE_ERROR_UNSUPPORTED, "node 3: the gradient of weight, which is read twice");
    EXPECT(te_plan_make(NULL, TE_DIRECTION_FORWARD, &id) == TE_ERROR_INVALID, "no graph");
    make_small(&g);
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_COUNT, &id) == TE_ERROR_INVALID, "direction 3");
    EXPECT(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &id) == TE_OK, "%s", te_last_error());
}

/* What the caller's structs hold behind names and dims is no part of a graph. */
static void check_identity(void)
{
    graph g;
    int64_t first = 0, second = 0;
    make_small(&g);
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &first));
    for (int i = 0; i < g.desc.value_count; i++) {
        te_value_desc *value = &g.values[i];
        value->name[TE_NAME_BYTES - 1] = 'x';
        value->shape[TE_MAX_DIMS - 1].add = 7;
    }
    for (int i = 0; i < g.desc.node_count; i++) g.nodes[i].name[TE_NAME_BYTES - 1] = 'x';
    OK(te_plan_make(&g.desc, TE_DIRECTION_FORWARD, &second));
    EXPECT(first == second, "%lld and %lld", (long long)first, (long long)second);
    graph_forget(&g);
}

int main(void)
{
    check_identity();
    check_refusals();
    (void)puts("graph errors: ok");
    return 0;
}
