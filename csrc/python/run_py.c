/* SPDX-License-Identifier: Apache-2.0
 *
 * run_py.c - runs plans: run(), the one call that a module makes per direction, run_consuming(),
 * the same of a backward after which nobody reads what was saved, and run_staged(), with Python
 * functions at stages.
 *
 * Everything is checked and allocated before the first stage, so a wrong argument changes no state.
 * Outputs come from torch.empty because they outlive the call (a tensor made by DLPack can not be
 * resized); scratch does not outlive it and comes from torch's allocator through DLPack, which is
 * cheaper. On CUDA it goes back right after the launches: the allocator reuses it in stream order.
 */
#include "python/run_py.h"

#include <string.h>

#define SCRATCH_ALIGN 256

static int begin(tepy_run_call *run, PyObject *module, const char *function)
{
    memset(run, 0, offsetof(tepy_run_call, leading));
    for (int i = 0; i < TE_SEQUENCES; i++) run->leading[i].count = 0;
    run->state = tepy_state_of(module);
    run->function = function;
    run->slots = run->few_slots;
    run->buffers = run->few_buffers;
    run->held = run->few_held;
    run->plain = run->few_plain;
    run->call.size = sizeof run->call;
    return tepy_require_torch(run->state, function);
}

/* The plan, and memory for what is kept of each of its buffers. */
static int take_plan(tepy_run_call *run, PyObject *plan)
{
    size_t count;
    run->plan = tepy_plan_of(run->state, plan, run->function);
    if (run->plan == NULL) return -1;
    count = (size_t)run->plan->info.buffer_count;
    run->call.plan = run->plan->plan;
    if (run->plan->info.owners > TEPY_FEW_OWNERS) {
        run->slots = PyMem_Calloc(2 * (size_t)run->plan->info.owners, sizeof *run->slots);
        if (run->slots == NULL) return tepy_no_memory();
    }
    if (count > TEPY_FEW_BUFFERS) { /* all three in one piece */
        run->buffers = PyMem_Calloc(count + 1, sizeof *run->buffers + 3 * sizeof(PyObject *));
        if (run->buffers == NULL) return tepy_no_memory();
        run->plain = (PyObject **)(void *)(run->buffers + count);
        run->held = run->plain + count;
    }
    run->call.buffers = run->buffers;
    return 0;
}

static void end(tepy_run_call *run)
{
    tepy_context_release(run->context);
    if (run->scratch != NULL && run->scratch->deleter != NULL) run->scratch->deleter(run->scratch);
    Py_XDECREF(run->scratch_object);
    Py_XDECREF(run->saved);
    Py_XDECREF(run->outputs);
    Py_XDECREF(run->selection);
    for (int i = 0; i < run->held_count; i++) Py_DECREF(run->held[i]);
    if (run->buffers != run->few_buffers) PyMem_Free(run->buffers);
    if (run->slots != run->few_slots) PyMem_Free(run->slots);
}

/* The first slot of each owner in the chunks of one direction: an int for one, else a tuple. */
static int take_slots(tepy_run_call *run, PyObject *forward, PyObject *backward)
{
    const int way = run->plan->info.direction != TE_DIRECTION_FORWARD;
    const tepy_site site = {run->function, way ? "slot_bwd" : "slot_fwd"};
    PyObject *object = way ? backward : forward;
    Py_ssize_t owners = run->plan->info.owners, count = 1;
    int tuple = PyTuple_Check(object);
    run->call.slots = run->slots;
    if (tuple) count = PyTuple_Size(object);
    if (count < owners) {
        return tepy_fail(PyExc_ValueError, site, "%zd slots, expected those of %zd modules", count,
                         owners);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t value = 0;
        PyObject *item = tuple ? PyTuple_GetItem(object, i) : object;
        if (tepy_int(item, site, 0, INT32_MAX, &value) != 0) return -1;
        if (i < owners) run->slots[2 * i + way] = (int32_t)value;
    }
    return 0;
}

/* A view of one argument; all of them are on one device. */
static int take_tensor(tepy_run_call *run, PyObject *object, const tepy_spec *spec, te_tensor *view)
{
    PyObject *held = NULL;
    int result = tepy_view(run->state, object, spec, view, &held);
    if (held != NULL) run->held[run->held_count++] = held;
    if (result != 0) return -1;
    if (run->device_known) return tepy_same_device(spec->site, view->device, run->device);
    run->device = view->device;
    run->device_known = 1;
    return 0;
}

/* The packed saved buffer of at least so many bytes; where it has none, NULL or None will do. */
static int take_saved(tepy_run_call *run, PyObject *object, int64_t minimum)
{
    tepy_spec spec = {.site = {run->function, "saved"}, .form = TEPY_VECTOR, .access = TEPY_WRITE};
    te_tensor view;
    run->saved_given = object;
    if (object == NULL || object == Py_None) {
        if (minimum == 0) return 0;
        return tepy_fail(PyExc_TypeError, spec.site,
                         "expected a uint8 tensor of %lld bytes, got None", (long long)minimum);
    }
    if (take_tensor(run, object, &spec, &view) != 0) return -1;
    if (view.dtype != TE_DTYPE_U8) {
        return tepy_fail(PyExc_TypeError, spec.site, "dtype %s, expected u8",
                         te_dtype_name(view.dtype));
    }
    if (view.shape[0] < minimum) {
        return tepy_fail(PyExc_ValueError, spec.site,
                         "%lld bytes, expected at least %lld for %lld rows",
                         (long long)view.shape[0], (long long)minimum,
                         (long long)run->call.sizes.of[TE_SYMBOL_ROWS]);
    }
    run->call.saved = view.data;
    return 0;
}

/* Checks dtype and shape here, where the argument's fix can be named; te_plan_run checks again. */
static int check_shape(const tepy_run_call *run, int32_t at)
{
    const te_buffer_info *info = &run->plan->info.buffers[at];
    const te_tensor *view = &run->buffers[at];
    tepy_site site = {run->function, info->name};
    if (view->dtype != info->dtype) {
        return tepy_fail(PyExc_TypeError, site, "dtype %s, expected %s: convert it with .to()",
                         te_dtype_name(view->dtype), te_dtype_name(info->dtype));
    }
    if (view->ndim != info->ndim) {
        return tepy_fail(PyExc_ValueError, site, "it has %d dims, expected %d", (int)view->ndim,
                         (int)info->ndim);
    }
    for (int32_t i = info->ndim - 1; i >= 0; i--) {
        int64_t expected = te_extent_value(&info->shape[i], &run->call.sizes);
        if (view->shape[i] == expected || (expected == TE_ANY_LENGTH && view->shape[i] > 0))
            continue;
        if (info->leading && i == 0 && info->ndim < 4) {
            const int32_t input = run->plan->info.sized_by[te_sequence_of(info)];
            return tepy_fail(PyExc_ValueError, site,
                             "its leading dims hold %lld rows, expected %lld as in %s",
                             (long long)view->shape[i], (long long)expected,
                             input < 0 ? "rows" : run->plan->info.buffers[input].name);
        }
        if (expected == TE_ANY_LENGTH) {
            return tepy_fail(PyExc_ValueError, site, "dim %d has size 0, expected at least 1",
                             (int)i);
        }
        if (i > 0 && i < info->ndim - 1) {
            return tepy_fail(PyExc_ValueError, site, "dim %d has size %lld, expected %lld", (int)i,
                             (long long)view->shape[i], (long long)expected);
        }
        return tepy_fail(PyExc_ValueError, site, "%s has size %lld, expected %lld",
                         i == info->ndim - 1 ? "the last dim" : "the first dim",
                         (long long)view->shape[i], (long long)expected);
    }
    return 0;
}

static int64_t saved_bytes_of(const tepy_run_call *run)
{
    int64_t bytes = 0;
    for (int s = 0; s < TE_SEQUENCES; s++) {
        bytes += te_extent_value(&run->plan->info.saved_bytes[s], &run->call.sizes);
    }
    return bytes;
}

/* Sizes of the sequences; what has the wrong number of dims is left to check_shape. */
static int take_sizes(tepy_run_call *run)
{
    const te_plan_info *info = &run->plan->info;
    for (int s = 0; s < TE_SEQUENCES; s++) {
        const int32_t input = info->sized_by[s];
        if (input >= 0 && run->buffers[input].ndim != info->buffers[input].ndim) {
            return check_shape(run, input);
        }
    }
    return tepy_check(te_plan_take_sizes(info, run->buffers, run->leading, &run->call.sizes));
}

/* The tensors, then the saved buffer, then the number of rows. */
static int take_arguments(tepy_run_call *run, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_plan *plan = run->plan;
    Py_ssize_t extra = nargs - plan->info.argument_count;
    int reads_saved = !plan->makes_saved && plan->info.has_saved,
        takes_rows = plan->info.sized_by[0] < 0;
    PyObject *saved = NULL;
    if (extra < reads_saved + takes_rows || extra > !plan->makes_saved + takes_rows) {
        PyErr_Format(PyExc_TypeError, "%s: expected %d tensors%s%s, got %zd arguments for them",
                     run->function, (int)plan->info.argument_count,
                     reads_saved ? ", the saved tensor" : "", takes_rows ? " and the rows" : "",
                     nargs);
        return -1;
    }
    if (takes_rows && tepy_int(args[nargs - 1], (tepy_site){run->function, "rows"}, 0, INT32_MAX,
                               &run->call.sizes.of[TE_SYMBOL_ROWS]) != 0) {
        return -1;
    }
    for (int32_t i = 0; i < plan->info.argument_count; i++) {
        tepy_spec spec = tepy_argument_spec(run->function, plan, i);
        int held = run->held_count;
        for (int q = 0; q < TE_SEQUENCES; q++) {
            if (i == plan->info.sized_by[q]) spec.leading = &run->leading[q];
        }
        if (take_tensor(run, args[i], &spec, &run->buffers[i]) != 0) return -1;
        run->plain[i] = run->held_count == held ? args[i] : NULL;
    }
    if (take_sizes(run) != 0) return -1;
    for (int32_t i = 0; i < plan->info.argument_count; i++) {
        if (check_shape(run, i) != 0) return -1;
    }
    if (extra > takes_rows) saved = args[plan->info.argument_count];
    if (reads_saved) return take_saved(run, saved, saved_bytes_of(run));
    if (saved != NULL && saved != Py_None) {
        return tepy_fail(PyExc_TypeError, (tepy_site){run->function, "saved"},
                         "this plan saves nothing: pass None");
    }
    return 0;
}

/* Whether two views have one shape and both are dense. */
static int are_alike(const te_tensor *view, const te_tensor *dense)
{
    if (view->ndim != dense->ndim || view->dtype != dense->dtype) return 0;
    for (int32_t i = 0; i < view->ndim; i++) {
        if (view->shape[i] != dense->shape[i] || view->strides[i] != dense->strides[i]) return 0;
    }
    return 1;
}

/* Borrowed: an argument of the output's dtype and shape, dense, or NULL. */
static PyObject *find_alike(const tepy_run_call *run, const te_buffer_info *info,
                            const te_tensor *output)
{
    for (int32_t at = 0; info->ndim > 1 && at < run->plan->info.argument_count; at++) {
        const te_buffer_info *other = &run->plan->info.buffers[at];
        if (other->leading == info->leading && are_alike(&run->buffers[at], output) &&
            (!info->leading || info->ndim > 2 ||
             at == run->plan->info.sized_by[te_sequence_of(info)])) {
            return run->plain[at];
        }
    }
    return NULL;
}

/* Makes output `at` and stores it as item `index` of the result: a new tensor like one of the
 * arguments where there is one, for torch parses less for that. */
static int make_output(tepy_run_call *run, int32_t at, int32_t index)
{
    const te_buffer_info *info = &run->plan->info.buffers[at];
    const te_leading *leading = &run->leading[te_sequence_of(info)];
    int64_t shape[TE_MAX_LEADING + TE_MAX_DIMS], elements = 1;
    int32_t ndim = 0, d = 0;
    te_tensor *view = &run->buffers[at];
    PyObject *tensor, *alike;
    *view = (te_tensor){.dtype = info->dtype, .device = run->device, .ndim = info->ndim};
    for (int32_t i = info->ndim - 1; i >= 0; i--) {
        view->shape[i] = te_extent_value(&info->shape[i], &run->call.sizes);
        view->strides[i] = elements;
        elements *= view->shape[i];
    }
    if (info->leading && info->ndim < 3 && run->plan->info.sized_by[te_sequence_of(info)] >= 0) {
        for (; ndim < leading->count; ndim++) shape[ndim] = leading->dims[ndim];
        if (ndim > 0) shape[0] *= info->shape[0].multiply; /* rows of several ranks */
        d = 1;
    }
    for (; d < info->ndim; d++) shape[ndim++] = view->shape[d];
    alike = find_alike(run, info, view);
    tensor = alike != NULL ? PyObject_CallFunctionObjArgs(run->state->empty_like, alike, NULL)
                           : tepy_empty(run->state, run->device, info->dtype, shape, ndim);
    if (tensor == NULL) return -1;
    if (PyTuple_SetItem(run->outputs, index, tensor) != 0) return -1; /* takes the reference */
    return tepy_fresh_data(run->state, tensor, (tepy_site){run->function, info->name}, run->device,
                           elements * (int64_t)te_dtype_bytes(info->dtype), &view->data);
}

/* The result tuple with its tensors: outputs, then the saved buffer or None. */
static int make_results(tepy_run_call *run)
{
    const tepy_plan *plan = run->plan;
    int64_t saved_bytes = 0;
    run->outputs = PyTuple_New(plan->info.output_count + 1);
    if (run->outputs == NULL) return -1;
    for (int32_t i = 0; i < plan->info.output_count; i++) {
        if (make_output(run, plan->info.argument_count + i, i) != 0) return -1;
    }
    if (plan->makes_saved && plan->info.has_saved) saved_bytes = saved_bytes_of(run);
    if (saved_bytes == 0)
        return PyTuple_SetItem(run->outputs, plan->info.output_count, Py_NewRef(Py_None));
    run->saved = tepy_empty(run->state, run->device, TE_DTYPE_U8, &saved_bytes, 1);
    if (run->saved == NULL ||
        tepy_fresh_data(run->state, run->saved, (tepy_site){run->function, "saved"}, run->device,
                        saved_bytes, &run->call.saved) != 0) {
        return -1;
    }
    return PyTuple_SetItem(run->outputs, plan->info.output_count, Py_NewRef(run->saved));
}

/* The exchange allocator's own report is dropped: torch.empty is tried next and says it better. */
static void ignore_error(void *context, const char *kind, const char *message)
{
}

static void *align_up(void *data)
{
    return (void *)(((uintptr_t)data + SCRATCH_ALIGN - 1) & ~(uintptr_t)(SCRATCH_ALIGN - 1));
}

/* `kept`: it may outlive the run, by tensors over it. */
static int make_scratch(tepy_run_call *run, int kept)
{
    const tepy_dl_exchange *exchange = run->state->exchange;
    /* torch aligns to 64 bytes on the CPU, to 512 on CUDA; others may not */
    int64_t bytes = (int64_t)run->call.scratch_size + SCRATCH_ALIGN;
    tepy_dl_tensor prototype = {
        NULL,   {te_device_type_dlpack(run->device.type), run->device.index},
        1,      {1, 8, 1},
        &bytes, NULL,
        0};
    void *data = NULL;
    if (run->call.scratch_size == 0) return 0;
    if (!kept && exchange->allocate != NULL &&
        exchange->allocate(&prototype, &run->scratch, NULL, ignore_error) == 0) {
        data = (char *)run->scratch->tensor.data + run->scratch->tensor.byte_offset;
    } else {
        run->scratch = NULL;
        PyErr_Clear();
        run->scratch_object = tepy_empty(run->state, run->device, TE_DTYPE_U8, &bytes, 1);
        if (run->scratch_object == NULL ||
            tepy_fresh_data(run->state, run->scratch_object, (tepy_site){run->function, "scratch"},
                            run->device, bytes, &data) != 0) {
            return -1;
        }
    }
    run->call.scratch = align_up(data);
    return 0;
}

/* The GIL is let go on the CPU, where kernels run in the call, and where the device may have to
 * load libraries or search algorithms: the first time that this plan meets this device or row
 * count. */
static int may_block(const tepy_run_call *run)
{
    return run->device.type == TE_DEVICE_CPU ||
           memcmp(&run->plan->seen_sizes, &run->call.sizes, sizeof run->call.sizes) != 0 ||
           !tepy_same(run->plan->seen_device, run->device);
}

static int query_scratch(tepy_run_call *run)
{
    tepy_without_gil without = {NULL, {NULL, NULL}};
    te_status st;
    run->context = tepy_context_acquire(run->state, run->function, NULL, run->device);
    if (run->context == NULL) return -1;
    if (run->device.type != TE_DEVICE_CPU && may_block(run)) tepy_leave_gil(&without);
    st = te_plan_scratch_for(run->context->context, &run->call, &run->call.scratch_size);
    tepy_retake_gil(&without);
    return tepy_check(st);
}

static int launch(tepy_run_call *run)
{
    tepy_without_gil without = {NULL, {NULL, NULL}};
    void *stream = NULL;
    te_status st;
    if (tepy_stream(run->state, run->device, &stream) != 0) return -1;
    if (may_block(run)) tepy_leave_gil(&without);
    st = te_plan_run(run->context->context, &run->call, stream);
    tepy_retake_gil(&without);
    if (tepy_check(st) != 0) return -1;
    run->plan->seen_sizes = run->call.sizes;
    run->plan->seen_device = run->device;
    return 0;
}

/* From the arguments behind the slots to the result, a new reference. */
static PyObject *run_whole(tepy_run_call *run, PyObject *const *args, Py_ssize_t nargs, int kept)
{
    PyObject *result;
    if (tepy_selection_in_force(run->state, &run->selection, &run->call.selection) != 0 ||
        take_arguments(run, args, nargs) != 0 || query_scratch(run) != 0 ||
        make_results(run) != 0 || make_scratch(run, kept) != 0 || launch(run) != 0) {
        return NULL;
    }
    result = run->outputs;
    run->outputs = NULL;
    return result;
}

static PyObject *run_plain(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           const char *function, int consumes_saved)
{
    tepy_run_call run;
    PyObject *result = NULL;
    if (begin(&run, module, function) != 0) return NULL;
    if (nargs < 3)
        return PyErr_Format(PyExc_TypeError,
                            "%s: expected plan, slot_fwd, slot_bwd and tensors, got %zd arguments",
                            function, nargs);
    run.call.consumes_saved = consumes_saved;
    if (take_plan(&run, args[0]) != 0) goto done;
    if (run.plan->info.external) {
        (void)tepy_fail(PyExc_RuntimeError, (tepy_site){function, "plan"},
                        "it has external stages: use run_staged");
        goto done;
    }
    if (take_slots(&run, args[1], args[2]) == 0) {
        result = run_whole(&run, args + 3, nargs - 3, 0);
    }
done:
    end(&run);
    return result;
}

PyObject *tepy_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return run_plain(module, args, nargs, "run", 0);
}

PyObject *tepy_run_consuming(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return run_plain(module, args, nargs, "run_consuming", 1);
}

PyObject *tepy_run_staged(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_run_call run;
    tepy_staged staged = {.run = &run};
    PyObject *result = NULL;
    if (begin(&run, module, "run_staged") != 0) return NULL;
    if (nargs < 6)
        return PyErr_Format(PyExc_TypeError,
                            "run_staged: expected plan, slot_fwd, slot_bwd, functions, observer, "
                            "make_buffers and tensors, got %zd arguments",
                            nargs);
    if (!PyDict_Check(args[3]))
        return TEPY_EXPECTED((tepy_site){"run_staged", "functions"}, "a dict", args[3]);
    if (take_plan(&run, args[0]) == 0 && tepy_staged_begin(&staged, &run, args) == 0 &&
        take_slots(&run, args[1], args[2]) == 0) {
        result = run_whole(&run, args + 6, nargs - 6, 1);
    }
    tepy_staged_end(&staged);
    end(&run);
    return result;
}
