/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cpu_attention.c - softmax, attention, dropout and rotary embedding give the same bits with
 * every instruction set (attention: of those with a fused multiply-add) and with every number of
 * threads.
 */
#include "cpu_variants.h"

enum { ROWS = 96, COLUMNS = 1027, HEADS = 4, DIM = 72 };

/* All inputs, and one output per step. */
typedef struct attention_data {
    te_dtype dtype;
    test_matrix x, mask, bias, residual, angles;
    test_matrix y, p, dx, added, grad, sums, turned;
} attention_data;

static const int64_t rng[2] = {0x123456789abcdef, 0xfedcba987};
static const float scale = 0.3F, dropout = 0.15F;

static te_tensor as4(const test_matrix *x, int64_t queries, int64_t keys)
{
    te_tensor tensor = x->tensor;
    tensor.ndim = 4;
    memcpy(tensor.shape, (int64_t[4]){2, ROWS / queries / 2, queries, keys}, 4 * sizeof(int64_t));
    tensor.strides[3] = 1;
    tensor.strides[2] = keys;
    tensor.strides[1] = queries * keys;
    tensor.strides[0] = tensor.shape[1] * tensor.strides[1];
    return tensor;
}

static void run_softmax(test_device *t, attention_data *d)
{
    te_softmax_args args = {.size = sizeof args,
                            .input = as4(&d->x, 16, COLUMNS),
                            .mask = as4(&d->mask, 16, COLUMNS),
                            .bias = as4(&d->bias, 16, COLUMNS),
                            .output = as4(&d->y, 16, COLUMNS),
                            .probabilities = as4(&d->p, 16, COLUMNS),
                            .rng = rng,
                            .scale = scale,
                            .dropout = dropout,
                            .window_left = 700,
                            .window_right = 3,
                            .diagonal = COLUMNS - 16};
    te_softmax_backward_args back = {.size = sizeof back,
                                     .grad_output = as4(&d->residual, 16, COLUMNS),
                                     .probabilities = as4(&d->p, 16, COLUMNS),
                                     .grad_input = as4(&d->dx, 16, COLUMNS),
                                     .rng = rng,
                                     .scale = scale,
                                     .dropout = dropout};
    TEST_OK(t, te_softmax(t->context, &args, NULL));
    TEST_OK(t, te_softmax_backward(t->context, &back, NULL));
}

static void run_dropout(test_device *t, attention_data *d)
{
    te_tensor bias = d->bias.tensor;
    bias.ndim = 1;
    bias.shape[0] = COLUMNS;
    bias.strides[0] = 1;
    te_dropout_add_args args = {.size = sizeof args,
                                .input = d->x.tensor,
                                .bias = bias,
                                .residual = d->residual.tensor,
                                .output = d->added.tensor,
                                .rng = rng,
                                .dropout = dropout,
                                .drop_path = dropout,
                                .samples = ROWS / 8};
    te_dropout_backward_args back = {.size = sizeof back,
                                     .grad_output = d->x.tensor,
                                     .grad_input = d->grad.tensor,
                                     .bias_grad = d->sums.tensor,
                                     .rng = rng,
                                     .dropout = dropout,
                                     .drop_path = dropout,
                                     .samples = ROWS / 8};
    back.workspace = test_workspace(t, TE_OP_DROPOUT_BACKWARD, &back, &back.workspace_size);
    TEST_OK(t, te_dropout_add(t->context, &args, NULL));
    TEST_OK(t, te_dropout_backward(t->context, &back, NULL));
}

static void run_rope(test_device *t, attention_data *d)
{
    for (int way = 0; way < 4; way++) { /* each on the result of the one before */
        te_rope_args args = {.size = sizeof args,
                             .parts = {{.input = as4(way == 0 ? &d->x : &d->turned, HEADS, DIM),
                                        .output = as4(&d->turned, HEADS, DIM),
                                        .freqs = d->angles.tensor}},
                             .interleaved = way & 1,
                             .backward = way >> 1};
        TEST_OK(t, te_rope(t->context, &args, NULL));
    }
}

/* Runs everything over new outputs. */
static uint64_t run_all(test_device *t, const void *data)
{
    attention_data d = *(const attention_data *)data;
    uint64_t hash = empty_digest;
    test_matrix *made[] = {&d.y, &d.p, &d.dx, &d.added, &d.grad, &d.turned, &d.sums};
    for (int i = 0; i < 6; i++) *made[i] = test_matrix_new(t, d.dtype, ROWS, COLUMNS, 0);
    d.sums = test_vector_new(t, TE_DTYPE_F32, COLUMNS);
    run_softmax(t, &d);
    run_dropout(t, &d);
    run_rope(t, &d);
    for (int i = 0; i < 7; i++) hash = test_digest(hash, made[i]->buffer);
    return hash;
}

static void compare(test_device *t, te_dtype dtype)
{
    attention_data d = {.dtype = dtype};
    test_matrix *inputs[] = {&d.x, &d.bias, &d.residual};
    for (int i = 0; i < 3; i++) {
        *inputs[i] = test_matrix_new(t, dtype, ROWS, COLUMNS, 0);
        test_fill_random(t, inputs[i], 3.0, 0);
    }
    d.mask = test_matrix_new(t, TE_DTYPE_U8, ROWS, COLUMNS, 0);
    for (size_t i = 0; i < d.mask.buffer->bytes; i++)
        d.mask.buffer->host[i] = test_random() % 4 == 0;
    test_upload(t, d.mask.buffer);
    d.angles = test_matrix_new(t, TE_DTYPE_F32, ROWS, DIM - 6, 0);
    test_fill_random(t, &d.angles, 20.0, 0);
    compare_variants(t, te_dtype_name(dtype), PORTABLE, run_all, &d);
    test_release(t);
}

/* ---- attention ---- */

enum { BATCH = 2, QUERIES = 210, KEYS = 410 };

typedef struct fused_data {
    test_matrix query, key, value, bias, grad_output;
    float dropout;
    int heads_of_keys;
} fused_data;

static te_tensor tokens_of(const test_matrix *x, int64_t count, int64_t heads, int64_t dim)
{
    te_tensor tensor = x->tensor;
    tensor.ndim = 4;
    memcpy(tensor.shape, (int64_t[4]){BATCH, count, heads, dim}, 4 * sizeof(int64_t));
    memcpy(tensor.strides, (int64_t[4]){count * heads * dim, heads * dim, dim, 1},
           4 * sizeof(int64_t));
    return tensor;
}

static uint64_t run_attention(test_device *t, const void *data)
{
    const fused_data *d = data;
    const int heads = d->heads_of_keys;
    const te_dtype dtype = d->query.tensor.dtype;
    uint64_t hash = empty_digest;
    test_matrix made[6];
    const int64_t sizes[] = {QUERIES * HEADS, BATCH * HEADS, QUERIES * HEADS, KEYS * heads,
                             KEYS * heads};
    for (int i = 0; i < 5; i++) {
        made[i] = i == 1 ? test_matrix_new(t, TE_DTYPE_F32, BATCH * HEADS, QUERIES, 0)
                         : test_matrix_new(t, dtype, BATCH * sizes[i], DIM, 0);
    }
    made[5] = test_matrix_new(t, TE_DTYPE_F32, 1, KEYS, 0);
    te_attention_args args = {.size = sizeof args,
                              .output = tokens_of(&made[0], QUERIES, HEADS, DIM),
                              .statistics = made[1].tensor};
    args.problem = (te_attention_problem){.query = tokens_of(&d->query, QUERIES, HEADS, DIM),
                                          .key = tokens_of(&d->key, KEYS, heads, DIM),
                                          .value = tokens_of(&d->value, KEYS, heads, DIM),
                                          .bias = d->bias.tensor,
                                          .rng = rng,
                                          .scale = scale,
                                          .dropout = d->dropout,
                                          .window_left = 250,
                                          .window_right = 30,
                                          .bottom_right = 1};
    args.problem.bias.ndim = 4;
    memcpy(args.problem.bias.shape, (int64_t[4]){1, 1, 1, KEYS}, 4 * sizeof(int64_t));
    memcpy(args.problem.bias.strides, (int64_t[4]){KEYS, KEYS, KEYS, 1}, 4 * sizeof(int64_t));
    args.statistics.ndim = 3;
    memcpy(args.statistics.shape, (int64_t[3]){BATCH, HEADS, QUERIES}, 3 * sizeof(int64_t));
    memcpy(args.statistics.strides, (int64_t[3]){HEADS * QUERIES, QUERIES, 1}, 3 * sizeof(int64_t));
    te_attention_backward_args back = {.size = sizeof back,
                                       .problem = args.problem,
                                       .grad_output =
                                           tokens_of(&d->grad_output, QUERIES, HEADS, DIM),
                                       .output = args.output,
                                       .statistics = args.statistics,
                                       .grad_query = tokens_of(&made[2], QUERIES, HEADS, DIM),
                                       .grad_key = tokens_of(&made[3], KEYS, heads, DIM),
                                       .grad_value = tokens_of(&made[4], KEYS, heads, DIM),
                                       .grad_bias = args.problem.bias};
    back.grad_bias.data = made[5].tensor.data;
    args.workspace = test_workspace(t, TE_OP_ATTENTION, &args, &args.workspace_size);
    TEST_OK(t, te_attention(t->context, &args, NULL));
    back.workspace = test_workspace(t, TE_OP_ATTENTION_BACKWARD, &back, &back.workspace_size);
    TEST_OK(t, te_attention_backward(t->context, &back, NULL));
    for (int i = 0; i < 6; i++) hash = test_digest(hash, made[i].buffer);
    return hash;
}

static void compare_attention(test_device *t, te_dtype dtype, int heads_of_keys, float drop)
{
    fused_data d = {.dropout = drop, .heads_of_keys = heads_of_keys};
    d.query = test_matrix_new(t, dtype, BATCH * QUERIES * HEADS, DIM, 0);
    d.grad_output = test_matrix_new(t, dtype, BATCH * QUERIES * HEADS, DIM, 0);
    d.key = test_matrix_new(t, dtype, BATCH * KEYS * heads_of_keys, DIM, 0);
    d.value = test_matrix_new(t, dtype, BATCH * KEYS * heads_of_keys, DIM, 0);
    d.bias = test_matrix_new(t, TE_DTYPE_F32, 1, KEYS, 0);
    test_matrix *inputs[] = {&d.query, &d.grad_output, &d.key, &d.value, &d.bias};
    for (int i = 0; i < 5; i++) test_fill_random(t, inputs[i], 1.0, 0);
    compare_variants(t, "attention", AVX2, run_attention, &d);
    test_release(t);
}

static void check_all(test_device *t)
{
    for (int dtype = TE_DTYPE_F32; dtype <= TE_DTYPE_BF16; dtype++) compare(t, (te_dtype)dtype);
    compare_attention(t, TE_DTYPE_F32, 1, 0.0F);
    compare_attention(t, TE_DTYPE_BF16, HEADS, 0.2F);
}

int main(void)
{
    return test_on_cpu("attention", check_all);
}
