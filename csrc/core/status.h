/* SPDX-License-Identifier: Apache-2.0
 *
 * status.h - how a failure is reported: a negative te_status, and a text with file, line and the
 * offending values in a thread-local buffer. Nothing here allocates, prints or aborts.
 */
#ifndef TE_CORE_STATUS_H
#define TE_CORE_STATUS_H

#include "transformer_engine.h"

/* Writes the text and returns kind. Use TE_FAIL, which adds file and line. */
te_status te_fail(te_status kind, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* return TE_FAIL(TE_ERROR_INVALID, "rows = %lld must not be negative", rows); */
#define TE_FAIL(kind, ...) te_fail((kind), __FILE__, __LINE__, __VA_ARGS__)

/* Propagates a failure out of a function that holds nothing to release. */
#define TE_TRY(expression)                                                                         \
    do {                                                                                           \
        te_status te_try_status = (expression);                                                    \
        if (te_try_status != TE_OK) return te_try_status;                                          \
    } while (0)

/* The same for a function that leaves through `done:` with its status in `st`. */
#define TE_TRY_DONE(expression)                                                                    \
    do {                                                                                           \
        st = (expression);                                                                         \
        if (st != TE_OK) goto done;                                                                \
    } while (0)

#endif
