/* SPDX-License-Identifier: Apache-2.0
 *
 * modules_py.c - what a torch.nn.Module would do at a call but run its forward. A layer asks it of
 * its modules at each call, for a program may change them at any time.
 */
#include "python/args.h"

/* X(NAME, name): attributes that are read, in the order of `module_names` of the state. */
#define NAMES(X)                                                                                   \
    X(MODULE, "__module__")                                                                        \
    X(CALL, "__call__")                                                                            \
    X(PLANNED, "IS_PLANNED")                                                                       \
    X(OWN_FORWARD, "_FORWARD")                                                                     \
    X(FORWARD, "forward")                                                                          \
    X(COMPILED, "_compiled_call_impl")                                                             \
    X(HOOKS, "_forward_hooks")                                                                     \
    X(PRE_HOOKS, "_forward_pre_hooks")                                                             \
    X(BACKWARD_HOOKS, "_backward_hooks")                                                           \
    X(BACKWARD_PRE_HOOKS, "_backward_pre_hooks")

enum {
#define X(NAME, name) NAME,
    NAMES(X)
#undef X
        NAME_COUNT
};
_Static_assert(NAME_COUNT == TEPY_MODULE_NAMES, "state.h has room for these names");

int tepy_modules_add(tepy_state *state)
{
    static const char *const names[NAME_COUNT] = {
#define X(NAME, name) name,
        NAMES(X)
#undef X
    };
    for (int i = 0; i < NAME_COUNT; i++) {
        state->module_names[i] = PyUnicode_InternFromString(names[i]);
        if (state->module_names[i] == NULL) return -1;
    }
    return 0;
}

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
static int is_known(PyObject *const *names, PyObject *kind, PyObject *prefix)
{
    PyObject *module = PyObject_GetAttr(kind, names[MODULE]);
    int known = module != NULL && PyUnicode_Check(module) &&
                PyUnicode_Tailmatch(module, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
    Py_XDECREF(module);
    PyErr_Clear();
    return known || has(kind, names[PLANNED], Py_True);
}

/* Whether a class calls by `call` and runs the forward that it has as its own. */
static int runs_own(PyObject *const *names, PyObject *kind, PyObject *call)
{
    PyObject *own = PyObject_GetAttr(kind, names[OWN_FORWARD]);
    int result = own != NULL && has(kind, names[FORWARD], own) && has(kind, names[CALL], call);
    if (own == NULL) PyErr_Clear();
    Py_XDECREF(own);
    return result;
}

/* Whether the attributes of a module are those of one without hooks, its dict. */
static int is_plain(PyObject *const *names, PyObject *own)
{
    PyObject *compiled;
    if (!PyDict_Check(own) || PyDict_GetItemWithError(own, names[FORWARD]) != NULL) return 0;
    compiled = PyDict_GetItemWithError(own, names[COMPILED]);
    if (compiled != NULL && compiled != Py_None) return 0;
    for (int i = HOOKS; i < NAME_COUNT; i++) {
        PyObject *hooks = PyDict_GetItemWithError(own, names[i]);
        if (hooks == NULL || PyObject_Size(hooks) != 0) return 0;
    }
    return 1;
}

PyObject *tepy_only_forward(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *const *names = tepy_state_of(module)->module_names;
    int result = 1;
    if (tepy_count("only_forward", nargs, 3, 3) != 0) return NULL;
    if (!PyTuple_Check(args[0]) || !PyUnicode_Check(args[2]))
        return TEPY_FAIL(PyExc_TypeError, (tepy_site){"only_forward", "modules"},
                         "expected a tuple, a function and a str, got %R", Py_TYPE(args[0]));
    for (Py_ssize_t i = 0; result && i < PyTuple_Size(args[0]); i++) {
        PyObject *each = PyTuple_GetItem(args[0], i), *kind = (PyObject *)Py_TYPE(each);
        PyObject *own = PyObject_GenericGetDict(each, NULL);
        result = own != NULL && is_plain(names, own) && runs_own(names, kind, args[1]) &&
                 is_known(names, kind, args[2]);
        Py_XDECREF(own);
        PyErr_Clear();
    }
    return PyBool_FromLong(result);
}
