/* SPDX-License-Identifier: Apache-2.0
 *
 * obeying_py.c - operators for module code that is no plan: a call asks first what runs of plans
 * ask. The functions of the module itself run this library's own implementations.
 */
#include "python/dispatch_py.h"

static PyObject *call_obeying(PyObject *module, te_op op, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *names)
{
    tepy_slot_call by = {.slot = NULL};
    PyObject *selection, *result;
    if (tepy_selection_in_force(tepy_state_of(module), &selection, &by.selection) != 0) return NULL;
    result = tepy_call_operator(module, op, by, args, nargs, names);
    Py_XDECREF(selection);
    return result;
}

#define X(NAME, name)                                                                              \
    static PyObject *obey_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs,        \
                                 PyObject *names)                                                  \
    {                                                                                              \
        return call_obeying(module, TE_OP_##NAME, args, nargs, names);                             \
    }
TE_OPS(X)
#undef X

PyObject *tepy_obeying(PyObject *module, PyObject *name)
{
    static const PyMethodDef functions[] = {
#define X(NAME, name)                                                                              \
    {#name, (PyCFunction)(void (*)(void))obey_##name, METH_FASTCALL | METH_KEYWORDS,               \
     "The operator as runs of plans have it; arguments as of the module's function."},
        TE_OPS(X)
#undef X
    };
    const int op = tepy_op_by_name(name, (tepy_site){"obeying", "name"});
    if (op < 0) return NULL;
    return PyCFunction_NewEx((PyMethodDef *)(uintptr_t)&functions[op], module, NULL);
}
