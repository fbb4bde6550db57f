/* SPDX-License-Identifier: Apache-2.0
 *
 * fields.c - the lists of fields.h as tables.
 */
#include "core/fields.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* The kind of a field is that of its member: a list can not say something else than the struct. */
#define KIND_OF(lvalue)                                                                            \
    _Generic((lvalue),                                                                             \
        te_tensor: TE_FIELD_TENSOR,                                                                \
        float *: TE_FIELD_FLOATS,                                                                  \
        const float *: TE_FIELD_FLOATS,                                                            \
        const int64_t *: TE_FIELD_INT64S,                                                          \
        float: TE_FIELD_FLOAT,                                                                     \
        double: TE_FIELD_DOUBLE,                                                                   \
        int32_t: TE_FIELD_INT32,                                                                   \
        int64_t: TE_FIELD_INT64,                                                                   \
        uint32_t: TE_FIELD_ENUM,                                                                   \
        void *: TE_FIELD_WORKSPACE)

_Static_assert(_Generic((te_norm_kind)0, uint32_t : 1) &&
                   _Generic((te_scaling_mode)0, uint32_t : 1),
               "an enum is read as 32 bits");

/* Flags are listed bit by bit. */
#define X_FIELD(op, field, member, needed, how, lies, of, many, start)                             \
    {.name = #field,                                                                               \
     .offset = offsetof(te_##op##_args, member),                                                   \
     .size = sizeof(((te_##op##_args *)0)->member),                                                \
     .kind = KIND_OF(((te_##op##_args *)0)->member) == TE_FIELD_ENUM && (many) != 0                \
                 ? TE_FIELD_BIT                                                                    \
                 : KIND_OF(((te_##op##_args *)0)->member),                                         \
     .form = TE_FORM_##lies,                                                                       \
     .dtypes = TE_DTYPES_##of,                                                                     \
     .access = TE_ACCESS_##how,                                                                    \
     .required = needed,                                                                           \
     .count = many,                                                                                \
     .initial = start},

#define X(NAME, op)                                                                                \
    static const te_field op##_fields[] = {TE_ALL_FIELDS(X_FIELD, op)};                            \
    _Static_assert((int)te_field_count_##op <= (int)TE_OP_MAX_FIELDS,                              \
                   "TE_OP_MAX_FIELDS is too low");
TE_OPS(X)
#undef X

static const te_op_info infos[TE_OP_COUNT] = {
#define X(NAME, op)                                                                                \
    [TE_OP_##NAME] = {.size = sizeof(te_##op##_args),                                              \
                      .fields = op##_fields,                                                       \
                      .field_count = te_field_count_##op,                                          \
                      .summary = TE_SUMMARY_##op},
    TE_OPS(X)
#undef X
};

const te_op_info *te_op_describe(te_op op)
{
    return (int)op >= 0 && op < TE_OP_COUNT ? &infos[op] : NULL;
}

void te_field_set_number(const te_field *field, void *args, double value)
{
    void *member = (char *)args + field->offset;
    switch (field->kind) {
    case TE_FIELD_FLOAT:
        *(float *)member = (float)value;
        return;
    case TE_FIELD_DOUBLE:
        *(double *)member = value;
        return;
    case TE_FIELD_INT32:
    case TE_FIELD_ENUM:
        *(int32_t *)member = (int32_t)value;
        return;
    case TE_FIELD_INT64:
        *(int64_t *)member = (int64_t)value;
        return;
    case TE_FIELD_BIT:
        *(uint32_t *)member &= ~(uint32_t)field->count;
        if (value != 0.0) *(uint32_t *)member |= (uint32_t)field->count;
        return;
    default:
        return;
    }
}

double te_field_number(const te_field *field, const void *args)
{
    const void *member = te_field_member(field, args);
    switch (field->kind) {
    case TE_FIELD_FLOAT:
        return (double)*(const float *)member;
    case TE_FIELD_DOUBLE:
        return *(const double *)member;
    case TE_FIELD_INT32:
    case TE_FIELD_ENUM:
        return (double)*(const int32_t *)member;
    case TE_FIELD_INT64:
        return (double)*(const int64_t *)member;
    case TE_FIELD_BIT:
        return (*(const uint32_t *)member & (uint32_t)field->count) != 0U;
    default:
        return 0.0;
    }
}

void te_op_initial(te_op op, void *args)
{
    const te_op_info *info = te_op_describe(op);
    if (info == NULL) return;
    memset(args, 0, info->size);
    *(size_t *)args = info->size;
    for (int32_t i = 0; i < info->field_count; i++) {
        te_field_set_number(&info->fields[i], args, info->fields[i].initial);
    }
}

/* Adds to a text that may be full; returns its length, which never reaches `size`. */
__attribute__((format(printf, 4, 5))) static size_t add(char *text, size_t size, size_t length,
                                                        const char *format, ...)
{
    va_list arguments;
    int added;
    va_start(arguments, format);
    added = vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
    if (added < 0) return length;
    return (size_t)added < size - length ? length + (size_t)added : size - 1;
}

void te_op_shapes(te_op op, const void *args, char *text, size_t size)
{
    const te_op_info *info = te_op_describe(op);
    size_t length = 0;
    if (size == 0) return;
    text[0] = '\0';
    for (int32_t i = 0; info != NULL && i < info->field_count; i++) {
        const te_tensor *tensor = te_field_member(&info->fields[i], args);
        if (info->fields[i].kind != TE_FIELD_TENSOR || tensor->ndim == 0) continue;
        length = add(text, size, length, "%s%s %s [", length == 0 ? "" : ", ", info->fields[i].name,
                     te_dtype_name(tensor->dtype));
        for (int32_t d = 0; d < tensor->ndim && d < TE_MAX_DIMS; d++) {
            length =
                add(text, size, length, "%s%lld", d > 0 ? ", " : "", (long long)tensor->shape[d]);
        }
        length = add(text, size, length, tensor->ndim > TE_MAX_DIMS ? ", ...]" : "]");
    }
}
