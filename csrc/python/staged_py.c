/* SPDX-License-Identifier: Apache-2.0
 *
 * staged_py.c - Python functions at the stages of a run: a collective, a quantizer, an overridden
 * operator, an observer.
 *
 * They are called inside the run. Buffers become tensors when they are asked for: one over scratch
 * or saved memory keeps that memory.
 */
#include "python/run_py.h"

static const char *const capsule_name = "transformer_engine._core.run";

/* Borrowed: the argument, the output, or the tensor of all packed memory that a buffer lies in. */
static PyObject *whole_of(const tepy_staged *staged, int32_t at)
{
    const tepy_plan *plan = staged->run->plan;
    te_buffer_role role = plan->info.buffers[at].role;
    if (role == TE_ROLE_VIEW) return whole_of(staged, plan->info.buffers[at].base);
    if (role <= TE_ROLE_STATE) return staged->given[at];
    if (role == TE_ROLE_OUTPUT)
        return PyTuple_GetItem(staged->run->outputs, at - plan->info.argument_count);
    if (role == TE_ROLE_SCRATCH) return staged->run->scratch_object;
    return staged->run->saved != NULL ? staged->run->saved : staged->run->saved_given;
}

/* lend(number): the argument, the output, or a tensor over other memory. */
static PyObject *lend(PyObject *capsule, PyObject *number)
{
    tepy_staged *staged = NULL; /* of a run that is over there is none any more */
    const tepy_site site = {"run_staged", "buffers"};
    const tepy_plan *plan;
    const te_buffer_info *info;
    int64_t at = 0;
    PyObject *whole;
    if (PyCapsule_IsValid(capsule, capsule_name)) {
        staged = PyCapsule_GetPointer(capsule, capsule_name);
    }
    if (staged == NULL || staged->views == NULL)
        return TEPY_FAIL(PyExc_RuntimeError, site, "the run is over: take buffers while it runs");
    plan = staged->run->plan;
    if (tepy_int(number, site, 0, plan->info.buffer_count - 1, &at) != 0) return NULL;
    info = &plan->info.buffers[at];
    whole = whole_of(staged, (int32_t)at);
    if (info->role <= TE_ROLE_STATE || info->role == TE_ROLE_OUTPUT) return Py_XNewRef(whole);
    if (whole == NULL || whole == Py_None) { /* there is none for what has no elements */
        return tepy_empty(staged->run->state, staged->run->device, info->dtype,
                          staged->views[at].shape, info->ndim);
    }
    return tepy_share(staged->run->state, whole, &staged->views[at]);
}

static PyMethodDef lend_methods[] = {
    {"lend", lend, METH_O, "A tensor over the memory of a buffer."},
    {NULL, NULL, 0, NULL},
};

/* The object that functions get, made at first use. Borrowed. */
static PyObject *buffers_of(tepy_staged *staged)
{
    const te_plan_call *call = &staged->run->call;
    int forward = staged->run->plan->info.direction == TE_DIRECTION_FORWARD;
    PyObject *function;
    if (staged->buffers != NULL) return staged->buffers;
    staged->self = PyCapsule_New(staged, capsule_name, NULL);
    if (staged->self == NULL) return NULL;
    function = PyCFunction_New(lend_methods, staged->self);
    if (function == NULL) return NULL;
    staged->buffers = PyObject_CallFunction(staged->make_buffers, "NLi", function,
                                            (long long)call->sizes.of[TE_SYMBOL_ROWS],
                                            (int)call->slots[!forward]);
    return staged->buffers;
}

/* New reference: what an external stage calls. */
static PyObject *function_of(const tepy_staged *staged, const te_stage_info *stage)
{
    const tepy_site site = {"run_staged", "functions"};
    PyObject *name = PyUnicode_FromString(stage->name), *function = NULL;
    if (name != NULL) function = PyDict_GetItemWithError(staged->functions, name);
    Py_XDECREF(name);
    if (function != NULL && PyCallable_Check(function)) return Py_NewRef(function);
    if (PyErr_Occurred()) return NULL;
    if (function == NULL) {
        (void)tepy_fail(PyExc_RuntimeError, site, "stage %s is external and has no function",
                        stage->name);
    } else {
        (void)tepy_fail(PyExc_TypeError, site, "%s: %R is not callable", stage->name, function);
    }
    return NULL;
}

/* New reference: what the function of an external stage returns. That of a second half gets what
 * that of the first one has returned. */
static PyObject *call_function(tepy_staged *staged, int32_t stage, PyObject *given)
{
    const te_stage_info *info = &staged->run->plan->info.stages[stage];
    PyObject *function = function_of(staged, info), *started = NULL, *result;
    if (function == NULL) return NULL;
    if (info->half >= 0 && info->half < stage) started = staged->started[info->half];
    result = PyObject_CallFunctionObjArgs(function, given, started, NULL);
    Py_DECREF(function);
    if (info->half > stage) staged->started[stage] = Py_XNewRef(result);
    return result;
}

/* The te_stage_function of every staged run. */
static te_status call_python(void *self, int32_t stage, te_stage_event event, te_tensor *buffers)
{
    tepy_staged *staged = self;
    const te_stage_info *info = &staged->run->plan->info.stages[stage];
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *error = NULL, *name = NULL, *given, *result = NULL;
    const int abandoned = event == TE_STAGE_ABANDON;
    if (abandoned) {
        error = tepy_take_error(); /* of the stage that raised, if one has */
        name = PyUnicode_FromString(info->name);
    }
    staged->views = buffers;
    given = buffers_of(staged);
    if (given != NULL && (event == TE_STAGE_RUN || abandoned)) {
        result = call_function(staged, stage, given);
    } else if (given != NULL) {
        result = PyObject_CallFunction(staged->observer, "iOO", (int)stage, given,
                                       event == TE_STAGE_AFTER ? Py_True : Py_False);
    }
    staged->views = NULL;
    Py_XDECREF(result);
    if (abandoned) {
        if (result == NULL) PyErr_WriteUnraisable(name); /* nobody catches it besides the first */
        Py_XDECREF(name);
        tepy_set_error(error);
    }
    PyGILState_Release(gil);
    if (result != NULL) return TE_OK;
    return TE_FAIL(TE_ERROR_CALLBACK, "stage %s: its Python function raised", info->name);
}

int tepy_staged_begin(tepy_staged *staged, tepy_run_call *run, PyObject *const *args)
{
    const te_plan_info *info = &run->plan->info;
    *staged = (tepy_staged){.run = run,
                            .functions = args[3],
                            .observer = args[4],
                            .make_buffers = args[5],
                            .given = args + 6};
    run->call.stage = call_python;
    run->call.stage_self = staged;
    run->call.observed = staged->observer != Py_None;
    if ((run->call.observed && !PyCallable_Check(staged->observer)) ||
        !PyCallable_Check(staged->make_buffers)) {
        return tepy_fail(PyExc_TypeError, (tepy_site){"run_staged", "observer"},
                         "expected callables for observer and make_buffers, got %R and %R",
                         Py_TYPE(staged->observer), Py_TYPE(staged->make_buffers));
    }
    for (int32_t s = 0; s < info->stage_count; s++) {
        PyObject *function;
        if (!info->stages[s].external) continue;
        function = function_of(staged, &info->stages[s]);
        if (function == NULL) return -1;
        Py_DECREF(function);
        if (info->stages[s].half < 0 || staged->started != NULL) continue;
        staged->started = PyMem_Calloc((size_t)info->stage_count, sizeof(PyObject *));
        if (staged->started == NULL) return tepy_no_memory();
    }
    return 0;
}

void tepy_staged_end(tepy_staged *staged)
{
    /* Whoever has kept lend() finds no run. */
    if (staged->self != NULL) (void)PyCapsule_SetName(staged->self, NULL);
    Py_XDECREF(staged->buffers);
    for (int32_t s = 0; staged->started != NULL && s < staged->run->plan->info.stage_count; s++) {
        Py_XDECREF(staged->started[s]);
    }
    PyMem_Free(staged->started);
    Py_XDECREF(staged->self);
}
