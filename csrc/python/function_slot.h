/* SPDX-License-Identifier: Apache-2.0
 *
 * function_slot.h - a Python function as a slot of the operator table.
 */
#ifndef TE_PYTHON_FUNCTION_SLOT_H
#define TE_PYTHON_FUNCTION_SLOT_H

#include "python/args.h"

#define TEPY_ALL_FIELDS UINT64_MAX

typedef struct tepy_function_slot {
    PyObject *function; /* NULL: none, or unregistered */
    const tepy_state *state;
    const char *backend; /* whose it is, for messages */
    te_op op;
    uint64_t lent; /* bit i: the function gets field i */
} tepy_function_slot;

/* The te_op_function of a slot whose `self` is a tepy_function_slot. CALLBACK with an exception
 * that the function has raised; UNSUPPORTED where it returns NotImplemented. */
te_status tepy_call_function(void *self, te_context *context, const void *args, void *stream);

#endif
