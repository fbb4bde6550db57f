/* SPDX-License-Identifier: Apache-2.0
 *
 * check_ops.c - how the fields of one call agree: a list of rules per operator, and a function for
 * what no rule says.
 */
#include <float.h>

#include "core/attention.h"
#include "core/check.h"
#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"

/* ---- rules -------------------------------------------------------------------------------- */

typedef enum rule_kind {
    END,
    SAME,      /* the sizes of `of` */
    ALIKE,     /* and its dtype */
    DTYPE,     /* its dtype alone */
    BROADCAST, /* each size is 1 or that of `of` */
    COLUMNS,   /* a vector as long as the last dim of `of` */
    ROWS,      /* a vector as long as its first */
    LINES,     /* a vector as long as all before its last */
    DIVIDES,   /* a positive number that divides its first dim */
    CAST,      /* the mode of a cast request for values with the sizes of `of` */
    RANDOM,    /* the state of a generator, unless the probability `of` is 0 */
    LAYERNORM, /* only where the norm of the kind `of` has it */
    RANGE,     /* a number from low to high */
    DIMS,      /* `low` dims */
    SOME       /* dim `low` is not 0; below 0: the last one */
} rule_kind;

typedef struct rule {
    rule_kind kind;
    int16_t at, of; /* positions of fields */
    double low, high;
    const char *expected; /* of RANGE, in words; NULL: an enumerator */
} rule;

#define SMALLEST ((double)FLT_TRUE_MIN)
#define FARTHEST 0x1p60 /* far beyond any sequence, and sums of a few do not overflow */

/* R(operator, field, rule, other field), N(operator, field, rule, low, high, words) */
#define KIND(N, op, last) N(op, kind, RANGE, 0, last, NULL)
#define DROP(R, N, op, name)                                                                       \
    N(op, name, RANGE, 0, 1, "a probability, 0 to 1") R(op, rng, RANDOM, name)
#define WINDOW(N, op)                                                                              \
    N(op, window_left, RANGE, -FARTHEST, FARTHEST, "-2^60 to 2^60")                                \
    N(op, window_right, RANGE, -FARTHEST, FARTHEST, "-2^60 to 2^60")                               \
    N(op, diagonal, RANGE, -FARTHEST, FARTHEST, "-2^60 to 2^60")

#define RULES_quantize(R, N) R(quantize, bias_grad, COLUMNS, input) R(quantize, mode, CAST, input)
#define RULES_dequantize(R, N)
#define RULES_amax(R, N)
#define RULES_transpose(R, N) R(transpose, output, DTYPE, input)
#define RULES_gemm(R, N)                                                                           \
    N(gemm, a_mode, RANGE, 0, TE_SCALING_COUNT - 1, NULL)                                          \
    N(gemm, b_mode, RANGE, 0, TE_SCALING_COUNT - 1, NULL)                                          \
    N(gemm, epilogue, RANGE, 0, TE_EPILOGUE_GELU, NULL)                                            \
    R(gemm, bias, COLUMNS, d) R(gemm, bias_grad, ROWS, d) R(gemm, aux, SAME, d)
#define RULES_scaling_update(R, N)                                                                 \
    N(scaling_update, history, SOME, 0, 0, NULL)                                                   \
    R(scaling_update, scale, COLUMNS, history)                                                     \
    N(scaling_update, fp8_max, RANGE, SMALLEST, FLT_MAX, "a positive number")                      \
    N(scaling_update, algo, RANGE, 0, TE_AMAX_MOST_RECENT, NULL)
#define RULES_fill(R, N)
#define RULES_cast(R, N)
#define RULES_norm(R, N)                                                                           \
    KIND(N, norm, TE_NORM_L2)                                                                      \
    N(norm, input, SOME, -1, 0, NULL)                                                              \
    R(norm, gamma, COLUMNS, input)                                                                 \
    R(norm, beta, COLUMNS, input)                                                                  \
    R(norm, beta, DTYPE, gamma)                                                                    \
    R(norm, beta, LAYERNORM, kind)                                                                 \
    R(norm, mean, LINES, input)                                                                    \
    R(norm, mean, LAYERNORM, kind)                                                                 \
    R(norm, rsigma, LINES, input)                                                                  \
    N(norm, eps, RANGE, 0, FLT_MAX, "a finite number from 0 on") R(norm, mode, CAST, input)
#define RULES_norm_backward(R, N)                                                                  \
    KIND(N, norm_backward, TE_NORM_L2)                                                             \
    N(norm_backward, input, SOME, -1, 0, NULL)                                                     \
    R(norm_backward, grad_add, ALIKE, grad_output)                                                 \
    R(norm_backward, gamma, COLUMNS, input)                                                        \
    R(norm_backward, rsigma, LINES, input)                                                         \
    R(norm_backward, mean, LINES, input)                                                           \
    R(norm_backward, mean, LAYERNORM, kind)                                                        \
    R(norm_backward, grad_input, SAME, input)                                                      \
    R(norm_backward, grad_residual, ALIKE, grad_input)                                             \
    R(norm_backward, gamma_grad, COLUMNS, input)                                                   \
    R(norm_backward, beta_grad, COLUMNS, input) R(norm_backward, beta_grad, LAYERNORM, kind)
#define RULES_activation(R, N) KIND(N, activation, TE_ACTIVATION_COUNT - 1)
#define RULES_activation_backward(R, N)                                                            \
    KIND(N, activation_backward, TE_ACTIVATION_COUNT - 1)                                          \
    R(activation_backward, bias_grad, COLUMNS, input) R(activation_backward, mode, CAST, input)
#define RULES_softcap(R, N)                                                                        \
    N(softcap, cap, RANGE, SMALLEST, FLT_MAX, "a positive number")                                 \
    R(softcap, grad_output, ALIKE, input) R(softcap, mode, CAST, input)
#define RULES_softmax(R, N)                                                                        \
    N(softmax, input, DIMS, 4, 0, NULL)                                                            \
    R(softmax, output, ALIKE, input)                                                               \
    R(softmax, probabilities, ALIKE, input)                                                        \
    R(softmax, mask, BROADCAST, input)                                                             \
    R(softmax, bias, BROADCAST, input) DROP(R, N, softmax, dropout) WINDOW(N, softmax)
#define RULES_softmax_backward(R, N)                                                               \
    N(softmax_backward, grad_output, DIMS, 4, 0, NULL)                                             \
    R(softmax_backward, probabilities, ALIKE, grad_output)                                         \
    R(softmax_backward, grad_input, ALIKE, grad_output) DROP(R, N, softmax_backward, dropout)
#define RULES_PROBLEM(R, N, op)                                                                    \
    N(op, query, DIMS, 4, 0, NULL)                                                                 \
    N(op, key, DIMS, 4, 0, NULL)                                                                   \
    N(op, value, DIMS, 4, 0, NULL)                                                                 \
    R(op, key, DTYPE, query)                                                                       \
    R(op, value, DTYPE, query)                                                                     \
    R(op, output, DTYPE, query) DROP(R, N, op, dropout) WINDOW(N, op)
#define RULES_attention(R, N) RULES_PROBLEM(R, N, attention)
#define RULES_attention_backward(R, N)                                                             \
    RULES_PROBLEM(R, N, attention_backward)                                                        \
    R(attention_backward, grad_output, SAME, output)                                               \
    R(attention_backward, grad_query, SAME, query)                                                 \
    R(attention_backward, grad_query, DTYPE, grad_output)                                          \
    R(attention_backward, grad_key, SAME, key)                                                     \
    R(attention_backward, grad_key, DTYPE, grad_output)                                            \
    R(attention_backward, grad_value, SAME, value)                                                 \
    R(attention_backward, grad_value, DTYPE, grad_output)
#define RULES_dropout_add(R, N)                                                                    \
    R(dropout_add, bias, COLUMNS, input)                                                           \
    R(dropout_add, residual, ALIKE, input)                                                         \
    R(dropout_add, output, ALIKE, input)                                                           \
    R(dropout_add, samples, DIVIDES, input)                                                        \
    DROP(R, N, dropout_add, dropout) DROP(R, N, dropout_add, drop_path)
#define RULES_dropout_backward(R, N)                                                               \
    R(dropout_backward, grad_input, ALIKE, grad_output)                                            \
    R(dropout_backward, bias_grad, COLUMNS, grad_output)                                           \
    R(dropout_backward, samples, DIVIDES, grad_output)                                             \
    DROP(R, N, dropout_backward, dropout) DROP(R, N, dropout_backward, drop_path)
#define RULES_CACHE(R, N, op)                                                                      \
    N(op, key_cache, DIMS, 4, 0, NULL)                                                             \
    N(op, value_cache, DIMS, 4, 0, NULL)                                                           \
    R(op, value_cache, DTYPE, key_cache)                                                           \
    R(op, key, DTYPE, key_cache)                                                                   \
    R(op, value, DTYPE, key_cache)
#define RULES_cache_append(R, N)                                                                   \
    RULES_CACHE(R, N, cache_append) R(cache_append, counts, ROWS, starts)
#define RULES_cache_gather(R, N)                                                                   \
    RULES_CACHE(R, N, cache_gather)                                                                \
    N(cache_gather, key, DIMS, 4, 0, NULL)                                                         \
    R(cache_gather, lengths, ROWS, key)
#define RULES_rope(R, N)                                                                           \
    N(rope, channels, RANGE, 0, FARTHEST, "the channels of a head, or 0")                          \
    N(rope, cp_size, RANGE, 0, INT32_MAX, "a number of ranks")                                     \
    N(rope, cp_rank, RANGE, 0, INT32_MAX, "a rank")

#define RULE(op, field, what, other)                                                               \
    {.kind = (what), .at = te_at_##op##_##field, .of = te_at_##op##_##other},
#define NUMBER(op, field, what, lowest, highest, words)                                            \
    {.kind = (what),                                                                               \
     .at = te_at_##op##_##field,                                                                   \
     .low = (lowest),                                                                              \
     .high = (highest),                                                                            \
     .expected = (words)},
#define X(NAME, name) static const rule name##_rules[] = {RULES_##name(RULE, NUMBER){.kind = END}};
TE_OPS(X)
#undef X

/* Each size is that of `like`, or 1 where that is allowed. */
static te_status check_sizes(const te_check_site *site, const char *name, const te_tensor *tensor,
                             const te_tensor *like, int or_1)
{
    if (tensor->ndim != like->ndim) {
        return INVALID(name, "ndim = %d, expected %d", (int)tensor->ndim, (int)like->ndim);
    }
    for (int32_t i = 0; i < like->ndim; i++) {
        if (tensor->shape[i] == like->shape[i] || (or_1 && tensor->shape[i] == 1)) continue;
        if (like->ndim == 2) {
            return INVALID(name, "shape [%lld, %lld], expected [%lld, %lld]", LL(tensor->shape[0]),
                           LL(tensor->shape[1]), LL(like->shape[0]), LL(like->shape[1]));
        }
        return INVALID(name, "dim %d: size %lld, expected %s%lld", (int)i, LL(tensor->shape[i]),
                       or_1 ? "1 or " : "", LL(like->shape[i]));
    }
    return TE_OK;
}

/* Rows, where each has the last dim. */
static int64_t lines_of(const te_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim - 1; i++) count *= tensor->shape[i];
    return count;
}

static te_status check_length(const te_check_site *site, const char *name, const te_tensor *tensor,
                              int64_t length)
{
    if (!te_tensor_requested(tensor) || tensor->shape[0] == length) return TE_OK;
    return INVALID(name, "ndim %d and length %lld, expected a vector of %lld", (int)tensor->ndim,
                   LL(tensor->shape[0]), LL(length));
}

static te_status check_dtype(const te_check_site *site, const char *name, te_dtype dtype,
                             te_dtype expected)
{
    if (dtype == expected) return TE_OK;
    return WRONG_TYPE(name, "dtype %s, expected %s", te_dtype_name(dtype), te_dtype_name(expected));
}

/* A quantized form: [major, >= minor]. */
static te_status check_form(const te_check_site *site, const char *name, const te_tensor *data,
                            int64_t major, int64_t minor)
{
    if (!te_tensor_requested(data) || (data->shape[0] == major && data->shape[1] >= minor))
        return TE_OK;
    return INVALID(name, "shape [%lld, %lld], expected [%lld, >= %lld]", LL(data->shape[0]),
                   LL(data->shape[1]), LL(major), LL(minor));
}

/* The scales of a form [rows, columns]. */
static te_status check_scales(const te_check_site *site, const char *name, te_scaling_mode mode,
                              const te_tensor *scales, te_scale_layout layout)
{
    const int64_t *shape = scales->shape;
    if (!te_tensor_requested(scales)) return TE_OK;
    TE_TRY(
        check_dtype(site, name, scales->dtype, te_scales_micro(mode) ? TE_DTYPE_U8 : TE_DTYPE_F32));
    if (layout.ndim == 1) {
        if (scales->ndim == 1 && shape[0] == layout.shape[0]) return TE_OK;
        return INVALID(name, "ndim %d and length %lld, expected a vector of %lld",
                       (int)scales->ndim, LL(shape[0]), LL(layout.shape[0]));
    }
    if (scales->ndim == 2 && shape[0] == layout.shape[0] && shape[1] == layout.shape[1] &&
        (shape[0] <= 1 || shape[1] == 0 || scales->strides[0] == shape[1])) {
        return TE_OK;
    }
    return INVALID(name, "ndim %d, shape [%lld, %lld], expected [%lld, %lld] without gaps",
                   (int)scales->ndim, LL(shape[0]), LL(scales->ndim > 1 ? shape[1] : 0),
                   LL(layout.shape[0]), LL(layout.shape[1]));
}

static te_status check_codes(const te_check_site *site, const char *name, te_scaling_mode mode,
                             const te_tensor *data)
{
    const int bytes = mode == TE_SCALING_NVFP4;
    if (!te_tensor_requested(data) || te_dtype_is_fp8(data->dtype) == !bytes) return TE_OK;
    return WRONG_TYPE(name, "dtype %s, expected %s", te_dtype_name(data->dtype),
                      bytes ? "u8: two e2m1 to a byte" : "e4m3 or e5m2");
}

/* The quantized forms of [rows, columns], and their scales. */
static te_status check_forms(const te_check_site *site, const te_operand *operand, int64_t rows,
                             int64_t columns)
{
    const te_tensor *row = &operand->row, *column = &operand->column;
    int micro;
    if ((unsigned)operand->mode >= TE_SCALING_COUNT) {
        return INVALID("mode", "%d does not exist, expected 0 to %d", (int)operand->mode,
                       TE_SCALING_COUNT - 1);
    }
    if (operand->mode == TE_SCALING_NONE) {
        if (!te_tensor_present(row) && !te_tensor_present(column)) return TE_OK;
        return INVALID("mode", "scaling mode none casts nothing");
    }
    TE_TRY(check_codes(site, "row", operand->mode, row));
    TE_TRY(check_codes(site, "column", operand->mode, column));
    TE_TRY(check_form(site, "row", row, rows, te_row_bytes(operand->mode, columns)));
    if (operand->mode == TE_SCALING_MXFP8) {
        TE_TRY(check_form(site, "column", column, rows, columns));
    } else {
        TE_TRY(check_form(site, "column", column, columns, te_row_bytes(operand->mode, rows)));
    }
    if (operand->mode == TE_SCALING_NVFP4) {
        TE_TRY(check_length(site, "row_amax", &operand->row_amax, 1));
        TE_TRY(check_length(site, "column_amax", &operand->column_amax, 1));
    }
    if (te_tensor_requested(row) && te_tensor_requested(column)) {
        TE_TRY(check_dtype(site, "column", column->dtype, row->dtype));
    }
    /* But for bytes of groups, scales cover the padding of data too. */
    micro = te_scales_micro(operand->mode);
    TE_TRY(check_scales(
        site, "row_scales", operand->mode, &operand->row_scales,
        te_scale_layout_of(operand->mode, rows,
                           !micro && te_tensor_requested(row) ? row->shape[1] : columns)));
    return check_scales(
        site, "column_scales", operand->mode, &operand->column_scales,
        te_column_scale_layout_of(operand->mode,
                                  !micro && te_tensor_requested(column) ? column->shape[1] : rows,
                                  columns));
}

/* What MXFP8 and NVFP4 alone may be asked for. */
static te_status check_micro(const te_check_site *site, const te_cast_request *cast)
{
    const te_operand *result = &cast->result;
    const int fp4 = result->mode == TE_SCALING_NVFP4;
    if (!te_scales_micro(result->mode) && cast->square != 0) {
        return INVALID("square", "mode %d has a mode of its own for squares, or none",
                       (int)result->mode);
    }
    if (!fp4 && (cast->hadamard != 0 || cast->column_partials != NULL || cast->rng != NULL)) {
        return INVALID(cast->hadamard != 0             ? "hadamard"
                       : cast->column_partials != NULL ? "column_partials"
                                                       : "rng",
                       "mode %d does not have it, only nvfp4 (%d) has", (int)result->mode,
                       (int)TE_SCALING_NVFP4);
    }
    if (!fp4) return TE_OK;
    if (cast->hadamard != 0 && cast->square != 0) {
        return INVALID("hadamard", "a square is not transformed: leave it or square out");
    }
    if (cast->partials == NULL &&
        (te_tensor_requested(&result->row) || cast->column_partials == NULL)) {
        return INVALID("partials", "is NULL: nvfp4 scales by the amax");
    }
    if (cast->hadamard != 0 && te_tensor_requested(&result->column) &&
        cast->column_partials == NULL) {
        return INVALID("column_partials",
                       "is NULL: the transform has an amax of its own, which te_amax finds");
    }
    if (te_tensor_present(&result->row) && !te_tensor_present(&result->row_amax)) {
        return INVALID("row_amax", "is missing: row can not be read without");
    }
    if (te_tensor_present(&result->column) && !te_tensor_present(&result->column_amax)) {
        return INVALID("column_amax", "is missing: column can not be read without");
    }
    return TE_OK;
}

/* What is asked of a cast that measures by itself: forms with the scales that they need. */
static te_status check_own_scales(const te_check_site *site, const te_cast_request *cast)
{
    const te_operand *result = &cast->result;
    const int measured = result->mode == TE_SCALING_NVFP4;
    if (cast->scale != NULL || (cast->partials != NULL && !measured)) {
        return INVALID(cast->scale != NULL ? "scale" : "partials",
                       "it is given, and the mode makes its scales by itself");
    }
    if (cast->amax != NULL || cast->amax_partials != NULL) {
        return INVALID(cast->amax != NULL ? "amax" : "amax_partials",
                       "the mode measures rows or tiles: take it without a cast");
    }
    if (te_tensor_requested(&result->row) && !te_tensor_requested(&result->row_scales)) {
        return INVALID("row_scales", "is missing: row can not be read without");
    }
    if (te_tensor_requested(&result->column) && !te_tensor_requested(&result->column_scales)) {
        return INVALID("column_scales", "is missing: column can not be read without");
    }
    if (te_tensor_requested(&result->row_scales) && !te_tensor_requested(&result->row)) {
        return INVALID("row_scales", "there is no row that they are for");
    }
    if (te_tensor_requested(&result->column_scales) && !te_tensor_requested(&result->column)) {
        return INVALID("column_scales", "there is no column that they are for");
    }
    return TE_OK;
}

/* What is asked of values of [rows, columns]. */
static te_status check_cast_request(const te_check_site *site, const te_cast_request *cast,
                                    int64_t rows, int64_t columns)
{
    const te_operand *result = &cast->result;
    const te_tensor like = {.ndim = 2, .shape = {rows, columns}};
    if (te_tensor_requested(&result->wide))
        TE_TRY(check_sizes(site, "wide", &result->wide, &like, 0));
    TE_TRY(check_forms(site, result, rows, columns));
    if (result->mode == TE_SCALING_NONE) {
        if (cast->amax == NULL || site->op == TE_OP_QUANTIZE) return TE_OK;
        return INVALID("amax", "scaling mode none records none: take amax_partials, or cast");
    }
    if (te_scales_micro(result->mode) && site->op != TE_OP_QUANTIZE) {
        return INVALID("mode", "%d: te_quantize alone casts to mxfp8 (%d) and nvfp4 (%d)",
                       (int)result->mode, (int)TE_SCALING_MXFP8, (int)TE_SCALING_NVFP4);
    }
    TE_TRY(check_micro(site, cast));
    if (te_scales_own(result->mode) || te_scales_micro(result->mode)) {
        return check_own_scales(site, cast);
    }
    if (cast->scale == NULL && cast->partials == NULL) {
        return INVALID("mode", "neither scale nor partials is given, which say how to scale");
    }
    if (cast->partials == NULL || te_dtype_is_fp8(te_operand_dtype(result))) return TE_OK;
    return WRONG_TYPE("partials", "they scale to the dtype of row or column, and none is FP8");
}

static te_status check_number(const te_check_site *site, const rule *r, const te_field *field,
                              const void *args)
{
    const te_tensor *tensor = te_field_member(field, args);
    const double value = te_field_number(field, args);
    if (r->kind == DIMS) {
        if (tensor->ndim == (int32_t)r->low) return TE_OK;
        return INVALID(field->name, "ndim = %d, expected %g", (int)tensor->ndim, r->low);
    }
    if (r->kind == SOME) {
        if (tensor->shape[r->low < 0.0 ? tensor->ndim - 1 : (int)r->low] > 0) return TE_OK;
        return INVALID(field->name, "shape [%lld, %lld], expected at least one %s",
                       LL(lines_of(tensor)), LL(tensor->shape[tensor->ndim - 1]),
                       r->low == 0.0 ? "row" : "column");
    }
    if (value >= r->low && value <= r->high) return TE_OK;
    if (r->expected == NULL) {
        return INVALID(field->name, "%g does not exist, expected %g to %g", value, r->low, r->high);
    }
    return INVALID(field->name, "%.*g, expected %s", field->kind == TE_FIELD_INT64 ? 20 : 6, value,
                   r->expected);
}

static te_status check_rule(const te_check_site *site, const rule *r, const te_field *fields,
                            const void *args)
{
    const char *name = fields[r->at].name;
    const te_tensor *tensor = te_field_member(&fields[r->at], args);
    const te_tensor *of = te_field_member(&fields[r->of], args);
    const double number = te_field_number(&fields[r->of], args);
    switch (r->kind) {
    case RANDOM:
        if (number == 0.0 || *(const void *const *)(const void *)tensor != NULL) return TE_OK;
        return INVALID(name, "is NULL with a %s of %g: give {seed, offset}", fields[r->of].name,
                       number);
    case LAYERNORM:
        if (number == (double)TE_NORM_LAYERNORM || !te_tensor_present(tensor)) return TE_OK;
        return INVALID(name, "kind %g has none, only layernorm (%d) has", number,
                       (int)TE_NORM_LAYERNORM);
    case DIVIDES: {
        const int64_t divisor = *(const int64_t *)(const void *)tensor;
        if (divisor >= 1 && of->shape[0] % divisor == 0) return TE_OK;
        return INVALID(name, "%lld, expected a number from 1 on that divides the %lld rows",
                       LL(divisor), LL(of->shape[0]));
    }
    case CAST: /* the mode is the first of all in the request */
        return check_cast_request(site, (const void *)tensor, lines_of(of),
                                  of->shape[of->ndim - 1]);
    case COLUMNS:
        return check_length(site, name, tensor, of->shape[of->ndim - 1]);
    case ROWS:
        return check_length(site, name, tensor, of->shape[0]);
    case LINES:
        return check_length(site, name, tensor, lines_of(of));
    case SAME:
    case ALIKE:
    case BROADCAST:
        if (!te_tensor_requested(tensor)) return TE_OK;
        TE_TRY(check_sizes(site, name, tensor, of, r->kind == BROADCAST));
        if (r->kind != ALIKE) return TE_OK;
        return check_dtype(site, name, tensor->dtype, of->dtype);
    case DTYPE:
        if (!te_tensor_requested(tensor) || !te_tensor_requested(of)) return TE_OK;
        return check_dtype(site, name, tensor->dtype, of->dtype);
    default:
        return check_number(site, r, &fields[r->at], args);
    }
}

/* ---- what no rule says -------------------------------------------------------------------- */

static te_status check_missing(const te_check_site *site, const char *name, const te_tensor *tensor,
                               const char *why)
{
    return te_tensor_present(tensor) ? TE_OK : INVALID(name, "is missing: %s", why);
}

static te_status check_quantize(const te_check_site *site, const te_quantize_args *args)
{
    if (!te_tensor_present(&args->cast.result.wide) && args->cast.amax_partials == NULL) {
        return TE_OK;
    }
    return INVALID("wide", "neither it nor amax_partials is written: te_cast and te_amax do that");
}

static te_status check_dequantize(const te_check_site *site, const te_dequantize_args *args)
{
    const te_operand *input = &args->input;
    const int by_rows = te_tensor_present(&input->row);
    if (input->mode == TE_SCALING_NONE || te_tensor_present(&input->wide)) {
        return INVALID("mode", "the input is not quantized: give its mode, or te_cast it");
    }
    TE_TRY(check_forms(site, input, args->output.shape[0], args->output.shape[1]));
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    if (!by_rows) TE_TRY(check_missing(site, "row", &input->column, "and so is column"));
    TE_TRY(check_missing(site, by_rows ? "row_scales" : "column_scales",
                         by_rows ? &input->row_scales : &input->column_scales,
                         "the data can not be read without"));
    if (input->mode != TE_SCALING_NVFP4) return TE_OK;
    return check_missing(site, by_rows ? "row_amax" : "column_amax",
                         by_rows ? &input->row_amax : &input->column_amax,
                         "the data can not be read without");
}

static te_status check_transpose(const te_check_site *site, const te_transpose_args *args)
{
    const te_tensor *input = &args->input;
    if (te_dtype_bits(input->dtype) != 8) {
        return WRONG_TYPE("input", "dtype %s, expected one-byte elements",
                          te_dtype_name(input->dtype));
    }
    return check_form(site, "output", &args->output, input->shape[1], input->shape[0]);
}

static te_status check_cast(const te_check_site *site, const te_cast_args *args)
{
    const te_dtype from = args->input.dtype, to = args->output.dtype;
    const int wrong_input = !te_dtype_is_high_precision(from);
    if (from == to || (!wrong_input && te_dtype_is_high_precision(to))) return TE_OK;
    return WRONG_TYPE(wrong_input ? "input" : "output", "dtype %s, expected f32, f16 or bf16",
                      te_dtype_name(wrong_input ? from : to));
}

/* The form of an operand that is read, and its scales. `first` is the operand's first field. */
static te_status check_gemm_operand(const te_check_site *site, int first, const te_operand *operand,
                                    const te_gemm_operand *form)
{
    const te_field *fields = te_op_describe(TE_OP_GEMM)->fields + first;
    const te_field *mode = fields + (te_at_gemm_a_mode - te_at_gemm_a);
    const te_field *data = form->data == &operand->row      ? mode + 1
                           : form->data == &operand->column ? mode + 3
                                                            : fields;
    if (operand->mode == TE_SCALING_NONE &&
        (te_tensor_present(&operand->row) || te_tensor_present(&operand->column))) {
        return INVALID(mode->name, "none, but there is quantized data: how is it scaled?");
    }
    if (!te_tensor_requested(form->data)) {
        return INVALID(data->name, "is missing: a_transposed and b_transposed say which is read");
    }
    TE_TRY(te_check_tensor(site, data, form->data, 1));
    if (form->scales == NULL) return TE_OK;
    TE_TRY(te_check_tensor(site, data + 1, form->scales, 1));
    TE_TRY(check_codes(site, data->name, form->mode, form->data));
    if (form->mode == TE_SCALING_NVFP4) {
        TE_TRY(te_check_tensor(site, mode + (form->data == &operand->row ? 5 : 6), form->amax, 1));
    }
    return check_scales(
        site, data[1].name, form->mode, form->scales,
        form->mode == TE_SCALING_MXFP8 && form->data == &operand->column
            ? te_column_scale_layout_of(form->mode, form->data->shape[0], form->data->shape[1])
            : te_scale_layout_of(form->mode, form->data->shape[0], te_gemm_extent(form, 1)));
}

/* Two operands whose scales can be multiplied out: both per tensor, per row, or by tiles. */
static te_status check_modes(const te_check_site *site, te_scaling_mode a, te_scaling_mode b)
{
    const int blocks = (a == TE_SCALING_BLOCK_1D || a == TE_SCALING_BLOCK_2D) &&
                       (b == TE_SCALING_BLOCK_1D || b == TE_SCALING_BLOCK_2D);
    if (a == b || blocks) return TE_OK;
    return INVALID("b_mode", "%d beside a_mode %d, expected the same, or both by blocks", (int)b,
                   (int)a);
}

/* Dtypes: of the operands a and b, and what they make of the others. */
static te_status check_gemm_dtypes(const te_check_site *site, const te_gemm_args *args, te_dtype a,
                                   te_dtype b)
{
    const te_dtype d = args->d.dtype, narrow = d == TE_DTYPE_F16 ? d : TE_DTYPE_BF16;
    const int fp8 = te_dtype_is_fp8(a) || a == TE_DTYPE_U8,
              accumulates = (args->flags & TE_GEMM_ACCUMULATE) != 0;
    if (te_dtype_is_fp8(a) ? !te_dtype_is_fp8(b) || (a == TE_DTYPE_E5M2 && b == TE_DTYPE_E5M2)
                           : a != b) {
        return WRONG_TYPE(
            "b",
            "operands %s and %s, expected the same high precision or FP8 with at most one e5m2",
            te_dtype_name(a), te_dtype_name(b));
    }
    if (te_dtype_is_fp8(d)) {
        if (!fp8 || args->d_scale == NULL || accumulates) {
            return INVALID("d",
                           "FP8 output %s needs FP8 operands and d_scale, and can not accumulate",
                           te_dtype_name(d));
        }
    } else if (!te_dtype_is_high_precision(d)) {
        return WRONG_TYPE("d", "dtype %s, expected f32, f16 or bf16", te_dtype_name(d));
    } else if (!fp8 && d != a && d != TE_DTYPE_F32) {
        return WRONG_TYPE("d", "dtype %s from %s operands, expected the same or f32",
                          te_dtype_name(d), te_dtype_name(a));
    }
    if (te_tensor_present(&args->bias)) {
        TE_TRY(check_dtype(site, "bias", args->bias.dtype, fp8 ? narrow : d));
    }
    if (te_tensor_present(&args->bias_grad) && (fp8 || args->bias_grad.dtype != a)) {
        return WRONG_TYPE("bias_grad",
                          "dtype %s with %s operands, expected the same high precision",
                          te_dtype_name(args->bias_grad.dtype), te_dtype_name(a));
    }
    if (!accumulates || (!te_tensor_present(&args->bias) && args->epilogue == TE_EPILOGUE_NONE &&
                         d != TE_DTYPE_F16)) {
        return TE_OK;
    }
    return INVALID("accumulate", "into %s: only f32 or bf16, without bias or activation",
                   te_dtype_name(d));
}

static te_status check_gemm(const te_check_site *site, const te_gemm_args *args)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    const int64_t *d = args->d.shape;
    int64_t m, n, k;
    TE_TRY(check_gemm_operand(site, te_at_gemm_a, &args->a, &a));
    TE_TRY(check_gemm_operand(site, te_at_gemm_b, &args->b, &b));
    m = te_gemm_extent(&a, a.transposed);
    k = te_gemm_extent(&a, !a.transposed);
    n = te_gemm_extent(&b, !b.transposed);
    if (te_gemm_extent(&b, b.transposed) != k || d[0] != m || d[1] != n) {
        return INVALID("d",
                       "[%lld, %lld] from a [%lld, %lld] and b [%lld, %lld]: inner sizes must "
                       "agree, outer sizes are those of d",
                       LL(d[0]), LL(d[1]), LL(m), LL(k), LL(te_gemm_extent(&b, b.transposed)),
                       LL(n));
    }
    TE_TRY(check_gemm_dtypes(site, args, a.data->dtype, b.data->dtype));
    TE_TRY(check_modes(site, a.mode, b.mode));
    if (a.mode > TE_SCALING_TENSOR && te_dtype_is_fp8(args->d.dtype)) {
        return WRONG_TYPE("d",
                          "dtype %s from operands scaled by rows or tiles, expected f32, f16 "
                          "or bf16",
                          te_dtype_name(args->d.dtype));
    }
    if (a.mode == TE_SCALING_NVFP4 && args->d.dtype == TE_DTYPE_F16) {
        return WRONG_TYPE("d", "dtype f16 from nvfp4 operands, expected f32 or bf16");
    }
    if (a.scales != NULL && !te_scales_micro(a.mode) && k % 16 != 0) {
        return INVALID("a", "k = %lld of quantized operands, expected a multiple of 16: pad them",
                       LL(k));
    }
    if (!te_tensor_requested(&args->aux) || args->epilogue != TE_EPILOGUE_NONE) return TE_OK;
    return INVALID("aux", "there is no activation: d is what it would receive");
}

/* Rows that are normalized. */
static te_status check_normalized(const te_check_site *site, const te_tensor *input)
{
    if (input->ndim < 2) {
        return INVALID("input", "ndim = %d, expected rows: 2 to 4", (int)input->ndim);
    }
    return TE_OK;
}

static te_status check_norm(const te_check_site *site, const te_norm_args *args)
{
    const te_cast_request *cast = &args->cast;
    TE_TRY(check_normalized(site, &args->input));
    if (te_tensor_rows(&args->input).strides[0] == TE_NO_STRIDE &&
        (cast->result.mode != TE_SCALING_NONE || cast->amax_partials != NULL)) {
        return INVALID("input", "its rows are those of no matrix: only `wide` is made of them");
    }
    if ((args->flags & TE_NORM_STATISTICS_GIVEN) == 0 || te_tensor_numel(&args->input) == 0) {
        return TE_OK;
    }
    TE_TRY(check_missing(site, "rsigma", &args->rsigma, "statistics_given reads it"));
    if (args->kind != TE_NORM_LAYERNORM) return TE_OK;
    return check_missing(site, "mean", &args->mean, "statistics_given reads it");
}

static te_status check_norm_backward(const te_check_site *site, const te_norm_backward_args *args)
{
    const te_tensor *input = &args->input;
    te_tensor rows;
    TE_TRY(check_normalized(site, input));
    rows = te_tensor_rows(input);
    TE_TRY(check_sizes(site, "grad_output", &args->grad_output, &rows, 0));
    if (args->kind != TE_NORM_LAYERNORM || te_tensor_numel(input) == 0) return TE_OK;
    return check_missing(site, "mean", &args->mean, "the gradient of layernorm reads it");
}

/* *columns is the width of the output. */
static te_status check_activation_input(const te_check_site *site, te_activation_kind kind,
                                        const te_activation_params *params, const te_tensor *input,
                                        int64_t *columns)
{
    const int gated = te_activation_is_gated(kind);
    *columns = gated ? input->shape[1] / 2 : input->shape[1];
    if (gated && input->shape[1] % 2 != 0) {
        return INVALID("input", "%lld columns, expected an even number for the two halves of %s",
                       LL(input->shape[1]), te_activation_name(kind));
    }
    if (kind != TE_ACTIVATION_CLAMPED_SWIGLU || params->limit >= 0.0F) return TE_OK;
    return INVALID("limit", "%g, expected a number from 0 on", (double)params->limit);
}

static te_status check_activation(const te_check_site *site, const te_activation_args *args)
{
    int64_t columns = 0;
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &columns));
    return check_cast_request(site, &args->cast, args->input.shape[0], columns);
}

static te_status check_activation_backward(const te_check_site *site,
                                           const te_activation_backward_args *args)
{
    te_tensor like = {.ndim = 2, .shape = {args->input.shape[0]}};
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &like.shape[1]));
    return check_sizes(site, "grad_output", &args->grad_output, &like, 0);
}

/* Packed sequences: one batch entry, offsets for both sides, bounds, and what goes with them. */
static te_status check_packed(const te_check_site *site, const te_attention_problem *p,
                              int64_t batch)
{
    const te_tensor *const absent[] = {&p->mask, &p->bias};
    static const char *const names[] = {"mask", "bias"};
    if (!te_tensor_requested(&p->query_offsets)) {
        return INVALID("query_offsets", "None beside key_offsets: give both");
    }
    if (batch < 0) return INVALID("query_offsets", "length 0, expected a vector of batch + 1");
    if (!te_tensor_requested(&p->key_offsets)) {
        return INVALID("key_offsets", "None beside query_offsets: give both");
    }
    TE_TRY(check_length(site, "key_offsets", &p->key_offsets, batch + 1));
    if (p->query.shape[0] != 1) {
        return INVALID("query", "dim 0: size %lld, expected 1 of packed sequences",
                       LL(p->query.shape[0]));
    }
    for (int i = 0; i < 2; i++) {
        if (te_tensor_requested(absent[i])) {
            return INVALID(names[i], "it does not go with packed sequences (query_offsets)");
        }
    }
    if (p->max_queries < 0 || p->max_queries > INT32_MAX) {
        return INVALID("max_queries", "%lld, expected 0 to 2^31 - 1", LL(p->max_queries));
    }
    if (p->max_keys < 0 || p->max_keys > INT32_MAX) {
        return INVALID("max_keys", "%lld, expected 0 to 2^31 - 1", LL(p->max_keys));
    }
    return TE_OK;
}

static te_status check_softmax(const te_check_site *site, const te_softmax_args *args)
{
    return check_length(site, "sink", &args->sink, args->input.shape[1]);
}

/* [heads], or [1 or batch, heads]. */
static te_status check_slopes(const te_check_site *site, const te_tensor *slopes, int64_t batch,
                              int64_t heads)
{
    if (!te_tensor_requested(slopes)) return TE_OK;
    if (slopes->ndim <= 2 && slopes->shape[slopes->ndim - 1] == heads &&
        (slopes->ndim == 1 || slopes->shape[0] == 1 || slopes->shape[0] == batch)) {
        return TE_OK;
    }
    return INVALID("slopes", "ndim %d, first size %lld, expected [%lld] or [%lld or 1, %lld]",
                   (int)slopes->ndim, LL(slopes->shape[0]), LL(heads), LL(batch), LL(heads));
}

/* What is computed of the queries included; `statistics` dense, where they are requested. */
static te_status check_problem(const te_check_site *site, const te_attention_problem *p,
                               const te_tensor *output, const te_tensor *statistics)
{
    const int packed = te_attention_is_packed(p) || te_tensor_requested(&p->key_offsets);
    const int64_t batch = te_attention_batch(p);
    const int64_t *q = p->query.shape, *k = p->key.shape, d_v = p->value.shape[3];
    const te_tensor keys = {.ndim = 4, .shape = {q[0], k[1], k[2], q[3]}};
    const te_tensor values = {.ndim = 4, .shape = {q[0], k[1], k[2], d_v}};
    const te_tensor attended = {.ndim = 4, .shape = {q[0], q[1], q[2], d_v}};
    const te_tensor scores = {.ndim = 4, .shape = {q[0], q[2], q[1], k[1]}};
    const te_tensor sums = {.ndim = 3, .shape = {q[0], packed ? q[1] : q[2], packed ? q[2] : q[1]}};
    int64_t dense = 1;
    if (packed) TE_TRY(check_packed(site, p, batch));
    TE_TRY(check_length(site, "query_lengths", &p->query_lengths, batch));
    TE_TRY(check_length(site, "key_lengths", &p->key_lengths, batch));
    if (k[2] == 0 ? q[2] != 0 : q[2] % k[2] != 0) {
        return INVALID("key", "%lld heads, expected a number that divides the %lld of query",
                       LL(k[2]), LL(q[2]));
    }
    TE_TRY(check_sizes(site, "key", &p->key, &keys, 0));
    TE_TRY(check_sizes(site, "value", &p->value, &values, 0));
    TE_TRY(check_sizes(site, "output", output, &attended, 0));
    if (te_tensor_requested(&p->mask)) TE_TRY(check_sizes(site, "mask", &p->mask, &scores, 1));
    if (te_tensor_requested(&p->bias)) TE_TRY(check_sizes(site, "bias", &p->bias, &scores, 1));
    TE_TRY(check_length(site, "sink", &p->sink, q[2]));
    TE_TRY(check_slopes(site, &p->slopes, batch, q[2]));
    if (!te_tensor_requested(statistics)) return TE_OK;
    TE_TRY(check_sizes(site, "statistics", statistics, &sums, 0));
    for (int i = 2; i >= 0; i--) {
        if (dense > 0 && sums.shape[i] > 1 && statistics->strides[i] != dense) {
            return INVALID("statistics", "dim %d: stride %lld, expected %lld: make it contiguous",
                           i, LL(statistics->strides[i]), LL(dense));
        }
        dense *= sums.shape[i];
    }
    return TE_OK;
}

/* Scales that have to be there with FP8, and not without. */
static te_status check_pair(const te_check_site *site, const char *name, const te_tensor *scales,
                            int fp8)
{
    if (te_tensor_requested(scales) != fp8) {
        return INVALID(name, fp8 ? "is missing: FP8 has scales" : "there is no FP8 to scale");
    }
    return check_length(site, name, scales, TE_TENSOR_SCALES);
}

/* What goes with FP8, and what does not; the floats of `names` are part of it. */
static te_status check_fp8(const te_check_site *site, const te_attention_problem *p,
                           const float *const *floats, const char *const *names, int count)
{
    const te_tensor *const scales[] = {&p->query_scales, &p->key_scales, &p->value_scales};
    static const char *const named[] = {"query_scales", "key_scales", "value_scales"};
    const te_tensor *const absent[] = {&p->mask, &p->bias, &p->sink, &p->slopes};
    static const char *const others[] = {"mask", "bias", "sink", "slopes"};
    const int fp8 = te_attention_is_fp8(p);
    if (p->query.dtype == TE_DTYPE_E5M2) {
        return WRONG_TYPE("query", "dtype e5m2, expected f32, f16, bf16 or e4m3");
    }
    for (int i = 0; i < 3; i++) TE_TRY(check_pair(site, named[i], scales[i], fp8));
    for (int i = 0; i < 4; i++) {
        if (fp8 && te_tensor_requested(absent[i])) {
            return INVALID(others[i], "it does not go with FP8 (query)");
        }
    }
    for (int i = 0; i < count; i++) {
        if (fp8 || floats[i] == NULL) continue;
        return INVALID(names[i], "there is no FP8 to scale");
    }
    return TE_OK;
}

static te_status check_attention(const te_check_site *site, const te_attention_args *args)
{
    const float *const floats[] = {args->output_scale, args->output_amax, args->weights_amax};
    static const char *const names[] = {"output_scale", "output_amax", "weights_amax"};
    const int fp8 = te_attention_is_fp8(&args->problem);
    TE_TRY(check_problem(site, &args->problem, &args->output, &args->statistics));
    TE_TRY(check_fp8(site, &args->problem, floats, names, 3));
    TE_TRY(check_pair(site, "output_scales", &args->output_scales, fp8));
    if (fp8 && te_tensor_requested(&args->top)) {
        return INVALID("top", "it does not go with FP8 (query)");
    }
    return check_length(site, "top", &args->top, args->problem.query.shape[2]);
}

static te_status check_fp8_backward(const te_check_site *site,
                                    const te_attention_backward_args *args)
{
    const float *const floats[] = {args->grad_scores_scale, args->grads_scale,
                                   args->grad_scores_amax, args->grads_amax};
    static const char *const names[] = {"grad_scores_scale", "grads_scale", "grad_scores_amax",
                                        "grads_amax"};
    const te_attention_problem *p = &args->problem;
    const te_dtype grad = args->grad_output.dtype;
    const int fp8 = te_attention_is_fp8(p);
    TE_TRY(check_fp8(site, p, floats, names, 4));
    TE_TRY(check_pair(site, "output_scales", &args->output_scales, fp8));
    TE_TRY(check_pair(site, "grad_output_scales", &args->grad_output_scales, fp8));
    TE_TRY(check_pair(site, "grads_scales", &args->grads_scales, fp8));
    if (!fp8) return check_dtype(site, "grad_output", grad, args->output.dtype);
    if (!te_dtype_is_fp8(grad)) {
        return WRONG_TYPE("grad_output", "dtype %s, expected e4m3 or e5m2 as query is FP8",
                          te_dtype_name(grad));
    }
    for (int i = 0; i < 2; i++) {
        if (floats[i] == NULL) return INVALID(names[i], "is missing: FP8 has scales");
    }
    if (p->dropout == 0.0F) return TE_OK;
    return INVALID("dropout", "%g, expected 0: a gradient in FP8 has none", (double)p->dropout);
}

static te_status check_attention_backward(const te_check_site *site,
                                          const te_attention_backward_args *args)
{
    const te_tensor *bias = &args->problem.bias, *grad_bias = &args->grad_bias;
    TE_TRY(check_problem(site, &args->problem, &args->output, &args->statistics));
    TE_TRY(check_fp8_backward(site, args));
    TE_TRY(check_length(site, "grad_sink", &args->grad_sink, args->problem.query.shape[2]));
    if (te_tensor_requested(&args->grad_sink) && !te_tensor_requested(&args->problem.sink)) {
        return INVALID("grad_sink", "there is no sink");
    }
    if (!te_tensor_requested(grad_bias)) return TE_OK;
    if (!te_tensor_requested(bias)) return INVALID("grad_bias", "there is no bias");
    return check_sizes(site, "grad_bias", grad_bias, bias, 0);
}

/* A part of a call against the first one, which has the tokens. */
static te_status check_rope_part(const te_check_site *site, const te_rope_args *args, int number)
{
    static const char *const names[TE_ROPE_PARTS][3] = {{"input", "output", "freqs"},
                                                        {"key", "key_output", "key_freqs"},
                                                        {"value", "value_output", "value_freqs"}};
    const te_rope_part *part = &args->parts[number], *first = &args->parts[0];
    const char *const *name = names[number];
    const te_tensor *input = &part->input, *freqs = &part->freqs;
    const int last = first->input.ndim - 1;
    te_tensor like = *input;
    int64_t width = input->shape[last];
    if (!te_tensor_requested(input)) {
        if (!te_tensor_requested(&part->output) && !te_tensor_requested(freqs)) return TE_OK;
        return INVALID(name[0], "is missing, and %s is given", name[1]);
    }
    for (int i = 0; i < last - 1; i++) like.shape[i] = first->input.shape[i];
    like.ndim = first->input.ndim;
    TE_TRY(check_sizes(site, name[0], input, &like, 0));
    TE_TRY(check_dtype(site, name[0], input->dtype, first->input.dtype));
    TE_TRY(check_sizes(site, name[1], &part->output, input, 0));
    TE_TRY(check_dtype(site, name[1], part->output.dtype, input->dtype));
    if (te_tensor_present(input) && te_tensor_numel(input) > 0) {
        TE_TRY(check_missing(site, name[1], &part->output, "there is nowhere to write to"));
    }
    if (!te_tensor_requested(freqs)) return TE_OK;
    if (args->channels > 0) {
        if (width % args->channels != 0) {
            return INVALID("channels", "%lld, which does not divide the last dim of %s, %lld",
                           LL(args->channels), name[0], LL(width));
        }
        width = args->channels;
    }
    if (freqs->shape[1] % 2 != 0 || freqs->shape[1] > width) {
        return INVALID(name[2], "%lld rotary channels, expected an even number of at most %lld",
                       LL(freqs->shape[1]), LL(width));
    }
    if (freqs->shape[0] > 1 && freqs->strides[0] != freqs->shape[1]) {
        return INVALID(name[2], "row stride %lld, expected %lld: make it contiguous",
                       LL(freqs->strides[0]), LL(freqs->shape[1]));
    }
    /* Lengths and starts on the device are known to the kernel alone. */
    width = input->shape[1] * (args->cp_size > 1 ? args->cp_size : 1);
    if (last < 3 || freqs->shape[0] >= width) return TE_OK;
    return INVALID(name[2], "%lld positions, expected at least the %lld of the sequence",
                   LL(freqs->shape[0]), LL(width));
}

static te_status check_rope(const te_check_site *site, const te_rope_args *args)
{
    const te_tensor *input = &args->parts[0].input, *limits = &args->cu_seqlens;
    const int packed = te_tensor_present(limits);
    if (input->ndim != (packed ? 3 : 4)) {
        return INVALID("input", "ndim = %d, expected %d", (int)input->ndim, packed ? 3 : 4);
    }
    if (packed && (limits->shape[0] < 1 || (limits->shape[0] < 2 && input->shape[0] > 0))) {
        return INVALID("cu_seqlens", "length %lld, expected a vector of batch + 1 for %lld tokens",
                       LL(limits->shape[0]), LL(input->shape[0]));
    }
    TE_TRY(check_length(site, "start_positions", &args->start_positions,
                        packed ? limits->shape[0] - 1 : input->shape[0]));
    if (args->cp_rank > 0 && args->cp_rank >= args->cp_size) {
        return INVALID("cp_rank", "%d, expected one of cp_size = %d ranks", args->cp_rank,
                       args->cp_size);
    }
    if (args->cp_size > 1 && !packed && input->shape[1] % 2 != 0) {
        return INVALID("input", "a sequence of %lld tokens, expected two chunks of one length",
                       LL(input->shape[1]));
    }
    for (int i = 0; i < TE_ROPE_PARTS; i++) TE_TRY(check_rope_part(site, args, i));
    return TE_OK;
}

/* Tokens [.., heads, channels] for a cache. */
static te_status check_tokens(const te_check_site *site, const char *name, const te_tensor *tokens,
                              const te_tensor *like, const te_tensor *cache)
{
    const int64_t *last = tokens->shape + tokens->ndim - 2, *kept = cache->shape + 2;
    int same = tokens->ndim == like->ndim;
    for (int32_t i = 0; same && i < like->ndim - 2; i++) same = tokens->shape[i] == like->shape[i];
    if (!same) return INVALID(name, "shape, expected the leading dims of key");
    if (last[0] == kept[0] && last[1] == kept[1]) return TE_OK;
    return INVALID(name, "%lld heads of %lld channels, the cache has %lld of %lld", LL(last[0]),
                   LL(last[1]), LL(kept[0]), LL(kept[1]));
}

/* A cache, and tokens of `batch` sequences that come from there or go there. */
static te_status check_cache(const te_check_site *site, const te_cache *cache, const te_tensor *key,
                             const te_tensor *value, int64_t batch)
{
    const te_tensor *table = &cache->page_table;
    for (int32_t i = 0; i < 3; i++) {
        if (cache->value.shape[i] == cache->key.shape[i]) continue;
        return INVALID("value_cache", "dim %d: size %lld, expected %lld", (int)i,
                       LL(cache->value.shape[i]), LL(cache->key.shape[i]));
    }
    TE_TRY(check_tokens(site, "key", key, key, &cache->key));
    TE_TRY(check_tokens(site, "value", value, key, &cache->value));
    if (te_tensor_requested(table) && table->shape[0] != batch) {
        return INVALID("page_table", "%lld rows, expected one for each of %lld sequences",
                       LL(table->shape[0]), LL(batch));
    }
    if (te_tensor_requested(table) || cache->key.shape[0] >= batch) return TE_OK;
    return INVALID("key_cache", "%lld pages for %lld sequences without a page_table",
                   LL(cache->key.shape[0]), LL(batch));
}

static te_status check_cache_append(const te_check_site *site, const te_cache_append_args *args)
{
    const te_tensor *key = &args->key, *limits = &args->cu_seqlens;
    const int packed = te_tensor_present(limits);
    const int64_t batch = args->starts.shape[0];
    if (key->ndim != (packed ? 3 : 4)) {
        return INVALID("key", "ndim = %d, expected %d", (int)key->ndim, packed ? 3 : 4);
    }
    if (!packed && key->shape[0] != batch) {
        return INVALID("starts", "length %lld, expected a vector of %lld", LL(batch),
                       LL(key->shape[0]));
    }
    TE_TRY(check_length(site, "cu_seqlens", limits, batch + 1));
    return check_cache(site, &args->cache, key, &args->value, batch);
}

static te_status check_cache_gather(const te_check_site *site, const te_cache_gather_args *args)
{
    const te_tensor *pages = &args->cache.key, *table = &args->cache.page_table;
    const int64_t each = te_tensor_requested(table) ? table->shape[1] : 1;
    TE_TRY(check_cache(site, &args->cache, &args->key, &args->value, args->key.shape[0]));
    if (args->key.shape[1] <= each * pages->shape[1]) return TE_OK;
    return INVALID("key", "%lld tokens of each sequence, the cache has room for %lld",
                   LL(args->key.shape[1]), LL(each * pages->shape[1]));
}

/* Operators of which the rules do not say all. */
#define OTHERS(X)                                                                                  \
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
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(ROPE, rope)                                                                                  \
    X(CACHE_APPEND, cache_append)                                                                  \
    X(CACHE_GATHER, cache_gather)

te_status te_check_args(te_op op, te_device device, const void *args)
{
    const te_check_site here = {op, device}, *site = &here;
    static const rule *const rules[TE_OP_COUNT] = {
#define X(NAME, name) [TE_OP_##NAME] = name##_rules,
        TE_OPS(X)
#undef X
    };
    const te_field *fields = te_op_describe(op)->fields;
    TE_TRY(te_check_fields(site, args));
    for (const rule *r = rules[op]; r->kind != END; r++) {
        TE_TRY(check_rule(site, r, fields, args));
    }
    switch (op) {
#define X(NAME, name)                                                                              \
    case TE_OP_##NAME:                                                                             \
        return check_##name(site, args);
        OTHERS(X)
#undef X
    default:
        return TE_OK;
    }
}
