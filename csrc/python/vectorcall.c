/* SPDX-License-Identifier: Apache-2.0
 *
 * vectorcall.c - calls whose arguments are passed on as they came.
 */
#include "python/vectorcall.h"

PyObject *tepy_call_vector(PyObject *function, PyObject *const *args, size_t nargsf,
                           PyObject *names)
{
    /* lint: allow(PyObject_Vectorcall) a tuple and a dict for each call would take twice the time
     */
    return PyObject_Vectorcall(function, args, nargsf, names);
}

int tepy_require_callable(PyObject *object, tepy_site site)
{
    if (PyCallable_Check(object)) return 0;
    return tepy_fail(PyExc_TypeError, site, "expected a callable, got %R", Py_TYPE(object));
}
