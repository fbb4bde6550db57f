/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm_py.c - te_l2norm from Python: a list of tensors as an array of views, new tensors as the
 * results.
 */
#include "python/args.h"

#include <stdlib.h>

/* What holds the tensors of a call besides the caller: its own, and copies of elements. */
enum { TOTAL, EACH, WORKSPACE, FACTOR, FLAG, HELD };

typedef struct l2norm_call {
    tepy_state *state;
    te_l2norm_args args;
    PyObject *list; /* new reference: a tuple */
    te_tensor *views;
    PyObject **held; /* by tensor: its copy */
    PyObject *kept[HELD];
    te_device device;
} l2norm_call;

static tepy_site site_of(const char *argument)
{
    return (tepy_site){"l2norm", argument};
}

static int take_tensors(l2norm_call *call, PyObject *given)
{
    const tepy_spec spec = {.site = site_of("tensors"), .form = TEPY_FLAT, .access = TEPY_READ};
    Py_ssize_t count;
    call->list = PySequence_Tuple(given);
    if (call->list == NULL) return -1;
    count = PyTuple_Size(call->list);
    if (count == 0) return tepy_fail(PyExc_ValueError, site_of("tensors"), "none: expected some");
    call->views = calloc((size_t)count, sizeof *call->views);
    call->held = calloc((size_t)count, sizeof(PyObject *));
    if (call->views == NULL || call->held == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    call->args.count = count;
    call->args.tensors = call->views;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GetItem(call->list, i); /* borrowed */
        if (tepy_view(call->state, tensor, &spec, &call->views[i], &call->held[i]) != 0) return -1;
    }
    call->device = call->views[0].device;
    return 0;
}

/* One element on the device of the call; nothing is written for None. */
static int take_element(l2norm_call *call, PyObject *tensor, int at, const char *name,
                        te_dtype dtype, void **data)
{
    const tepy_elements spec = {site_of(name), dtype, 1, call->device};
    if (tensor == Py_None) return 0;
    return tepy_view_elements(call->state, tensor, &spec, data, &call->kept[at]);
}

static int take_elements(l2norm_call *call, PyObject *factor, PyObject *flag)
{
    void *data[2] = {NULL, NULL};
    if (take_element(call, factor, FACTOR, "factor", TE_DTYPE_F32, &data[0]) != 0 ||
        take_element(call, flag, FLAG, "flag", TE_DTYPE_I32, &data[1]) != 0) {
        return -1;
    }
    call->args.factor = data[0];
    call->args.flag = data[1];
    return 0;
}

/* A new tensor of fp32, kept as number `at`, and its memory. */
static float *make(l2norm_call *call, int64_t count, int at)
{
    const tepy_elements spec = {site_of("results"), TE_DTYPE_F32, count, call->device};
    PyObject *copy = NULL;
    void *data = NULL;
    call->kept[at] = tepy_empty(call->state, call->device, TE_DTYPE_F32, &count, 1);
    if (call->kept[at] == NULL) return NULL;
    (void)tepy_view_elements(call->state, call->kept[at], &spec, &data, &copy);
    Py_XDECREF(copy);
    return data;
}

/* The norms of tensors have no elements where nobody asks for them. */
static int make_results(l2norm_call *call, int per_tensor)
{
    te_l2norm_args *args = &call->args;
    const te_status st = te_l2norm_workspace(args, &args->workspace_size);
    if (st != TE_OK) {
        (void)tepy_raise(st);
        return -1;
    }
    args->total = make(call, 1, TOTAL);
    args->each = make(call, per_tensor ? args->count : 0, EACH);
    args->workspace = make(call, (int64_t)(args->workspace_size / sizeof(float)), WORKSPACE);
    if (!per_tensor) args->each = NULL;
    return PyErr_Occurred() == NULL ? 0 : -1;
}

/* Launches on torch's current stream; on the CPU it computes without the GIL. */
static int run(l2norm_call *call)
{
    tepy_context *context = tepy_context_acquire(call->state, "l2norm", NULL, call->device);
    tepy_without_gil without = {NULL, {NULL, NULL}};
    void *stream = NULL;
    te_status st = TE_ERROR_INVALID;
    if (context == NULL) return -1;
    if (tepy_stream(call->state, call->device, &stream) == 0) {
        if (call->device.type == TE_DEVICE_CPU) tepy_leave_gil(&without);
        st = te_l2norm(context->context, &call->args, stream);
        tepy_retake_gil(&without);
        if (st != TE_OK) (void)tepy_raise(st);
    }
    tepy_context_release(context);
    return st == TE_OK ? 0 : -1;
}

PyObject *tepy_l2norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    l2norm_call call = {.state = state, .args = {.size = sizeof(te_l2norm_args)}};
    PyObject *result = NULL;
    int per_tensor;
    if (tepy_require_torch(state, "l2norm") != 0 || tepy_count("l2norm", nargs, 4, 4) != 0) {
        return NULL;
    }
    per_tensor = PyObject_IsTrue(args[3]);
    if (per_tensor >= 0 && take_tensors(&call, args[0]) == 0 &&
        take_elements(&call, args[1], args[2]) == 0 && make_results(&call, per_tensor) == 0 &&
        run(&call) == 0) {
        result = PyTuple_Pack(2, call.kept[TOTAL], call.kept[EACH]);
    }
    for (int64_t i = 0; call.held != NULL && i < call.args.count; i++) Py_XDECREF(call.held[i]);
    for (int i = 0; i < HELD; i++) Py_XDECREF(call.kept[i]);
    Py_XDECREF(call.list);
    free(call.views);
    free(call.held);
    return result;
}
