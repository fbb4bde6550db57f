/* SPDX-License-Identifier: Apache-2.0
 *
 * xla_py.c - what a front end over XLA takes from the module: the custom calls as capsules, and the
 * workspace of an operator whose tensors are not there yet.
 */
#include <string.h>

#include "python/args.h"
#include "xla/handlers.h"

/* ---- custom calls ---- */

typedef struct handler {
    const char *target, *platform;
    te_xla_handler function;
} handler;

/* Adds {platform: capsule} of a handler to the dict of its target. */
static int add_handler(PyObject *targets, const handler *of)
{
    PyObject *target = PyUnicode_FromString(of->target), *platforms = NULL, *capsule = NULL;
    void *address = NULL;
    int result = -1;
    memcpy(&address, &of->function, sizeof address); /* ISO C has no such cast */
    if (target == NULL) return -1;
    platforms = PyDict_GetItemWithError(targets, target); /* borrowed */
    Py_XINCREF(platforms);
    if (platforms == NULL && !PyErr_Occurred()) {
        platforms = PyDict_New();
        if (platforms != NULL && PyDict_SetItem(targets, target, platforms) != 0) goto done;
    }
    if (platforms == NULL) goto done;
    capsule = PyCapsule_New(address, "xla._CUSTOM_CALL_TARGET", NULL);
    if (capsule != NULL) result = PyDict_SetItemString(platforms, of->platform, capsule);
done:
    Py_XDECREF(capsule);
    Py_XDECREF(platforms);
    Py_DECREF(target);
    return result;
}

PyObject *tepy_xla_handlers(PyObject *module, PyObject *unused)
{
    static const handler handlers[] = {
#define X(name, platform, type) {"te_" #name, #platform, te_xla_##name##_##platform},
        TE_XLA_HANDLERS(X)
#undef X
    };
    PyObject *targets = PyDict_New();
    for (size_t i = 0; targets != NULL && i < sizeof handlers / sizeof *handlers; i++) {
        if (add_handler(targets, &handlers[i]) != 0) Py_CLEAR(targets);
    }
    return targets;
}

/* ---- workspaces ---- */

/* Stand-in address while only sizes are asked: aligned as XLA aligns. */
#define ANY_ADDRESS ((void *)(uintptr_t)0x10000)

/* A dense tensor of a dtype and a shape; a field that is a matrix has two dims, the first
 * ones joined, or one more of size 1. */
static int describe(const te_field *field, PyObject *value, tepy_site site, te_device device,
                    te_tensor *view)
{
    PyObject *shape = NULL;
    int64_t dtype = 0, stride = 1;
    Py_ssize_t ndim, more = 0;
    if (PyTuple_Check(value) && PyTuple_Size(value) == 2) shape = PyTuple_GetItem(value, 1);
    if (shape == NULL || !PyTuple_Check(shape)) return tepy_expected(site, "(dtype, shape)", value);
    ndim = PyTuple_Size(shape);
    if (field->form == TE_FORM_MATRIX && ndim > 0) more = ndim - 2;
    if (ndim - more > TE_MAX_DIMS) {
        return tepy_fail(PyExc_ValueError, site, "it has %zd dims, expected at most %d", ndim,
                         TE_MAX_DIMS);
    }
    if (tepy_int(PyTuple_GetItem(value, 0), site, 0, TE_DTYPE_COUNT - 1, &dtype) != 0) return -1;
    *view = (te_tensor){.data = ANY_ADDRESS,
                        .dtype = (te_dtype)dtype,
                        .device = device,
                        .ndim = (int32_t)(ndim - more)};
    for (Py_ssize_t i = 0; i < view->ndim; i++) view->shape[i] = 1;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        int64_t length = 0;
        if (tepy_int(PyTuple_GetItem(shape, i), site, 0, INT32_MAX, &length) != 0) return -1;
        view->shape[i > more ? i - more : 0] *= length;
    }
    for (int32_t d = view->ndim - 1; d >= 0; d--) {
        view->strides[d] = stride;
        stride *= view->shape[d];
    }
    return 0;
}

static int take_field(const te_field *field, PyObject *value, tepy_site site, te_device device,
                      te_any_args *args)
{
    void *member = (char *)args + field->offset;
    double number = 0.0;
    if (field->kind == TE_FIELD_TENSOR) return describe(field, value, site, device, member);
    if (field->kind == TE_FIELD_FLOATS || field->kind == TE_FIELD_INT64S) {
        *(void **)member = ANY_ADDRESS;
        return 0;
    }
    if (tepy_float(value, site, &number) != 0) return -1;
    te_field_set_number(field, args, number);
    return 0;
}

PyObject *tepy_op_workspace(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char function[] = "op_workspace";
    const int op = tepy_op_by_name(args[0], (tepy_site){function, "name"});
    const te_op_info *info = op < 0 ? NULL : te_op_describe((te_op)op);
    Py_ssize_t found = 0;
    tepy_context *context;
    te_any_args filled;
    te_device device;
    size_t bytes = 0;
    te_status st;
    if (info == NULL ||
        tepy_device_args(function, args[2], nargs > 3 ? args[3] : NULL, &device) != 0) {
        return NULL;
    }
    if (!PyDict_Check(args[1]))
        return TEPY_EXPECTED((tepy_site){function, "fields"}, "a dict", args[1]);
    te_op_initial((te_op)op, &filled);
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        PyObject *name = tepy_field_name(tepy_state_of(module), (te_op)op, i);
        PyObject *value = PyDict_GetItemWithError(args[1], name); /* borrowed */
        if (value == NULL && PyErr_Occurred()) return NULL;
        if (value == NULL || field->kind == TE_FIELD_WORKSPACE) continue;
        if (take_field(field, value, (tepy_site){function, field->name}, device, &filled) != 0) {
            return NULL;
        }
        found++;
    }
    if (found != PyDict_Size(args[1])) {
        return PyErr_Format(PyExc_ValueError, "op_workspace: fields: some are none of %U", args[0]);
    }
    context = tepy_context_acquire(tepy_state_of(module), function, NULL, device);
    if (context == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS; /* may ask a vendor library */
    st = te_op_workspace(context->context, (te_op)op, &filled, &bytes);
    Py_END_ALLOW_THREADS;
    tepy_context_release(context);
    return st == TE_OK ? PyLong_FromSize_t(bytes) : tepy_raise(st);
}
