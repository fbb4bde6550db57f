/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fields.c - what every operator does with its args struct, tested by the lists of fields: no
 * byte belongs to no field, a pointer may be NULL and a size another one without a crash, and what
 * is written is no memory of another field.
 */
#include <stddef.h>

#include "cpu_device.h"

enum { SIDE = 16, WORKSPACE = 1 << 24, EXTRA = 24 };

typedef union any_args {
    size_t size;
#define X(NAME, name) te_##name##_args name;
    TE_OPS(X)
#undef X
} any_args;

/* An operator with every field that can be given together with the others. */
typedef struct sample {
    te_op op;
    const char *without; /* " name name ", fields that are not given; the others are */
    int quantized;       /* the modes are TENSOR */
} sample;

#define FP8_HEADS "query_scales key_scales value_scales output_scales "
#define FP8_FORWARD FP8_HEADS "output_scale output_amax weights_amax "
#define FP8_BACKWARD                                                                               \
    FP8_HEADS "grad_output_scales grads_scales grad_scores_scale grads_scale "                     \
              "grad_scores_amax grads_amax "

/* FP8 goes with other dtypes. */
static const sample samples[] = {
    {TE_OP_QUANTIZE, " partials noop column_partials rng ", 1},
    {TE_OP_QUANTIZE, " scale noop column_partials rng ", 1},
    {TE_OP_DEQUANTIZE, " ", 1},
    {TE_OP_AMAX, " ", 0},
    {TE_OP_TRANSPOSE, " ", 0},
    {TE_OP_GEMM, " a_row a_column b_row b_column aux ", 0},
    {TE_OP_GEMM, " aux bias bias_grad ", 1},
    {TE_OP_SCALING_UPDATE, " ", 0},
    {TE_OP_FILL, " ", 0},
    {TE_OP_CAST, " ", 0},
    {TE_OP_NORM, " partials column_partials rng ", 1},
    {TE_OP_NORM, " scale column_partials rng ", 1},
    {TE_OP_NORM_BACKWARD, " ", 0},
    {TE_OP_ACTIVATION, " partials column_partials rng ", 1},
    {TE_OP_ACTIVATION_BACKWARD, " partials column_partials rng ", 1},
    {TE_OP_SOFTCAP, " partials column_partials rng ", 1},
    {TE_OP_SOFTMAX, " ", 0},
    {TE_OP_SOFTMAX_BACKWARD, " ", 0},
    {TE_OP_ATTENTION, " query_offsets key_offsets " FP8_FORWARD, 0},
    {TE_OP_ATTENTION, " mask bias " FP8_FORWARD, 0},
    {TE_OP_ATTENTION_BACKWARD, " query_offsets key_offsets " FP8_BACKWARD, 0},
    {TE_OP_ATTENTION_BACKWARD, " mask bias grad_bias " FP8_BACKWARD, 0},
    {TE_OP_DROPOUT_ADD, " ", 0},
    {TE_OP_DROPOUT_BACKWARD, " ", 0},
    {TE_OP_ROPE, " cu_seqlens ", 0},
    {TE_OP_CACHE_APPEND, " cu_seqlens ", 0},
    {TE_OP_CACHE_GATHER, " ", 0},
};
#define SAMPLES (sizeof samples / sizeof *samples)

static int lists(const char *names, const char *name)
{
    char word[64];
    (void)snprintf(word, sizeof word, " %s ", name);
    return strstr(names, word) != NULL;
}

static int ends_with(const char *name, const char *end)
{
    size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

static void *member_of(any_args *args, const te_field *field)
{
    return (char *)args + field->offset;
}

/* Pointers come first in a tensor as well. */
static void **pointer_of(any_args *args, const te_field *field)
{
    return member_of(args, field);
}

static int is_pointer(const te_field *field)
{
    return field->kind == TE_FIELD_TENSOR || field->kind == TE_FIELD_FLOATS ||
           field->kind == TE_FIELD_INT64S;
}

/* 1 where a byte of the args struct that is no field's is known: what a cast request has more than
 * its operator. */
static int is_unused(te_op op, size_t at)
{
    const size_t wide = sizeof(te_tensor), partials = offsetof(te_cast_request, amax_partials);
    const size_t cast = offsetof(te_quantize_args, cast);
    size_t start = op == TE_OP_QUANTIZE     ? cast + offsetof(te_operand, wide)
                   : op == TE_OP_DEQUANTIZE ? offsetof(te_dequantize_args, input.wide)
                                            : SIZE_MAX;
    if (at >= start && at - start < wide) return 1;
    return op == TE_OP_QUANTIZE && at >= cast + partials && at < cast + partials + sizeof(float *);
}

static void check_coverage(test_device *t, te_op op)
{
    const te_op_info *info = te_op_describe(op);
    char owners[sizeof(any_args)] = {0};
    memset(owners, 1, sizeof(size_t));
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        size_t bytes = field->size + (field->kind == TE_FIELD_WORKSPACE ? sizeof(size_t) : 0);
        for (size_t at = field->offset; at < field->offset + bytes; at++) {
            TEST_CHECK(t, owners[at] == 0 || field->kind == TE_FIELD_BIT,
                       "%s: byte %zu is that of two fields", field->name, at);
            owners[at] = 1;
        }
    }
    for (size_t at = 0, gap = 0; at < info->size; at++) {
        gap = owners[at] || is_unused(op, at) ? 0 : gap + 1;
        TEST_CHECK(t, gap < sizeof(float *) && (gap == 0 || at % sizeof(float *) >= gap),
                   "byte %zu of %s belongs to no field", at, te_op_name(op));
    }
}

/* ---- filled args -------------------------------------------------------------------------- */

static te_dtype dtype_of(te_op op, const te_field *field)
{
    switch (field->dtypes) {
    case TE_DTYPES_CODES:
        return TE_DTYPE_E4M3;
    case TE_DTYPES_I32:
        return TE_DTYPE_I32;
    case TE_DTYPES_MASK:
        return TE_DTYPE_U8;
    default:
        return op == TE_OP_TRANSPOSE ? TE_DTYPE_U8 : TE_DTYPE_F32;
    }
}

/* Zeros everywhere; a tensor of any number of dims has 4, but for a norm, whose others are
 * matrices. */
static te_tensor filled_tensor(test_device *t, te_op op, const te_field *field)
{
    const int scales = ends_with(field->name, "_scales"); /* of the mode TENSOR */
    const int rows = strcmp(field->name, "log_sum") == 0 || strcmp(field->name, "grad_sinks") == 0;
    const int64_t length = scales ? TE_TENSOR_SCALES : rows ? 2 * SIDE * SIDE : SIDE;
    te_tensor tensor = {.dtype = dtype_of(op, field), .device = t->device};
    const int norm = op == TE_OP_NORM || op == TE_OP_NORM_BACKWARD;
    int64_t count = 1;
    tensor.ndim = scales || field->form == TE_FORM_VECTOR ? 1
                  : field->form == TE_FORM_DIMS && !norm  ? 4
                                                          : 2;
    for (int32_t i = tensor.ndim - 1; i >= 0; i--) {
        tensor.shape[i] = tensor.ndim == 4 && i == 2 ? 2 : tensor.ndim == 1 ? length : SIDE;
        tensor.strides[i] = count;
        count *= tensor.shape[i];
    }
    tensor.data = test_allocate(t, te_dtype_size(tensor.dtype, count))->device;
    memset(tensor.data, 0, te_dtype_size(tensor.dtype, count));
    return tensor;
}

/* The first elements of a tensor, as [SIDE, rows, columns, SIDE]. */
static te_tensor dense(te_tensor tensor, int64_t rows, int64_t columns)
{
    tensor.shape[1] = rows;
    tensor.shape[2] = columns;
    tensor.strides[1] = columns * tensor.strides[2];
    tensor.strides[0] = rows * tensor.strides[1];
    return tensor;
}

/* A dense vector or tensor with other sizes in front, of as many elements at most. */
static void shorten(te_tensor *tensor, int64_t first)
{
    if (tensor->data != NULL) tensor->shape[0] = first;
}

/* Queries and keys are [SIDE, SIDE, 2, SIDE]: scores are [SIDE, 2, SIDE, SIDE], of which mask and
 * bias have [SIDE, 1, 1, SIDE], statistics [SIDE, 2, SIDE], slopes [SIDE, 2], and sink and
 * `of_heads` [2]. Packed there are SIDE - 1 empty sequences among SIDE tokens, [1, SIDE, 2, SIDE].
 */
static void fill_attention(te_attention_problem *problem, te_tensor *statistics,
                           te_tensor *of_heads)
{
    problem->sink.shape[0] = of_heads->shape[0] = problem->slopes.shape[1] = 2;
    problem->slopes.ndim = 2;
    problem->slopes.strides[0] = 2;
    problem->slopes.strides[1] = 1;
    if (problem->query_offsets.data != NULL) {
        shorten(&problem->query, 1);
        shorten(&problem->key, 1);
        shorten(&problem->value, 1);
        shorten(&problem->query_lengths, SIDE - 1);
        shorten(&problem->key_lengths, SIDE - 1);
        shorten(&problem->slopes, SIDE - 1);
        statistics->ndim = 3;
        statistics->shape[0] = 1;
        statistics->shape[2] = 2;
        statistics->strides[2] = 1;
        statistics->strides[1] = 2;
        return;
    }
    problem->mask = dense(problem->mask, 1, 1);
    problem->bias = dense(problem->bias, 1, 1);
    statistics->ndim = 3;
    statistics->shape[1] = 2;
    statistics->shape[2] = SIDE;
    statistics->strides[2] = 1;
    statistics->strides[1] = SIDE;
    statistics->strides[0] = 2 * SIDE;
}

static any_args fill(test_device *t, const sample *s)
{
    const te_op_info *info = te_op_describe(s->op);
    any_args args;
    te_op_initial(s->op, &args);
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        if (lists(s->without, field->name)) continue;
        if (field->kind == TE_FIELD_TENSOR) {
            *(te_tensor *)member_of(&args, field) = filled_tensor(t, s->op, field);
        } else if (is_pointer(field)) {
            size_t bytes = (size_t)field->count * sizeof(int64_t);
            *pointer_of(&args, field) = test_allocate(t, bytes)->device;
            memset(*pointer_of(&args, field), 0, bytes);
        } else if (field->kind == TE_FIELD_WORKSPACE) {
            size_t bytes = WORKSPACE;
            *pointer_of(&args, field) = test_allocate(t, bytes)->device;
            memcpy((char *)member_of(&args, field) + sizeof(void *), &bytes, sizeof bytes);
        } else if (s->quantized && ends_with(field->name, "mode")) {
            *(te_scaling_mode *)member_of(&args, field) = TE_SCALING_TENSOR;
        }
    }
    if (s->op == TE_OP_SCALING_UPDATE) args.scaling_update.fp8_max = 448.0F;
    if (s->op == TE_OP_SOFTCAP) args.softcap.cap = 1.0F;
    if (s->op == TE_OP_GEMM) args.gemm.b_transposed = 1;
    if (s->op == TE_OP_ATTENTION) {
        fill_attention(&args.attention.problem, &args.attention.statistics, &args.attention.top);
        args.attention.output.shape[0] = args.attention.problem.query.shape[0];
    } else if (s->op == TE_OP_ATTENTION_BACKWARD) {
        te_attention_backward_args *of = &args.attention_backward;
        te_tensor *const all[] = {&of->grad_output, &of->output, &of->grad_query, &of->grad_key,
                                  &of->grad_value};
        fill_attention(&of->problem, &of->statistics, &of->grad_sink);
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            shorten(all[i], of->problem.query.shape[0]);
        }
        args.attention_backward.grad_bias = dense(args.attention_backward.grad_bias, 1, 1);
    }
    return args;
}

/* Runs, and asks for the workspace: both give a status, and a failure has a text. */
static te_status call(test_device *t, te_op op, const void *args)
{
    size_t bytes = 0;
    te_status asked = te_op_workspace(t->context, op, args, &bytes), st;
    st = te_op_run(t->context, op, args, NULL);
    TEST_CHECK(t, st <= TE_OK && asked <= TE_OK, "status %d, %d", (int)st, (int)asked);
    if (st != TE_OK) {
        TEST_CHECK(t, strstr(te_last_error(), te_op_name(op)) != NULL, "%s", te_last_error());
    }
    return st;
}

/* ---- NULL --------------------------------------------------------------------------------- */

static void check_null(test_device *t, const sample *s, any_args *whole)
{
    const te_op_info *info = te_op_describe(s->op);
    any_args args;
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        if (!is_pointer(field) && field->kind != TE_FIELD_WORKSPACE) continue;
        for (int way = 0; way < 2; way++) { /* no data; nothing at all */
            te_status st;
            args = *whole;
            if (way == 0) *pointer_of(&args, field) = NULL;
            if (way == 1) memset(member_of(&args, field), 0, field->size);
            st = call(t, s->op, &args);
            TEST_CHECK(t, !field->required || st == TE_ERROR_INVALID, "%s: %s is NULL: status %d",
                       te_op_name(s->op), field->name, (int)st);
        }
    }
    te_op_initial(s->op, &args);
    TEST_CHECK(t, call(t, s->op, &args) == TE_ERROR_INVALID, "%s: nothing is given",
               te_op_name(s->op));
    TEST_CHECK(t, te_op_run(t->context, s->op, NULL, NULL) == TE_ERROR_INVALID, "args NULL");
    TEST_CHECK(t, te_op_run(NULL, s->op, whole, NULL) == TE_ERROR_STATE, "context NULL");
    TEST_CHECK(t, te_op_workspace(t->context, s->op, whole, NULL) == TE_ERROR_INVALID, "no bytes");
}

/* ---- sizes of the struct ------------------------------------------------------------------ */

static te_status call_copy(test_device *t, te_op op, const void *args, size_t size)
{
    void *copy = malloc(size); /* not a byte more than the size says */
    te_status st;
    memcpy(copy, args, size);
    memcpy(copy, &size, sizeof size);
    st = call(t, op, copy);
    free(copy);
    return st;
}

static void check_size(test_device *t, const sample *s, any_args *whole)
{
    const te_op_info *info = te_op_describe(s->op);
    char larger[sizeof(any_args) + EXTRA] = {0}, text[512];
    for (int32_t i = 0; i < info->field_count; i++) {
        const size_t end = info->fields[i].offset;
        any_args known;
        te_status st, expected;
        te_op_initial(s->op, &known);
        memcpy((char *)&known + sizeof(size_t), (char *)whole + sizeof(size_t),
               end - sizeof(size_t));
        expected = call(t, s->op, &known);
        (void)snprintf(text, sizeof text, "%s", te_last_error());
        st = call_copy(t, s->op, whole, end);
        TEST_CHECK(t, st == expected && (st == TE_OK || strcmp(text, te_last_error()) == 0),
                   "%s up to %s: status %d, not %d: %s", te_op_name(s->op), info->fields[i].name,
                   (int)st, (int)expected, te_last_error());
        TEST_CHECK(t, call_copy(t, s->op, whole, end + 1) == TE_ERROR_INVALID,
                   "%s: a size within %s", te_op_name(s->op), info->fields[i].name);
    }
    memcpy(larger, whole, info->size);
    TEST_CHECK(t, call_copy(t, s->op, larger, info->size + EXTRA) == TE_OK, "%s", te_last_error());
    larger[info->size + EXTRA - 1] = 1;
    TEST_CHECK(t, call_copy(t, s->op, larger, info->size + EXTRA) == TE_ERROR_INVALID,
               "%s: unknown fields are set", te_op_name(s->op));
}

/* ---- memory that is written --------------------------------------------------------------- */

/* As the public header has it. */
static int may_share(te_op op, const char *written, const char *other)
{
    static const struct {
        te_op op;
        const char *written, *other;
    } pairs[] = {{TE_OP_ACTIVATION_BACKWARD, "wide", "grad_output"},
                 {TE_OP_SOFTCAP, "wide", "input"},
                 {TE_OP_SOFTCAP, "wide", "grad_output"},
                 {TE_OP_SOFTMAX_BACKWARD, "grad_input", "grad_output"},
                 {TE_OP_DROPOUT_ADD, "output", "input"},
                 {TE_OP_DROPOUT_BACKWARD, "grad_input", "grad_output"},
                 {TE_OP_NORM_BACKWARD, "grad_input", "grad_residual"},
                 {TE_OP_ROPE, "output", "input"},
                 {TE_OP_ROPE, "key_output", "key"},
                 {TE_OP_ROPE, "value_output", "value"}};
    if (ends_with(written, "_scales") && ends_with(other, "_scales")) return 1;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (op == pairs[i].op && strcmp(written, pairs[i].written) == 0 &&
            strcmp(other, pairs[i].other) == 0) {
            return 1;
        }
    }
    return 0;
}

static void check_memory(test_device *t, const sample *s, any_args *whole)
{
    const te_op_info *info = te_op_describe(s->op);
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *written = &info->fields[i];
        if (!is_pointer(written) || written->access == TE_ACCESS_READ) continue;
        for (int32_t j = 0; j < info->field_count; j++) {
            const te_field *other = &info->fields[j];
            any_args args = *whole;
            te_status st;
            if (i == j || !is_pointer(other)) continue;
            if (*pointer_of(&args, written) == NULL || *pointer_of(&args, other) == NULL) continue;
            *pointer_of(&args, written) = *pointer_of(&args, other);
            st = call(t, s->op, &args);
            TEST_CHECK(
                t, st == (may_share(s->op, written->name, other->name) ? TE_OK : TE_ERROR_INVALID),
                "%s: %s is the memory of %s: status %d", te_op_name(s->op), written->name,
                other->name, (int)st);
        }
    }
}

/* Dense tensors that overlap in part, columns of one matrix, and the same elements seen otherwise.
 */
static void check_partial(test_device *t)
{
    test_matrix both = test_matrix_new(t, TE_DTYPE_F32, SIDE, 2 * SIDE, 0);
    te_dropout_add_args args;
    te_op_initial(TE_OP_DROPOUT_ADD, &args);
    args.input = args.output = both.tensor;
    memset(both.tensor.data, 0, both.buffer->bytes);
    args.input.shape[0] = args.output.shape[0] = SIDE - 1;
    TEST_OK(t, te_dropout_add(t->context, &args, NULL));
    args.output.data = (float *)both.tensor.data + 2 * SIDE;
    TEST_CHECK(t, te_dropout_add(t->context, &args, NULL) == TE_ERROR_INVALID, "rows further on");
    TEST_CHECK(t, strstr(te_last_error(), "output: it is memory of input") != NULL, "%s",
               te_last_error());
    args.input.shape[1] = args.output.shape[1] = SIDE;
    args.output.data = (float *)both.tensor.data + SIDE;
    TEST_OK(t, te_dropout_add(t->context, &args, NULL));
    args.output.data = both.tensor.data;
    args.output.strides[0] = SIDE;
    TEST_CHECK(t, te_dropout_add(t->context, &args, NULL) == TE_ERROR_INVALID, "other strides");
}

static void check_all(test_device *t)
{
    int seen[TE_OP_COUNT] = {0};
    for (size_t i = 0; i < SAMPLES; i++) {
        const sample *s = &samples[i];
        any_args args = fill(t, s);
        t->running = te_op_name(s->op);
        seen[s->op] = 1;
        TEST_CHECK(t, call(t, s->op, &args) == TE_OK, "%s", te_last_error());
        check_null(t, s, &args);
        check_size(t, s, &args);
        check_memory(t, s, &args);
        test_release(t);
    }
    for (int op = 0; op < TE_OP_COUNT; op++) {
        TEST_CHECK(t, seen[op], "%s has no sample", te_op_name((te_op)op));
        check_coverage(t, (te_op)op);
    }
    check_partial(t);
    test_release(t);
    TEST_CHECK(t, te_op_run(t->context, TE_OP_COUNT, &samples, NULL) == TE_ERROR_INVALID,
               "operator");
    TEST_CHECK(t, te_op_run(t->context, (te_op)-1, &samples, NULL) == TE_ERROR_INVALID, "operator");
    TEST_CHECK(t, te_op_describe(TE_OP_COUNT) == NULL, "operator");
}

int main(void)
{
    return test_on_cpu("fields", check_all);
}
