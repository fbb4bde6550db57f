/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h - the operator table: which function runs an operator on a device.
 *
 * Registered backends are kept in order of priority; each change publishes a new immutable table
 * per device atomically. A call holds the table it began with; a table that is no longer in force
 * goes with its last call, and a backend with its last table.
 */
#ifndef TE_CORE_BACKEND_H
#define TE_CORE_BACKEND_H

#include "transformer_engine.h"

typedef struct te_op_table te_op_table;

/* Holds the table in force for a device until te_op_table_release. Never NULL. */
te_op_table *te_op_table_acquire(te_device_type device);
void te_op_table_release(te_op_table *table);
/* A number that no other table of the process has had; never 0. */
int64_t te_op_table_number(const te_op_table *table);
/* Whom a call asks: the backends of a selection (NULL: none), then those of a table. */
typedef struct te_op_candidates {
    const te_selection *selection;
    const te_op_table *table;
} te_op_candidates;

/* Checks the arguments, then runs the first candidate that supports the call. */
te_status te_op_run_in(te_op_candidates candidates, te_context *context, te_op op, const void *args,
                       void *stream);
/* Arguments have been checked: te_op_run without its checks. */
te_status te_op_run_checked(te_context *context, te_op op, const void *args, void *stream);
te_status te_op_workspace_in(te_op_candidates candidates, te_context *context, te_op op,
                             const void *args, size_t *bytes);

#endif
