/* SPDX-License-Identifier: Apache-2.0
 *
 * status.h - how a failure (te_fail of the public header) is handed on.
 */
#ifndef TE_CORE_STATUS_H
#define TE_CORE_STATUS_H

#include "transformer_engine.h"

/* How often this thread has failed: whether a call has left a text. */
uint64_t te_failure_count(void);

/* Bytes of te_last_error's text, and another text in its place. */
#define TE_ERROR_TEXT_BYTES 1024
void te_set_error(const char *text);

/* Propagates a failure out of a function that holds nothing to release. */
#define TE_TRY(expression)                                                                         \
    do {                                                                                           \
        te_status te_try_status = (expression);                                                    \
        if (te_try_status != TE_OK) return te_try_status;                                          \
    } while (0)

/* Fails out of such a function where a condition holds. */
#define TE_FAIL_IF(condition, kind, ...)                                                           \
    do {                                                                                           \
        if (condition) return TE_FAIL(kind, __VA_ARGS__);                                          \
    } while (0)

/* TE_TRY for a function that leaves through `done:` with its status in `st`. */
#define TE_TRY_DONE(expression)                                                                    \
    do {                                                                                           \
        st = (expression);                                                                         \
        if (st != TE_OK) goto done;                                                                \
    } while (0)

#endif
