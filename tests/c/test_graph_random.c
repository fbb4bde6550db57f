/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graph_random.c - random graphs of every kind of node, every way; and the same with words of
 * their description replaced by others, which gives a plan with sizes, or a status.
 */
#include <stddef.h>

#include "graph_ways.h"

enum { RANDOM_GRAPHS = 400, DAMAGED_GRAPHS = 3000 };

static uint32_t one_in(uint32_t count)
{
    return test_random() % count == 0;
}

/* What a random graph is made of, so far. */
typedef struct pool {
    graph *g;
    int first, source;              /* order of the leading dims; there is a source */
    int32_t values[2][GRAPH_NODES]; /* of the tokens, of the source: any node may read them */
    int count[2];
    int nodes;
} pool;

/* A value that is read now, the latest ones most of all. */
static int32_t pick(const pool *p, int sequence)
{
    int count = p->count[sequence];
    int back = (int)(test_random() % 3 * test_random() % (uint32_t)count);
    return p->values[sequence][count - 1 - back % count];
}

static void add(pool *p, int sequence, int32_t value)
{
    p->values[sequence][p->count[sequence]++] = value;
}

static const char *named(const char *what, int number)
{
    static char name[TE_NAME_BYTES];
    (void)snprintf(name, sizeof name, "%.8s%d", what, number);
    return name;
}

static int64_t rows_in(int sequence)
{
    return sequence ? GRAPH_SOURCE : GRAPH_ROWS;
}

/* Graphs have FP8 with one scale, or groups that have one. */
static int small_groups;

static te_recipe random_recipe(void)
{
    static const te_recipe recipes[2][3] = {
        {TE_RECIPE_NONE, TE_RECIPE_DELAYED, TE_RECIPE_CURRENT},
        {TE_RECIPE_NONE, TE_RECIPE_MXFP8, TE_RECIPE_NVFP4},
    };
    return recipes[small_groups][test_random() % 3];
}

static te_node_desc *add_linear(graph *g, const char *name, int32_t x, int32_t y)
{
    static const uint32_t flags[] = {0,
                                     0,
                                     0,
                                     TE_VALUE_DEFER,
                                     TE_VALUE_ACCUMULATE,
                                     TE_VALUE_OVERWRITE,
                                     TE_VALUE_ACCUMULATE | TE_VALUE_DEFER};
    te_node_desc *node;
    g->owner = (int32_t)(test_random() % 3);
    node = graph_linear(g, name, x, y, flags[test_random() % 7]);
    g->values[node->inputs[1]].grad_dtype = TE_DTYPE_F32;
    if (one_in(3)) inputs_of(g, node)[2] = -1;
    if (one_in(4)) graph_cast(node, random_recipe());
    if (is_micro(node) && one_in(3)) {
        node->quantization.casts[TE_WEIGHT_OPERAND].options = TE_CAST_TILES_2D;
    }
    if (node->quantization.casts[0].recipe == TE_RECIPE_NVFP4 && one_in(3)) {
        node->quantization.casts[TE_INPUT_OPERAND].options = TE_CAST_ROW_SCALED;
    } else if (node->quantization.casts[0].recipe == TE_RECIPE_NVFP4 && one_in(3)) {
        node->quantization.casts[TE_INPUT_OPERAND].options = TE_CAST_HADAMARD;
        node->quantization.casts[TE_GRAD_OPERAND].options = TE_CAST_HADAMARD;
    }
    if (node->quantization.casts[0].recipe != TE_RECIPE_NONE && one_in(2)) {
        node->quantization.backward =
            one_in(2) ? TE_BACKWARD_HIGH_PRECISION : TE_BACKWARD_DEQUANTIZED;
    }
    return node;
}

/* A value of so many columns as y among what there is, or none. */
static int32_t find_residual(const pool *p, int sequence, int32_t y)
{
    for (int tries = 0; tries < 4; tries++) {
        int32_t value = pick(p, sequence);
        if (graph_columns(p->g, value) == graph_columns(p->g, y)) return value;
    }
    return -1;
}

static void add_random_node(pool *p, const char *name, int sequence, int32_t x, int32_t y)
{
    static const double probabilities[] = {0, 0, 0.3, 1};
    graph *g = p->g;
    uint32_t kind = test_random() % 6;
    int64_t in = graph_columns(g, x), out = graph_columns(g, y);
    if (in == 2 * out && kind == 0) {
        graph_activation(g, TE_ACTIVATION_REGLU, x, y);
    } else if (in != out || kind == 0) {
        (void)add_linear(g, name, x, y);
    } else if (kind == 1) {
        te_norm_kind norm = one_in(2) ? TE_NORM_LAYERNORM : TE_NORM_RMSNORM;
        *numbers_of(g, graph_norm(g, norm, name, x, y)) = 0.01; /* rows may be 0 */
    } else if (kind == 2) {
        graph_activation(g, one_in(2) ? TE_ACTIVATION_RELU : TE_ACTIVATION_GELU, x, y);
    } else if (kind == 3) {
        graph_softcap(g, 2, x, y);
    } else if (kind == 4) {
        (void)graph_node(g, TE_NODE_CONVERT, name, x, y);
    } else {
        te_node_desc *node =
            graph_dropout_add(g, name, x, find_residual(p, sequence, y), y, (int)one_in(2));
        numbers_of(g, node)[0] = probabilities[test_random() % 4];
        numbers_of(g, node)[1] = one_in(3) ? 0.5 : 0;
    }
}

/* ---- heads ---- */

/* Queries, keys and values, as matrices and slices of them. */
typedef struct heads {
    int32_t x[3];
    te_slice slices[3];
} heads;

/* A matrix that is to be read by slices: an input, or a projection. */
static int32_t project(pool *p, const char *what, int sequence, int64_t columns)
{
    graph *g = p->g;
    const char *name = named(what, p->nodes);
    int32_t y, x = pick(p, sequence);
    if (one_in(6)) {
        uint32_t flags = TE_VALUE_INPUT | TE_VALUE_GRADIENT;
        return graph_value(g, name, flags, rows_in(sequence), columns);
    }
    y = graph_value(g, name, 0, rows_in(sequence), columns);
    (void)add_linear(g, name, x, y);
    return y;
}

/* Slices of one matrix for the last `count` of the three: one behind the other, or by group of
 * heads. */
static void share(heads *h, int count, int32_t matrix, int interleaved)
{
    int32_t groups = h->slices[2].heads;
    int64_t offset = 0, whole = 0;
    for (int i = 3 - count; i < 3; i++) {
        whole += (int64_t)h->slices[i].heads / groups * h->slices[i].channels;
    }
    for (int i = 3 - count; i < 3; i++) {
        te_slice *slice = &h->slices[i];
        h->x[i] = matrix;
        slice->offset = offset;
        slice->together = interleaved ? slice->heads / groups : 0;
        slice->stride = interleaved ? whole : slice->channels;
        offset += (int64_t)(interleaved ? slice->together : slice->heads) * slice->channels;
    }
}

static heads make_heads(pool *p, int sequence, int cross, int32_t channels)
{
    static const int32_t groups[][2] = {{2, 2}, {2, 1}, {4, 4}, {4, 2}};
    const int32_t *count = groups[test_random() % 4];
    int32_t key = 2 * (1 + (int32_t)(test_random() % 4)), value = channels / count[0];
    int from = cross ? !sequence : sequence, interleaved = (int)one_in(2);
    heads h = {.slices = {graph_dense(count[0], key), graph_dense(count[1], key),
                          graph_dense(count[1], value)}};
    int64_t q = (int64_t)count[0] * key, k = (int64_t)count[1] * key;
    int64_t v = (int64_t)count[1] * value;
    if (!cross && one_in(2)) {
        share(&h, 3, project(p, "qkv", sequence, q + k + v), interleaved);
        return h;
    }
    h.x[0] = project(p, "q", sequence, q);
    if (one_in(2)) {
        share(&h, 2, project(p, "kv", from, k + v), interleaved);
        return h;
    }
    h.x[1] = project(p, "k", from, k);
    h.x[2] = project(p, "v", from, v);
    return h;
}

/* Normalizes each head of queries or keys. */
static void normalize(pool *p, heads *h, int i, int sequence)
{
    static const te_norm_kind kinds[] = {TE_NORM_LAYERNORM, TE_NORM_RMSNORM};
    graph *g = p->g;
    te_slice slice = h->slices[i];
    char name[TE_NAME_BYTES];
    int32_t y = graph_value(g, named("hn", 2 * p->nodes + i), 0, rows_in(sequence),
                            (int64_t)slice.heads * slice.channels);
    (void)snprintf(name, sizeof name, "heads%d_", 2 * p->nodes + i);
    (void)graph_head_norm(g, kinds[one_in(2)], name, h->x[i], slice, y);
    h->x[i] = y;
    h->slices[i] = graph_dense(slice.heads, slice.channels);
}

/* Turns queries or keys, or copies them. */
static void turn(pool *p, heads *h, int i, int sequence)
{
    graph *g = p->g;
    te_slice slice = h->slices[i];
    te_extent shape[2] = {graph_constant(TE_ANY_LENGTH),
                          graph_constant(one_in(2) ? slice.channels : 2)};
    int32_t angles = one_in(4) ? -1
                               : graph_tensor(g, named("f", 2 * p->nodes + i), TE_VALUE_INPUT,
                                              TE_DTYPE_F32, 2, shape);
    int32_t y = graph_value(g, named("r", 2 * p->nodes + i), 0, rows_in(sequence),
                            (int64_t)slice.heads * slice.channels);
    te_node_desc *node = graph_rope(g, "", h->x[i], slice, angles, y);
    (void)snprintf(node->name, sizeof node->name, "rope%d_", 2 * p->nodes + i);
    if (p->first) node->flags |= TE_NODE_SEQUENCE_FIRST;
    if (one_in(2)) node->flags |= TE_NODE_INTERLEAVED;
    h->x[i] = y;
    h->slices[i] = graph_dense(slice.heads, slice.channels);
}

/* Shape of scores, with lengths of 1 here and there. */
static void score_shape(const pool *p, const heads *h, int sequence, int from, te_extent shape[4])
{
    int32_t rows[2] = {sequence ? TE_SYMBOL_SOURCE_ROWS : TE_SYMBOL_ROWS,
                       from ? TE_SYMBOL_SOURCE_ROWS : TE_SYMBOL_ROWS};
    shape[0] = graph_symbol(rows[0] + 1 + p->first);
    shape[1] = graph_constant(h->slices[0].heads);
    shape[2] = graph_symbol(rows[0] + 2 - p->first);
    shape[3] = graph_symbol(rows[1] + 2 - p->first);
    for (int d = 0; d < 4; d++) {
        if (one_in(3)) shape[d] = graph_constant(1);
    }
}

static void add_random_attention(pool *p, const char *name, int sequence, int32_t y)
{
    graph *g = p->g;
    int cross = p->source && one_in(2), from = cross ? !sequence : sequence;
    heads h = make_heads(p, sequence, cross, (int32_t)graph_columns(g, y));
    te_extent shape[4];
    te_node_desc *node;
    char prefix[TE_NAME_BYTES];
    (void)snprintf(prefix, sizeof prefix, "%s", name);
    for (int i = 0; i < 2; i++) {
        int first = (int)one_in(2), of = i == 0 ? sequence : from;
        if (first && one_in(3)) normalize(p, &h, i, of);
        if (one_in(3)) turn(p, &h, i, of);
        if (!first && one_in(3)) normalize(p, &h, i, of);
        if (h.slices[i].together > 1) turn(p, &h, i, of); /* attention reads none together */
    }
    node = graph_attention(g, prefix, h.x, h.slices, y);
    if (p->first) node->flags |= TE_NODE_SEQUENCE_FIRST;
    if (one_in(3)) node->flags |= TE_NODE_BOTTOM_RIGHT;
    if (one_in(3)) node->flags |= TE_NODE_DETERMINISTIC;
    if (one_in(3)) numbers_of(g, node)[1] = 0.25;
    if (one_in(4)) numbers_of(g, node)[4] = 0.5;
    if (one_in(2)) numbers_of(g, node)[3] = (double)(test_random() % 3);
    if (one_in(3)) numbers_of(g, node)[2] = (double)(test_random() % 4);
    score_shape(p, &h, sequence, from, shape);
    if (one_in(3)) {
        inputs_of(g, node)[3] =
            graph_tensor(g, named("m", p->nodes), TE_VALUE_INPUT, TE_DTYPE_U8, 4, shape);
    }
    score_shape(p, &h, sequence, from, shape);
    if (one_in(3)) {
        inputs_of(g, node)[4] = graph_tensor(
            g, named("b", p->nodes), TE_VALUE_INPUT | TE_VALUE_GRADIENT, g->dtype, 4, shape);
    }
    shape[0] = graph_symbol((sequence ? TE_SYMBOL_SOURCE_ROWS : TE_SYMBOL_ROWS) + 1 + p->first);
    for (int i = 5; i < 7; i++) {
        if (!one_in(4)) continue;
        inputs_of(g, node)[i] =
            graph_tensor(g, named("l", 2 * p->nodes + i), TE_VALUE_INPUT, TE_DTYPE_I32, 1, shape);
    }
}

/* ---- whole graphs ---- */

/* Returns whether sequences come first. */
static int make_random(graph *g)
{
    int nodes = 1 + (int)(test_random() % 9);
    pool p = {.g = g, .first = (int)one_in(2), .source = (int)one_in(3)};
    small_groups = (int)one_in(3);
    graph_start(g, random_recipe(), 0);
    g->dtype = one_in(4) ? TE_DTYPE_BF16 : TE_DTYPE_F32;
    add(&p, 0, graph_input(g, "x", WIDTH * (1 + one_in(3))));
    if (one_in(3)) add(&p, 0, graph_input(g, "z", WIDTH * (1 + one_in(3))));
    if (p.source) {
        uint32_t flags = TE_VALUE_INPUT | TE_VALUE_GRADIENT;
        add(&p, 1, graph_value(g, "s", flags, GRAPH_SOURCE, WIDTH));
    }
    for (; p.nodes < nodes; p.nodes++) {
        char name[TE_NAME_BYTES];
        int sequence = p.source && one_in(4);
        int32_t x = pick(&p, sequence), y;
        y = graph_value(g, named("y", p.nodes), one_in(5) ? TE_VALUE_RESULT : 0, rows_in(sequence),
                        WIDTH * (1 + one_in(3)));
        (void)snprintf(name, sizeof name, "n%d_", p.nodes);
        if (one_in(4)) {
            add_random_attention(&p, name, sequence, y);
        } else {
            add_random_node(&p, name, sequence, x, y);
        }
        if (one_in(4)) g->values[y].flags |= TE_VALUE_ROUNDED;
        add(&p, sequence, y);
    }
    for (int i = 0; i < p.count[0] + p.count[1]; i++) {
        int32_t v = i < p.count[0] ? p.values[0][i] : p.values[1][i - p.count[0]];
        int read = 0;
        for (int32_t n = 0; n < g->desc.node_count; n++) {
            for (int k = 0; k < GRAPH_INPUTS; k++) read |= g->inputs[n][k] == v;
        }
        if (!read && !graph_has(g, v, TE_VALUE_INPUT)) g->values[v].flags |= TE_VALUE_RESULT;
    }
    if (repeats(g) && one_in(4)) g->desc.flags = TE_GRAPH_RECOMPUTE;
    for (int32_t v = 0; v < g->desc.value_count; v++) {
        if (one_in(6)) g->values[v].flags &= ~(uint32_t)TE_VALUE_GRADIENT;
    }
    return p.first;
}

static void check_random(void)
{
    static const int64_t lengths[][3] = {{0, 3, 2}, {2, 0, 3},  {1, 1, 1}, {1, 5, 7},
                                         {2, 7, 4}, {3, 11, 6}, {2, 4, 0}};
    static graph g;
    int grouped = 0;
    for (int i = 0; i < RANDOM_GRAPHS; i++) {
        const int64_t *size = lengths[i % 7];
        te_sizes sizes;
        test_seed = (uint64_t)i + 1;
        sizes = sizes_of(size[0], size[1], size[2], make_random(&g));
        if (getenv("GRAPHS_SAY") != NULL) (void)fprintf(stderr, "graph %d\n", i);
        check_every_way(&g, &sizes);
        for (int32_t n = 0; n < g.desc.node_count; n++) grouped += is_micro(&g.nodes[n]);
    }
    EXPECT(grouped > RANDOM_GRAPHS / 10, "%d linear nodes with scales of groups", grouped);
    EXPECT(quantized_inputs > RANDOM_GRAPHS / 10 && quantized_gradients > RANDOM_GRAPHS / 10,
           "%d inputs and %d gradients arrived quantized", quantized_inputs, quantized_gradients);
    EXPECT(dequantized > RANDOM_GRAPHS && in_high_precision > RANDOM_GRAPHS,
           "%d backwards dequantized, %d in high precision", dequantized, in_high_precision);
}

/* ---- damaged graphs ------------------------------------------------------------------------- */

/* A word of a random graph is another one. */
static void damage(graph *g)
{
    static const uint32_t words[] = {0,          1,          2,          3,          7,
                                     16,         32,         255,        0x7fffffff, 0x80000000,
                                     0xffffffff, 0xfffffffe, 0x7fc00000, 0x7f800000, 0x10000000};
    uint32_t word = words[test_random() % (sizeof words / sizeof words[0])];
    int values = (int)one_in(2);
    size_t bytes = values ? (size_t)g->desc.value_count * sizeof g->values[0]
                          : (size_t)g->desc.node_count * sizeof g->nodes[0];
    size_t at = test_random() % (bytes / sizeof word) * sizeof word;
    if (!values) { /* counts, casts, owner and slots, and what is before the lists */
        const size_t begin = offsetof(te_node_desc, input_count), of = at % sizeof g->nodes[0];
        if (one_in(2) || of >= offsetof(te_node_desc, inputs)) {
            at += begin + of % (sizeof g->nodes[0] - begin) - of;
        }
    }
    if (!values && one_in(2)) { /* an entry of a list */
        size_t nodes = (size_t)g->desc.node_count;
        char *const lists[] = {(char *)g->inputs, (char *)g->numbers, (char *)g->slices};
        const size_t sizes[] = {sizeof g->inputs[0], sizeof g->numbers[0], sizeof g->slices[0]};
        size_t list = test_random() % 3;
        at = test_random() % (nodes * sizes[list] / sizeof word) * sizeof word;
        memcpy(lists[list] + at, &word, sizeof word);
        return;
    }
    memcpy((values ? (char *)g->values : (char *)g->nodes) + at, &word, sizeof word);
}

/* What is taken all the same has sizes, or none that fits. */
static void check_taken(const te_plan *plan)
{
    const te_sizes few = sizes_of(1, 5, 3, 0);
    te_sizes too_many;
    te_plan_info info;
    te_plan_sizes sizes;
    size_t scratch;
    for (int64_t rows = 1; rows <= INT32_MAX; rows = rows * 46341 + 1) {
        const te_sizes given = sizes_of(1, rows, rows, 0);
        (void)te_plan_infer(plan, &given, &sizes, NULL);
    }
    for (int s = 0; s < TE_SYMBOL_COUNT; s++) too_many.of[s] = (int64_t)INT32_MAX + 1;
    OK(te_plan_describe(plan, &info));
    EXPECT(te_plan_infer(plan, &too_many, &sizes, NULL) ==
               (info.symbols > 1U << TE_SYMBOL_NONE ? TE_ERROR_INVALID : TE_OK),
           "rows");
    (void)te_plan_scratch(context, plan, &few, &scratch);
}

static void check_damage(void)
{
    static graph g;
    int taken = 0, refused = 0;
    for (int i = 0; i < DAMAGED_GRAPHS; i++) {
        test_seed = (uint64_t)i + 1;
        (void)make_random(&g);
        graph_draw(&g);
        for (int k = 0; k < 3; k++) damage(&g);
        for (int d = 0; d < TE_DIRECTION_COUNT; d++) {
            te_plan *plan = NULL;
            te_status st = te_plan_make(&g.desc, (te_direction)d, &plan);
            if (st == TE_OK) {
                taken++;
                check_taken(plan);
                te_plan_release(plan);
                continue;
            }
            refused++;
            EXPECT(st == TE_ERROR_INVALID || st == TE_ERROR_TYPE || st == TE_ERROR_UNSUPPORTED,
                   "%d: %s", (int)st, te_last_error());
        }
    }
    EXPECT(taken > DAMAGED_GRAPHS / 10 && refused > DAMAGED_GRAPHS / 10, "%d taken, %d refused",
           taken, refused);
}

int main(void)
{
    OK(te_context_create(plan_cpu, &context));
    check_random();
    check_damage();
    te_context_destroy(context);
    (void)puts("random graphs: ok");
    return 0;
}
