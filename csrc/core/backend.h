/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h - the operator table: which function runs an operator on a device.
 *
 * Registered backends are kept in order of priority; each change publishes a new immutable table
 * per device atomically. Old tables live as long as the process, so a call in flight may go on
 * using the one it began with.
 */
#ifndef TE_CORE_BACKEND_H
#define TE_CORE_BACKEND_H

#include "transformer_engine.h"

typedef struct te_op_candidate {
    const char *backend; /* name, for messages */
    te_op_slot slot;
} te_op_candidate;

#define TE_MAX_BACKENDS 8

typedef struct te_op_table {
    int count[TE_OP_COUNT];
    te_op_candidate candidates[TE_OP_COUNT][TE_MAX_BACKENDS]; /* highest priority first */
} te_op_table;

/* The table in force for a device. Never NULL. */
const te_op_table *te_op_table_current(te_device_type device);
/* Checks the arguments, then runs the first candidate that supports the call. */
te_status te_op_run_in(const te_op_table *table, te_context *context, te_op op, const void *args,
                       void *stream);
te_status te_op_workspace_in(const te_op_table *table, te_context *context, te_op op,
                             const void *args, size_t *bytes);

#endif
