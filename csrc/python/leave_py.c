/* SPDX-License-Identifier: Apache-2.0
 *
 * leave_py.c - context managers that an interrupt can not split: `__enter__` and `__exit__`.
 *
 * CPython runs signal handlers where a function in Python begins and after calls, so Ctrl-C may end
 * an `__exit__` before its first statement, and an `__enter__` behind any call that it makes. A
 * method in C begins and ends without that. What a context changes is undone by the records of its
 * attribute `_outer`: a Leaving undoes them before it calls the Python function for the rest, an
 * Entering where its Python function fails.
 */
#include "python/dispatch_py.h"

typedef struct leaving {
    PyObject_HEAD vectorcallfunc call;
    PyObject *function;
    PyObject *context; /* whose method it is; NULL: the descriptor in the class */
    PyObject *outer;   /* the name "_outer" */
} leaving;

static PyObject *make(PyTypeObject *type, vectorcallfunc call, PyObject *function,
                      PyObject *context, PyObject *outer)
{
    leaving *self = (leaving *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->call = call;
    self->function = Py_NewRef(function);
    self->context = Py_XNewRef(context);
    self->outer = Py_NewRef(outer);
    return (PyObject *)self;
}

static PyObject *leaving_get(PyObject *object, PyObject *context, PyObject *owner)
{
    const leaving *self = (leaving *)object;
    if (context == NULL || context == Py_None) return Py_NewRef(object);
    return make(Py_TYPE(object), self->call, self->function, context, self->outer);
}

/* ---- undoing -----------------------------------------------------------------------------------
 */

/* Of an attribute that says which context is in force the value that another context found, which
 * is the last of the first record that it has; borrowed, or NULL without an exception. */
static PyObject *found_by(PyObject *outer)
{
    PyObject *record, *values;
    if (!PyTuple_Check(outer) || PyTuple_Size(outer) < 1) return NULL;
    record = PyTuple_GetItem(outer, 0);
    if (!PyTuple_Check(record) || PyTuple_Size(record) != 4) return NULL;
    values = PyTuple_GetItem(record, 2);
    if (!PyTuple_Check(values) || PyTuple_Size(values) < 1) return NULL;
    return PyTuple_GetItem(values, PyTuple_Size(values) - 1);
}

/* Whether another context than this one is in force, that of a region inside of it: 1, 0, or -1
 * with an exception. Then that one, which is left later, is to restore what this one would have. */
static int is_inside(PyObject *context, PyObject *name, PyObject *outer)
{
    PyObject *record = PyTuple_GetItem(outer, 0), *inner, *records, *found;
    int result = 0;
    if (found_by(outer) == NULL) return 0;
    inner = PyObject_GetAttr(PyTuple_GetItem(record, 0), PyTuple_GetItem(record, 3));
    while (inner != NULL && inner != context && inner != Py_None && result == 0) {
        records = PyObject_GetAttr(inner, name);
        found = records == NULL ? NULL : found_by(records);
        Py_XINCREF(found);
        if (found == context) result = PyObject_SetAttr(inner, name, outer) == 0 ? 1 : -1;
        Py_XDECREF(records);
        Py_DECREF(inner);
        inner = found;
    }
    Py_XDECREF(inner);
    return PyErr_Occurred() != NULL ? -1 : result;
}

/* Sets attributes of an object again: (object, names, values). */
static int set_again(PyObject *target, PyObject *names, PyObject *values)
{
    const Py_ssize_t count = PyTuple_Size(names);
    int failed = count < 0 || PyTuple_Size(values) != count;
    if (failed && PyErr_Occurred() == NULL)
        PyErr_SetString(PyExc_TypeError, "_outer: expected as many values as names");
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = PyObject_SetAttr(target, PyTuple_GetItem(names, i), PyTuple_GetItem(values, i));
    return failed ? -1 : 0;
}

/* Calls a function again that restores something: (function, arguments). One in Python may be
 * interrupted: it is called once more, and the interrupt goes on. */
static int call_again(PyObject *function, PyObject *arguments)
{
    PyObject *first, *result = PyObject_Call(function, arguments, NULL);
    Py_XDECREF(result);
    if (result != NULL) return 0;
    first = tepy_take_error();
    result = PyObject_Call(function, arguments, NULL);
    Py_XDECREF(result);
    tepy_set_error(first);
    return -1;
}

static int undo(PyObject *record)
{
    PyObject *first, *second, *third = NULL, *in_force;
    if (!PyTuple_Check(record)) {
        PyErr_SetString(PyExc_TypeError, "_outer: expected a tuple of tuples");
        return -1;
    }
    if (!PyArg_ParseTuple(record, "OO!|O!U:_outer", &first, &PyTuple_Type, &second, &PyTuple_Type,
                          &third, &in_force))
        return -1;
    return third == NULL ? call_again(first, second) : set_again(first, second, third);
}

/* Undoes all records of `_outer`, which becomes None; 0, or -1 with the first exception. */
static int restore(PyObject *context, PyObject *name, PyObject *outer)
{
    PyObject *first = NULL, *records = PyTuple_Check(outer) ? outer : NULL;
    Py_ssize_t count = records == NULL ? 1 : PyTuple_Size(records);
    const int inside = count < 1 || records == NULL ? 0 : is_inside(context, name, outer);
    if (inside < 0) first = tepy_take_error();
    if (inside > 0) count = 0; /* another context undoes it */
    for (Py_ssize_t i = 0; i <= count; i++) {
        const int status = i == count        ? PyObject_SetAttr(context, name, Py_None)
                           : records == NULL ? undo(outer)
                                             : undo(PyTuple_GetItem(records, i));
        if (status != 0 && first == NULL)
            first = tepy_take_error();
        else if (status != 0)
            PyErr_Clear();
    }
    if (first == NULL) return 0;
    tepy_set_error(first);
    return -1;
}

/* ---- calls -------------------------------------------------------------------------------------
 */

/* The context manager of a call, borrowed; NULL with an exception. */
static PyObject *context_of(const leaving *self, PyObject *const *args, size_t nargsf)
{
    if (self->context != NULL) return self->context;
    if (tepy_positional(nargsf) > 0) return args[0];
    PyErr_SetString(PyExc_TypeError,
                    "__enter__ and __exit__ take the context manager as their first argument");
    return NULL;
}

/* Calls the function with the context manager before the arguments, where it is bound to one. */
static PyObject *call_function(const leaving *self, PyObject *const *args, size_t nargsf,
                               PyObject *names)
{
    const Py_ssize_t count = tepy_positional(nargsf);
    PyObject *whole[4] = {self->context, NULL, NULL, NULL};
    if (self->context == NULL) return tepy_call_vector(self->function, args, nargsf, names);
    if (count > 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "a context manager takes none or three arguments");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) whole[i + 1] = args[i];
    return tepy_call_vector(self->function, whole, (size_t)count + 1, NULL);
}

static PyObject *leave(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    const leaving *self = (leaving *)object;
    PyObject *context = context_of(self, args, nargsf), *outer, *kind;
    int failed;
    if (context == NULL || (outer = PyObject_GetAttr(context, self->outer)) == NULL) return NULL;
    if (outer == Py_None) {
        kind = PyType_GetName(Py_TYPE(context));
        if (kind != NULL)
            (void)PyErr_Format(PyExc_RuntimeError,
                               "%U: this region is not active: __exit__ without __enter__; use a "
                               "with block",
                               kind);
        Py_XDECREF(kind);
        failed = 1;
    } else {
        failed = restore(context, self->outer, outer);
    }
    Py_DECREF(outer);
    return failed ? NULL : call_function(self, args, nargsf, names);
}

static PyObject *enter(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names)
{
    const leaving *self = (leaving *)object;
    PyObject *context = context_of(self, args, nargsf), *before, *result, *outer, *error;
    int entered;
    if (context == NULL || (before = PyObject_GetAttr(context, self->outer)) == NULL) return NULL;
    entered = before != Py_None; /* another entry made the records */
    Py_DECREF(before);
    result = call_function(self, args, nargsf, names);
    if (result != NULL || entered) return result;
    error = tepy_take_error();
    outer = PyObject_GetAttr(context, self->outer);
    if (outer != NULL && outer != Py_None) (void)restore(context, self->outer, outer);
    Py_XDECREF(outer);
    tepy_set_error(error);
    return NULL;
}

/* ---- the types ---------------------------------------------------------------------------------
 */

static PyObject *new_of(PyTypeObject *type, vectorcallfunc call, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", NULL};
    PyObject *function, *outer, *made;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &function)) return NULL;
    outer = PyUnicode_InternFromString("_outer");
    made = outer == NULL ? NULL : make(type, call, function, NULL, outer);
    Py_XDECREF(outer);
    return made;
}

#define HELD(X) X(function) X(context) X(outer)
TEPY_HOLDER(leaving, leaving, HELD)
#undef HELD

static PyMemberDef leaving_members[] = {
    {"__func__", T_OBJECT, offsetof(leaving, function), READONLY, "The function in Python."},
    {"__self__", T_OBJECT, offsetof(leaving, context), READONLY, "The context manager, or None."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(leaving, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define KIND(name, title, call)                                                                    \
    static PyObject *name##_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)              \
    {                                                                                              \
        return new_of(type, call, args, kwargs);                                                   \
    }                                                                                              \
    TEPY_TYPE(name, leaving, leaving, title, Py_TPFLAGS_HAVE_VECTORCALL,                           \
              {Py_tp_doc, title "(function)\n--\n\n"}, {Py_tp_new, name##_new},                    \
              {Py_tp_call, PyVectorcall_Call}, {Py_tp_descr_get, leaving_get},                     \
              {Py_tp_members, leaving_members})
KIND(leaving, "Leaving", leave)
KIND(entering, "Entering", enter)
