/* SPDX-License-Identifier: Apache-2.0
 *
 * update_py.c - te_update and te_l2norm from Python: lists of tensors as arrays of views.
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

/* Views of the tensors of a tuple; `held` gets what they need besides that. */
static int take_views(const tepy_state *state, PyObject *tuple, const tepy_spec *spec,
                      te_tensor *views, PyObject **held)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        if (tepy_view(state, PyTuple_GetItem(tuple, i), spec, &views[i], &held[i]) != 0) return -1;
    }
    return 0;
}

static void drop(PyObject **objects, size_t count)
{
    for (size_t i = 0; objects != NULL && i < count; i++) Py_XDECREF(objects[i]);
}

/* ---- update ------------------------------------------------------------------------------- */

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

/* Takes the lists as sequences of one length. */
static int take_lists(update_call *call, PyObject *lists)
{
    if (!PyTuple_Check(lists) || PyTuple_Size(lists) != TE_UPDATE_LIST_COUNT) {
        return tepy_fail(PyExc_TypeError, (tepy_site){"update", "lists"},
                         "expected a tuple of %d lists or None", TE_UPDATE_LIST_COUNT);
    }
    for (int list = 0; list < TE_UPDATE_LIST_COUNT; list++) {
        PyObject *given = PyTuple_GetItem(lists, list); /* borrowed */
        Py_ssize_t length;
        if (given == Py_None) continue;
        call->lists[list] = PySequence_Tuple(given);
        if (call->lists[list] == NULL) return -1;
        length = PyTuple_Size(call->lists[list]);
        if (call->lists[0] == NULL || length != PyTuple_Size(call->lists[0])) {
            return tepy_fail(PyExc_ValueError, (tepy_site){"update", list_names[list]},
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
        const tepy_spec spec = {.site = {"update", list_names[list]},
                                .form = TEPY_FLAT,
                                .access = reads ? TEPY_READ : TEPY_WRITE};
        if (call->lists[list] == NULL) continue;
        call->args.lists[list] = call->views + (size_t)list * count;
        if (take_views(call->state, call->lists[list], &spec, call->views + (size_t)list * count,
                       call->held + (size_t)list * count) != 0) {
            return -1;
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
    const tepy_site site = {"update", "numbers"};
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != NUMBERS)
        return tepy_fail(PyExc_TypeError, site, "expected a tuple of %d floats", NUMBERS);
    for (int i = 0; i < NUMBERS; i++) {
        if (tepy_float(PyTuple_GetItem(numbers, i), site, fields[i]) != 0) return -1;
    }
    return 0;
}

/* Elements on the device of the call, NULL for None: the flag, then those of `numbers`. */
static int take_device_numbers(update_call *call, PyObject *flag, PyObject *numbers)
{
    static const struct {
        const char *name;
        te_dtype dtype;
        size_t offset;
    } elements[] = {{"flag", TE_DTYPE_I32, offsetof(te_update_args, flag)},
                    {"lr", TE_DTYPE_F32, offsetof(te_update_args, lr_at)},
                    {"grad_scale", TE_DTYPE_F32, offsetof(te_update_args, grad_scale_at)},
                    {"step", TE_DTYPE_I32, offsetof(te_update_args, step_at)}};
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != DEVICE_NUMBERS) {
        return tepy_fail(PyExc_TypeError, (tepy_site){"update", "device_numbers"},
                         "expected a tuple of %d tensors or None", DEVICE_NUMBERS);
    }
    for (int i = 0; i <= DEVICE_NUMBERS; i++) {
        PyObject *given = i == 0 ? flag : PyTuple_GetItem(numbers, i - 1);
        const tepy_elements spec = {
            {"update", elements[i].name}, elements[i].dtype, 1, call->device};
        void *data;
        if (tepy_view_optional(call->state, given, &spec, &data, &call->numbers[i]) != 0) return -1;
        memcpy((char *)&call->args + elements[i].offset, &data, sizeof data);
    }
    return 0;
}

/* `casts`: None, or as many dicts of fields of quantize as there are tensors. */
static int take_casts(update_call *call, PyObject *module, PyObject *casts)
{
    const Py_ssize_t count = (Py_ssize_t)call->args.count;
    if (casts == Py_None) return 0;
    if (!PyTuple_Check(casts) || PyTuple_Size(casts) != count) {
        return tepy_fail(PyExc_TypeError, (tepy_site){"update", "casts"},
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

static te_status run_update(te_context *context, const void *args, void *stream)
{
    return te_update(context, args, stream);
}

PyObject *tepy_update(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    update_call call = {.state = state, .args = {.size = sizeof(te_update_args)}};
    int64_t kind = 0, flags = 0;
    int failed;
    if (tepy_int(args[0], (tepy_site){"update", "kind"}, 0, TE_UPDATE_KIND_COUNT - 1, &kind) != 0 ||
        tepy_int(args[1], (tepy_site){"update", "flags"}, 0, INT32_MAX, &flags) != 0 ||
        tepy_int(args[5], (tepy_site){"update", "step"}, INT64_MIN, INT64_MAX, &call.args.step) !=
            0) {
        return NULL;
    }
    call.args.kind = (te_update_kind)kind;
    call.args.flags = (uint32_t)flags;
    failed = take_numbers(&call, args[4]) != 0 || take_lists(&call, args[2]) != 0 ||
             take_tensors(&call) != 0 || take_device_numbers(&call, args[3], args[6]) != 0 ||
             (nargs == 8 && take_casts(&call, module, args[7]) != 0) ||
             tepy_context_run(state, "update", call.device, run_update, &call.args) != 0;
    drop(call.cast_held, (size_t)call.args.count);
    drop(call.held, (size_t)call.args.count * TE_UPDATE_LIST_COUNT);
    drop(call.numbers, DEVICE_NUMBERS + 1);
    drop(call.lists, TE_UPDATE_LIST_COUNT);
    free(call.casts);
    free(call.cast_held);
    free(call.views);
    free(call.held);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- l2norm ------------------------------------------------------------------------------- */

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

static int take_list(l2norm_call *call, PyObject *given)
{
    const tepy_spec spec = {.site = {"l2norm", "tensors"}, .form = TEPY_FLAT, .access = TEPY_READ};
    Py_ssize_t count;
    call->list = PySequence_Tuple(given);
    if (call->list == NULL) return -1;
    count = PyTuple_Size(call->list);
    if (count == 0)
        return tepy_fail(PyExc_ValueError, (tepy_site){"l2norm", "tensors"}, "none: expected some");
    call->views = calloc((size_t)count, sizeof *call->views);
    call->held = calloc((size_t)count, sizeof(PyObject *));
    if (call->views == NULL || call->held == NULL) return tepy_no_memory();
    call->args.count = count;
    call->args.tensors = call->views;
    if (take_views(call->state, call->list, &spec, call->views, call->held) != 0) return -1;
    call->device = call->views[0].device;
    return 0;
}

static int take_elements(l2norm_call *call, PyObject *factor, PyObject *flag)
{
    const tepy_elements of_factor = {{"l2norm", "factor"}, TE_DTYPE_F32, 1, call->device};
    const tepy_elements of_flag = {{"l2norm", "flag"}, TE_DTYPE_I32, 1, call->device};
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

/* A new tensor of fp32, kept as number `at`, and its memory in *data. */
static int make(l2norm_call *call, int64_t count, int at, void **data)
{
    call->kept[at] = tepy_empty(call->state, call->device, TE_DTYPE_F32, &count, 1);
    return call->kept[at] == NULL
               ? -1
               : tepy_fresh_data(call->state, call->kept[at], (tepy_site){"l2norm", "results"},
                                 call->device, count * (int64_t)sizeof(float), data);
}

/* The norms of tensors have no elements where nobody asks for them. A check makes none. */
static int make_results(l2norm_call *call, int per_tensor)
{
    te_l2norm_args *args = &call->args;
    void *total, *each, *workspace;
    if ((args->flags & TE_L2NORM_CHECK) != 0U) return 0;
    if (tepy_check(te_l2norm_workspace(args, &args->workspace_size)) != 0 ||
        make(call, 1, TOTAL, &total) != 0 ||
        make(call, per_tensor ? args->count : 0, EACH, &each) != 0 ||
        make(call, (int64_t)(args->workspace_size / sizeof(float)), WORKSPACE, &workspace) != 0) {
        return -1;
    }
    args->total = total;
    args->each = per_tensor ? each : NULL;
    args->workspace = workspace;
    return 0;
}

static te_status run_l2norm(te_context *context, const void *args, void *stream)
{
    return te_l2norm(context, args, stream);
}

PyObject *tepy_l2norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    l2norm_call call = {.state = state, .args = {.size = sizeof(te_l2norm_args)}};
    PyObject *result = NULL;
    const int per_tensor = PyObject_IsTrue(args[3]);
    int64_t flags = 0;
    if (per_tensor < 0 || (nargs == 5 && tepy_int(args[4], (tepy_site){"l2norm", "flags"}, 0,
                                                  INT32_MAX, &flags) != 0)) {
        return NULL;
    }
    call.args.flags = (uint32_t)flags;
    if (take_list(&call, args[0]) == 0 && take_elements(&call, args[1], args[2]) == 0 &&
        make_results(&call, per_tensor) == 0 &&
        tepy_context_run(state, "l2norm", call.device, run_l2norm, &call.args) == 0) {
        result = call.kept[TOTAL] == NULL ? Py_NewRef(Py_None)
                                          : PyTuple_Pack(2, call.kept[TOTAL], call.kept[EACH]);
    }
    drop(call.held, (size_t)call.args.count);
    drop(call.kept, HELD);
    Py_XDECREF(call.list);
    free(call.views);
    free(call.held);
    return result;
}
