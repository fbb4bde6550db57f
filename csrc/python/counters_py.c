/* SPDX-License-Identifier: Apache-2.0
 *
 * counters_py.c - what really ran, as a dict.
 */
#include "python/state.h"

PyObject *tepy_counters(PyObject *module, PyObject *unused)
{
    te_counter *list = NULL;
    size_t capacity = 64, count = 0;
    PyObject *dict = NULL;
    te_status st;
    for (;;) { /* a counter may appear between two reads */
        PyMem_Free(list);
        list = PyMem_Malloc(capacity * sizeof *list);
        if (list == NULL) return PyErr_NoMemory();
        st = te_counters_read(list, capacity, &count);
        if (tepy_check(st) != 0) goto done;
        if (count <= capacity) break;
        capacity = count;
    }
    dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(list[i].value);
        if (value == NULL || PyDict_SetItemString(dict, list[i].name, value) != 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
done:
    PyMem_Free(list);
    return dict;
}

PyObject *tepy_reset_counters(PyObject *module, PyObject *unused)
{
    te_counters_reset();
    return Py_NewRef(Py_None);
}
