/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - argument checks of the operators, done once for every backend before a slot is called.
 *
 * Every field is checked by its row of fields.h (check.c), then those of one call against each
 * other (check_ops.c). A backend may rely on what these let through: sizes agree, dtypes are legal
 * for the operator, all tensors live on the context's device, strides are as documented, data is
 * there where there are elements. A backend's `supports` only says what of that it has not got.
 */
#ifndef TE_CORE_CHECK_H
#define TE_CORE_CHECK_H

#include "core/fields.h"

/* Makes args of the size that this library knows. *whole is args itself, or *buffer: that of a
 * caller that knows fewer fields has their initial values, that of one that knows more must be 0
 * there. */
te_status te_check_size(te_op op, const void *args, te_any_args *buffer, const void **whole);
/* Checks whole args: each field, and how they agree. */
te_status te_check_args(te_op op, te_device device, const void *args);
/* Nothing that is written is the memory of another field, unless it is documented to be. Plans need
 * not ask: they lay out their buffers. */
te_status te_check_memory(te_op op, const void *args);
/* The workspace of a call has the bytes that its operator needs. */
te_status te_check_workspace(te_op op, const void *workspace, size_t size, size_t needed);

/* ---- between check.c, check_ops.c and its siblings ---- */

typedef struct te_check_site {
    te_op op;
    te_device device;
} te_check_site;

/* "quantize: input: ..." */
te_status te_check_fail(const te_check_site *site, const char *name, te_status kind,
                        const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
/* A tensor by its field: present if it is required, and as the field says where it is given. */
te_status te_check_tensor(const te_check_site *site, const te_field *field, const te_tensor *tensor,
                          int required);
/* Each field of a call by itself. */
te_status te_check_fields(const te_check_site *site, const void *args);

/* Each size is that of `like`, or 1 where that is allowed. */
te_status te_check_sizes(const te_check_site *site, const char *name, const te_tensor *tensor,
                         const te_tensor *like, int or_1);
/* A vector of `length`, where it is requested. */
te_status te_check_length(const te_check_site *site, const char *name, const te_tensor *tensor,
                          int64_t length);
te_status te_check_dtype(const te_check_site *site, const char *name, te_dtype dtype,
                         te_dtype expected);
/* The tensor is there; `why` it has to be. */
te_status te_check_missing(const te_check_site *site, const char *name, const te_tensor *tensor,
                           const char *why);
/* Operators of which the rules do not say all. */
#define TE_CHECKED_OPS(X)                                                                          \
    X(QUANTIZE, quantize)                                                                          \
    X(DEQUANTIZE, dequantize)                                                                      \
    X(TRANSPOSE, transpose)                                                                        \
    X(CAST, cast)                                                                                  \
    X(GEMM, gemm)                                                                                  \
    X(NORM, norm)                                                                                  \
    X(NORM_BACKWARD, norm_backward)                                                                \
    X(ACTIVATION, activation)                                                                      \
    X(ACTIVATION_BACKWARD, activation_backward)                                                    \
    X(SOFTMAX, softmax)                                                                            \
    X(SOFTMAX_BACKWARD, softmax_backward)                                                          \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(ATTENTION_MERGE, attention_merge)                                                            \
    X(ROPE, rope)                                                                                  \
    X(CACHE_APPEND, cache_append)                                                                  \
    X(CACHE_GATHER, cache_gather)

/* What no rule of check_ops.c says of these. */
#define X(NAME, name)                                                                              \
    te_status te_check_##name(const te_check_site *site, const te_##name##_args *args);
TE_CHECKED_OPS(X)
#undef X

/* What is asked of values of [rows, columns]. */
te_status te_check_cast_request(const te_check_site *site, const te_cast_request *cast,
                                int64_t rows, int64_t columns);

/* A failure names operator, argument, value and expectation. */
#define INVALID(name, ...)                                                                         \
    te_check_fail(site, name, TE_ERROR_INVALID, __FILE__, __LINE__, __VA_ARGS__)
#define WRONG_TYPE(name, ...)                                                                      \
    te_check_fail(site, name, TE_ERROR_TYPE, __FILE__, __LINE__, __VA_ARGS__)
/* Fail where a condition holds. */
#define INVALID_IF(condition, ...)                                                                 \
    do {                                                                                           \
        if (condition) return INVALID(__VA_ARGS__);                                                \
    } while (0)
#define WRONG_TYPE_IF(condition, ...)                                                              \
    do {                                                                                           \
        if (condition) return WRONG_TYPE(__VA_ARGS__);                                             \
    } while (0)
#define LL(value) ((long long)(value))

#endif
