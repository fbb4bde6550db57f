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
    if (call->views == NULL || call->held == NULL) return tepy_no_memory();
    call->args.count = count;
    call->args.tensors = call->views;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = PyTuple_GetItem(call->list, i); /* borrowed */
        if (tepy_view(call->state, tensor, &spec, &call->views[i], &call->held[i]) != 0) return -1;
    }
    call->device = call->views[0].device;
    return 0;
}

static int take_elements(l2norm_call *call, PyObject *factor, PyObject *flag)
{
    const tepy_elements of_factor = {site_of("factor"), TE_DTYPE_F32, 1, call->device};
    const tepy_elements of_flag = {site_of("flag"), TE_DTYPE_I32, 1, call->device};
    PyObject **kept = call->kept;
    void *data[2];
    if (tepy_view_optional(call->state, factor, &of_factor, &data[0], &kept[FACTOR]) != 0 ||
        tepy_view_optional(call->state, flag, &of_flag, &data[1], &kept[FLAG]) != 0) {
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
    if (tepy_check(st) != 0) return -1;
    args->total = make(call, 1, TOTAL);
    args->each = make(call, per_tensor ? args->count : 0, EACH);
    args->workspace = make(call, (int64_t)(args->workspace_size / sizeof(float)), WORKSPACE);
    if (!per_tensor) args->each = NULL;
    return PyErr_Occurred() == NULL ? 0 : -1;
}

static te_status run(te_context *context, const void *args, void *stream)
{
    return te_l2norm(context, args, stream);
}

PyObject *tepy_l2norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    l2norm_call call = {.state = state, .args = {.size = sizeof(te_l2norm_args)}};
    PyObject *result = NULL;
    int per_tensor;
    per_tensor = PyObject_IsTrue(args[3]);
    if (per_tensor >= 0 && take_tensors(&call, args[0]) == 0 &&
        take_elements(&call, args[1], args[2]) == 0 && make_results(&call, per_tensor) == 0 &&
        tepy_context_run(state, "l2norm", call.device, run, &call.args) == 0) {
        result = PyTuple_Pack(2, call.kept[TOTAL], call.kept[EACH]);
    }
    for (int64_t i = 0; call.held != NULL && i < call.args.count; i++) Py_XDECREF(call.held[i]);
    for (int i = 0; i < HELD; i++) Py_XDECREF(call.kept[i]);
    Py_XDECREF(call.list);
    free(call.views);
    free(call.held);
    return result;
}
