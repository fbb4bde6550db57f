/* SPDX-License-Identifier: Apache-2.0
 *
 * check_helpers.h - what the argument checks of check.c and check_layer.c share: questions about
 * one argument, and one function per operator. A failure names operator, argument, value and
 * expectation. Private to these two files.
 */
#ifndef TE_CORE_CHECK_HELPERS_H
#define TE_CORE_CHECK_HELPERS_H

#include "core/status.h"

typedef struct te_check_site {
    te_op op;
    te_device device;
} te_check_site;

#define LL(value) ((long long)(value))

/* "quantize: input: ..." */
#define FAIL_AT(kind, site, name, format, ...)                                                     \
    TE_FAIL(kind, "%s: %s: " format, te_op_name((site)->op), name, __VA_ARGS__)

/* It lives on the context's device. */
te_status te_check_device(const te_check_site *site, const char *name, const te_tensor *tensor);
/* A matrix of unit column stride with data wherever it has elements. */
te_status te_check_matrix(const te_check_site *site, const char *name, const te_tensor *tensor);
/* A dense vector of this length. */
te_status te_check_vector(const te_check_site *site, const char *name, const te_tensor *tensor,
                          int64_t length);
te_status te_check_high_precision(const te_check_site *site, const char *name, te_dtype dtype);
/* What a cast to FP8 of [rows, columns] is asked for: mode, usages, and one source of the scale. */
te_status te_check_cast_to_fp8(const te_check_site *site, const char *name,
                               const te_quantized *output, const float *partials,
                               const int64_t shape[2]);

/* te_check_quantize(site, args), ... */
#define X(NAME, name)                                                                              \
    te_status te_check_##name(const te_check_site *site, const te_##name##_args *args);
TE_OPS(X)
#undef X

#endif
