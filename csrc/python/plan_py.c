/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_py.c - describing and sizing plans, and the module's table of them.
 */
#include "python/plan_py.h"

#include <string.h>

/* ---- the table ---- */

void tepy_plans_free(tepy_state *state)
{
    for (size_t i = 0; i < state->plan_capacity; i++) PyMem_Free(state->plans[i]);
    PyMem_Free(state->plans);
    state->plans = NULL;
    state->plan_capacity = state->plan_count = 0;
}

/* Entry of an id, or the empty one where it belongs. The ids are hashes already; capacity is 2^n.
 */
static tepy_plan **locate(tepy_plan **plans, size_t capacity, int64_t id)
{
    size_t at = (size_t)id & (capacity - 1);
    while (plans[at] != NULL && plans[at]->id != id) at = (at + 1) & (capacity - 1);
    return &plans[at];
}

static int grow(tepy_state *state)
{
    size_t capacity = state->plan_capacity == 0 ? 64 : state->plan_capacity * 2;
    tepy_plan **plans = PyMem_Calloc(capacity, sizeof(tepy_plan *));
    if (plans == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < state->plan_capacity; i++) {
        if (state->plans[i] != NULL)
            *locate(plans, capacity, state->plans[i]->id) = state->plans[i];
    }
    PyMem_Free(state->plans);
    state->plans = plans;
    state->plan_capacity = capacity;
    return 0;
}

static void examine(tepy_plan *plan)
{
    size_t kind = strlen(plan->info.kind);
    size_t suffix = strlen("_forward");
    plan->makes_saved = kind >= suffix && strcmp(plan->info.kind + kind - suffix, "_forward") == 0;
    plan->lead = -1;
    plan->seen_rows = -1;
    for (int32_t i = 0; i < plan->info.stage_count; i++) {
        if (strcmp(plan->info.stages[i].op, "external") == 0) plan->external = 1;
    }
    for (int32_t i = 0; i < plan->info.buffer_count; i++) {
        const te_buffer_info *info = &plan->info.buffers[i];
        if (info->role == TE_ROLE_SAVED) plan->has_saved = 1;
        if (info->role == TE_ROLE_OUTPUT) plan->outputs[plan->output_count++] = i;
        if (info->role == TE_ROLE_OUTPUT || tepy_is_packed(info)) continue;
        plan->args[plan->arg_count++] = i;
        if (info->role == TE_ROLE_INPUT && info->leading && plan->lead < 0) plan->lead = i;
    }
}

tepy_plan *tepy_plan_find(tepy_state *state, PyObject *id, const char *function)
{
    int64_t value = 0;
    tepy_plan *plan, **entry;
    te_plan_info info = {.size = sizeof info};
    te_status st;
    if (tepy_int(id, (tepy_site){function, "plan"}, 1, INT64_MAX, &value) != 0) return NULL;
    if (state->plan_capacity != 0) {
        plan = *locate(state->plans, state->plan_capacity, value);
        if (plan != NULL) return plan;
    }
    st = te_plan_describe(value, &info);
    if (st != TE_OK) {
        (void)tepy_raise(st);
        return NULL;
    }
    if (2 * (state->plan_count + 1) > state->plan_capacity && grow(state) != 0) return NULL;
    plan = PyMem_Calloc(1, sizeof *plan);
    if (plan == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    plan->id = value;
    plan->info = info;
    examine(plan);
    entry = locate(state->plans, state->plan_capacity, value);
    *entry = plan;
    state->plan_count++;
    return plan;
}

/* ---- describing and sizing ---- */

static const char *const role_names[] = {
    [TE_ROLE_INPUT] = "input",   [TE_ROLE_PARAMETER] = "parameter", [TE_ROLE_STATE] = "state",
    [TE_ROLE_OUTPUT] = "output", [TE_ROLE_SAVED] = "saved",         [TE_ROLE_SCRATCH] = "scratch",
};

static PyObject *extent_tuple(const te_extent *extent)
{
    return Py_BuildValue("(LLL)", (long long)extent->multiply, (long long)extent->align,
                         (long long)extent->add);
}

static PyObject *buffer_tuple(const te_buffer_info *info)
{
    PyObject *shape = info->ndim == 1 ? Py_BuildValue("[N]", extent_tuple(&info->shape[0]))
                                      : Py_BuildValue("[NN]", extent_tuple(&info->shape[0]),
                                                      extent_tuple(&info->shape[1]));
    return Py_BuildValue("(ssiiN)", info->name, role_names[info->role], (int)info->dtype,
                         (int)info->leading, shape);
}

/* Appends an object whose reference is taken; NULL is an error. */
static int append(PyObject *list, PyObject *object)
{
    int result = object == NULL ? -1 : PyList_Append(list, object);
    Py_XDECREF(object);
    return result;
}

const char tepy_plan_describe_doc[] = "plan_describe($module, plan, /)\n--\n\n"
                                      "Buffers and stages of a plan, in plan order.";

PyObject *tepy_plan_describe(PyObject *module, PyObject *arg)
{
    const tepy_plan *plan = tepy_plan_find(tepy_state_of(module), arg, "plan_describe");
    const te_plan_info *info;
    PyObject *buffers = NULL, *stages = NULL, *result = NULL;
    if (plan == NULL) return NULL;
    info = &plan->info;
    buffers = PyList_New(0);
    stages = PyList_New(0);
    if (buffers == NULL || stages == NULL) goto done;
    for (int32_t i = 0; i < info->buffer_count; i++) {
        if (append(buffers, buffer_tuple(&info->buffers[i])) != 0) goto done;
    }
    for (int32_t i = 0; i < info->stage_count; i++) {
        if (append(stages, Py_BuildValue("(ss)", info->stages[i].name, info->stages[i].op)) != 0) {
            goto done;
        }
    }
    result = Py_BuildValue("{sssOsOsN}", "kind", info->kind, "buffers", buffers, "stages", stages,
                           "saved_bytes", extent_tuple(&info->saved_bytes));
done:
    Py_XDECREF(buffers);
    Py_XDECREF(stages);
    return result;
}

const char tepy_plan_infer_doc[] =
    "plan_infer($module, plan, rows, /)\n--\n\n"
    "(saved bytes, own scratch bytes, offsets per buffer); pure arithmetic.";

PyObject *tepy_plan_infer(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_plan *plan;
    int64_t rows = 0;
    int64_t offsets[TE_PLAN_MAX_BUFFERS];
    te_plan_sizes sizes = {.size = sizeof sizes};
    PyObject *tuple;
    te_status st;
    if (tepy_count("plan_infer", nargs, 2, 2) != 0) return NULL;
    plan = tepy_plan_find(tepy_state_of(module), args[0], "plan_infer");
    if (plan == NULL ||
        tepy_int(args[1], (tepy_site){"plan_infer", "rows"}, 0, INT32_MAX, &rows) != 0) {
        return NULL;
    }
    st = te_plan_infer(plan->id, rows, &sizes, offsets);
    if (st != TE_OK) return tepy_raise(st);
    tuple = PyTuple_New(plan->info.buffer_count);
    if (tuple == NULL) return NULL;
    for (int32_t i = 0; i < plan->info.buffer_count; i++) {
        PyObject *offset = PyLong_FromLongLong(offsets[i]);
        if (offset == NULL || PyTuple_SetItem(tuple, i, offset) != 0) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return Py_BuildValue("(LLN)", (long long)sizes.saved_bytes, (long long)sizes.scratch_bytes,
                         tuple);
}

const char tepy_plan_scratch_doc[] =
    "plan_scratch($module, plan, rows, device_type, device_index=0, /)\n--\n\n"
    "Bytes of scratch that a run on this device takes, operator workspaces included.";

PyObject *tepy_plan_scratch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    const tepy_plan *plan;
    tepy_context *context;
    te_device device;
    int64_t rows = 0;
    size_t bytes = 0;
    te_status st;
    if (tepy_count("plan_scratch", nargs, 3, 4) != 0) return NULL;
    plan = tepy_plan_find(state, args[0], "plan_scratch");
    if (plan == NULL ||
        tepy_int(args[1], (tepy_site){"plan_scratch", "rows"}, 0, INT32_MAX, &rows) != 0 ||
        tepy_device_args("plan_scratch", args[2], nargs > 3 ? args[3] : NULL, &device) != 0) {
        return NULL;
    }
    context = tepy_context_acquire(state, "plan_scratch", NULL, device);
    if (context == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS; /* may ask a vendor library */
    st = te_plan_scratch(context->context, plan->id, rows, &bytes);
    Py_END_ALLOW_THREADS;
    tepy_context_release(context);
    return st == TE_OK ? PyLong_FromSize_t(bytes) : tepy_raise(st);
}
