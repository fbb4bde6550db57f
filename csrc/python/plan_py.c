/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_py.c - the Plan type: a te_plan, held as long as the object; describing and sizing plans.
 */
#include "python/plan_py.h"

#include <string.h>

#include "python/records_py.h"
#include "python/types.h"

/* ---- the type ---- */

static int examine(tepy_plan *plan)
{
    plan->makes_saved = plan->info.direction == TE_DIRECTION_FORWARD;
    plan->lead[0] = plan->lead[1] = -1;
    plan->seen_sizes.of[TE_SYMBOL_ROWS] = -1;
    for (int32_t i = 0; i < plan->info.stage_count; i++) {
        plan->external |= plan->info.stages[i].external;
    }
    for (int32_t i = 0; i < plan->info.buffer_count; i++) {
        const te_buffer_info *info = &plan->info.buffers[i];
        plan->has_saved |= info->role == TE_ROLE_SAVED;
        plan->output_count += info->role == TE_ROLE_OUTPUT;
        plan->arg_count += info->role <= TE_ROLE_STATE;
        if (info->role == TE_ROLE_INPUT && info->leading && plan->lead[tepy_sequence(info)] < 0) {
            plan->lead[tepy_sequence(info)] = i;
        }
    }
    plan->parted = PyMem_Calloc((size_t)plan->arg_count + 1, 1);
    if (plan->parted == NULL) return -1;
    for (int32_t i = 0; i < plan->info.buffer_count; i++) {
        const te_buffer_info *info = &plan->info.buffers[i];
        if (info->role == TE_ROLE_VIEW && info->view == TE_VIEW_PART &&
            info->base < plan->arg_count) {
            plan->parted[info->base] = 1;
        }
    }
    return 0;
}

TEPY_HOLDER(plan, tepy_plan, TEPY_NOTHING, te_plan_release(self->plan), PyMem_Free(self->parted))

static PyObject *plan_id(PyObject *self, void *unused)
{
    return PyLong_FromLongLong(((const tepy_plan *)self)->info.id);
}

static PyGetSetDef plan_getset[] = {
    {"id", plan_id, NULL, "The same for the same graph in every process.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

TEPY_TYPE(plan, plan, tepy_plan, "Plan", Py_TPFLAGS_DISALLOW_INSTANTIATION,
          {Py_tp_doc, "A plan of make_plan, which lives as long as somebody holds it."},
          {Py_tp_getset, plan_getset})

PyObject *tepy_plan_wrap(const tepy_state *state, te_plan *plan)
{
    tepy_plan *self = (tepy_plan *)TEPY_ALLOCATE((PyTypeObject *)state->plan_type);
    if (self == NULL) {
        te_plan_release(plan);
        return NULL;
    }
    self->plan = plan;
    (void)te_plan_describe(plan, &self->info); /* it is there */
    if (examine(self) != 0) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

tepy_plan *tepy_plan_of(const tepy_state *state, PyObject *object, const char *function)
{
    if ((PyObject *)Py_TYPE(object) == state->plan_type) return (tepy_plan *)object;
    (void)tepy_fail(PyExc_TypeError, (tepy_site){function, "plan"},
                    "expected a Plan, of make_plan, got %R", Py_TYPE(object));
    return NULL;
}

PyObject *tepy_plan_count(PyObject *module, PyObject *unused)
{
    return PyLong_FromLongLong(te_plan_count());
}

/* ---- describing and sizing ---- */

PyObject *tepy_plan_describe(PyObject *module, PyObject *arg)
{
    const tepy_state *state = tepy_state_of(module);
    const tepy_plan *plan = tepy_plan_of(state, arg, "plan_describe");
    return plan == NULL ? NULL : tepy_give_record(state, TE_RECORD_PLAN, &plan->info);
}

/* Sizes from the rows, or from a tuple of the values of SYMBOL_ROWS and those behind it. */
static int take_sizes(PyObject *object, const char *function, te_sizes *sizes)
{
    const tepy_site site = {function, "rows"};
    Py_ssize_t count = PyTuple_Check(object) ? PyTuple_Size(object) : 1;
    memset(sizes, 0, sizeof *sizes);
    if (count < 1 || count >= TE_SYMBOL_COUNT) {
        return tepy_fail(PyExc_ValueError, site, "%zd sizes, expected 1 to %d", count,
                         TE_SYMBOL_COUNT - 1);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_Check(object) ? PyTuple_GetItem(object, i) : object;
        if (tepy_int(item, site, 0, INT32_MAX, &sizes->of[TE_SYMBOL_ROWS + i]) != 0) return -1;
    }
    return 0;
}

PyObject *tepy_plan_infer(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_plan *plan;
    te_plan_sizes sizes = {.size = sizeof sizes};
    te_sizes given;
    int64_t *offsets;
    PyObject *tuple;
    te_status st;
    plan = tepy_plan_of(tepy_state_of(module), args[0], "plan_infer");
    if (plan == NULL || take_sizes(args[1], "plan_infer", &given) != 0) return NULL;
    offsets = PyMem_Calloc((size_t)plan->info.buffer_count + 1, sizeof *offsets);
    if (offsets == NULL) return PyErr_NoMemory();
    st = te_plan_infer(plan->plan, &given, &sizes, offsets);
    tuple = st == TE_OK ? PyTuple_New(plan->info.buffer_count) : NULL;
    for (int32_t i = 0; tuple != NULL && i < plan->info.buffer_count; i++) {
        tepy_fill(&tuple, i, PyLong_FromLongLong(offsets[i]));
    }
    PyMem_Free(offsets);
    if (st != TE_OK) return tepy_raise(st);
    return Py_BuildValue("(LLN)", (long long)sizes.saved_bytes, (long long)sizes.scratch_bytes,
                         tuple);
}

PyObject *tepy_plan_scratch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    const tepy_plan *plan;
    tepy_context *context;
    te_device device;
    size_t bytes = 0;
    te_sizes sizes;
    te_status st;
    plan = tepy_plan_of(state, args[0], "plan_scratch");
    if (plan == NULL || take_sizes(args[1], "plan_scratch", &sizes) != 0 ||
        tepy_device_args("plan_scratch", args[2], nargs > 3 ? args[3] : NULL, &device) != 0) {
        return NULL;
    }
    context = tepy_context_acquire(state, "plan_scratch", NULL, device);
    if (context == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS; /* may ask a vendor library */
    st = te_plan_scratch(context->context, plan->plan, &sizes, &bytes);
    Py_END_ALLOW_THREADS;
    tepy_context_release(context);
    return st == TE_OK ? PyLong_FromSize_t(bytes) : tepy_raise(st);
}
