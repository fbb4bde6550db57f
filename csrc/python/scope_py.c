/* SPDX-License-Identifier: Apache-2.0
 *
 * scope_py.c - which table is in force for a thread.
 *
 * A Scope puts a policy, or a table that was in force once, in the place of a dispatcher's own for
 * one thread: what is in force there is a list of frames in memory of the thread, which a call
 * reads without a lock.
 */
#include "python/dispatch_py.h"

#include <stdlib.h>

#include "python/args.h"

typedef struct scope {
    PyObject_HEAD PyObject *policy; /* None: none was in force */
    PyObject *of, *table; /* a dispatcher's table of then; NULL: whatever the policy says */
    PyObject *label;      /* NULL: not made yet */
    tepy_state *state;
    PyObject *module;
} scope;

/* What is in force for a thread, innermost first. */
struct tepy_frame {
    PyObject *owner; /* the Scope */
    PyObject *table; /* of `met`; NULL: not made yet */
    PyObject *met;   /* the dispatcher that asked last */
    unsigned long long version;
    tepy_frame *outer;
    tepy_frame *next, **link; /* in the list of all threads; what points to this one */
};

static tepy_frame *innermost(const tepy_state *state)
{
    return state->frames == NULL ? NULL : PyThread_tss_get(state->frames);
}

static void release(tepy_frame *frame)
{
    Py_DECREF(frame->owner);
    Py_XDECREF(frame->table);
    Py_XDECREF(frame->met);
    free(frame);
}

/* A frame that its thread has no more. */
static void drop(tepy_frame *frame)
{
    *frame->link = frame->next;
    if (frame->next != NULL) frame->next->link = frame->link;
    release(frame);
}

int tepy_scopes_visit(tepy_state *state, visitproc visit, void *arg)
{
    for (tepy_frame *frame = state->entered; frame != NULL; frame = frame->next) {
        Py_VISIT(frame->owner);
        Py_VISIT(frame->table);
        Py_VISIT(frame->met);
    }
    return 0;
}

void tepy_scopes_clear(tepy_state *state)
{
    tepy_frame *frame = state->entered;
    if (state->frames != NULL) PyThread_tss_free(state->frames);
    state->frames = NULL; /* no thread is in a scope, leaves or enters one */
    state->entered = NULL;
    while (frame != NULL) {
        tepy_frame *next = frame->next;
        release(frame);
        frame = next;
    }
}

/* ---- tables in force ---------------------------------------------------------------------- */

int tepy_check_implementations(const tepy_state *state, PyObject *entry, tepy_site site)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(entry); i++) {
        PyObject *item = PyTuple_GetItem(entry, i);
        if (Py_TYPE(item) != (PyTypeObject *)state->implementation_type)
            return tepy_expected(site, "Implementations", item);
    }
    return 0;
}

int tepy_check_table(const tepy_dispatcher *self, PyObject *table, tepy_site site)
{
    for (Py_ssize_t place = 0; place < PyTuple_Size(table); place++) {
        PyObject *entry = PyTuple_GetItem(table, place);
        if (PyTuple_Check(entry) && tepy_check_implementations(self->state, entry, site) != 0)
            return -1;
    }
    return 0;
}

/* New reference: what a dispatcher's function makes of a policy. */
static PyObject *make_table(const tepy_dispatcher *self, PyObject *policy)
{
    PyObject *table = PyObject_CallFunctionObjArgs(self->resolve, policy, NULL);
    const tepy_site site = {"Dispatcher", "resolve"};
    if (table == NULL) return NULL;
    if (!PyTuple_Check(table)) {
        (void)tepy_expected(site, "a tuple from it", table);
    } else if (tepy_check_table(self, table, site) == 0) {
        return table;
    }
    Py_DECREF(table);
    return NULL;
}

/* Whether the thread is still in a scope by this frame; the memory of one that was left may have
 * become that of another scope's. */
static int is_entered(const tepy_state *state, const tepy_frame *frame, const PyObject *owner)
{
    const tepy_frame *each = innermost(state);
    while (each != NULL && each != frame) each = each->outer;
    return each != NULL && each->owner == owner;
}

/* New reference to the table of a frame's policy; it stays with the frame. What is asked while it
 * is made may leave the scope (a generator that holds it goes on), and the frame is gone. */
static PyObject *table_of_frame(tepy_dispatcher *self, tepy_frame *frame)
{
    const unsigned long long version = self->version;
    PyObject *table, *owner;
    if (frame->table != NULL && frame->met == (PyObject *)self && frame->version == version) {
        return Py_NewRef(frame->table);
    }
    owner = Py_NewRef(frame->owner);
    table = make_table(self, ((scope *)owner)->policy);
    if (table != NULL && is_entered(self->state, frame, owner)) {
        PyObject *former = frame->table, *met = frame->met;
        frame->table = Py_NewRef(table);
        frame->met = Py_NewRef((PyObject *)self);
        frame->version = version;
        Py_XDECREF(former); /* from here on the frame may be gone, too */
        Py_XDECREF(met);
    }
    Py_DECREF(owner);
    return table;
}

PyObject *tepy_table_in_force(tepy_dispatcher *self, Py_ssize_t place)
{
    unsigned long long version;
    PyObject *table;
    for (tepy_frame *frame = innermost(self->state); frame != NULL; frame = frame->outer) {
        const scope *owner = (const scope *)frame->owner;
        const int mine = owner->of == (PyObject *)self;
        if (mine && place < PyTuple_Size(owner->table)) return Py_NewRef(owner->table);
        if (owner->policy != Py_None) return table_of_frame(self, frame);
        if (mine) break; /* an operator that came later, and no policy was in force */
    }
    if (self->table != NULL) return Py_NewRef(self->table);
    version = self->version;
    table = make_table(self, Py_None);
    if (table == NULL) return NULL;
    if (self->version == version && self->table == NULL) /* what it is made of has not changed */
        self->table = Py_NewRef(table);
    return table;
}

int tepy_obeys_nobody(const tepy_dispatcher *self)
{
    const tepy_frame *frame = innermost(self->state);
    const scope *owner = frame == NULL ? NULL : (const scope *)frame->owner;
    if (owner == NULL || owner->of != (const PyObject *)self) return 0;
    return PyTuple_Size(owner->table) > 0 && PyTuple_GetItem(owner->table, 0) == Py_None;
}

/* ---- scopes ------------------------------------------------------------------------------- */

#define HELD(X) X(policy) X(of) X(table) X(label) X(module)
TEPY_HOLDER(scope, scope, HELD)
#undef HELD

static PyObject *scope_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"policy", NULL};
    PyObject *policy, *module = PyType_GetModule(type);
    scope *self;
    if (module == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, "O:Scope", names, &policy)) {
        return NULL;
    }
    self = (scope *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->policy = Py_NewRef(policy);
    self->state = tepy_state_of(module);
    self->module = Py_NewRef(module);
    return (PyObject *)self;
}

/* Tells graphs which scope a thread is in: they have the label among their conditions. */
static int show_label(const tepy_state *state, PyObject *labels)
{
    const tepy_frame *frame = innermost(state);
    PyObject *label = NULL;
    int result;
    if (labels == NULL) return 0;
    if (frame == NULL) {
        label = PyUnicode_FromString("");
    } else {
        scope *self = (scope *)Py_NewRef(frame->owner);
        if (self->label == NULL && self->table != NULL)
            self->label = PyUnicode_FromFormat("table %p", (void *)self->table);
        else if (self->label == NULL) /* another thread may have made it meanwhile */
            tepy_set(&self->label, PyObject_Repr(self->policy));
        label = Py_XNewRef(self->label);
        Py_DECREF((PyObject *)self);
    }
    if (label == NULL) return -1;
    result = PyObject_SetAttrString(labels, "scope", label);
    Py_DECREF(label);
    return result;
}

PyObject *tepy_label_scopes(PyObject *module, PyObject *labels)
{
    tepy_state *state = tepy_state_of(module);
    if (show_label(state, labels) != 0) {
        (void)tepy_fail_from_current(PyExc_TypeError, (tepy_site){"label_scopes", "labels"},
                                     "expected an object that takes an attribute");
        return NULL;
    }
    tepy_set(&state->labels, Py_NewRef(labels));
    return Py_NewRef(Py_None);
}

static PyObject *scope_enter(PyObject *object, PyObject *unused)
{
    const scope *self = (const scope *)object;
    tepy_state *state = self->state;
    tepy_frame *frame;
    if (state->frames == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "__enter__: the module is being finalized");
        return NULL;
    }
    frame = calloc(1, sizeof *frame);
    if (frame == NULL) return PyErr_NoMemory();
    frame->outer = innermost(state);
    if (PyThread_tss_set(state->frames, frame) != 0) {
        free(frame);
        return PyErr_NoMemory();
    }
    frame->owner = Py_NewRef(object);
    frame->link = &state->entered;
    frame->next = state->entered;
    if (frame->next != NULL) frame->next->link = &frame->next;
    state->entered = frame;
    if (show_label(state, state->labels) == 0) return Py_NewRef(self->policy);
    (void)PyThread_tss_set(state->frames, frame->outer); /* nobody is going to leave it */
    drop(frame);
    return NULL;
}

static PyObject *scope_exit(PyObject *object, PyObject *args)
{
    const scope *self = (const scope *)object;
    tepy_frame *frame = innermost(self->state);
    if (frame == NULL || frame->owner != object) {
        PyErr_SetString(PyExc_RuntimeError,
                        "__exit__: the scope is not the innermost one of this thread: leave scopes "
                        "where they were entered, in the opposite order");
        return NULL;
    }
    (void)PyThread_tss_set(self->state->frames, frame->outer);
    drop(frame);
    return show_label(self->state, self->state->labels) != 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *scope_selection(PyObject *object, void *unused)
{
    const scope *self = (scope *)object;
    if (self->table == NULL || PyTuple_Size(self->table) == 0) return Py_NewRef(Py_None);
    return Py_NewRef(PyTuple_GetItem(self->table, 0));
}

static PyObject *scope_in_force(PyObject *object, void *unused)
{
    const scope *self = (scope *)object;
    PyObject *table;
    int same;
    (void)unused;
    if (self->table == NULL) return PyBool_FromLong(0);
    table = tepy_table_in_force((tepy_dispatcher *)self->of, 0);
    if (table == NULL) return NULL;
    same = table == self->table;
    Py_DECREF(table);
    return PyBool_FromLong(same);
}

static PyMethodDef scope_methods[] = {
    {"__enter__", scope_enter, METH_NOARGS, "__enter__($self, /)\n--\n\n"},
    {"__exit__", scope_exit, METH_VARARGS, "__exit__($self, /, *error)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef scope_members[] = {
    {"policy", T_OBJECT, offsetof(scope, policy), READONLY, "The policy that it puts in force."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef scope_getset[] = {
    {"selection", scope_selection, NULL, "The Selection of a table that it keeps, or None.", NULL},
    {"in_force", scope_in_force, NULL, "Whether the table that it keeps is in force anyway.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

TEPY_TYPE(scope, scope, scope, "Scope", 0, {Py_tp_doc, "Scope(policy)\n--\n\n"},
          {Py_tp_new, scope_new}, {Py_tp_methods, scope_methods}, {Py_tp_members, scope_members},
          {Py_tp_getset, scope_getset})

PyObject *tepy_scope_of_table(tepy_dispatcher *dispatcher, PyObject *given)
{
    tepy_state *state = dispatcher->state;
    PyObject *table = given != NULL ? Py_NewRef(given) : tepy_table_in_force(dispatcher, 0);
    const tepy_frame *frame = innermost(state);
    scope *made;
    if (table == NULL) return NULL;
    made = (scope *)TEPY_ALLOCATE((PyTypeObject *)state->scope_type);
    if (made == NULL) {
        Py_DECREF(table);
        return NULL;
    }
    made->policy = Py_NewRef(frame == NULL ? Py_None : ((scope *)frame->owner)->policy);
    made->of = Py_NewRef((PyObject *)dispatcher);
    made->table = table;
    made->state = state;
    made->module = Py_NewRef(dispatcher->module);
    return (PyObject *)made;
}

PyObject *tepy_policy_in_force(PyObject *module, PyObject *unused)
{
    const tepy_frame *frame = innermost(tepy_state_of(module));
    return Py_NewRef(frame == NULL ? Py_None : ((scope *)frame->owner)->policy);
}
