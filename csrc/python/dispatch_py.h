/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_py.h - operators whose implementations are chosen from Python: what their calls and the
 * scopes of threads share.
 */
#ifndef TE_PYTHON_DISPATCH_PY_H
#define TE_PYTHON_DISPATCH_PY_H

#include "python/state.h"
#include "python/vectorcall.h"

typedef struct tepy_dispatcher {
    PyObject_HEAD PyObject *resolve; /* resolve(policy or None): the table */
    PyObject *refuse;                /* refuse(name, asked): raises */
    PyObject *describe;              /* describe(name): a function with its signature; or NULL */
    PyObject *table;                 /* NULL: to be made at the next call */
    unsigned long long version;      /* of what tables are made of */
    tepy_state *state;
    PyObject *module; /* keeps the state */
} tepy_dispatcher;

#define TEPY_FREE(self) ((freefunc)PyType_GetSlot(Py_TYPE(self), Py_tp_free))(self)
#define TEPY_ALLOCATE(type) ((allocfunc)PyType_GetSlot((type), Py_tp_alloc))((type), 0)
/* The member by which objects of a struct are called, which has it as `call`. */
#define TEPY_CALL_MEMBER(type)                                                                     \
    {                                                                                              \
        "__vectorcalloffset__", T_PYSSIZET, offsetof(type, call), READONLY, NULL                   \
    }

/* The end of a dealloc: the memory of an instance of a heap type, and its reference to that. */
static inline void tepy_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    TEPY_FREE(object);
    Py_DECREF(type);
}

/* ---- predicate_py.c ---- */

/* Creates the type of Predicate; new reference. */
PyObject *tepy_predicate_make_type(PyObject *module);
/* Whether a Predicate says that a call is taken: 1, 0, or -1 with an exception. *reason, owned or
 * NULL, becomes what it says against a call that is not. */
int tepy_predicate_takes(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names,
                         PyObject **reason);
/* The same of what a `supports` has returned, which is stolen; NULL where it has raised. A text is
 * a reason against the call. */
int tepy_predicate_read(PyObject *answer, PyObject **reason);

/* ---- leave_py.c ---- */

/* Creates the types of Leaving and Entering; new references. */
PyObject *tepy_leaving_make_type(PyObject *module);
PyObject *tepy_entering_make_type(PyObject *module);

/* ---- scope_py.c ---- */

/* Creates the type of Scope; new reference. */
PyObject *tepy_scope_make_type(PyObject *module);
/* New reference to the table that the calls of this thread read. One that is kept and has no such
 * place is older than the operator, which goes by what is in force outside. */
PyObject *tepy_table_in_force(tepy_dispatcher *dispatcher, Py_ssize_t place);
/* Whether this thread is in a scope in which runs of plans obey nobody: the innermost one. */
int tepy_obeys_nobody(const tepy_dispatcher *dispatcher);
/* -1 with an exception where an entry of a table, a tuple, has another item than Implementations.
 */
int tepy_check_table(const tepy_dispatcher *dispatcher, PyObject *table, tepy_site site);
/* New reference: a Scope of a table; NULL: of the one in force for this thread. */
PyObject *tepy_scope_of_table(tepy_dispatcher *dispatcher, PyObject *given);

/* ---- selection_py.c ---- */

/* Creates the type of Selection; new reference. */
PyObject *tepy_selection_make_type(PyObject *module);
/* What runs of plans of this thread ask first: a new reference that keeps *native, or NULL; -1 with
 * an exception. */
int tepy_selection_in_force(tepy_state *state, PyObject **object, const te_selection **native);

#endif
