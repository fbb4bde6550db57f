/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch_py.h - operators whose implementations are chosen from Python: what their calls and the
 * scopes of threads share.
 */
#ifndef TE_PYTHON_DISPATCH_PY_H
#define TE_PYTHON_DISPATCH_PY_H

#include "transformer_engine_plugin.h"

#include "python/state.h"
#include "python/vectorcall.h"

typedef struct tepy_dispatcher {
    PyObject_HEAD PyObject *resolve; /* resolve(policy or None): the table */
    PyObject *refuse;                /* refuse(name, asked): raises */
    PyObject *describe;              /* describe(name): a function with its signature; or NULL */
    PyObject *table;                 /* NULL: to be made at the next call */
    unsigned long long version;      /* of what tables are made of */
    tepy_state *state;
    PyObject *module; /* keeps the state */
} tepy_dispatcher;

#define TEPY_FREE(self) ((freefunc)PyType_GetSlot(Py_TYPE(self), Py_tp_free))(self)
#define TEPY_ALLOCATE(type) ((allocfunc)PyType_GetSlot((type), Py_tp_alloc))((type), 0)
/* The member by which objects of a struct are called, which has it as `call`. */
#define TEPY_CALL_MEMBER(type)                                                                     \
    {                                                                                              \
        "__vectorcalloffset__", T_PYSSIZET, offsetof(type, call), READONLY, NULL                   \
    }

/* The end of a dealloc: drops the memory of an untracked instance of a heap type, and its reference
 * to that. */
static inline void tepy_dispose(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    TEPY_FREE(object);
    Py_DECREF(type);
}

/* clang-format off */
/* Slots of the type of such objects that have no other members. */
#define TEPY_CALLED(type)                                                                          \
    {Py_tp_call, PyVectorcall_Call},                                                               \
    {Py_tp_members, (PyMemberDef[]){TEPY_CALL_MEMBER(type), {NULL, 0, 0, 0, NULL}}}
#define TEPY_VISIT(member) Py_VISIT(self->member);
#define TEPY_DROP(member) Py_XDECREF((PyObject *)self->member);
/* NAME_traverse and NAME_dealloc of objects of a struct that holds references in the members that
 * HELD(X) lists, of which some may be NULL. */
#define TEPY_HOLDER(name, kind, HELD)                                                              \
    static int name##_traverse(PyObject *object, visitproc visit, void *arg)                       \
    {                                                                                              \
        const kind *self = (const kind *)object;                                                   \
        Py_VISIT(Py_TYPE(object));                                                                 \
        HELD(TEPY_VISIT)                                                                           \
        return 0;                                                                                  \
    }                                                                                              \
    static void name##_dealloc(PyObject *object)                                                   \
    {                                                                                              \
        const kind *self = (const kind *)object;                                                   \
        PyObject_GC_UnTrack(object);                                                               \
        HELD(TEPY_DROP)                                                                            \
        tepy_dispose(object);                                                                      \
    }
/* clang-format on */

/* Defines a function that makes the type TITLE, which has OWN_traverse, OWN_dealloc and the slots
 * that are given; new reference. */
#define TEPY_TYPE(function, own, kind, title, more, ...)                                           \
    function(PyObject *module)                                                                     \
    {                                                                                              \
        PyType_Slot slots[] = {{Py_tp_traverse, own##_traverse},                                   \
                               {Py_tp_dealloc, own##_dealloc},                                     \
                               __VA_ARGS__,                                                        \
                               {0, NULL}};                                                         \
        PyType_Spec spec = {                                                                       \
            .name = "transformer_engine._core." title,                                             \
            .basicsize = sizeof(kind),                                                             \
            .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | (more),  \
            .slots = slots,                                                                        \
        };                                                                                         \
        return PyType_FromModuleAndSpec(module, &spec, NULL);                                      \
    }

/* Create types; new references. */
PyObject *tepy_predicate_make_type(PyObject *module);
PyObject *tepy_leaving_make_type(PyObject *module);
PyObject *tepy_entering_make_type(PyObject *module);
PyObject *tepy_scope_make_type(PyObject *module);
PyObject *tepy_selection_make_type(PyObject *module);
PyObject *tepy_native_slot_make_type(PyObject *module);

/* ---- predicate_py.c ---- */

/* Whether a Predicate says that a call is taken: 1, 0, or -1 with an exception. *reason, owned or
 * NULL, becomes what it says against a call that is not. */
int tepy_predicate_takes(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names,
                         PyObject **reason);
/* The same of what a `supports` has returned, which is stolen; NULL where it has raised. A text is
 * a reason against the call. */
int tepy_predicate_read(PyObject *answer, PyObject **reason);

/* ---- scope_py.c ---- */

/* New reference to the table that the calls of this thread read. One that is kept and has no such
 * place is older than the operator, which goes by what is in force outside. */
PyObject *tepy_table_in_force(tepy_dispatcher *dispatcher, Py_ssize_t place);
/* Whether this thread is in a scope in which runs of plans obey nobody: the innermost one. */
int tepy_obeys_nobody(const tepy_dispatcher *dispatcher);
/* -1 with an exception where a tuple, or an entry of a table that is one, has another item than
 * Implementations. */
int tepy_check_implementations(const tepy_state *state, PyObject *entry, tepy_site site);
int tepy_check_table(const tepy_dispatcher *dispatcher, PyObject *table, tepy_site site);
/* New reference: a Scope of a table; NULL: of the one in force for this thread. */
PyObject *tepy_scope_of_table(tepy_dispatcher *dispatcher, PyObject *given);

/* ---- plugin_py.c ---- */

/* The slot of a NativeSlot of this module, which keeps it; NULL for other objects. */
const te_plugin_slot *tepy_native_slot(const tepy_state *state, PyObject *object);

/* ---- selection_py.c ---- */

/* What runs of plans of this thread ask first: a new reference that keeps *native, or NULL; -1 with
 * an exception. */
int tepy_selection_in_force(tepy_state *state, PyObject **object, const te_selection **native);

#endif
