/* SPDX-License-Identifier: Apache-2.0
 *
 * modules_py.c - what a torch.nn.Module would do at a call but run its forward. A layer asks it of
 * its modules at each call, for a program may change them at any time.
 */
#include "python/args.h"

/* Whether an attribute of a class is this object; one that lacks it has none of these. */
static int has(PyObject *kind, PyObject *name, PyObject *expected)
{
    PyObject *found = PyObject_GetAttr(kind, name);
    const int result = found == expected;
    if (found == NULL) PyErr_Clear();
    Py_XDECREF(found);
    return result;
}

/* Whether a class is of the library, whose names begin so, or says that it is composed of such. */
static int is_known(PyObject *const *keys, PyObject *kind, PyObject *prefix)
{
    PyObject *module = PyObject_GetAttr(kind, keys[TEPY_KEY_MODULE]);
    int known = module != NULL && PyUnicode_Check(module) &&
                PyUnicode_Tailmatch(module, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
    Py_XDECREF(module);
    PyErr_Clear();
    return known || has(kind, keys[TEPY_KEY_PLANNED], Py_True);
}

/* Whether a class calls by `call` and runs the forward that it has as its own. */
static int runs_own(PyObject *const *keys, PyObject *kind, PyObject *call)
{
    PyObject *own = PyObject_GetAttr(kind, keys[TEPY_KEY_OWN_FORWARD]);
    int result = own != NULL && has(kind, keys[TEPY_KEY_FORWARD], own) &&
                 has(kind, keys[TEPY_KEY_CALL], call);
    if (own == NULL) PyErr_Clear();
    Py_XDECREF(own);
    return result;
}

/* Whether the attributes of a module are those of one without hooks, its dict. */
static int is_plain(PyObject *const *keys, PyObject *own)
{
    PyObject *compiled;
    if (!PyDict_Check(own) || PyDict_GetItemWithError(own, keys[TEPY_KEY_FORWARD]) != NULL)
        return 0;
    compiled = PyDict_GetItemWithError(own, keys[TEPY_KEY_COMPILED]);
    if (compiled != NULL && compiled != Py_None) return 0;
    for (int i = TEPY_KEY_HOOKS; i <= TEPY_KEY_BACKWARD_PRE_HOOKS; i++) {
        PyObject *hooks = PyDict_GetItemWithError(own, keys[i]);
        if (hooks == NULL || PyObject_Size(hooks) != 0) return 0;
    }
    return 1;
}

PyObject *tepy_only_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *const *keys = tepy_state_of(module)->keys;
    int result = 1;
    if (!PyTuple_Check(args[0]) || !PyUnicode_Check(args[2]))
        return TEPY_EXPECTED((tepy_site){"only_forward", "modules"},
                             "a tuple, a function and a str", args[0]);
    for (Py_ssize_t i = 0; result && i < PyTuple_Size(args[0]); i++) {
        PyObject *each = PyTuple_GetItem(args[0], i), *kind = (PyObject *)Py_TYPE(each);
        PyObject *own = PyObject_GenericGetDict(each, NULL);
        result = own != NULL && is_plain(keys, own) && runs_own(keys, kind, args[1]) &&
                 is_known(keys, kind, args[2]);
        Py_XDECREF(own);
        PyErr_Clear();
    }
    return PyBool_FromLong(result);
}
