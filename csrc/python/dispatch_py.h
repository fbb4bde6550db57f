/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_py.h - operators whose implementations are chosen from Python: what their calls and the
 * scopes of threads share.
 */
#ifndef TE_PYTHON_DISPATCH_PY_H
#define TE_PYTHON_DISPATCH_PY_H

#include "transformer_engine_plugin.h"

#include "python/types.h"

typedef struct tepy_dispatcher {
    PyObject_HEAD PyObject *resolve; /* resolve(policy or None): the table */
    PyObject *refuse;                /* refuse(name, asked): raises */
    PyObject *describe;              /* describe(name): a function with its signature; or NULL */
    PyObject *table;                 /* NULL: to be made at the next call */
    unsigned long long version;      /* of what tables are made of */
    tepy_state *state;
    PyObject *module; /* keeps the state */
} tepy_dispatcher;

/* ---- predicate_py.c ---- */

/* Whether a Predicate says that a call is taken: 1, 0, or -1 with an exception. *reason, owned or
 * NULL, becomes what it says against a call that is not. */
int tepy_predicate_takes(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names,
                         PyObject **reason);
/* The same of what a `supports` has returned, which is stolen; NULL where it has raised. A text is
 * a reason against the call. */
int tepy_predicate_read(PyObject *answer, PyObject **reason);

/* ---- scope_py.c ---- */

/* New reference to the table that the calls of this thread read. One that is kept and has no such
 * place is older than the operator, which goes by what is in force outside. */
PyObject *tepy_table_in_force(tepy_dispatcher *dispatcher, Py_ssize_t place);
/* Whether this thread is in a scope in which runs of plans obey nobody: the innermost one. */
int tepy_obeys_nobody(const tepy_dispatcher *dispatcher);
/* -1 with an exception where a tuple, or an entry of a table that is one, has another item than
 * Implementations. */
int tepy_check_implementations(const tepy_state *state, PyObject *entry, tepy_site site);
int tepy_check_table(const tepy_dispatcher *dispatcher, PyObject *table, tepy_site site);
/* New reference: a Scope of a table; NULL: of the one in force for this thread. */
PyObject *tepy_scope_of_table(tepy_dispatcher *dispatcher, PyObject *given);

/* ---- plugin_py.c ---- */

/* The slot of a NativeSlot of this module, which keeps it; NULL for other objects. */
const te_plugin_slot *tepy_native_slot(const tepy_state *state, PyObject *object);

/* ---- selection_py.c ---- */

/* What runs of plans of this thread ask first: a new reference that keeps *native, or NULL; -1 with
 * an exception. */
int tepy_selection_in_force(tepy_state *state, PyObject **object, const te_selection **native);

#endif
