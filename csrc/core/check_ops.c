/* SPDX-License-Identifier: Apache-2.0
 *
 * check_ops.c - how the fields of one call agree: a list of rules per operator, and for what no
 * rule says a function (check_operand.c, check_attention.c).
 */
#include <float.h>

#include "core/check.h"
#include "core/operand.h"
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
    R(softmax, log_sum, LINES, input)                                                              \
    R(softmax, mask, BROADCAST, input)                                                             \
    R(softmax, bias, BROADCAST, input) DROP(R, N, softmax, dropout) WINDOW(N, softmax)
#define RULES_softmax_backward(R, N)                                                               \
    N(softmax_backward, grad_output, DIMS, 4, 0, NULL)                                             \
    R(softmax_backward, probabilities, ALIKE, grad_output)                                         \
    R(softmax_backward, log_sum, LINES, grad_output)                                               \
    R(softmax_backward, grad_sinks, LINES, grad_output)                                            \
    R(softmax_backward, grad_input, ALIKE, grad_output) DROP(R, N, softmax_backward, dropout)
#define RULES_PROBLEM(R, N, op)                                                                    \
    N(op, query, DIMS, 4, 0, NULL)                                                                 \
    N(op, key, DIMS, 4, 0, NULL)                                                                   \
    N(op, value, DIMS, 4, 0, NULL)                                                                 \
    R(op, key, DTYPE, query)                                                                       \
    R(op, value, DTYPE, query)                                                                     \
    N(op, softcap, RANGE, 0, FLT_MAX, "a finite number from 0 on, which is none")                  \
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
#define RULES_attention_merge(R, N)                                                                \
    N(attention_merge, total, DIMS, 4, 0, NULL)                                                    \
    R(attention_merge, step, SAME, total)                                                          \
    R(attention_merge, output, SAME, total)
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

/* Rows, where each has the last dim. */
static int64_t lines_of(const te_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim - 1; i++) count *= tensor->shape[i];
    return count;
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
    INVALID_IF(r->expected == NULL, field->name, "%g does not exist, expected %g to %g", value,
               r->low, r->high);
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
        return te_check_cast_request(site, (const void *)tensor, lines_of(of),
                                     of->shape[of->ndim - 1]);
    case COLUMNS:
        return te_check_length(site, name, tensor, of->shape[of->ndim - 1]);
    case ROWS:
        return te_check_length(site, name, tensor, of->shape[0]);
    case LINES:
        return te_check_length(site, name, tensor, lines_of(of));
    case SAME:
    case ALIKE:
    case BROADCAST:
        if (!te_tensor_requested(tensor)) return TE_OK;
        TE_TRY(te_check_sizes(site, name, tensor, of, r->kind == BROADCAST));
        if (r->kind != ALIKE) return TE_OK;
        return te_check_dtype(site, name, tensor->dtype, of->dtype);
    case DTYPE:
        if (!te_tensor_requested(tensor) || !te_tensor_requested(of)) return TE_OK;
        return te_check_dtype(site, name, tensor->dtype, of->dtype);
    default:
        return check_number(site, r, &fields[r->at], args);
    }
}

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
        return te_check_##name(site, args);
        TE_CHECKED_OPS(X)
#undef X
    default:
        return TE_OK;
    }
}
