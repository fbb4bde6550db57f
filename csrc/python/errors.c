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
    PyObject *exception = status == TE_ERROR_INVALID       ? PyExc_ValueError
                          : status == TE_ERROR_TYPE        ? PyExc_TypeError
                          : status == TE_ERROR_UNSUPPORTED ? PyExc_NotImplementedError
                          : status == TE_ERROR_MEMORY      ? PyExc_MemoryError
                                                           : PyExc_RuntimeError;
    const char *text = te_last_error();
    PyObject *decoded;
    if ((status == TE_ERROR_CALLBACK || status == TE_ERROR_INTERRUPTED) && PyErr_Occurred()) {
        return NULL;
    }
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

int tepy_expected(tepy_site site, const char *what, PyObject *object)
{
    return tepy_fail(PyExc_TypeError, site, "expected %s, got %R", what, Py_TYPE(object));
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

PyObject *tepy_take_error(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (type != NULL) PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) (void)PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

void tepy_set_error(PyObject *error)
{
    PyErr_Clear();
    if (error == NULL) return;
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
}

void tepy_set_error_noted(PyObject *error, PyObject *note)
{
    PyObject *done = note == NULL ? NULL : PyObject_CallMethod(error, "add_note", "O", note);
    Py_XDECREF(note);
    Py_XDECREF(done);
    tepy_set_error(error); /* whatever came of the note: the error itself matters more */
}

int tepy_fail_from_current(PyObject *exception, tepy_site site, const char *fix)
{
    PyObject *cause = tepy_take_error(), *error;
    (void)tepy_fail(exception, site, "%s", fix);
    error = tepy_take_error();
    PyException_SetCause(error, cause); /* takes the reference */
    tepy_set_error(error);
    return -1;
}
