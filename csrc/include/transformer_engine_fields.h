/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_fields.h - public C API: what is known of each field of an args struct, for
 * whoever fills or reads one without knowing the operator: a binding of another language, a
 * plug-in.
 *
 * Part of transformer_engine.h, which has the types of everything here.
 */
#ifndef TRANSFORMER_ENGINE_FIELDS_H
#define TRANSFORMER_ENGINE_FIELDS_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

typedef enum te_field_kind {
    TE_FIELD_TENSOR,   /* te_tensor */
    TE_FIELD_FLOATS,   /* float *: `count` elements on the device */
    TE_FIELD_INT64S,   /* int64_t *: likewise */
    TE_FIELD_FLOAT,    /* float */
    TE_FIELD_DOUBLE,   /* double */
    TE_FIELD_INT32,    /* int32_t */
    TE_FIELD_INT64,    /* int64_t */
    TE_FIELD_ENUM,     /* an enum, or uint32_t */
    TE_FIELD_BIT,      /* bit `count` of a uint32_t */
    TE_FIELD_WORKSPACE /* void *, and its size_t behind it; the last in every operator's list */
} te_field_kind;

/* How the elements of a tensor lie. */
typedef enum te_field_form {
    TE_FORM_NONE,
    TE_FORM_MATRIX, /* two dims, unit column stride */
    TE_FORM_VECTOR, /* one dim, dense */
    TE_FORM_DIMS    /* up to TE_MAX_DIMS dims, unit last stride */
} te_field_form;

typedef enum te_field_dtypes {
    TE_DTYPES_ANY,
    TE_DTYPES_NUMBERS, /* f32, f16, bf16 */
    TE_DTYPES_CODES,   /* e4m3, e5m2, u8 */
    TE_DTYPES_SCALES,  /* f32, u8 */
    TE_DTYPES_F32,
    TE_DTYPES_I32,
    TE_DTYPES_MASK,  /* u8: 0 or not */
    TE_DTYPES_FLOATS /* f32, f16, bf16, e4m3, e5m2 */
} te_field_dtypes;

typedef enum te_field_access { TE_ACCESS_READ, TE_ACCESS_WRITE, TE_ACCESS_UPDATE } te_field_access;

typedef struct te_field {
    const char *name;
    size_t offset, size; /* of the member; a workspace has its size behind it */
    te_field_kind kind;
    te_field_form form;
    te_field_dtypes dtypes;
    te_field_access access;
    int32_t required; /* a call without it is INVALID */
    int64_t count;
    double initial; /* of a number that is not given */
} te_field;

typedef struct te_op_info {
    size_t size; /* of the args struct */
    const te_field *fields;
    int32_t field_count; /* at most TE_OP_MAX_FIELDS */
    const char *summary; /* one sentence */
} te_op_info;

enum { TE_OP_MAX_FIELDS = 48 };

/* Room for the args struct of any operator. */
typedef union te_any_args {
    size_t size;
#define X(NAME, name) te_##name##_args name;
    TE_OPS(X)
#undef X
} te_any_args;

/* Fields of an operator in the order of its args struct, but that the workspace comes behind those
 * which a version has appended; NULL for a bad number. */
TE_API const te_op_info *te_op_describe(te_op op);
/* Sets a number, an enum or a bit of an args struct; a field of another kind stays as it is. */
TE_API void te_field_set_number(const te_field *field, void *args, double value);
/* The value of one; 0 for a field of another kind. */
TE_API double te_field_number(const te_field *field, const void *args);
/* Where a field lies. Data comes first in a tensor: the same for pointers. */
static inline const void *te_field_member(const te_field *field, const void *args)
{
    return (const char *)args + field->offset;
}
/* Fills an args struct as if nothing was given: its size, initial values, zeros. */
TE_API void te_op_initial(te_op op, void *args);
/* "input f32 [4, 16], gamma f32 [16]": the tensors of a call, for messages; cut off at `size`. */
TE_API void te_op_shapes(te_op op, const void *args, char *text, size_t size);

#endif
