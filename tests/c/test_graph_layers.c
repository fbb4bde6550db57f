/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graph_layers.c - whole Transformer layers as graphs, and what they are made of: residual
 * streams whose gradients are passed on, heads of packed projections, dropout by drawn pairs, slots
 * of several owners, attention of the caller.
 */
#include "graph_ways.h"

/* ---- residual streams ----------------------------------------------------------------------- */

static double drop; /* of the dropout + add nodes here */

static void add_dropout(graph *g, const char *name, int32_t x, int32_t residual, int32_t y,
                        int bias)
{
    *numbers_of(g, graph_dropout_add(g, name, x, residual, y, bias)) = drop;
}

static void both_are_inputs(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), z = graph_input(g, "z", WIDTH);
    add_dropout(g, "", x, z, rows_of(g, "y", TE_VALUE_RESULT, WIDTH), 1);
}

static void the_same_twice(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_linear(g, "", x, a, 0);
    add_dropout(g, "add_", a, a, y, 0);
}

static void residual_is_a_result(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", TE_VALUE_RESULT, WIDTH);
    int32_t b = rows_of(g, "b", 0, WIDTH), y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "", x, a);
    (void)graph_linear(g, "", a, b, 0);
    add_dropout(g, "add_", b, a, y, 1);
}

/* One value is the residual of two, and is read by a third. */
static void read_thrice(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t b = rows_of(g, "b", 0, WIDTH), c = rows_of(g, "c", 0, WIDTH);
    int32_t d = rows_of(g, "d", 0, WIDTH), y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_linear(g, "first_", x, a, 0);
    add_dropout(g, "one_", x, a, b, 0);
    (void)graph_linear(g, "second_", a, c, 0);
    add_dropout(g, "two_", c, a, d, 0);
    add_dropout(g, "three_", d, b, y, 0);
}

/* Activations at both ends of a sum, and where a gradient that is passed on may not be changed. */
static void activations_around(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t b = rows_of(g, "b", 0, WIDTH), c = rows_of(g, "c", 0, WIDTH);
    int32_t d = rows_of(g, "d", 0, WIDTH), e = rows_of(g, "e", 0, WIDTH);
    int32_t f = rows_of(g, "f", 0, WIDTH), y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    add_dropout(g, "first_", x, -1, a, 0);
    graph_activation(g, TE_ACTIVATION_GELU, a, b);
    graph_softcap(g, 2, b, c);
    add_dropout(g, "second_", c, x, d, 1);
    graph_activation(g, TE_ACTIVATION_GELU, d, e);
    graph_softcap(g, 1, e, f);
    add_dropout(g, "last_", f, -1, y, 0);
}

static void stream(graph *g)
{
    int32_t x = graph_input(g, "x", WIDTH);
    for (int i = 0; i < 4; i++) {
        char name[TE_NAME_BYTES];
        int32_t a = rows_of(g, "a", 0, WIDTH), b = rows_of(g, "b", 0, WIDTH);
        int32_t y = rows_of(g, "y", i == 3 ? TE_VALUE_RESULT : 0, WIDTH);
        (void)snprintf(name, sizeof name, "n%d_", i);
        (void)graph_norm(g, TE_NORM_LAYERNORM, name, x, a);
        (void)graph_linear(g, name, a, b, i == 1 ? TE_VALUE_DEFER : 0);
        (void)snprintf(name, sizeof name, "add%d_", i);
        add_dropout(g, name, b, x, y, 1);
        x = y;
    }
}

/* Sums in fp32 of terms in the dtype of the graph: of either one, and of both. */
static void stream_in_f32(graph *g)
{
    const te_dtype narrow = g->dtype;
    int32_t x, a, b, c, d, e, f, y;
    g->dtype = TE_DTYPE_F32;
    x = graph_input(g, "x", WIDTH);
    c = rows_of(g, "c", 0, WIDTH);
    e = rows_of(g, "e", 0, WIDTH);
    f = rows_of(g, "f", 0, WIDTH);
    y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    g->dtype = narrow;
    a = rows_of(g, "a", 0, WIDTH);
    b = rows_of(g, "b", 0, WIDTH);
    d = rows_of(g, "d", 0, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "one_", x, a);
    (void)graph_linear(g, "one_", a, b, 0);
    add_dropout(g, "add_", b, x, c, 1);
    (void)graph_norm(g, TE_NORM_RMSNORM, "two_", c, d);
    add_dropout(g, "narrow_residual_", c, b, e, 0);
    add_dropout(g, "both_narrow_", d, b, f, 1);
    add_dropout(g, "last_", e, f, y, 0);
}

static void drop_paths(graph *g)
{
    static const double numbers[][2] = {{0, 0.5}, {0.3, 0.5}, {1, 0}, {0, 1}};
    int32_t x = graph_input(g, "x", WIDTH);
    for (int i = 0; i < 4; i++) {
        char name[TE_NAME_BYTES];
        int32_t y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
        (void)snprintf(name, sizeof name, "n%d_", i);
        memcpy(numbers_of(g, graph_dropout_add(g, name, x, x, y, 1)), numbers[i],
               sizeof numbers[i]);
        x = y;
    }
}

/* ---- heads ---------------------------------------------------------------------------------- */

/* The output of one attention is read by heads by another one. */
static void attention_of_attention(graph *g)
{
    const te_slice dense = graph_dense(4, 4);
    const te_slice thirds[3] = {{1, 8, 0, 8, 1}, {1, 8, 8, 8, 1}, {1, 16, 16, 16, 1}};
    int32_t x = graph_input(g, "x", 2 * WIDTH), a = rows_of(g, "a", 0, WIDTH);
    int32_t y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH), z = graph_input(g, "z", WIDTH);
    (void)graph_attention(g, "one_", (const int32_t[]){x, x, x}, thirds, a);
    (void)graph_attention(g, "two_", (const int32_t[]){a, z, graph_input(g, "v", WIDTH)},
                          (const te_slice[]){dense, dense, dense}, y);
}

static void attention_of_inputs(graph *g)
{
    const te_slice slices[3] = {{4, 6, 0, 6, 1}, {2, 6, 24, 10, 1}, {2, 4, 30, 10, 1}};
    const te_extent shape[4] = {graph_constant(1), graph_constant(4), graph_symbol(TE_SYMBOL_DIM_1),
                                graph_symbol(TE_SYMBOL_DIM_1)};
    int32_t x = graph_input(g, "x", 44), y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    int32_t bias = graph_tensor(g, "bias", TE_VALUE_INPUT | TE_VALUE_GRADIENT, g->dtype, 4, shape);
    te_node_desc *node = graph_attention(g, "", (const int32_t[]){x, x, x}, slices, y);
    inputs_of(g, node)[GRAPH_BIAS] = bias;
    numbers_of(g, node)[1] = 0.3;
    numbers_of(g, node)[3] = 0;
}

static void check_parts(void)
{
    static void (*const chosen[])(graph *) = {both_are_inputs,        the_same_twice,
                                              residual_is_a_result,   read_thrice,
                                              activations_around,     stream,
                                              stream_in_f32,          drop_paths,
                                              attention_of_attention, attention_of_inputs};
    const te_sizes some = sizes_of(3, 4, 0, 0), none = sizes_of(3, 0, 0, 0);
    static graph g;
    for (unsigned i = 0; i < 4 * sizeof chosen / sizeof chosen[0]; i++) {
        for (int recipe = TE_RECIPE_NONE; recipe <= TE_RECIPE_CURRENT; recipe++) {
            drop = i % 2 ? 0.4 : 0;
            graph_start(&g, (te_recipe)recipe, 0);
            g.dtype = i / 2 % 2 ? TE_DTYPE_BF16 : TE_DTYPE_F32;
            chosen[i / 4](&g);
            check_every_way(&g, &some);
            check_every_way(&g, &none);
        }
    }
}

/* ---- layers --------------------------------------------------------------------------------- */

typedef struct layer_options {
    te_dtype dtype;
    double dropout, drop_path, attention_dropout;
    int first, cross, rope, interleaved, norm_is_residual, late_weights, returns_norm;
    int kv_heads; /* of 4 */
} layer_options;

enum { HEADS = 4, HEAD = 4, FFN = 24 };

static int32_t turn(graph *g, const layer_options *o, const char *name, int32_t x, te_slice *slice)
{
    const te_extent shape[2] = {graph_constant(TE_ANY_LENGTH), graph_constant(HEAD / 2)};
    char text[TE_NAME_BYTES];
    int32_t angles, y;
    te_node_desc *node;
    (void)snprintf(text, sizeof text, "%sangles", name);
    angles = graph_tensor(g, text, TE_VALUE_INPUT, TE_DTYPE_F32, 2, shape);
    y = rows_of(g, name, 0, (int64_t)slice->heads * HEAD);
    node = graph_rope(g, name, x, *slice, angles, y);
    node->flags |=
        (o->first ? TE_NODE_SEQUENCE_FIRST : 0) | (o->interleaved ? TE_NODE_INTERLEAVED : 0);
    *slice = graph_dense(slice->heads, HEAD);
    return y;
}

/* dropout(attention(x, source)) + residual; source -1: x itself. */
static int32_t attend_in_layer(graph *g, const layer_options *o, const char *prefix, int32_t x,
                               int32_t source, int32_t residual)
{
    int32_t kv = o->kv_heads, columns = 2 * kv * HEAD, in[3], attended, projected, y;
    te_slice slices[3] = {
        graph_dense(HEADS, HEAD), {kv, HEAD, 0, 2 * HEAD, 1}, {kv, HEAD, HEAD, 2 * HEAD, 1}};
    char name[3][TE_NAME_BYTES];
    te_node_desc *node;
    for (int i = 0; i < 3; i++) {
        static const char *const parts[] = {"qkv", "kv", "proj"};
        (void)snprintf(name[i], sizeof name[i], "%s%s_", prefix, parts[i]);
    }
    if (source < 0) {
        in[0] = in[1] = in[2] = rows_of(g, name[0], 0, WIDTH + columns);
        slices[1].offset += WIDTH;
        slices[2].offset += WIDTH;
    } else {
        in[0] = rows_of(g, name[0], 0, WIDTH);
        in[1] = in[2] = graph_value(g, name[1], 0, GRAPH_SOURCE, columns);
        (void)graph_linear(g, name[1], source, in[1], 0);
        g->owner++;
    }
    (void)graph_linear(g, name[0], x, in[0], o->late_weights ? TE_VALUE_DEFER : 0);
    g->owner++;
    if (o->rope) {
        in[0] = turn(g, o, "turned_q_", in[0], &slices[0]);
        if (source < 0) in[1] = turn(g, o, "turned_k_", in[1], &slices[1]);
    }
    attended = rows_of(g, "attended", 0, WIDTH);
    node = graph_attention(g, prefix, in, slices, attended);
    numbers_of(g, node)[1] = o->attention_dropout;
    if (source < 0) numbers_of(g, node)[3] = 0;
    if (o->first) node->flags |= TE_NODE_SEQUENCE_FIRST;
    projected = rows_of(g, name[2], 0, WIDTH);
    (void)graph_linear(g, name[2], attended, projected, 0);
    g->owner++;
    y = rows_of(g, "sum", 0, WIDTH);
    (void)snprintf(name[0], sizeof name[0], "%sadd_", prefix);
    node = graph_dropout_add(g, name[0], projected, residual, y, 0);
    numbers_of(g, node)[0] = o->dropout;
    numbers_of(g, node)[1] = o->drop_path;
    return y;
}

static void make_layer(graph *g, const layer_options *o)
{
    uint32_t given = TE_VALUE_INPUT | TE_VALUE_GRADIENT;
    int32_t x = graph_input(g, "x", WIDTH), source = -1, a, b, before, after, out, y;
    te_node_desc *node;
    if (o->cross) source = graph_value(g, "source", given, GRAPH_SOURCE, WIDTH);
    a = rows_of(g, "norm_output", o->returns_norm ? TE_VALUE_RESULT : 0, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "self_", x, a);
    x = attend_in_layer(g, o, "self_", a, -1, o->norm_is_residual ? a : x);
    if (o->cross) {
        b = rows_of(g, "b", 0, WIDTH);
        (void)graph_norm(g, TE_NORM_LAYERNORM, "inter_", x, b);
        x = attend_in_layer(g, o, "inter_", b, source, o->norm_is_residual ? b : x);
    }
    b = rows_of(g, "b", 0, WIDTH);
    before = rows_of(g, "before", 0, FFN);
    after = rows_of(g, "after", 0, FFN);
    out = rows_of(g, "out", 0, WIDTH);
    y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "mlp_", x, b);
    (void)graph_linear(g, "fc1_", b, before, 0);
    graph_activation(g, TE_ACTIVATION_GELU, before, after);
    (void)graph_linear(g, "fc2_", after, out, o->late_weights ? TE_VALUE_DEFER : 0);
    node = graph_dropout_add(g, "mlp_add_", out, o->norm_is_residual ? b : x, y, 1);
    numbers_of(g, node)[0] = o->dropout;
}

static int count_stages(const te_plan *plan, const char *name)
{
    te_plan_info info;
    int count = 0;
    OK(te_plan_describe(plan, &info));
    for (int s = 0; s < info.stage_count; s++) count += strcmp(info.stages[s].name, name) == 0;
    return count;
}

/* Every owner's nodes use its chunk, the slots behind its first one, and no others. */
static void check_owners(graph *described, const te_sizes *sizes)
{
    static plan_memory memory;
    static graph g;
    te_plan_info info;
    graph_draw(described);
    g = *described;
    g.desc.values = g.values;
    g.desc.nodes = g.nodes;
    graph_make(&g);
    OK(te_plan_describe(g.plans[0], &info));
    EXPECT(info.owners == g.owner + 1, "%d owners", info.owners);
    start_memory(&memory, &g, sizes);
    fill(&g, &memory);
    for (int o = 0; o <= g.owner; o++) {
        memory.slots[2 * o] = 11 * o + 1;
        memory.slots[2 * o + 1] = 5 * o;
    }
    graph_run(context, &g, &memory);
    for (int o = 0; o < PLAN_OWNERS; o++) {
        int expected[2][PLAN_SLOTS] = {{0}};
        for (int32_t n = 0; n < g.desc.node_count && o <= g.owner; n++) {
            const te_node_desc *node = &g.nodes[n];
            if (node->kind != TE_NODE_LINEAR || node->owner != o) continue;
            expected[0][11 * o + 1 + node->slots[0]] = expected[0][11 * o + 2 + node->slots[0]] = 1;
            expected[1][5 * o + node->slots[1]] = 1;
        }
        for (int i = 0; i < 2 * PLAN_SLOTS; i++) {
            float amax = memory.history[o][i / PLAN_SLOTS][i % PLAN_SLOTS];
            EXPECT((amax > 0) == expected[i / PLAN_SLOTS][i % PLAN_SLOTS],
                   "owner %d, slot %d of chunk %d: %g", o, i % PLAN_SLOTS, i / PLAN_SLOTS,
                   (double)amax);
        }
    }
    plan_memory_end(&memory);
}

/* Without gradients nothing is saved, and there is no backward. */
static void check_forward_alone(graph *described, const te_sizes *sizes)
{
    static graph g;
    te_plan_sizes needs;
    te_plan_info info;
    graph_draw(described);
    g = *described;
    g.desc.values = g.values;
    g.desc.nodes = g.nodes;
    for (int v = 0; v < g.desc.value_count; v++) g.values[v].flags &= ~(uint32_t)TE_VALUE_GRADIENT;
    graph_make(&g);
    OK(te_plan_infer(g.plans[0], sizes, &needs, NULL));
    EXPECT(needs.saved_bytes == 0, "saves %d bytes", (int)needs.saved_bytes);
    OK(te_plan_describe(g.plans[1], &info));
    EXPECT(info.stage_count == 0, "%d stages", info.stage_count);
}

static void check_layers(void)
{
    static const layer_options layers[] = {
        {.kv_heads = 4},
        {.kv_heads = 2, .dropout = 0.3, .attention_dropout = 0.2, .rope = 1},
        {.kv_heads = 1, .first = 1, .rope = 1, .interleaved = 1, .late_weights = 1},
        {.kv_heads = 2, .cross = 1, .drop_path = 0.5, .dropout = 0.1, .returns_norm = 1},
        {.kv_heads = 4, .cross = 1, .first = 1, .norm_is_residual = 1, .attention_dropout = 0.4},
        {.kv_heads = 4, .norm_is_residual = 1, .dropout = 1, .returns_norm = 1, .late_weights = 1},
    };
    static graph g;
    for (unsigned i = 0; i < 2 * sizeof layers / sizeof layers[0]; i++) {
        const layer_options *o = &layers[i / 2];
        for (int recipe = TE_RECIPE_NONE; recipe <= TE_RECIPE_CURRENT; recipe++) {
            const te_sizes some = sizes_of(3, 5, 7, o->first), none = sizes_of(2, 0, 0, o->first);
            /* Gradients are passed on, but into what a deferred plan reads and sums of results. */
            int copies = (o->late_weights && recipe == TE_RECIPE_NONE && o->dropout == 0) +
                         (o->norm_is_residual && o->returns_norm);
            graph_start(&g, (te_recipe)recipe, 0);
            g.dtype = i % 2 ? TE_DTYPE_BF16 : TE_DTYPE_F32;
            make_layer(&g, o);
            check_every_way(&g, &some);
            check_every_way(&g, &none);
            check_forward_alone(&g, &some);
            if (recipe == TE_RECIPE_DELAYED && o->dropout < 1) check_owners(&g, &some);
            graph_make(&g);
            EXPECT(count_stages(g.plans[1], "copy_gradient") == copies, "layer %u, recipe %d: %d",
                   i / 2, recipe, count_stages(g.plans[1], "copy_gradient"));
        }
    }
}

/* ---- what a run refuses --------------------------------------------------------------------- */

static void check_sizes(void)
{
    static graph g;
    te_plan_sizes sizes;
    size_t scratch;
    te_sizes given = sizes_of(2, 3, 5, 0);
    graph_start(&g, TE_RECIPE_NONE, 0);
    make_layer(&g, &(layer_options){.kv_heads = 4, .cross = 1, .drop_path = 0.5});
    graph_make(&g);
    OK(te_plan_infer(g.plans[0], &given, &sizes, NULL));
    OK(te_plan_scratch(context, g.plans[1], &given, &scratch));
    for (int s = TE_SYMBOL_ROWS; s < TE_SYMBOL_SEQUENCES; s++) {
        static const int64_t wrong[] = {-1,        1,        INT32_MAX, (int64_t)INT32_MAX + 1,
                                        INT64_MAX, INT64_MIN};
        for (unsigned i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
            te_sizes changed = given;
            changed.of[s] = wrong[i];
            for (int d = 0; d < 2; d++) {
                EXPECT(te_plan_infer(g.plans[d], &changed, &sizes, NULL) == TE_ERROR_INVALID,
                       "symbol %d is %lld", s, (long long)wrong[i]);
                EXPECT(te_plan_scratch(context, g.plans[d], &changed, &scratch) == TE_ERROR_INVALID,
                       "symbol %d is %lld", s, (long long)wrong[i]);
            }
        }
    }
    /* Drop path alone: samples are the first leading dim. */
    graph_start(&g, TE_RECIPE_NONE, 0);
    drop_paths(&g);
    graph_make(&g);
    given = te_sizes_of_rows(6);
    EXPECT(te_plan_infer(g.plans[0], &given, &sizes, NULL) == TE_ERROR_INVALID, "no samples");
    EXPECT(strstr(te_last_error(), "leading dims 0 x 0, expected the 6 rows") != NULL, "%s",
           te_last_error());
    /* What a plan does not name is not read. */
    graph_start(&g, TE_RECIPE_NONE, 0);
    both_are_inputs(&g);
    graph_make(&g);
    memset(&given, 0xff, sizeof given);
    given.of[TE_SYMBOL_ROWS] = 6;
    OK(te_plan_infer(g.plans[0], &given, &sizes, NULL));
}

static void check_slots(void)
{
    const te_sizes sizes = sizes_of(2, 3, 0, 0);
    static graph g;
    static plan_memory memory;
    graph_start(&g, TE_RECIPE_DELAYED, 0);
    make_layer(&g, &(layer_options){.kv_heads = 4});
    graph_make(&g);
    start_memory(&memory, &g, &sizes);
    fill(&g, &memory);
    memory.slots[2] = PLAN_SLOTS - 1; /* of the second owner: the weight's is outside */
    EXPECT(plan_try(context, g.plans[0], &memory) == TE_ERROR_INVALID, "slots outside");
    EXPECT(strstr(te_last_error(), "scale_1: slot 256 is outside") != NULL, "%s", te_last_error());
    memory.slots[2] = -1;
    EXPECT(plan_try(context, g.plans[0], &memory) == TE_ERROR_INVALID, "slots outside");
    memory.slots[2] = PLAN_SLOTS - 2;
    plan_run(context, g.plans[0], &memory);
    plan_memory_end(&memory);
}

int main(void)
{
    OK(te_context_create(plan_cpu, &context));
    check_sizes();
    check_slots();
    check_parts();
    check_layers();
    te_context_destroy(context);
    (void)puts("layers: ok");
    return 0;
}
