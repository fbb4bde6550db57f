/* SPDX-License-Identifier: Apache-2.0
 *
 * selection_py.c - what runs of plans ask before the backends that are registered.
 *
 * A Selection has Python functions, and slots of plug-ins, for operators of the C library, in the
 * order in which they are asked. It is an entry of a dispatcher's table, so a run finds it as an
 * operator object finds its implementations: by the policy of its thread, without a look-up by
 * name.
 */
#include <stdlib.h>

#include "python/dispatch_py.h"
#include "python/function_slot.h"

typedef struct selection {
    PyObject_HEAD te_selection native;
    Py_ssize_t count;
    tepy_function_slot *slots;  /* one for each function */
    te_backend *backends;       /* those of a device hold at most one function of each operator */
    const te_backend **ordered; /* what `native` has */
    PyObject *others;           /* dict: functions by name that runs of plans do not ask */
    PyObject *module;           /* keeps the state of the slots */
} selection;

static int selection_traverse(PyObject *object, visitproc visit, void *arg)
{
    selection *self = (selection *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; self->slots != NULL && i < self->count; i++)
        Py_VISIT(self->slots[i].function);
    Py_VISIT(self->others);
    Py_VISIT(self->module);
    return 0;
}

static int selection_clear(PyObject *object)
{
    selection *self = (selection *)object;
    for (Py_ssize_t i = 0; self->slots != NULL && i < self->count; i++)
        Py_CLEAR(self->slots[i].function);
    Py_CLEAR(self->others);
    return 0;
}

static void selection_dealloc(PyObject *object)
{
    selection *self = (selection *)object;
    PyObject_GC_UnTrack(object);
    (void)selection_clear(object);
    Py_XDECREF(self->module);
    free(self->slots);
    free(self->backends);
    free(self->ordered);
    tepy_dispose(object);
}

/* The fields that a function names, as bits; -1 with an exception. */
static int take_fields(PyObject *names, te_op op, uint64_t *lent)
{
    const te_op_info *info = te_op_describe(op);
    const tepy_site site = {"Selection", te_op_name(op)};
    *lent = TEPY_ALL_FIELDS;
    if (names == Py_None) return 0;
    if (!PyTuple_Check(names))
        return tepy_fail(PyExc_TypeError, site, "fields: expected a tuple or None, got %R",
                         Py_TYPE(names));
    *lent = 0;
    for (Py_ssize_t n = 0; n < PyTuple_Size(names); n++) {
        PyObject *name = PyTuple_GetItem(names, n);
        int i = 0;
        if (!PyUnicode_Check(name))
            return tepy_fail(PyExc_TypeError, site, "fields: expected str, got %R", Py_TYPE(name));
        while (i < info->field_count &&
               PyUnicode_CompareWithASCIIString(name, info->fields[i].name) != 0)
            i++;
        if (i == info->field_count)
            return tepy_fail_showing(PyExc_ValueError, site, "it has no field %U", name);
        *lent |= (uint64_t)1 << i;
    }
    return 0;
}

/* (operator, function, fields or None) */
static int take_slot(selection *self, Py_ssize_t at, PyObject *item)
{
    const tepy_site site = {"Selection", "slots"};
    tepy_function_slot *slot = &self->slots[at];
    const te_plugin_slot *native;
    PyObject *name, *function, *fields;
    int op;
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 3)
        return tepy_expected(site, "(operator, function, fields)", item);
    name = PyTuple_GetItem(item, 0);
    function = PyTuple_GetItem(item, 1);
    fields = PyTuple_GetItem(item, 2);
    op = tepy_op_by_name(name, site);
    if (op < 0) return -1;
    native = tepy_native_slot(tepy_state_of(self->module), function);
    if (native != NULL) {
        if ((int)native->op != op || fields != Py_None)
            return tepy_fail(PyExc_ValueError, site, "%R is no slot of %U, or has fields", function,
                             name);
    } else if (!PyCallable_Check(function)) {
        return tepy_fail_showing(PyExc_TypeError, site, "%U is not callable", function);
    }
    if (take_fields(fields, (te_op)op, &slot->lent) != 0) return -1;
    slot->function = Py_NewRef(function);
    slot->state = tepy_state_of(self->module);
    slot->backend = "of the plug-in system";
    slot->op = (te_op)op;
    return 0;
}

/* The backend that the next slot of an operator goes into: the first one of the device behind those
 * that have slots of the operator, for they are asked before it, or a new one. */
static te_backend *backend_for(selection *self, int *count, te_op op, te_device_type device)
{
    int at = *count, behind = *count;
    while (behind > 0 && self->backends[behind - 1].slots[op].function == NULL) {
        behind--;
        if (self->backends[behind].device == device) at = behind;
    }
    if (at == *count) {
        self->backends[at] =
            (te_backend){.size = sizeof(te_backend), .name = "a selection", .device = device};
        self->ordered[(*count)++] = &self->backends[at];
    }
    return &self->backends[at];
}

/* Spreads the slots over backends: a function of Python is asked on every device, a plug-in's on
 * its own. */
static int make_backends(selection *self)
{
    int count = 0;
    self->backends = calloc((size_t)self->count + 1, sizeof *self->backends);
    self->ordered = calloc((size_t)self->count + 1, sizeof(te_backend *));
    if (self->backends == NULL || self->ordered == NULL) return tepy_no_memory();
    for (Py_ssize_t i = 0; i < self->count; i++) {
        tepy_function_slot *slot = &self->slots[i];
        const te_plugin_slot *native =
            tepy_native_slot(tepy_state_of(self->module), slot->function);
        const te_device_type device = native == NULL ? TE_DEVICE_ANY : native->device;
        backend_for(self, &count, slot->op, device)->slots[slot->op] =
            native == NULL ? (te_op_slot){.function = tepy_call_function, .self = slot}
                           : native->slot;
    }
    self->native = (te_selection){.size = sizeof self->native,
                                  .number = te_selection_next_number(),
                                  .count = count,
                                  .backends = self->ordered};
    return 0;
}

static PyObject *selection_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"slots", "others", NULL};
    PyObject *slots, *others = NULL, *module = PyType_GetModule(type);
    selection *self;
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O!:Selection", names, &PyTuple_Type, &slots,
                                     &PyDict_Type, &others) ||
        tepy_require_torch(tepy_state_of(module), "Selection") != 0) {
        return NULL;
    }
    self = (selection *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->module = Py_NewRef(module);
    self->others = others == NULL ? PyDict_New() : PyDict_Copy(others);
    if (self->others == NULL) goto failed;
    self->slots = calloc((size_t)PyTuple_Size(slots) + 1, sizeof *self->slots);
    if (self->slots == NULL) {
        (void)PyErr_NoMemory();
        goto failed;
    }
    self->count = PyTuple_Size(slots);
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (take_slot(self, i, PyTuple_GetItem(slots, i)) != 0) goto failed;
    }
    if (make_backends(self) == 0) return (PyObject *)self;
failed:
    Py_DECREF((PyObject *)self);
    return NULL;
}

static PyMemberDef selection_members[] = {
    {"number", T_LONGLONG, offsetof(selection, native.number), READONLY,
     "A number that no other one of the process has."},
    {NULL, 0, 0, 0, NULL},
};

TEPY_TYPE(selection, selection, selection, "Selection", 0,
          {Py_tp_doc, "Selection(slots, others={})\n--\n\n"}, {Py_tp_new, selection_new},
          {Py_tp_clear, selection_clear}, {Py_tp_members, selection_members})

/* ---- what runs ask ------------------------------------------------------------------------ */

/* New reference to the dispatcher that modules obey, or NULL; *failed where an exception is set.
 * Threads that come while the first one looks for plug-ins look, too, which has them wait for its
 * imports: none of them runs as if there were none. */
static tepy_dispatcher *obeyed(tepy_state *state, int *failed)
{
    *failed = 0;
    if (state->dispatcher == NULL && state->find_dispatcher != NULL && !state->found_dispatcher) {
        const unsigned long long told = state->told_dispatcher;
        PyObject *made = PyObject_CallNoArgs(state->find_dispatcher);
        *failed = made == NULL;
        /* Nobody has told meanwhile whom to obey, or to look anew: there is nobody. */
        if (made != NULL && told == state->told_dispatcher) state->found_dispatcher = 1;
        Py_XDECREF(made);
    }
    if (*failed) return NULL;
    /* Tables are made by functions of Python, meanwhile modules may be told to obey another one. */
    return (tepy_dispatcher *)Py_XNewRef(state->dispatcher);
}

int tepy_selection_in_force(tepy_state *state, PyObject **object, const te_selection **native)
{
    int failed;
    tepy_dispatcher *dispatcher = obeyed(state, &failed);
    PyObject *table, *entry = NULL;
    *object = NULL;
    *native = NULL;
    if (dispatcher == NULL) return failed ? -1 : 0;
    table = tepy_table_in_force(dispatcher, 0);
    Py_DECREF((PyObject *)dispatcher);
    if (table == NULL) return -1;
    if (PyTuple_Size(table) > 0) entry = PyTuple_GetItem(table, 0);
    if (entry != NULL && Py_TYPE(entry) == (PyTypeObject *)state->selection_type) {
        *object = Py_NewRef(entry);
        *native = &((const selection *)entry)->native;
    }
    Py_DECREF(table);
    return 0;
}

PyObject *tepy_obey(PyObject *module, PyObject *dispatcher)
{
    tepy_state *state = tepy_state_of(module);
    if (dispatcher != Py_None && Py_TYPE(dispatcher) != (PyTypeObject *)state->dispatcher_type)
        return TEPY_EXPECTED((tepy_site){"obey", "dispatcher"}, "a Dispatcher or None", dispatcher);
    state->found_dispatcher = 0;
    state->told_dispatcher++;
    tepy_set(&state->dispatcher, dispatcher == Py_None ? NULL : Py_NewRef(dispatcher));
    return Py_NewRef(Py_None);
}

PyObject *tepy_find_selections(PyObject *module, PyObject *find)
{
    tepy_state *state = tepy_state_of(module);
    if (tepy_require_callable(find, (tepy_site){"find_selections", "find"}) != 0) return NULL;
    tepy_set(&state->find_dispatcher, Py_NewRef(find));
    return Py_NewRef(Py_None);
}

PyObject *tepy_selected(PyObject *module, PyObject *unused)
{
    int failed;
    tepy_dispatcher *dispatcher = obeyed(tepy_state_of(module), &failed);
    PyObject *scope;
    if (dispatcher == NULL) return failed ? NULL : Py_NewRef(Py_None);
    scope = tepy_scope_of_table(dispatcher, NULL);
    Py_DECREF((PyObject *)dispatcher);
    return scope;
}

PyObject *tepy_unselected(PyObject *module, PyObject *unused)
{
    tepy_dispatcher *dispatcher = (tepy_dispatcher *)tepy_state_of(module)->dispatcher;
    PyObject *table, *scope;
    if (dispatcher == NULL || tepy_obeys_nobody(dispatcher)) return Py_NewRef(Py_None);
    table = PyTuple_Pack(1, Py_None);
    scope = table == NULL ? NULL : tepy_scope_of_table(dispatcher, table);
    Py_XDECREF(table);
    return scope;
}

PyObject *tepy_selection_number(PyObject *module, PyObject *unused)
{
    const te_selection *native;
    PyObject *object;
    int64_t number;
    if (tepy_selection_in_force(tepy_state_of(module), &object, &native) != 0) return NULL;
    number = native == NULL ? 0 : native->number;
    Py_XDECREF(object);
    return PyLong_FromLongLong(number);
}

PyObject *tepy_selected_function(PyObject *module, PyObject *name)
{
    const te_selection *native;
    PyObject *object, *found;
    if (tepy_selection_in_force(tepy_state_of(module), &object, &native) != 0) return NULL;
    if (object == NULL) return Py_NewRef(Py_None);
    found = PyDict_GetItemWithError(((const selection *)object)->others, name);
    if (found == NULL && !PyErr_Occurred()) found = Py_None;
    Py_XINCREF(found);
    Py_DECREF(object);
    return found;
}
