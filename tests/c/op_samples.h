/* SPDX-License-Identifier: Apache-2.0
 *
 * op_samples.h - a valid call of every operator with every field that can be given, made from the
 * lists of fields.
 */
#ifndef TE_TESTS_OP_SAMPLES_H
#define TE_TESTS_OP_SAMPLES_H

#include "testing.h"

enum { SIDE = 16, WORKSPACE = 1 << 24 };

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
    {TE_OP_ATTENTION_MERGE, " ", 0},
    {TE_OP_DROPOUT_ADD, " ", 0},
    {TE_OP_DROPOUT_BACKWARD, " ", 0},
    {TE_OP_ROPE, " cu_seqlens ", 0},
    {TE_OP_CACHE_APPEND, " cu_seqlens ", 0},
    {TE_OP_CACHE_GATHER, " ", 0},
};
#define SAMPLES (sizeof samples / sizeof *samples)

static inline int lists(const char *names, const char *name)
{
    char word[64];
    (void)snprintf(word, sizeof word, " %s ", name);
    return strstr(names, word) != NULL;
}

static inline int ends_with(const char *name, const char *end)
{
    size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

static inline void *member_of(any_args *args, const te_field *field)
{
    return (char *)args + field->offset;
}

/* Pointers come first in a tensor as well. */
static inline void **pointer_of(any_args *args, const te_field *field)
{
    return member_of(args, field);
}

static inline int is_pointer(const te_field *field)
{
    return field->kind == TE_FIELD_TENSOR || field->kind == TE_FIELD_FLOATS ||
           field->kind == TE_FIELD_INT64S;
}

/* ---- filled args -------------------------------------------------------------------------- */

static inline te_dtype dtype_of(te_op op, const te_field *field)
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
static inline te_tensor filled_tensor(test_device *t, te_op op, const te_field *field)
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
static inline te_tensor dense(te_tensor tensor, int64_t rows, int64_t columns)
{
    tensor.shape[1] = rows;
    tensor.shape[2] = columns;
    tensor.strides[1] = columns * tensor.strides[2];
    tensor.strides[0] = rows * tensor.strides[1];
    return tensor;
}

/* A dense vector or tensor with other sizes in front, of as many elements at most. */
static inline void shorten(te_tensor *tensor, int64_t first)
{
    if (tensor->data != NULL) tensor->shape[0] = first;
}

/* Queries and keys are [SIDE, SIDE, 2, SIDE]: scores are [SIDE, 2, SIDE, SIDE], of which mask and
 * bias have [SIDE, 1, 1, SIDE], statistics [SIDE, 2, SIDE], slopes [SIDE, 2], and sink and
 * `of_heads` [2]. Packed there are SIDE - 1 empty sequences among SIDE tokens, [1, SIDE, 2, SIDE].
 */
static inline void fill_attention(te_attention_problem *problem, te_tensor *statistics,
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

static inline any_args fill(test_device *t, const sample *s)
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
    } else if (s->op == TE_OP_ATTENTION_MERGE) {
        te_attention_merge_args *of = &args.attention_merge;
        of->total_statistics.shape[3] = of->step_statistics.shape[3] = of->statistics.shape[3] = 1;
    }
    return args;
}

#endif
