/* SPDX-License-Identifier: Apache-2.0
 *
 * errors.c - the only place where a te_status becomes a Python exception, and the one form that
 * messages about arguments have: "function: argument: what is wrong and what to do".
 */
#include <stdarg.h>
#include <string.h>

#include "python/state.h"

PyObject *tepy_raise(te_status status)
{
    PyObject *exception = PyExc_RuntimeError; /* STATE, DEVICE, and a callback that set none */
    PyObject *decoded;
    const char *text;
    switch (status) {
    case TE_ERROR_INVALID:
        exception = PyExc_ValueError;
        break;
    case TE_ERROR_TYPE:
        exception = PyExc_TypeError;
        break;
    case TE_ERROR_UNSUPPORTED:
        exception = PyExc_NotImplementedError;
        break;
    case TE_ERROR_MEMORY:
        exception = PyExc_MemoryError;
        break;
    case TE_ERROR_CALLBACK:
    case TE_ERROR_INTERRUPTED:
        if (PyErr_Occurred()) return NULL;
        break;
    default:
        break;
    }
    text = te_last_error();
    /* It may be cut off within a character, and a plug-in's may be in any encoding. */
    decoded = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
    if (decoded != NULL) PyErr_SetObject(exception, decoded);
    Py_XDECREF(decoded);
    return NULL;
}

int tepy_check(te_status status)
{
    if (status == TE_OK) return 0;
    (void)tepy_raise(status);
    return -1;
}

int tepy_no_memory(void)
{
    (void)PyErr_NoMemory();
    return -1;
}

int tepy_fail(PyObject *exception, tepy_site site, const char *format, ...)
{
    va_list arguments;
    PyObject *text;
    va_start(arguments, format);
    text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (text == NULL) return -1;
    PyErr_Format(exception, "%s: %s: %U", site.function, site.argument, text);
    Py_DECREF(text);
    return -1;
}

int tepy_fail_showing(PyObject *exception, tepy_site site, const char *format, PyObject *object)
{
    int plain = object == Py_None || PyUnicode_Check(object) || PyLong_Check(object) ||
                PyFloat_Check(object);
    PyObject *shown =
        plain ? PyObject_Repr(object) : PyUnicode_FromFormat("an object of %R", Py_TYPE(object));
    if (shown == NULL) return -1;
    (void)tepy_fail(exception, site, format, shown);
    Py_DECREF(shown);
    return -1;
}

int tepy_fail_from_current(PyObject *exception, tepy_site site, const char *fix)
{
    PyObject *type = NULL, *cause = NULL, *trace = NULL, *new_type = NULL, *new_value = NULL,
             *new_trace = NULL;
    PyErr_Fetch(&type, &cause, &trace);
    PyErr_NormalizeException(&type, &cause, &trace);
    (void)tepy_fail(exception, site, "%s", fix);
    if (cause == NULL) return -1;
    if (trace != NULL) (void)PyException_SetTraceback(cause, trace);
    PyErr_Fetch(&new_type, &new_value, &new_trace);
    PyErr_NormalizeException(&new_type, &new_value, &new_trace);
    if (new_value != NULL) {
        PyException_SetCause(new_value, cause); /* takes the reference */
        cause = NULL;
    }
    PyErr_Restore(new_type, new_value, new_trace);
    Py_XDECREF(cause);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return -1;
}
