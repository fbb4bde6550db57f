/* SPDX-License-Identifier: Apache-2.0
 *
 * backend_py.c - Python functions in the operator table.
 *
 * A slot's `self` is a record of ours. Unregistering empties it (under the GIL): a call in flight,
 * which holds an older table, finds it empty and goes to the next backend. The last such call lets
 * the operator table drop the record, on a thread without the GIL, which is why it is emptied
 * first.
 */
#include "python/args.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct function_record {
    PyObject *function; /* NULL: none, or unregistered */
    const tepy_state *state;
    const char *backend;
    te_op op;
} function_record;

struct tepy_backend {
    tepy_backend *next;
    char *name;
    atomic_int holders; /* the module's list, the operator table */
    function_record functions[TE_OP_COUNT];
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

/* ---- args structs as dicts ---- */

/* New reference: a torch tensor over the view's memory; None for an absent one. */
static PyObject *lend_tensor(const tepy_state *state, const te_tensor *view)
{
    return view->ndim == 0 ? Py_NewRef(Py_None) : tepy_share(state, NULL, view);
}

/* New reference: the elements behind a pointer; None for NULL. */
static PyObject *lend_elements(const tepy_state *state, const void *data, te_dtype dtype,
                               int64_t count, te_device device)
{
    te_tensor view = {.data = (void *)(uintptr_t)data, .dtype = dtype, .device = device, .ndim = 1};
    if (data == NULL) return Py_NewRef(Py_None);
    view.shape[0] = count;
    view.strides[0] = 1;
    return lend_tensor(state, &view);
}

/* Puts a new reference into the dict; NULL is an error. */
static int put(PyObject *dict, const char *name, PyObject *value)
{
    int result = value == NULL ? -1 : PyDict_SetItemString(dict, name, value);
    Py_XDECREF(value);
    return result;
}

/* New reference. */
static PyObject *lend_field(const tepy_state *state, const te_field *field, const void *args,
                            te_device device)
{
    const void *member = te_field_member(field, args);
    switch (field->kind) {
    case TE_FIELD_TENSOR:
        return lend_tensor(state, member);
    case TE_FIELD_FLOATS:
        return lend_elements(state, *(float *const *)member, TE_DTYPE_F32, field->count, device);
    case TE_FIELD_INT64S:
        return lend_elements(state, *(int64_t *const *)member, TE_DTYPE_I64, field->count, device);
    case TE_FIELD_INT64: /* more than a double holds */
        return PyLong_FromLongLong(*(const int64_t *)member);
    default:
        return tepy_number(field, te_field_number(field, args));
    }
}

/* New reference: every field by name, but for the workspace: a Python function allocates what it
 * needs. */
static PyObject *lend_args(const function_record *record, const void *args, te_device device)
{
    const te_op_info *info = te_op_describe(record->op);
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        if (field->kind == TE_FIELD_WORKSPACE) continue;
        if (put(dict, field->name, lend_field(record->state, field, args, device)) != 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* The te_op_function of every Python slot. */
static te_status call_python(void *self, te_context *context, const void *args, void *stream)
{
    const function_record *record = self;
    const char *op = te_op_name(record->op); /* never changes, unlike the function */
    PyObject *function, *dict = NULL, *result = NULL;
    PyGILState_STATE gil;
    te_status st = TE_OK;
    (void)stream; /* torch's current stream, on which the function works anyway */
    gil = PyGILState_Ensure();
    function = record->function;
    if (function == NULL) {
        st = TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: the Python backend %s was unregistered", op,
                     record->backend);
        goto done;
    }
    (void)Py_NewRef(function); /* it may unregister itself */
    dict = lend_args(record, args, te_context_device(context));
    if (dict != NULL) result = PyObject_CallFunctionObjArgs(function, dict, NULL);
    if (result == NULL) {
        st = TE_FAIL(TE_ERROR_CALLBACK, "%s: the Python backend %s raised", op, record->backend);
    } else if (result == Py_NotImplemented) {
        st = TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: the Python backend %s does not take this call", op,
                     record->backend);
    }
    Py_DECREF(function);
done:
    Py_XDECREF(result);
    Py_XDECREF(dict);
    PyGILState_Release(gil);
    return st;
}

/* ---- registration ---- */

/* One item of `functions` into its record. */
static int take_function(tepy_backend *backend, const tepy_state *state, PyObject *item)
{
    tepy_site site = {"register_backend", "functions"};
    PyObject *key = PyTuple_GetItem(item, 0), *function = PyTuple_GetItem(item, 1);
    int op;
    if (key == NULL || function == NULL || (op = tepy_op_by_name(key, site)) < 0) return -1;
    if (!PyCallable_Check(function)) {
        site.argument = te_op_name((te_op)op);
        return tepy_fail_showing(PyExc_TypeError, site, "%U is not callable", function);
    }
    backend->functions[op] =
        (function_record){Py_NewRef(function), state, backend->name, (te_op)op};
    return 0;
}

static int take_functions(tepy_backend *backend, const tepy_state *state, PyObject *functions)
{
    tepy_site site = {"register_backend", "functions"};
    PyObject *items = PyMapping_Items(functions);
    int failed = 0;
    if (items == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError) &&
            !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return tepy_fail(PyExc_TypeError, site,
                         "expected a mapping of operator names to callables, got %R",
                         Py_TYPE(functions));
    }
    for (Py_ssize_t i = 0; !failed && i < PyList_Size(items); i++) {
        PyObject *item = PyList_GetItem(items, i);
        if (item == NULL || !PyTuple_Check(item)) {
            failed = tepy_fail(PyExc_TypeError, site, "items() gave %R, expected pairs",
                               item == NULL ? Py_TYPE(items) : Py_TYPE(item));
        } else {
            failed = take_function(backend, state, item);
        }
    }
    Py_DECREF(items);
    return failed;
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
    if (tepy_count("register_backend", nargs, 4, 4) != 0 ||
        tepy_require_torch(state, "register_backend") != 0) {
        return NULL;
    }
    if (!PyUnicode_Check(args[0])) {
        (void)tepy_fail(PyExc_TypeError, (tepy_site){"register_backend", "name"},
                        "expected a str, got %R", Py_TYPE(args[0]));
        return NULL;
    }
    name = PyUnicode_AsUTF8AndSize(args[0], NULL);
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
        backend.slots[op] = (te_op_slot){.function = call_python, .self = &record->functions[op]};
    }
    st = te_backend_register(&backend);
    if (st != TE_OK) {
        (void)tepy_raise(st);
        goto failed;
    }
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
    const char *name;
    te_status st;
    if (!PyUnicode_Check(arg)) {
        (void)tepy_fail(PyExc_TypeError, site, "expected a str, got %R", Py_TYPE(arg));
        return NULL;
    }
    name = PyUnicode_AsUTF8AndSize(arg, NULL);
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
