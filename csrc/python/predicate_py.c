/* SPDX-License-Identifier: Apache-2.0
 *
 * predicate_py.c - whether an implementation takes a call, by dtype and device of the first tensor
 * that tells.
 *
 * A Predicate asks a Python function about each pair of dtype and device once, and remembers the
 * answers. Nearly all of the time that a remembered answer takes is torch's, to tell what the
 * tensor is: its dtype by the descriptor of that attribute, both by DLPack, which makes no object.
 */
#include "python/dispatch_py.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "python/args.h"

/* Pairs of dtype and device that are remembered; a later one takes the place of the oldest. */
#define REMEMBERED 8

typedef struct predicate {
    PyObject_HEAD vectorcallfunc call;
    PyObject *fits;     /* fits(dtype, device); None of a tensor that does not tell */
    PyObject *supports; /* asked about the arguments of each call that fits; NULL: nobody is */
    const tepy_state *state;
    PyObject *module; /* keeps the state */
    int by_device;    /* answers differ by device, too */
    uint64_t known[REMEMBERED];
    signed char answers[REMEMBERED];
    int count, next;
} predicate;

/* A pair as one number, which is never 0: dtypes have bits. */
static uint64_t key_of(const tepy_dl_tensor *tensor)
{
    const uint64_t dtype = (uint64_t)tensor->dtype.code << 24 | (uint64_t)tensor->dtype.bits << 16 |
                           tensor->dtype.lanes;
    return dtype << 32 | (uint64_t)((uint32_t)tensor->device.type & 0xffffU) << 16 |
           ((uint32_t)tensor->device.index & 0xffffU);
}

/* New reference to an attribute; NULL without an exception where the object has none. */
static PyObject *attribute_or_null(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return found;
}

/* By its attributes: 1 or 0, -1 with an exception, 2: it is no tensor, or none that tells. */
static int ask(const predicate *self, PyObject *object)
{
    PyObject *dtype = attribute_or_null(object, self->state->keys[TEPY_KEY_DTYPE]), *device = NULL,
             *answer;
    int result;
    if (dtype != NULL) device = attribute_or_null(object, self->state->keys[TEPY_KEY_DEVICE]);
    if (device == NULL) {
        Py_XDECREF(dtype);
        return PyErr_Occurred() ? -1 : 2;
    }
    answer = PyObject_CallFunctionObjArgs(self->fits, dtype, device, NULL);
    result = answer == Py_None ? 2 : answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    Py_DECREF(dtype);
    Py_DECREF(device);
    return result;
}

/* What answers are remembered by: of a pair as DLPack has it, or of a dtype alone, an object that
 * lives for ever. 0, or -1 with an exception. */
static int key_of_tensor(const predicate *self, PyObject *tensor, uint64_t *key)
{
    PyObject *getter = self->state->dtype_getter, *dtype;
    tepy_dl_tensor view;
    descrgetfunc get;
    if (self->by_device) {
        memset(&view, 0, sizeof view);
        if (self->state->exchange->view(tensor, &view) != 0) return -1;
        *key = key_of(&view);
        return 0;
    }
    get = (descrgetfunc)PyType_GetSlot(Py_TYPE(getter), Py_tp_descr_get);
    dtype = get == NULL ? PyObject_GetAttr(tensor, self->state->keys[TEPY_KEY_DTYPE])
                        : get(getter, tensor, (PyObject *)Py_TYPE(tensor));
    if (dtype == NULL) return -1;
    *key = (uint64_t)(uintptr_t)dtype;
    Py_DECREF(dtype);
    return 0;
}

/* The same of an object that is exactly a torch tensor. */
static int ask_once(predicate *self, PyObject *tensor)
{
    uint64_t key;
    int answer;
    if (key_of_tensor(self, tensor, &key) != 0) {
        PyErr_Clear(); /* it has no memory, or a layout of its own; it has a dtype all the same */
        return ask(self, tensor);
    }
    for (int i = 0; i < self->count; i++) {
        if (self->known[i] == key) return self->answers[i];
    }
    answer = ask(self, tensor);
    if (answer < 0) return answer;
    self->known[self->next] = key;
    self->answers[self->next] = (signed char)answer;
    self->next = (self->next + 1) % REMEMBERED;
    if (self->count < REMEMBERED) self->count++;
    return answer;
}

/* What operators get besides tensors, and what has no dtype for sure. */
static int is_plain(PyTypeObject *type)
{
    return type == Py_TYPE(Py_None) || type == &PyLong_Type || type == &PyBool_Type ||
           type == &PyFloat_Type || type == &PyUnicode_Type;
}

/* Lists in lists that are looked into; operators have two. */
#define DEPTH 4

/* Of a list or tuple the first item tells. Answers as of `ask`. */
static int ask_argument(predicate *self, PyObject *argument, int depth)
{
    const tepy_state *state = self->state;
    PyObject *type = (PyObject *)Py_TYPE(argument), *first;
    const int is_list = type == (PyObject *)&PyList_Type;
    int result;
    if ((type == state->tensor_type || type == state->parameter_type) && state->exchange != NULL)
        return ask_once(self, argument);
    if (is_plain((PyTypeObject *)type)) return 2;
    if (!is_list && type != (PyObject *)&PyTuple_Type) return ask(self, argument);
    if (depth == DEPTH || PyObject_Size(argument) < 1) return 2;
    first = Py_NewRef(is_list ? PyList_GetItem(argument, 0) : PyTuple_GetItem(argument, 0));
    result = ask_argument(self, first, depth + 1);
    Py_DECREF(first);
    return result;
}

int tepy_predicate_read(PyObject *answer, PyObject **reason)
{
    const int is_text = answer != NULL && PyUnicode_Check(answer);
    const int result = answer == NULL ? -1 : is_text ? 0 : PyObject_IsTrue(answer);
    if (result == 0 && (is_text || *reason != NULL))
        tepy_set(reason, is_text ? Py_NewRef(answer) : NULL);
    Py_XDECREF(answer);
    return result;
}

int tepy_predicate_takes(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names,
                         PyObject **reason)
{
    predicate *self = (predicate *)object;
    const Py_ssize_t count = tepy_positional(nargsf) + (names == NULL ? 0 : PyTuple_Size(names));
    int result = 2;
    for (Py_ssize_t i = 0; i < count && result == 2; i++) result = ask_argument(self, args[i], 0);
    if (result == 2) result = 1; /* nothing is against it */
    if (result == 0 && *reason != NULL) tepy_set(reason, NULL);
    if (result != 1 || self->supports == NULL) return result;
    return tepy_predicate_read(tepy_call_vector(self->supports, args, nargsf, names), reason);
}

static PyObject *predicate_vectorcall(PyObject *object, PyObject *const *args, size_t nargsf,
                                      PyObject *names)
{
    PyObject *reason = NULL;
    const int result = tepy_predicate_takes(object, args, nargsf, names, &reason);
    if (reason != NULL) return reason;
    return result < 0 ? NULL : PyBool_FromLong(result);
}

#define HELD(X) X(fits) X(supports) X(module)
TEPY_HOLDER(predicate, predicate, HELD)
#undef HELD

static PyObject *predicate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fits", "supports", "by_device", NULL};
    PyObject *fits, *supports = Py_None, *module = PyType_GetModule(type);
    int by_device = 1;
    predicate *self;
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O|Op:Predicate", names, &fits, &supports,
                                     &by_device) ||
        tepy_require_callable(fits, (tepy_site){"Predicate", "fits"}) != 0 ||
        tepy_optional_callable(supports, (tepy_site){"Predicate", "supports"}) != 0) {
        return NULL;
    }
    self = (predicate *)TEPY_ALLOCATE(type);
    if (self == NULL) return NULL;
    self->call = predicate_vectorcall;
    self->by_device = by_device;
    self->fits = Py_NewRef(fits);
    self->supports = supports == Py_None ? NULL : Py_NewRef(supports);
    self->state = tepy_state_of(module);
    self->module = Py_NewRef(module);
    return (PyObject *)self;
}

TEPY_TYPE(predicate, predicate, predicate, "Predicate", Py_TPFLAGS_HAVE_VECTORCALL,
          {Py_tp_doc, "Predicate(fits, supports=None, by_device=True)\n--\n\n"},
          {Py_tp_new, predicate_new}, TEPY_CALLED(predicate))
