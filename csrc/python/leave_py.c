/* SPDX-License-Identifier: Apache-2.0
 *
 * leave_py.c - the `__exit__` of a context manager that an interrupt can not keep from restoring.
 *
 * CPython runs signal handlers where a function in Python begins, so Ctrl-C may end an `__exit__`
 * before its first statement. A method in C begins without that: a Leaving restores what the
 * context changed, and calls the Python function for the rest.
 */
#include "python/dispatch_py.h"

#include <stddef.h>
#include <structmember.h>

typedef struct leaving {
    PyObject_HEAD PyObject *function;
    PyObject *context; /* whose method it is; NULL: the descriptor in the class */
} leaving;

static PyObject *make(PyTypeObject *type, PyObject *function, PyObject *context)
{
    leaving *self = (leaving *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->function = Py_NewRef(function);
    self->context = Py_XNewRef(context);
    return (PyObject *)self;
}

static PyObject *leaving_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", NULL};
    PyObject *function;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Leaving", names, &function)) return NULL;
    return make(type, function, NULL);
}

static PyObject *leaving_get(PyObject *object, PyObject *context, PyObject *owner)
{
    (void)owner;
    if (context == NULL || context == Py_None) return Py_NewRef(object);
    return make(Py_TYPE(object), ((leaving *)object)->function, context);
}

/* Puts back the (object, name, value) triples of `_outer`, which becomes None: 0, or -1 with an
 * exception. */
static int restore(PyObject *context)
{
    PyObject *outer = PyObject_GetAttrString(context, "_outer");
    int failed = outer == NULL;
    if (outer == Py_None) {
        PyObject *name = PyType_GetName(Py_TYPE(context));
        if (name != NULL)
            (void)PyErr_Format(PyExc_RuntimeError,
                               "%U: this region is not active: __exit__ without __enter__; use a "
                               "with block",
                               name);
        Py_XDECREF(name);
        failed = 1;
    }
    for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(outer); i++) {
        PyObject *target, *name, *value;
        failed = !PyArg_ParseTuple(PyTuple_GetItem(outer, i), "OOO", &target, &name, &value) ||
                 PyObject_SetAttr(target, name, value) != 0;
    }
    Py_XDECREF(outer);
    return failed || PyObject_SetAttrString(context, "_outer", Py_None) != 0 ? -1 : 0;
}

static PyObject *leaving_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    const leaving *self = (leaving *)object;
    const Py_ssize_t given = PyTuple_Size(args), bound = self->context != NULL;
    PyObject *context = self->context, *whole, *result;
    if (!bound && given == 0) {
        PyErr_SetString(PyExc_TypeError, "__exit__: no context manager was given");
        return NULL;
    }
    if (!bound) context = PyTuple_GetItem(args, 0);
    whole = PyTuple_New(given + bound);
    if (whole == NULL || restore(context) != 0) {
        Py_XDECREF(whole);
        return NULL;
    }
    if (bound) (void)PyTuple_SetItem(whole, 0, Py_NewRef(context));
    for (Py_ssize_t i = 0; i < given; i++)
        (void)PyTuple_SetItem(whole, i + bound, Py_NewRef(PyTuple_GetItem(args, i)));
    result = PyObject_Call(self->function, whole, kwargs);
    Py_DECREF(whole);
    return result;
}

static int leaving_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((leaving *)object)->function);
    Py_VISIT(((leaving *)object)->context);
    return 0;
}

static void leaving_dealloc(PyObject *object)
{
    leaving *self = (leaving *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->function);
    Py_XDECREF(self->context);
    TEPY_FREE(object);
    Py_DECREF(type);
}

static PyMemberDef leaving_members[] = {
    {"__func__", T_OBJECT, offsetof(leaving, function), READONLY, "The function in Python."},
    {"__self__", T_OBJECT, offsetof(leaving, context), READONLY, "The context manager, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot leaving_slots[] = {
    {Py_tp_doc, "Leaving(function)\n--\n\nAn __exit__ that restores before it can be interrupted."},
    {Py_tp_new, leaving_new},
    {Py_tp_dealloc, leaving_dealloc},
    {Py_tp_traverse, leaving_traverse},
    {Py_tp_call, leaving_call},
    {Py_tp_descr_get, leaving_get},
    {Py_tp_members, leaving_members},
    {0, NULL},
};

static PyType_Spec leaving_spec = {
    .name = "transformer_engine._core.Leaving",
    .basicsize = sizeof(leaving),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = leaving_slots,
};

PyObject *tepy_leaving_make_type(PyObject *module)
{
    return PyType_FromModuleAndSpec(module, &leaving_spec, NULL);
}
