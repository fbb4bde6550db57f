/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_py.h - operators whose implementations are chosen from Python: what their calls and the
 * scopes of threads share.
 */
#ifndef TE_PYTHON_DISPATCH_PY_H
#define TE_PYTHON_DISPATCH_PY_H

#include "python/state.h"

/* In the limited API from 3.12 on, and in every interpreter from 3.9 on. */
#if Py_LIMITED_API + 0 < 0x030c0000
typedef PyObject *(*vectorcallfunc)(PyObject *, PyObject *const *, size_t, PyObject *);
/* lint: allow(PyObject_Vectorcall) */
PyAPI_FUNC(PyObject *)
    PyObject_Vectorcall(PyObject *, PyObject *const *args, size_t nargsf, PyObject *names);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *callable, PyObject *tuple, PyObject *dict);
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#define PyVectorcall_NARGS(nargsf)                                                                 \
    ((Py_ssize_t)((nargsf) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))
#endif

typedef struct tepy_dispatcher {
    PyObject_HEAD PyObject *resolve; /* resolve(policy or None): the table */
    PyObject *refuse;                /* refuse(name, asked): raises */
    PyObject *table;                 /* NULL: to be made at the next call */
    unsigned long long version;      /* of what tables are made of */
    tepy_state *state;
    PyObject *module; /* keeps the state */
} tepy_dispatcher;

#define TEPY_FREE(self) ((freefunc)PyType_GetSlot(Py_TYPE(self), Py_tp_free))(self)
#define TEPY_ALLOCATE(type) ((allocfunc)PyType_GetSlot((type), Py_tp_alloc))((type), 0)

/* New reference: what a call returns whose arguments are given as they came. */
static inline PyObject *tepy_call_vector(PyObject *function, PyObject *const *args, size_t nargsf,
                                         PyObject *names)
{
    /* lint: allow(PyObject_Vectorcall) a tuple and a dict for each call would take twice the time
     */
    return PyObject_Vectorcall(function, args, nargsf, names);
}

/* 0, or -1 with TypeError. */
static inline int tepy_require_callable(PyObject *object, tepy_site site)
{
    if (PyCallable_Check(object)) return 0;
    return tepy_fail(PyExc_TypeError, site, "expected a callable, got %R", Py_TYPE(object));
}

/* ---- predicate_py.c ---- */

/* Creates the type of Predicate; new reference. */
PyObject *tepy_predicate_make_type(PyObject *module);
/* Whether a Predicate says that a call is taken: 1, 0, or -1 with an exception. */
int tepy_predicate_takes(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names);

/* ---- scope_py.c ---- */

/* Creates the type of Scope; new reference. */
PyObject *tepy_scope_make_type(PyObject *module);
/* New reference to the table that the calls of this thread read. One that is kept and has no such
 * place is older than the operator, which goes by what is in force outside. */
PyObject *tepy_table_in_force(tepy_dispatcher *dispatcher, Py_ssize_t place);
/* New reference: a Scope of a table; NULL: of the one in force for this thread. */
PyObject *tepy_scope_of_table(tepy_dispatcher *dispatcher, PyObject *given);

/* ---- selection_py.c ---- */

/* Creates the type of Selection; new reference. */
PyObject *tepy_selection_make_type(PyObject *module);
/* What runs of plans of this thread ask first: a new reference that keeps *native, or NULL; -1 with
 * an exception. */
int tepy_selection_in_force(tepy_state *state, PyObject **object, const te_selection **native);

#endif
