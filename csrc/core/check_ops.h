/* SPDX-License-Identifier: Apache-2.0
 *
 * check_ops.h - what check_ops.c shares with the files that check operators by functions.
 */
#ifndef TE_CORE_CHECK_OPS_H
#define TE_CORE_CHECK_OPS_H

#include "core/check.h"

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

#endif
