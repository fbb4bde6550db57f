/* SPDX-License-Identifier: Apache-2.0
 *
 * update_py.c - te_update from Python: lists of tensors as arrays of views.
 */
#include "python/args.h"

#include <stdlib.h>
#include <string.h>

#define NUMBERS 9
#define DEVICE_NUMBERS 3

static const char *const list_names[TE_UPDATE_LIST_COUNT] = {
#define X(NAME, name) #name,
    TE_UPDATE_LISTS(X)
#undef X
};

/* A call: views of all tensors, list by list, and what holds copies of gradients. */
typedef struct update_call {
    const tepy_state *state;
    te_update_args args;
    te_tensor *views;
    PyObject **held;
    PyObject *lists[TE_UPDATE_LIST_COUNT]; /* new references: lists or tuples; NULL: none */
    PyObject *numbers[DEVICE_NUMBERS + 1]; /* held of the flag and of numbers on the device */
    te_quantize_args *casts;
    PyObject **cast_held; /* by tensor: what its cast needs */
    te_device device;
} update_call;

static tepy_site site_of(const char *argument)
{
    return (tepy_site){"update", argument};
}

/* Takes the lists as sequences of one length. */
static int take_lists(update_call *call, PyObject *lists)
{
    if (!PyTuple_Check(lists) || PyTuple_Size(lists) != TE_UPDATE_LIST_COUNT) {
        return tepy_fail(PyExc_TypeError, site_of("lists"), "expected a tuple of %d lists or None",
                         TE_UPDATE_LIST_COUNT);
    }
    for (int list = 0; list < TE_UPDATE_LIST_COUNT; list++) {
        PyObject *given = PyTuple_GetItem(lists, list); /* borrowed */
        Py_ssize_t length;
        if (given == Py_None) continue;
        call->lists[list] = PySequence_Tuple(given);
        if (call->lists[list] == NULL) return -1;
        length = PyTuple_Size(call->lists[list]);
        if (call->lists[0] == NULL || length != PyTuple_Size(call->lists[0])) {
            return tepy_fail(PyExc_ValueError, site_of(list_names[list]),
                             "%zd tensors, expected as many as there are gradients", length);
        }
        call->args.count = length;
    }
    return 0;
}

static int take_tensors(update_call *call)
{
    const size_t count = (size_t)call->args.count;
    call->views = calloc(count * TE_UPDATE_LIST_COUNT + 1, sizeof *call->views);
    call->held = calloc(count * TE_UPDATE_LIST_COUNT + 1, sizeof(PyObject *));
    if (call->views == NULL || call->held == NULL) return tepy_no_memory();
    for (int list = 0; list < TE_UPDATE_LIST_COUNT; list++) {
        const int reads = list == TE_UPDATE_GRAD && (call->args.flags & TE_UPDATE_WRITE_GRAD) == 0U;
        const tepy_spec spec = {.site = site_of(list_names[list]),
                                .form = TEPY_FLAT,
                                .access = reads ? TEPY_READ : TEPY_WRITE};
        if (call->lists[list] == NULL) continue;
        call->args.lists[list] = call->views + (size_t)list * count;
        for (size_t i = 0; i < count; i++) {
            const size_t at = (size_t)list * count + i;
            PyObject *tensor = PyTuple_GetItem(call->lists[list], (Py_ssize_t)i);
            if (tepy_view(call->state, tensor, &spec, &call->views[at], &call->held[at]) != 0) {
                return -1;
            }
        }
    }
    call->device = call->views[0].device;
    return 0;
}

static int take_numbers(update_call *call, PyObject *numbers)
{
    double *const fields[NUMBERS] = {
        &call->args.lr,       &call->args.beta1,     &call->args.beta2,
        &call->args.eps,      &call->args.decay,     &call->args.grad_scale,
        &call->args.momentum, &call->args.dampening, &call->args.top};
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != NUMBERS) {
        return tepy_fail(PyExc_TypeError, site_of("numbers"), "expected a tuple of %d floats",
                         NUMBERS);
    }
    for (int i = 0; i < NUMBERS; i++) {
        if (tepy_float(PyTuple_GetItem(numbers, i), site_of("numbers"), fields[i]) != 0) return -1;
    }
    return 0;
}

/* One element on the device of the call, or NULL for None. */
static int take_element(update_call *call, PyObject *tensor, int at, const char *name,
                        te_dtype dtype, void *field)
{
    const tepy_elements spec = {site_of(name), dtype, 1, call->device};
    void *data;
    if (tepy_view_optional(call->state, tensor, &spec, &data, &call->numbers[at]) != 0) return -1;
    memcpy(field, &data, sizeof data);
    return 0;
}

static int take_device_numbers(update_call *call, PyObject *flag, PyObject *numbers)
{
    te_update_args *args = &call->args;
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != DEVICE_NUMBERS) {
        return tepy_fail(PyExc_TypeError, site_of("device_numbers"),
                         "expected a tuple of %d tensors or None", DEVICE_NUMBERS);
    }
    if (take_element(call, flag, 0, "flag", TE_DTYPE_I32, &args->flag) != 0 ||
        take_element(call, PyTuple_GetItem(numbers, 0), 1, "lr", TE_DTYPE_F32, &args->lr_at) != 0 ||
        take_element(call, PyTuple_GetItem(numbers, 1), 2, "grad_scale", TE_DTYPE_F32,
                     &args->grad_scale_at) != 0) {
        return -1;
    }
    return take_element(call, PyTuple_GetItem(numbers, 2), 3, "step", TE_DTYPE_I32, &args->step_at);
}

/* `casts`: None, or as many dicts of fields of quantize as there are tensors. */
static int take_casts(update_call *call, PyObject *module, PyObject *casts)
{
    const Py_ssize_t count = (Py_ssize_t)call->args.count;
    if (casts == Py_None) return 0;
    if (!PyTuple_Check(casts) || PyTuple_Size(casts) != count) {
        return tepy_fail(PyExc_TypeError, site_of("casts"),
                         "expected None, or a tuple of %zd dicts", count);
    }
    if (call->lists[TE_UPDATE_VALUE] == NULL) return 0; /* te_update says so */
    call->casts = calloc((size_t)count + 1, sizeof *call->casts);
    call->cast_held = calloc((size_t)count + 1, sizeof(PyObject *));
    if (call->casts == NULL || call->cast_held == NULL) return tepy_no_memory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PyTuple_GetItem(call->lists[TE_UPDATE_VALUE], i); /* borrowed */
        if (tepy_take_args(module, TE_OP_QUANTIZE, value, PyTuple_GetItem(casts, i),
                           &call->casts[i], &call->cast_held[i]) != 0) {
            return -1;
        }
    }
    call->args.casts = call->casts;
    return 0;
}

static te_status run(te_context *context, const void *args, void *stream)
{
    return te_update(context, args, stream);
}

PyObject *tepy_update(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    update_call call = {.state = state, .args = {.size = sizeof(te_update_args)}};
    int64_t kind = 0, flags = 0;
    int failed;
    if (tepy_int(args[0], site_of("kind"), 0, TE_UPDATE_KIND_COUNT - 1, &kind) != 0 ||
        tepy_int(args[1], site_of("flags"), 0, INT32_MAX, &flags) != 0 ||
        tepy_int(args[5], site_of("step"), INT64_MIN, INT64_MAX, &call.args.step) != 0) {
        return NULL;
    }
    call.args.kind = (te_update_kind)kind;
    call.args.flags = (uint32_t)flags;
    failed = take_numbers(&call, args[4]) != 0 || take_lists(&call, args[2]) != 0 ||
             take_tensors(&call) != 0 || take_device_numbers(&call, args[3], args[6]) != 0 ||
             (nargs == 8 && take_casts(&call, module, args[7]) != 0) ||
             tepy_context_run(state, "update", call.device, run, &call.args) != 0;
    for (size_t i = 0; call.cast_held != NULL && i < (size_t)call.args.count; i++) {
        Py_XDECREF(call.cast_held[i]);
    }
    for (size_t i = 0; call.held != NULL && i < (size_t)call.args.count * TE_UPDATE_LIST_COUNT;
         i++) {
        Py_XDECREF(call.held[i]);
    }
    for (int i = 0; i < DEVICE_NUMBERS + 1; i++) Py_XDECREF(call.numbers[i]);
    for (int list = 0; list < TE_UPDATE_LIST_COUNT; list++) Py_XDECREF(call.lists[list]);
    free(call.casts);
    free(call.cast_held);
    free(call.views);
    free(call.held);
    return failed ? NULL : Py_NewRef(Py_None);
}
