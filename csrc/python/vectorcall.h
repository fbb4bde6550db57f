/* SPDX-License-Identifier: Apache-2.0
 *
 * vectorcall.h - objects that are called without a tuple and a dict for each call.
 */
#ifndef TE_PYTHON_VECTORCALL_H
#define TE_PYTHON_VECTORCALL_H

#include "python/state.h"

#include <stddef.h>
#include <structmember.h>

/* In the limited API from 3.12 on, and in every interpreter from 3.9 on. */
#if Py_LIMITED_API + 0 < 0x030c0000
typedef PyObject *(*vectorcallfunc)(PyObject *, PyObject *const *, size_t, PyObject *);
/* lint: allow(PyObject_Vectorcall) */
PyAPI_FUNC(PyObject *)
    PyObject_Vectorcall(PyObject *, PyObject *const *args, size_t nargsf, PyObject *names);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *callable, PyObject *tuple, PyObject *dict);
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif

/* How many of the arguments of a vectorcall are positional: in the limited API from 3.12 on. */
static inline Py_ssize_t tepy_positional(size_t nargsf)
{
    return (Py_ssize_t)(nargsf & ~((size_t)1 << (8 * sizeof(size_t) - 1)));
}

/* New reference: what a call returns whose arguments are given as they came. */
PyObject *tepy_call_vector(PyObject *function, PyObject *const *args, size_t nargsf,
                           PyObject *names);
int tepy_require_callable(PyObject *object, tepy_site site);

#endif
