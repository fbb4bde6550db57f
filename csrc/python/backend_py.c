/* SPDX-License-Identifier: Apache-2.0
 *
 * backend_py.c - Python functions in the operator table.
 *
 * A slot's `self` is a record of ours. Unregistering empties it (under the GIL): a call in flight,
 * which holds an older table, finds it empty and goes to the next backend. The last such call lets
 * the operator table drop the record, on a thread without the GIL, which is why it is emptied
 * first.
 */
#include "python/function_slot.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct tepy_backend {
    tepy_backend *next;
    char *name;
    atomic_int holders; /* the module's list, the operator table */
    tepy_function_slot functions[TE_OP_COUNT];
};

int tepy_backends_visit(tepy_state *state, visitproc visit, void *arg)
{
    for (tepy_backend *backend = state->backends; backend != NULL; backend = backend->next) {
        for (int op = 0; op < TE_OP_COUNT; op++) Py_VISIT(backend->functions[op].function);
    }
    return 0;
}

static void empty_records(tepy_backend *backend)
{
    for (int op = 0; op < TE_OP_COUNT; op++) {
        backend->functions[op].state = NULL;
        Py_CLEAR(backend->functions[op].function);
    }
}

/* One holder less: also te_backend.release, so without the GIL. */
static void drop_backend(void *opaque)
{
    tepy_backend *backend = opaque;
    if (atomic_fetch_sub(&backend->holders, 1) > 1) return;
    free(backend->name);
    free(backend);
}

void tepy_backends_clear(tepy_state *state)
{
    while (state->backends != NULL) {
        tepy_backend *backend = state->backends;
        state->backends = backend->next;
        (void)te_backend_unregister(backend->name);
        empty_records(backend);
        drop_backend(backend);
    }
}

/* ---- registration ---- */

/* A function into its record. */
static int take_function(tepy_backend *backend, const tepy_state *state, PyObject *name,
                         PyObject *function)
{
    tepy_site site = {"register_backend", "functions"};
    const int op = tepy_op_by_name(name, site);
    if (op < 0) return -1;
    if (!PyCallable_Check(function)) {
        site.argument = te_op_name((te_op)op);
        return tepy_fail_showing(PyExc_TypeError, site, "%U is not callable", function);
    }
    backend->functions[op] =
        (tepy_function_slot){Py_NewRef(function), state, backend->name, (te_op)op, TEPY_ALL_FIELDS};
    return 0;
}

static int take_functions(tepy_backend *backend, const tepy_state *state, PyObject *functions)
{
    PyObject *own = PyDict_New(), *name, *function;
    Py_ssize_t at = 0;
    int failed = own == NULL || PyDict_Update(own, functions) != 0;
    if (failed &&
        (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_TypeError))) {
        PyErr_Clear();
        (void)tepy_expected((tepy_site){"register_backend", "functions"},
                            "a mapping of operator names to callables", functions);
    }
    while (!failed && PyDict_Next(own, &at, &name, &function)) {
        failed = take_function(backend, state, name, function) != 0;
    }
    Py_XDECREF(own);
    return failed ? -1 : 0;
}

PyObject *tepy_register_backend(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    te_backend backend = {.size = sizeof backend};
    tepy_backend *record = NULL;
    te_device device;
    int64_t priority = 0;
    const char *name;
    te_status st;
    name = tepy_text(args[0], (tepy_site){"register_backend", "name"}, NULL);
    if (name == NULL || tepy_device_args("register_backend", args[1], NULL, &device) != 0 ||
        tepy_int(args[2], (tepy_site){"register_backend", "priority"}, INT32_MIN, INT32_MAX,
                 &priority) != 0) {
        return NULL;
    }
    record = calloc(1, sizeof *record);
    if (record == NULL || (record->name = strdup(name)) == NULL) {
        (void)PyErr_NoMemory();
        goto failed;
    }
    if (take_functions(record, state, args[3]) != 0) goto failed;
    atomic_init(&record->holders, 2);
    backend.name = record->name;
    backend.release = drop_backend;
    backend.self = record;
    backend.device = device.type;
    backend.priority = (int32_t)priority;
    for (int op = 0; op < TE_OP_COUNT; op++) {
        if (record->functions[op].function == NULL) continue;
        backend.slots[op] =
            (te_op_slot){.function = tepy_call_function, .self = &record->functions[op]};
    }
    st = te_backend_register(&backend);
    if (tepy_check(st) != 0) goto failed;
    record->next = state->backends;
    state->backends = record;
    return Py_NewRef(Py_None);
failed: /* no table knows the record */
    if (record != NULL) {
        empty_records(record);
        free(record->name);
        free(record);
    }
    return NULL;
}

PyObject *tepy_unregister_backend(PyObject *module, PyObject *arg)
{
    tepy_state *state = tepy_state_of(module);
    tepy_site site = {"unregister_backend", "name"};
    const char *name = tepy_text(arg, site, NULL);
    te_status st;
    if (name == NULL) return NULL;
    for (tepy_backend **link = &state->backends; *link != NULL; link = &(*link)->next) {
        tepy_backend *backend = *link;
        if (strcmp(backend->name, name) != 0) continue;
        st = te_backend_unregister(name);
        if (st != TE_OK) return tepy_raise(st);
        *link = backend->next;
        empty_records(backend);
        drop_backend(backend);
        return Py_NewRef(Py_None);
    }
    (void)tepy_fail_showing(PyExc_ValueError, site,
                            "no backend %U is registered through this module", arg);
    return NULL;
}
