/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fields.c - what every operator does with its args struct, tested by the lists of fields: no
 * byte belongs to no field, a pointer may be NULL and a size another one without a crash, and what
 * is written is no memory of another field.
 */
#include <stddef.h>

#include "cpu_device.h"
#include "op_samples.h"

enum { EXTRA = 24 };

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
                 {TE_OP_ATTENTION_MERGE, "output", "total"},
                 {TE_OP_ATTENTION_MERGE, "output", "step"},
                 {TE_OP_ATTENTION_MERGE, "statistics", "total_statistics"},
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
    TEST_CHECK(t, strstr(te_last_error(), "output shares memory with input") != NULL, "%s",
               te_last_error());
    args.input.shape[1] = args.output.shape[1] = SIDE;
    args.output.data = (float *)both.tensor.data + SIDE;
    TEST_OK(t, te_dropout_add(t->context, &args, NULL));
    args.output.data = both.tensor.data;
    args.output.strides[0] = SIDE;
    TEST_CHECK(t, te_dropout_add(t->context, &args, NULL) == TE_ERROR_INVALID, "other strides");
}

/* Sizes that multiply to more than there is, a table without data, and dims beyond the struct's. */
static void check_huge(test_device *t)
{
    te_fill_args fill_args;
    te_cache_gather_args gather;
    any_args args = fill(t, &(sample){TE_OP_CACHE_GATHER, " ", 0});
    char text[512];
    const int64_t sizes[][2] = {
        {(int64_t)1 << 32, (int64_t)1 << 32}, /* 2^64: 0 where nothing looks */
        {(int64_t)1 << 31, (int64_t)1 << 26},
        {(int64_t)1 << 62, 0},
        {INT64_MAX, 1},
    };
    te_op_initial(TE_OP_FILL, &fill_args);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        fill_args.output = args.cache_gather.key;
        fill_args.output.ndim = 2;
        memcpy(fill_args.output.shape, sizes[i], sizeof sizes[i]);
        fill_args.output.strides[0] = sizes[i][1];
        fill_args.output.strides[1] = 1;
        TEST_CHECK(t, te_fill(t->context, &fill_args, NULL) == TE_ERROR_INVALID, "sizes %zu", i);
        TEST_CHECK(t, strstr(te_last_error(), "2^56") != NULL, "%s", te_last_error());
    }
    fill_args.output.shape[0] = fill_args.output.shape[1] = 2;
    fill_args.output.strides[0] = INT64_MAX;
    TEST_CHECK(t, te_fill(t->context, &fill_args, NULL) == TE_ERROR_INVALID, "stride");
    gather = args.cache_gather;
    gather.cache.page_table.data = NULL;
    TEST_CHECK(t, te_cache_gather(t->context, &gather, NULL) == TE_ERROR_INVALID, "page_table");
    TEST_CHECK(t, strstr(te_last_error(), "page_table: data is NULL") != NULL, "%s",
               te_last_error());
    gather = args.cache_gather;
    gather.key.ndim = 1 << 30;
    te_op_shapes(TE_OP_CACHE_GATHER, &gather, text, sizeof text);
    TEST_CHECK(t, strstr(text, "16, 16, 2, 16, ...]") != NULL, "%s", text);
    te_op_shapes(TE_OP_CACHE_GATHER, &gather, NULL, 0);
    test_release(t);
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
    check_huge(t);
    TEST_CHECK(t, te_op_run(t->context, TE_OP_COUNT, &samples, NULL) == TE_ERROR_INVALID,
               "operator");
    TEST_CHECK(t, te_op_run(t->context, (te_op)-1, &samples, NULL) == TE_ERROR_INVALID, "operator");
    TEST_CHECK(t, te_op_describe(TE_OP_COUNT) == NULL, "operator");
}

int main(void)
{
    return test_on_cpu("fields", check_all);
}
