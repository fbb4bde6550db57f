/* SPDX-License-Identifier: Apache-2.0
 *
 * types.h - what the types of the module are made with; objects that are called without a tuple and
 * a dict for each call.
 */
#ifndef TE_PYTHON_TYPES_H
#define TE_PYTHON_TYPES_H

#include "python/state.h"

#include <stddef.h>
#include <structmember.h>

/* In the limited API from 3.12 on, and in every interpreter from 3.9 on. */
#if Py_LIMITED_API + 0 < 0x030c0000
typedef PyObject *(*vectorcallfunc)(PyObject *, PyObject *const *, size_t, PyObject *);
/* lint: allow(PyObject_Vectorcall) */
PyAPI_FUNC(PyObject *)
    PyObject_Vectorcall(PyObject *, PyObject *const *args, size_t nargsf, PyObject *names);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *callable, PyObject *tuple, PyObject *dict);
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#endif

/* How many of the arguments of a vectorcall are positional: in the limited API from 3.12 on. */
static inline Py_ssize_t tepy_positional(size_t nargsf)
{
    return (Py_ssize_t)(nargsf & ~((size_t)1 << (8 * sizeof(size_t) - 1)));
}

/* New reference: what a call returns whose arguments are given as they came. */
static inline PyObject *tepy_call_vector(PyObject *function, PyObject *const *args, size_t nargsf,
                                         PyObject *names)
{
    /* lint: allow(PyObject_Vectorcall) a tuple and a dict for each call take twice the time */
    return PyObject_Vectorcall(function, args, nargsf, names);
}

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
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* clang-format off */
/* Slots of the type of such objects that have no other members. */
#define TEPY_CALLED(type)                                                                          \
    {Py_tp_call, PyVectorcall_Call},                                                               \
    {Py_tp_members, (PyMemberDef[]){TEPY_CALL_MEMBER(type), {NULL, 0, 0, 0, NULL}}}
#define TEPY_VISIT(member) Py_VISIT(self->member);
#define TEPY_DROP(member) Py_XDECREF((PyObject *)self->member);
#define TEPY_NOTHING(X)
/* NAME_traverse and NAME_dealloc of objects of a struct that holds references in the members that
 * HELD(X) lists, of which some may be NULL. What is given behind that releases the rest. */
#define TEPY_HOLDER(name, kind, HELD, ...)                                                         \
    static int name##_traverse(PyObject *object, visitproc visit, void *arg)                       \
    {                                                                                              \
        const kind *self = (const kind *)object;                                                   \
        (void)self;                                                                                \
        Py_VISIT(Py_TYPE(object));                                                                 \
        HELD(TEPY_VISIT)                                                                           \
        return 0;                                                                                  \
    }                                                                                              \
    static void name##_dealloc(PyObject *object)                                                   \
    {                                                                                              \
        const kind *self = (const kind *)object;                                                   \
        PyObject_GC_UnTrack(object);                                                               \
        (void)self;                                                                                \
        __VA_ARGS__;                                                                               \
        HELD(TEPY_DROP)                                                                            \
        tepy_dispose(object);                                                                      \
    }
/* clang-format on */

/* Defines tepy_make_<type>_type, which makes the type TITLE with OWN_traverse, OWN_dealloc and the
 * slots that are given. */
#define TEPY_TYPE(type, own, kind, title, more, ...)                                               \
    PyObject *tepy_make_##type##_type(PyObject *module)                                            \
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

#endif
