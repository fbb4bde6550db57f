/* SPDX-License-Identifier: Apache-2.0
 *
 * run_py.c - runs plans: run(), the one call that a module makes per direction, and run_range().
 *
 * Everything is checked and allocated before the first stage, so a wrong argument changes no state.
 * Outputs come from torch.empty because they outlive the call (a tensor made by DLPack can not be
 * resized); scratch does not outlive it and comes from torch's allocator through DLPack, which is
 * cheaper. On CUDA it goes back right after the launches: the allocator reuses it in stream order.
 */
#include "python/plan_py.h"

#define SCRATCH_ALIGN 256

/* One run of a plan and what it holds until it is over. */
typedef struct run_call {
    tepy_state *state;
    tepy_plan *plan;
    const char *function;
    te_plan_call call;
    te_device device;
    int device_known;
    tepy_leading leading;
    tepy_context *context;
    tepy_dl_managed *scratch; /* from the exchange allocator */
    PyObject *scratch_object; /* or from torch.empty */
    PyObject *saved;          /* a new tensor, for the result */
    PyObject *outputs;        /* the result */
    int held_count;
    PyObject *held[2 * TE_PLAN_MAX_BUFFERS + 2]; /* what views point into */
    te_tensor buffers[TE_PLAN_MAX_BUFFERS];
    PyObject
        *plain[TE_PLAN_MAX_BUFFERS]; /* borrowed: the argument itself, where its view is dense */
} run_call;

static int begin(run_call *run, PyObject *module, const char *function)
{
    run->state = tepy_state_of(module);
    run->function = function;
    run->device_known = 0;
    run->context = NULL;
    run->scratch = NULL;
    run->scratch_object = run->saved = run->outputs = NULL;
    run->held_count = 0;
    run->leading.count = 0;
    run->call = (te_plan_call){.size = sizeof run->call, .buffers = run->buffers, .last = -1};
    return tepy_require_torch(run->state, function);
}

static void end(run_call *run)
{
    tepy_context_release(run->context);
    if (run->scratch != NULL && run->scratch->deleter != NULL) run->scratch->deleter(run->scratch);
    Py_XDECREF(run->scratch_object);
    Py_XDECREF(run->saved);
    Py_XDECREF(run->outputs);
    for (int i = 0; i < run->held_count; i++) Py_DECREF(run->held[i]);
}

static int take_slots(run_call *run, PyObject *forward, PyObject *backward)
{
    int64_t value[2] = {0, 0};
    if (tepy_int(forward, (tepy_site){run->function, "slot_fwd"}, 0, INT32_MAX, &value[0]) != 0 ||
        tepy_int(backward, (tepy_site){run->function, "slot_bwd"}, 0, INT32_MAX, &value[1]) != 0) {
        return -1;
    }
    run->call.slots[0] = (int32_t)value[0];
    run->call.slots[1] = (int32_t)value[1];
    return 0;
}

/* A view of one argument; all of them are on one device. */
static int take_tensor(run_call *run, PyObject *object, const tepy_want *want, te_tensor *view)
{
    PyObject *held = NULL;
    int result = tepy_view(run->state, object, want, view, &held);
    if (held != NULL) run->held[run->held_count++] = held;
    if (result != 0) return -1;
    if (run->device_known) return tepy_same_device(want->site, view->device, run->device);
    run->device = view->device;
    run->device_known = 1;
    return 0;
}

/* A packed byte buffer given by the caller; NULL or None where it may be absent. */
static int take_bytes(run_call *run, PyObject *object, const char *name, int64_t least, void **data,
                      size_t *size)
{
    tepy_want want = {{run->function, name}, TEPY_VECTOR, TEPY_WRITE, NULL};
    te_tensor view;
    *data = NULL;
    *size = 0;
    if (object == NULL || object == Py_None) {
        if (least == 0) return 0;
        return tepy_fail(PyExc_TypeError, want.site,
                         "expected a uint8 tensor of %lld bytes, got None", (long long)least);
    }
    if (take_tensor(run, object, &want, &view) != 0) return -1;
    if (view.dtype != TE_DTYPE_U8) {
        return tepy_fail(PyExc_TypeError, want.site, "dtype %s, expected u8",
                         te_dtype_name(view.dtype));
    }
    if (view.shape[0] < least) {
        return tepy_fail(PyExc_ValueError, want.site,
                         "%lld bytes, expected at least %lld for %lld rows",
                         (long long)view.shape[0], (long long)least, (long long)run->call.rows);
    }
    *data = view.data;
    *size = (size_t)view.shape[0];
    return 0;
}

/* Checks dtype and shape here, where the argument's fix can be named; te_plan_run checks again. */
static int check_shape(const run_call *run, int32_t at)
{
    const te_buffer_info *info = &run->plan->info.buffers[at];
    const te_tensor *view = &run->buffers[at];
    tepy_site site = {run->function, info->name};
    if (view->dtype != info->dtype) {
        return tepy_fail(PyExc_TypeError, site, "dtype %s, expected %s: convert it with .to()",
                         te_dtype_name(view->dtype), te_dtype_name(info->dtype));
    }
    for (int32_t i = info->ndim - 1; i >= 0; i--) {
        int64_t expected = te_extent_value(&info->shape[i], run->call.rows);
        if (view->shape[i] == expected || (expected == TE_ANY_LENGTH && view->shape[i] > 0))
            continue;
        if (info->leading && i == 0) {
            return tepy_fail(
                PyExc_ValueError, site, "its leading dims hold %lld rows, expected %lld as in %s",
                (long long)view->shape[i], (long long)expected,
                run->plan->lead < 0 ? "rows" : run->plan->info.buffers[run->plan->lead].name);
        }
        if (expected == TE_ANY_LENGTH) {
            return tepy_fail(PyExc_ValueError, site, "dim %d has size 0, expected at least 1",
                             (int)i);
        }
        return tepy_fail(PyExc_ValueError, site, "%s has size %lld, expected %lld",
                         i == info->ndim - 1 ? "the last dim" : "the first dim",
                         (long long)view->shape[i], (long long)expected);
    }
    return 0;
}

/* The tensors, the saved buffer and the number of rows, from position 3 on. */
static int take_arguments(run_call *run, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_plan *plan = run->plan;
    Py_ssize_t least = 3 + plan->arg_count;
    Py_ssize_t at = 3;
    int reads_saved = !plan->makes_saved && plan->has_saved;
    PyObject *saved = NULL;
    size_t size;
    if (tepy_count(run->function, nargs, least + reads_saved + (plan->lead < 0),
                   least + !plan->makes_saved + (plan->lead < 0)) != 0) {
        return -1;
    }
    if (plan->lead < 0 && tepy_int(args[nargs - 1], (tepy_site){run->function, "rows"}, 0,
                                   INT32_MAX, &run->call.rows) != 0) {
        return -1;
    }
    for (int32_t i = 0; i < plan->arg_count; i++) {
        int32_t buffer = plan->args[i];
        tepy_want want = tepy_buffer_want(run->function, &plan->info.buffers[buffer]);
        if (buffer == plan->lead) want.leading = &run->leading;
        int held = run->held_count;
        if (take_tensor(run, args[at], &want, &run->buffers[buffer]) != 0) return -1;
        run->plain[buffer] = run->held_count == held ? args[at] : NULL;
        at++;
    }
    if (plan->lead >= 0) run->call.rows = run->buffers[plan->lead].shape[0];
    for (int32_t i = 0; i < plan->arg_count; i++) {
        if (check_shape(run, plan->args[i]) != 0) return -1;
    }
    if (at < nargs - (plan->lead < 0)) saved = args[at];
    if (reads_saved) {
        return take_bytes(run, saved, "saved",
                          te_extent_value(&plan->info.saved_bytes, run->call.rows),
                          &run->call.saved, &size);
    }
    if (saved != NULL && saved != Py_None) {
        return tepy_fail(PyExc_TypeError, (tepy_site){run->function, "saved"},
                         "this plan saves nothing: pass None");
    }
    return 0;
}

/* Address of a tensor that torch.empty just made. */
static int fresh_data(const run_call *run, PyObject *tensor, const char *name, int64_t elements,
                      void **data)
{
    tepy_dl_tensor dl;
    if (run->state->exchange->view(tensor, &dl) != 0) return -1;
    if (dl.data == NULL && elements > 0) {
        return tepy_fail(
            PyExc_TypeError, (tepy_site){run->function, name},
            "torch.empty gave %R without memory (a fake tensor mode is on): trace through "
            "the registered operators instead",
            Py_TYPE(tensor));
    }
    *data = dl.data == NULL ? NULL : (char *)dl.data + dl.byte_offset;
    return 0;
}

/* Borrowed: an argument of the output's dtype and shape, dense, or NULL. */
static PyObject *find_alike(const run_call *run, const te_buffer_info *info, const int64_t *matrix)
{
    for (int32_t i = 0; i < run->plan->arg_count; i++) {
        int32_t at = run->plan->args[i];
        const te_buffer_info *other = &run->plan->info.buffers[at];
        const te_tensor *view = &run->buffers[at];
        if (other->dtype == info->dtype && other->leading == info->leading && info->ndim == 2 &&
            (!info->leading || at == run->plan->lead) && view->ndim == 2 &&
            view->shape[0] == matrix[0] && view->shape[1] == matrix[1] &&
            view->strides[0] == matrix[1] && view->strides[1] == 1) {
            return run->plain[at];
        }
    }
    return NULL;
}

/* Makes output `at` and stores it as item `index` of the result: a new tensor like one of the
 * arguments where there is one, for torch parses less for that. */
static int make_output(run_call *run, int32_t at, int32_t index)
{
    const te_buffer_info *info = &run->plan->info.buffers[at];
    int64_t shape[TEPY_MAX_LEADING + 1];
    int64_t matrix[2] = {1, 1};
    int32_t ndim = 0;
    te_tensor *view = &run->buffers[at];
    PyObject *tensor, *alike;
    for (int32_t i = 0; i < info->ndim; i++) {
        matrix[i] = te_extent_value(&info->shape[i], run->call.rows);
    }
    if (info->leading && run->plan->lead >= 0) {
        for (; ndim < run->leading.count; ndim++) shape[ndim] = run->leading.dims[ndim];
        if (ndim > 0) shape[0] *= info->shape[0].multiply; /* rows of several ranks */
        shape[ndim++] = matrix[1];
    } else {
        for (; ndim < info->ndim; ndim++) shape[ndim] = matrix[ndim];
    }
    alike = find_alike(run, info, matrix);
    tensor = alike != NULL ? PyObject_CallFunctionObjArgs(run->state->empty_like, alike, NULL)
                           : tepy_empty(run->state, run->device, info->dtype, shape, ndim);
    if (tensor == NULL) return -1;
    if (PyTuple_SetItem(run->outputs, index, tensor) != 0) return -1; /* takes the reference */
    view->dtype = info->dtype;
    view->device = run->device;
    view->ndim = info->ndim;
    view->shape[0] = matrix[0];
    view->shape[1] = matrix[1];
    view->strides[0] = info->ndim == 1 ? 1 : matrix[1];
    view->strides[1] = 1;
    return fresh_data(run, tensor, info->name, matrix[0] * matrix[1], &view->data);
}

/* The result tuple with its tensors: outputs, then the saved buffer or None. */
static int make_results(run_call *run)
{
    const tepy_plan *plan = run->plan;
    int64_t saved_bytes = 0;
    run->outputs = PyTuple_New(plan->output_count + 1);
    if (run->outputs == NULL) return -1;
    for (int32_t i = 0; i < plan->output_count; i++) {
        if (make_output(run, plan->outputs[i], i) != 0) return -1;
    }
    if (plan->makes_saved && plan->has_saved) {
        saved_bytes = te_extent_value(&plan->info.saved_bytes, run->call.rows);
    }
    if (saved_bytes == 0)
        return PyTuple_SetItem(run->outputs, plan->output_count, Py_NewRef(Py_None));
    run->saved = tepy_empty(run->state, run->device, TE_DTYPE_U8, &saved_bytes, 1);
    if (run->saved == NULL ||
        fresh_data(run, run->saved, "saved", saved_bytes, &run->call.saved) != 0) {
        return -1;
    }
    return PyTuple_SetItem(run->outputs, plan->output_count, Py_NewRef(run->saved));
}

/* The exchange allocator's own report is dropped: torch.empty is tried next and says it better. */
static void ignore_error(void *context, const char *kind, const char *message)
{
    (void)context;
    (void)kind;
    (void)message;
}

static void *align_up(void *data)
{
    return (void *)(((uintptr_t)data + SCRATCH_ALIGN - 1) & ~(uintptr_t)(SCRATCH_ALIGN - 1));
}

static int make_scratch(run_call *run)
{
    const tepy_dl_exchange *exchange = run->state->exchange;
    int cpu = run->device.type == TE_DEVICE_CPU;
    /* torch aligns to 64 bytes on the CPU, to 512 on CUDA */
    int64_t bytes = (int64_t)run->call.scratch_size + SCRATCH_ALIGN;
    tepy_dl_tensor prototype = {
        NULL, {cpu ? TEPY_DL_CPU : TEPY_DL_CUDA, run->device.index}, 1, {1, 8, 1}, &bytes, NULL, 0};
    void *data = NULL;
    if (run->call.scratch_size == 0) return 0;
    if (exchange->allocate != NULL &&
        exchange->allocate(&prototype, &run->scratch, NULL, ignore_error) == 0) {
        data = (char *)run->scratch->tensor.data + run->scratch->tensor.byte_offset;
    } else {
        run->scratch = NULL;
        PyErr_Clear();
        run->scratch_object = tepy_empty(run->state, run->device, TE_DTYPE_U8, &bytes, 1);
        if (run->scratch_object == NULL ||
            fresh_data(run, run->scratch_object, "scratch", bytes, &data) != 0) {
            return -1;
        }
    }
    run->call.scratch = align_up(data);
    return 0;
}

/* The GIL is let go on the CPU, where kernels run in the call, and where the device may have to
 * load libraries or search algorithms: the first time that this plan meets this device or row
 * count. */
static int lets_go(const run_call *run)
{
    return run->device.type == TE_DEVICE_CPU || run->plan->seen_rows != run->call.rows ||
           !tepy_same(run->plan->seen_device, run->device);
}

static int query_scratch(run_call *run)
{
    tepy_without_gil without = {NULL, {NULL, NULL}};
    te_status st;
    run->context = tepy_context_acquire(run->state, run->function, NULL, run->device);
    if (run->context == NULL) return -1;
    if (run->device.type != TE_DEVICE_CPU && lets_go(run)) tepy_leave_gil(&without);
    run->call.plan = run->plan->id;
    st = te_plan_scratch_for(run->context->context, &run->call, &run->call.scratch_size);
    tepy_retake_gil(&without);
    if (st == TE_OK) return 0;
    (void)tepy_raise(st);
    return -1;
}

static int launch(run_call *run, int32_t *next)
{
    tepy_without_gil without = {NULL, {NULL, NULL}};
    void *stream = NULL;
    te_status st;
    if (tepy_stream(run->state, run->device, &stream) != 0) return -1;
    run->call.plan = run->plan->id;
    if (lets_go(run)) tepy_leave_gil(&without);
    st = te_plan_run(run->context->context, &run->call, next, stream);
    tepy_retake_gil(&without);
    if (st != TE_OK) {
        (void)tepy_raise(st);
        return -1;
    }
    run->plan->seen_rows = run->call.rows;
    run->plan->seen_device = run->device;
    return 0;
}

const char tepy_run_doc[] =
    "run($module, plan, slot_fwd, slot_bwd, /, *tensors)\n--\n\n"
    "Run a whole plan: (outputs..., packed saved tensor or None).\n\n"
    "tensors: one per input, parameter and state buffer in plan order; then, for a plan that "
    "reads\n"
    "saved data, the packed saved tensor; then, for a plan with no leading input, the rows.";

PyObject *tepy_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    run_call run;
    PyObject *result = NULL;
    if (begin(&run, module, "run") != 0) return NULL;
    if (nargs < 3) {
        PyErr_Format(PyExc_TypeError,
                     "run: expected plan, slot_fwd, slot_bwd and tensors, got %zd "
                     "arguments",
                     nargs);
        return NULL;
    }
    run.plan = tepy_plan_find(run.state, args[0], "run");
    if (run.plan == NULL) goto done;
    if (run.plan->external) {
        (void)tepy_fail(PyExc_RuntimeError, (tepy_site){"run", "plan"},
                        "%s has external stages: use run_range", run.plan->info.kind);
        goto done;
    }
    if (take_slots(&run, args[1], args[2]) != 0 || take_arguments(&run, args, nargs) != 0 ||
        query_scratch(&run) != 0 || make_results(&run) != 0 || make_scratch(&run) != 0 ||
        launch(&run, NULL) != 0) {
        goto done;
    }
    result = run.outputs;
    run.outputs = NULL;
done:
    end(&run);
    return result;
}

/* ---- run_range ---- */

static int take_sequence(run_call *run, PyObject *sequence)
{
    const te_plan_info *info = &run->plan->info;
    tepy_site site = {run->function, "buffers"};
    Py_ssize_t count = PySequence_Size(sequence);
    Py_ssize_t expected = run->plan->arg_count + run->plan->output_count;
    Py_ssize_t at = 0;
    if (count < 0) {
        PyErr_Clear();
        return tepy_fail(PyExc_TypeError, site, "expected a sequence, got %R", Py_TYPE(sequence));
    }
    if (count != expected) {
        return tepy_fail(PyExc_ValueError, site,
                         "%zd entries, expected %zd: one per input, parameter, state and output",
                         count, expected);
    }
    for (int32_t i = 0; i < info->buffer_count; i++) {
        const te_buffer_info *buffer = &info->buffers[i];
        tepy_want want = tepy_buffer_want(run->function, buffer);
        PyObject *object;
        int failed;
        if (tepy_is_packed(buffer)) continue;
        object = PySequence_GetItem(sequence, at++);
        if (object == NULL) return -1;
        run->held[run->held_count++] = object; /* the sequence may change under us */
        if (object == Py_None) {
            run->buffers[i] = (te_tensor){.dtype = TE_DTYPE_COUNT};
            continue;
        }
        failed = take_tensor(run, object, &want, &run->buffers[i]) != 0 || check_shape(run, i) != 0;
        if (failed) return -1;
    }
    return 0;
}

/* Buffers given as None must not be touched by the stages that will run; the others get the form
 * that te_plan_run checks for. */
static int check_absent(run_call *run)
{
    const te_plan_info *info = &run->plan->info;
    const te_plan *plan = NULL;
    int32_t last = run->call.last < 0 ? info->stage_count : run->call.last;
    te_status st = te_plan_get(run->plan->id, &plan);
    if (st != TE_OK) {
        (void)tepy_raise(st);
        return -1;
    }
    if (run->call.first > last || last > info->stage_count) {
        return tepy_fail(PyExc_ValueError, (tepy_site){run->function, "last"},
                         "stages [%d, %d) are not among the %d of this plan", (int)run->call.first,
                         (int)last, (int)info->stage_count);
    }
    for (int32_t s = run->call.first; s < last && !plan->stages[s].external; s++) {
        for (int position = 0; position < TE_STAGE_BUFFERS; position++) {
            int16_t at = plan->stages[s].buffer[position];
            if (at == TE_NO_BUFFER || tepy_is_packed(&info->buffers[at]) ||
                run->buffers[at].dtype != TE_DTYPE_COUNT) {
                continue;
            }
            return tepy_fail(PyExc_TypeError, (tepy_site){run->function, info->buffers[at].name},
                             "stage %s needs this tensor, got None", info->stages[s].name);
        }
    }
    for (int32_t i = 0; i < info->buffer_count; i++) {
        const te_buffer_info *buffer = &info->buffers[i];
        te_tensor *view = &run->buffers[i];
        if (tepy_is_packed(buffer) || view->dtype != TE_DTYPE_COUNT) continue;
        view->dtype = buffer->dtype;
        view->device = run->device;
        view->ndim = buffer->ndim;
        for (int32_t d = 0; d < buffer->ndim; d++) {
            view->shape[d] = te_extent_value(&buffer->shape[d], run->call.rows);
            view->strides[d] = 1;
        }
    }
    return 0;
}

static int take_scratch(run_call *run, PyObject *object)
{
    size_t least = 0;
    if (query_scratch(run) != 0) return -1;
    least = run->call.scratch_size;
    if (take_bytes(run, object, "scratch", (int64_t)least, &run->call.scratch,
                   &run->call.scratch_size) != 0) {
        return -1;
    }
    if (run->call.scratch == align_up(run->call.scratch)) return 0;
    return tepy_fail(PyExc_ValueError, (tepy_site){run->function, "scratch"},
                     "its data is not aligned to %d bytes: make it with empty_aligned",
                     SCRATCH_ALIGN);
}

const char tepy_run_range_doc[] =
    "run_range($module, plan, first, last, slot_fwd, slot_bwd, buffers, saved, scratch, rows, "
    "/)\n--\n\n"
    "Run stages [first, last); return the stage to go on with: an external one, or last.";

PyObject *tepy_run_range(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    run_call run;
    PyObject *result = NULL;
    int64_t first = 0, last = 0, saved_bytes;
    int32_t next = 0;
    size_t size;
    if (begin(&run, module, "run_range") != 0 || tepy_count("run_range", nargs, 9, 9) != 0)
        return NULL;
    run.plan = tepy_plan_find(run.state, args[0], "run_range");
    if (run.plan == NULL ||
        tepy_int(args[1], (tepy_site){"run_range", "first"}, 0, INT32_MAX, &first) != 0 ||
        tepy_int(args[2], (tepy_site){"run_range", "last"}, -1, INT32_MAX, &last) != 0 ||
        tepy_int(args[8], (tepy_site){"run_range", "rows"}, 0, INT32_MAX, &run.call.rows) != 0 ||
        take_slots(&run, args[3], args[4]) != 0) {
        goto done;
    }
    run.call.first = (int32_t)first;
    run.call.last = (int32_t)last;
    saved_bytes =
        run.plan->has_saved ? te_extent_value(&run.plan->info.saved_bytes, run.call.rows) : 0;
    if (take_sequence(&run, args[5]) != 0 ||
        take_bytes(&run, args[6], "saved", saved_bytes, &run.call.saved, &size) != 0) {
        goto done;
    }
    if (!run.device_known) {
        (void)tepy_fail(PyExc_ValueError, (tepy_site){"run_range", "buffers"},
                        "no tensor says which device to run on");
        goto done;
    }
    if (check_absent(&run) != 0 || take_scratch(&run, args[7]) != 0 || launch(&run, &next) != 0) {
        goto done;
    }
    result = PyLong_FromLong(next);
done:
    end(&run);
    return result;
}

const char tepy_empty_aligned_doc[] =
    "empty_aligned($module, size, device_type, device_index=0, /)\n--\n\n"
    "A 1-D uint8 tensor whose data is aligned to 256 bytes.";

PyObject *tepy_empty_aligned(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    run_call run;
    int64_t size = 0, padded, skip;
    void *data = NULL;
    PyObject *whole, *part = NULL;
    if (begin(&run, module, "empty_aligned") != 0 ||
        tepy_count("empty_aligned", nargs, 2, 3) != 0 ||
        tepy_int(args[0], (tepy_site){"empty_aligned", "size"}, 0, INT64_MAX - SCRATCH_ALIGN,
                 &size) != 0 ||
        tepy_device_args("empty_aligned", args[1], nargs > 2 ? args[2] : NULL, &run.device) != 0) {
        return NULL;
    }
    padded = size + SCRATCH_ALIGN;
    whole = tepy_empty(run.state, run.device, TE_DTYPE_U8, &padded, 1);
    if (whole == NULL) return NULL;
    if (fresh_data(&run, whole, "size", padded, &data) == 0) {
        skip = (int64_t)((char *)align_up(data) - (char *)data);
        part = PyObject_CallMethod(whole, "narrow", "iLL", 0, (long long)skip, (long long)size);
    }
    Py_DECREF(whole);
    return part;
}
