/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_py.c - operators whose implementations are chosen beforehand: a call loads the table in
 * force and calls what is there.
 *
 * A Dispatcher has one table, a tuple that nobody changes, with a tuple of Implementations for each
 * of its operators in the order in which they are tried. It is made by a Python function whenever
 * policies or registrations change, and never during a call.
 */
#include "python/dispatch_py.h"

#include "python/args.h"

typedef struct implementation {
    PyObject_HEAD PyObject *op, *impl_id, *function;
    PyObject *supports; /* NULL: it takes every call */
    PyObject *reason;   /* why it did not take the last call that it did not take, or NULL */
    tepy_state *state;
    int is_predicate;         /* a Predicate, which is asked without a call */
    unsigned long long calls; /* how many */
    unsigned long long told;  /* `state->published` when its use was logged */
} implementation;

typedef struct operator_object {
    PyObject_HEAD vectorcallfunc call;
    PyObject *name;
    tepy_dispatcher *dispatcher;
    Py_ssize_t index;
} operator_object;

/* ---- implementations ---------------------------------------------------------------------- */

#define HELD(X) X(op) X(impl_id) X(reason) X(function) X(supports)
TEPY_HOLDER(implementation, implementation, HELD)
#undef HELD

static int implementation_clear(PyObject *object)
{
    implementation *self = (implementation *)object;
    Py_CLEAR(self->function);
    Py_CLEAR(self->supports);
    return 0;
}

static PyObject *implementation_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", "impl_id", "function", "supports", NULL};
    PyObject *op, *impl_id, *function, *supports = Py_None, *module = PyType_GetModule(type);
    implementation *self;
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "UUO|O:Implementation", names, &op, &impl_id,
                                     &function, &supports) ||
        tepy_require_callable(function, (tepy_site){"Implementation", "function"}) != 0 ||
        tepy_optional_callable(supports, (tepy_site){"Implementation", "supports"}) != 0) {
        return NULL;
    }
    self = (implementation *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->op = Py_NewRef(op);
    self->impl_id = Py_NewRef(impl_id);
    self->function = Py_NewRef(function);
    self->supports = supports == Py_None ? NULL : Py_NewRef(supports);
    self->state = tepy_state_of(module);
    self->is_predicate = (PyObject *)Py_TYPE(supports) == self->state->predicate_type;
    return (PyObject *)self;
}

#define AT(field) offsetof(implementation, field), READONLY
static PyMemberDef implementation_members[] = {
    {"op", T_OBJECT, AT(op), "Name of the operator."},
    {"impl_id", T_OBJECT, AT(impl_id), "Its own name."},
    {"function", T_OBJECT, AT(function), "The implementation that is called."},
    {"calls", T_ULONGLONG, AT(calls), "How often it was."},
    {"reason", T_OBJECT, AT(reason), "Why it did not take the last call that it did not take."},
    {NULL, 0, 0, 0, NULL},
};
#undef AT

TEPY_TYPE(implementation, implementation, implementation, "Implementation", 0,
          {Py_tp_doc, "Implementation(op, impl_id, function, supports=None)\n--\n\n"},
          {Py_tp_new, implementation_new}, {Py_tp_clear, implementation_clear},
          {Py_tp_members, implementation_members})

/* ---- calls -------------------------------------------------------------------------------- */

/* New reference: whose call it was, and of what arguments; NULL with an exception. */
static PyObject *describe(const implementation *from, PyObject *const *args, size_t nargsf,
                          PyObject *names)
{
    const Py_ssize_t count = tepy_positional(nargsf);
    PyObject *module = PyImport_ImportModule("transformer_engine.plugin.core.failures");
    PyObject *given = PyTuple_New(count), *named = PyDict_New(), *note = NULL;
    if (module == NULL || given == NULL || named == NULL) goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyTuple_SetItem(given, i, Py_NewRef(args[i])) != 0) goto done;
    }
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_Size(names); i++) {
        if (PyDict_SetItem(named, PyTuple_GetItem(names, i), args[count + i]) != 0) goto done;
    }
    note = PyObject_CallMethod(module, "described", "OOOOO", from->op, from->impl_id,
                               from->function, given, named);
done:
    Py_XDECREF(module);
    Py_XDECREF(given);
    Py_XDECREF(named);
    return note;
}

/* Lets an error that an implementation raised say whose it is, and of what call. */
static void add_note(const implementation *from, PyObject *const *args, size_t nargsf,
                     PyObject *names)
{
    PyObject *error = tepy_take_error();
    tepy_set_error_noted(error, describe(from, args, nargsf, names));
}

/* Whether an implementation takes a call: 1, 0, or -1 with an exception. */
static int takes(implementation *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    int result;
    if (self->supports == NULL) return 1;
    if (self->is_predicate) {
        result = tepy_predicate_takes(self->supports, args, nargsf, names, &self->reason);
    } else {
        PyObject *answer = tepy_call_vector(self->supports, args, nargsf, names);
        result = tepy_predicate_read(answer, &self->reason);
    }
    if (result < 0) add_note(self, args, nargsf, names);
    return result;
}

/* Logs that an implementation is used, the first time after a change of what is in force. */
static int log_use(implementation *self)
{
    PyObject *module = PyImport_ImportModule("transformer_engine.plugin.core.logger_manager");
    PyObject *done = NULL;
    self->told = self->state->published;
    if (module != NULL)
        done = PyObject_CallMethod(module, "log_use", "OO", self->op, self->impl_id);
    Py_XDECREF(module);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* What the first candidate that takes a call returns; where none does `refuse` raises, or without
 * one it is NotImplemented. `keywords` says of each whether it gets the call's; NULL: all do. */
static PyObject *call_first(PyObject *name, PyObject *candidates, PyObject *keywords,
                            PyObject *refuse, PyObject *const *args, size_t nargsf, PyObject *names)
{
    const Py_ssize_t count = PyTuple_Size(candidates);
    PyObject *result;
    for (Py_ssize_t i = 0; i < count; i++) {
        implementation *found = (implementation *)PyTuple_GetItem(candidates, i);
        const int all = keywords == NULL || PyTuple_GetItem(keywords, i) == Py_True;
        PyObject *own_names = all ? names : NULL;
        const int fits = takes(found, args, nargsf, keywords == NULL ? names : NULL);
        if (fits < 0) return NULL;
        if (fits == 0) continue;
        if (found->told != found->state->published && log_use(found) != 0) return NULL;
        found->calls++;
        result = tepy_call_vector(found->function, args, nargsf, own_names);
        if (result == Py_NotImplemented) { /* it would read as that nobody has begun */
            Py_CLEAR(result);
            PyErr_Format(PyExc_TypeError,
                         "%U: %U returned NotImplemented: which calls it takes `supports` says",
                         name, found->impl_id);
        }
        if (result == NULL) add_note(found, args, nargsf, own_names);
        return result;
    }
    if (refuse == NULL) return Py_NewRef(Py_NotImplemented);
    result = PyObject_CallFunctionObjArgs(refuse, name, candidates, NULL);
    if (result != NULL) {
        Py_DECREF(result);
        PyErr_Format(PyExc_SystemError,
                     "%U: no implementation was called, and the handler of that raised nothing",
                     name);
    }
    return NULL;
}

static PyObject *operator_vectorcall(PyObject *object, PyObject *const *args, size_t nargsf,
                                     PyObject *names)
{
    const operator_object *self = (const operator_object *)object;
    PyObject *table = tepy_table_in_force(self->dispatcher, self->index), *candidates, *result;
    if (table == NULL) return NULL;
    candidates = self->index < PyTuple_Size(table) ? PyTuple_GetItem(table, self->index) : NULL;
    Py_XINCREF(candidates); /* what is called may publish another table */
    Py_DECREF(table);
    if (candidates == NULL || !PyTuple_Check(candidates)) {
        Py_XDECREF(candidates);
        candidates = PyTuple_New(0);
        if (candidates == NULL) return NULL;
    }
    result =
        call_first(self->name, candidates, NULL, self->dispatcher->refuse, args, nargsf, names);
    Py_DECREF(candidates);
    return result;
}

#define HELD(X) X(dispatcher) X(name)
TEPY_HOLDER(operator, operator_object, HELD)
#undef HELD

static PyObject *operator_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<operator %U>", ((operator_object *)object)->name);
}

/* New reference to the function that says what the operator's arguments are, or to an attribute of
 * it; AttributeError where there is none. */
static PyObject *operator_described(PyObject *object, void *attribute)
{
    const operator_object *self = (operator_object *)object;
    PyObject *found, *value, *describe = self->dispatcher->describe;
    if (describe == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "this manager has no description of the operator's arguments");
        return NULL;
    }
    found = PyObject_CallFunctionObjArgs(describe, self->name, NULL);
    if (found == NULL || attribute == NULL) return found;
    value = PyObject_GetAttrString(found, attribute);
    Py_DECREF(found);
    return value;
}

/* A copy is the operator itself, as it is of a function; `unused` is what deepcopy remembers. */
static PyObject *operator_copy(PyObject *object, PyObject *unused)
{
    return Py_NewRef(object);
}

static PyMethodDef operator_methods[] = {
    {"__copy__", operator_copy, METH_NOARGS, "The operator itself."},
    {"__deepcopy__", operator_copy, METH_O, "The operator itself."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef operator_members[] = {
    TEPY_CALL_MEMBER(operator_object),
    {"__name__", T_OBJECT, offsetof(operator_object, name), READONLY, "Name of the operator."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef operator_getset[] = {
    {"__wrapped__", operator_described, NULL, "The function that has its signature.", NULL},
    {"__doc__", operator_described, NULL, "Its description.", "__doc__"},
    {NULL, NULL, NULL, NULL, NULL},
};

/* It is not cleared: the dispatcher breaks circles, and a call must find one. */
TEPY_TYPE(operator, operator, operator_object, "Operator",
          Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
          {Py_tp_call, PyVectorcall_Call}, {Py_tp_repr, operator_repr},
          {Py_tp_methods, operator_methods}, {Py_tp_members, operator_members},
          {Py_tp_getset, operator_getset})

/* ---- choices ------------------------------------------------------------------------------ */

/* Implementations of one operator in the order in which they are asked, whatever is in force when
 * they are. */
typedef struct choice {
    PyObject_HEAD vectorcallfunc call;
    PyObject *name, *implementations;
    PyObject *keywords; /* a tuple: whether each gets the keywords of a call; NULL: all do */
    PyObject *refuse;   /* NULL: NotImplemented is the answer */
} choice;

static PyObject *choice_vectorcall(PyObject *object, PyObject *const *args, size_t nargsf,
                                   PyObject *names)
{
    const choice *self = (const choice *)object;
    return call_first(self->name, self->implementations, self->keywords, self->refuse, args, nargsf,
                      names);
}

#define HELD(X) X(name) X(implementations) X(refuse) X(keywords)
TEPY_HOLDER(choice, choice, HELD)
#undef HELD

static PyObject *choice_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "implementations", "refuse", "keywords", NULL};
    PyObject *name, *implementations, *refuse = Py_None, *keywords = Py_None;
    PyObject *module = PyType_GetModule(type);
    const tepy_state *state;
    Py_ssize_t count;
    choice *self;
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "UO!|OO:Choice", names, &name, &PyTuple_Type,
                                     &implementations, &refuse, &keywords) ||
        tepy_optional_callable(refuse, (tepy_site){"Choice", "refuse"}) != 0) {
        return NULL;
    }
    state = tepy_state_of(module);
    count = PyTuple_Size(implementations);
    if (keywords != Py_None && (!PyTuple_Check(keywords) || PyTuple_Size(keywords) != count))
        return TEPY_FAIL(PyExc_TypeError, (tepy_site){"Choice", "keywords"},
                         "expected None or a tuple, one bool for each implementation");
    if (tepy_check_implementations(state, implementations,
                                   (tepy_site){"Choice", "implementations"}) != 0)
        return NULL;
    self = (choice *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->call = choice_vectorcall;
    self->name = Py_NewRef(name);
    self->implementations = Py_NewRef(implementations);
    self->refuse = refuse == Py_None ? NULL : Py_NewRef(refuse);
    self->keywords = keywords == Py_None ? NULL : Py_NewRef(keywords);
    return (PyObject *)self;
}

TEPY_TYPE(choice, choice, choice, "Choice", Py_TPFLAGS_HAVE_VECTORCALL,
          {Py_tp_doc, "Choice(name, implementations, refuse=None, keywords=None)\n--\n\n"},
          {Py_tp_new, choice_new}, TEPY_CALLED(choice))

/* ---- dispatchers -------------------------------------------------------------------------- */

#define HELD(X) X(table) X(resolve) X(refuse) X(describe) X(module)
TEPY_HOLDER(dispatcher, tepy_dispatcher, HELD)
#undef HELD

static int dispatcher_clear(PyObject *object)
{
    Py_CLEAR(((tepy_dispatcher *)object)->table); /* an operator may still call the rest */
    return 0;
}

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"resolve", "refuse", "describe", NULL};
    PyObject *resolve, *refuse, *describe = Py_None, *module = PyType_GetModule(type);
    tepy_dispatcher *self;
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:Dispatcher", names, &resolve, &refuse,
                                     &describe) ||
        tepy_require_callable(resolve, (tepy_site){"Dispatcher", "resolve"}) != 0 ||
        tepy_require_callable(refuse, (tepy_site){"Dispatcher", "refuse"}) != 0 ||
        tepy_optional_callable(describe, (tepy_site){"Dispatcher", "describe"}) != 0) {
        return NULL;
    }
    self = (tepy_dispatcher *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->resolve = Py_NewRef(resolve);
    self->refuse = Py_NewRef(refuse);
    self->describe = describe == Py_None ? NULL : Py_NewRef(describe);
    self->module = Py_NewRef(module);
    self->state = tepy_state_of(module);
    return (PyObject *)self;
}

static PyObject *dispatcher_publish(PyObject *object, PyObject *table)
{
    tepy_dispatcher *self = (tepy_dispatcher *)object;
    const tepy_site site = {"publish", "table"};
    if (table != Py_None && !PyTuple_Check(table))
        return TEPY_EXPECTED(site, "a tuple or None", table);
    if (table != Py_None && tepy_check_table(self, table, site) != 0) return NULL;
    self->version++;
    self->state->published++;
    tepy_set(&self->table, table == Py_None ? NULL : Py_NewRef(table));
    return Py_NewRef(Py_None);
}

static PyObject *dispatcher_table(PyObject *object, PyObject *unused)
{
    return tepy_table_in_force((tepy_dispatcher *)object, 0);
}

static PyObject *dispatcher_operator(PyObject *object, PyObject *args)
{
    tepy_dispatcher *self = (tepy_dispatcher *)object;
    PyObject *name;
    Py_ssize_t index;
    operator_object *made;
    if (!PyArg_ParseTuple(args, "nU:operator", &index, &name)) return NULL;
    if (index < 0)
        return PyErr_Format(PyExc_ValueError, "operator: index = %zd, expected 0 or more", index);
    made = (operator_object *)TEPY_ALLOCATE((PyTypeObject *)self->state->operator_type);
    if (made == NULL) return NULL;
    made->call = operator_vectorcall;
    made->name = Py_NewRef(name);
    made->dispatcher = (tepy_dispatcher *)Py_NewRef(object);
    made->index = index;
    return (PyObject *)made;
}

static PyObject *dispatcher_selection(PyObject *object, PyObject *unused)
{
    return tepy_scope_of_table((tepy_dispatcher *)object, NULL);
}

static PyMethodDef dispatcher_methods[] = {
    {"publish", dispatcher_publish, METH_O, "publish($self, table, /)\n--\n\n"},
    {"table", dispatcher_table, METH_NOARGS, "table($self, /)\n--\n\n"},
    {"operator", dispatcher_operator, METH_VARARGS, "operator($self, index, name, /)\n--\n\n"},
    {"selection", dispatcher_selection, METH_NOARGS, "selection($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

TEPY_TYPE(dispatcher, dispatcher, tepy_dispatcher, "Dispatcher", 0,
          {Py_tp_doc, "Dispatcher(resolve, refuse, describe=None)\n--\n\n"},
          {Py_tp_new, dispatcher_new}, {Py_tp_clear, dispatcher_clear},
          {Py_tp_methods, dispatcher_methods})
