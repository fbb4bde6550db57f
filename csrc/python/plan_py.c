/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_py.c - the Plan type: a te_plan, held as long as the object; making, describing and sizing
 * plans; texts of graphs.
 */
#include "python/plan_py.h"

#include <string.h>

#include "python/records_py.h"
#include "python/types.h"

/* ---- the type ---- */

static int examine(tepy_plan *plan)
{
    plan->makes_saved = plan->info.direction == TE_DIRECTION_FORWARD;
    plan->seen_sizes.of[TE_SYMBOL_ROWS] = -1;
    plan->parted = PyMem_Calloc((size_t)plan->info.argument_count + 1, 1);
    if (plan->parted == NULL) return -1;
    for (int32_t i = 0; i < plan->info.buffer_count; i++) {
        const te_buffer_info *info = &plan->info.buffers[i];
        if (info->role == TE_ROLE_VIEW && info->view == TE_VIEW_PART &&
            info->base < plan->info.argument_count) {
            plan->parted[info->base] = 1;
        }
    }
    return 0;
}

TEPY_HOLDER(plan, tepy_plan, TEPY_NOTHING, te_plan_release(self->plan), PyMem_Free(self->parted))

static PyMemberDef plan_members[] = {
    {"id", T_LONGLONG, offsetof(tepy_plan, info.id), READONLY, "Of the graph, in every process."},
    {NULL, 0, 0, 0, NULL},
};

TEPY_TYPE(plan, plan, tepy_plan, "Plan", Py_TPFLAGS_DISALLOW_INSTANTIATION,
          {Py_tp_doc, "A plan of make_plan, which lives as long as somebody holds it."},
          {Py_tp_members, plan_members})

/* New reference to a plan that the caller holds, and no longer. */
static PyObject *wrap(const tepy_state *state, te_plan *plan)
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
    (void)tepy_expected((tepy_site){function, "plan"}, "a Plan, of make_plan", object);
    return NULL;
}

PyObject *tepy_plan_count(PyObject *module, PyObject *unused)
{
    return PyLong_FromLongLong(te_plan_count());
}

/* ---- graphs ---- */

/* The arguments of make_plan and write_graph; the caller releases the graph, on failure too. */
static int take_graph(const char *function, PyObject *const *args, te_direction *direction,
                      te_graph_desc *graph)
{
    const te_record *record = te_record_describe(TE_RECORD_GRAPH);
    int64_t number = 0;
    te_record_initial(record, graph);
    graph->size = sizeof *graph;
    if (tepy_int(args[0], (tepy_site){function, "direction"}, 0, TE_DIRECTION_COUNT - 1, &number) !=
        0) {
        return -1;
    }
    *direction = (te_direction)number;
    return tepy_take_record(function, record, args[1], graph);
}

PyObject *tepy_make_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    te_graph_desc graph;
    te_direction direction = TE_DIRECTION_FORWARD;
    te_plan *plan = NULL;
    te_status st = TE_ERROR_CALLBACK; /* an exception is set */
    if (take_graph("make_plan", args, &direction, &graph) == 0) {
        st = te_plan_make(&graph, direction, &plan);
    }
    te_graph_release(&graph);
    return st == TE_OK ? wrap(tepy_state_of(module), plan) : tepy_raise(st);
}

PyObject *tepy_write_graph(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    te_graph_desc graph;
    te_direction direction = TE_DIRECTION_FORWARD;
    PyObject *made = NULL;
    size_t length = 0;
    char *text = NULL;
    te_status st = TE_ERROR_CALLBACK;
    if (take_graph("write_graph", args, &direction, &graph) == 0) {
        st = te_graph_write(&graph, direction, NULL, 0, &length);
        if (st == TE_OK) text = PyMem_Malloc(length + 1);
        if (text != NULL) st = te_graph_write(&graph, direction, text, length + 1, &length);
        if (text != NULL && st == TE_OK) made = PyUnicode_FromString(text);
    }
    te_graph_release(&graph);
    PyMem_Free(text);
    if (st != TE_OK) return tepy_raise(st);
    return made != NULL || PyErr_Occurred() ? made : PyErr_NoMemory();
}

PyObject *tepy_read_graph(PyObject *module, PyObject *arg)
{
    te_graph_desc graph;
    te_direction direction = TE_DIRECTION_FORWARD;
    PyObject *made;
    const char *text = tepy_text(arg, (tepy_site){"read_graph", "text"}, NULL);
    te_status st;
    if (text == NULL) return NULL;
    st = te_graph_read(text, &graph, &direction); /* ends at a null character, as damaged */
    if (st != TE_OK) return tepy_raise(st);
    made = tepy_give_record(tepy_state_of(module), TE_RECORD_GRAPH, &graph);
    te_graph_release(&graph);
    return made == NULL ? NULL : Py_BuildValue("(iN)", (int)direction, made);
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

PyObject *tepy_plan_ports(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_plan *plan = tepy_plan_of(tepy_state_of(module), args[0], "plan_ports");
    unsigned char *ports;
    int64_t first, end;
    PyObject *made;
    te_status st;
    if (plan == NULL ||
        tepy_int(args[1], (tepy_site){"plan_ports", "first"}, 0, INT32_MAX, &first) != 0 ||
        tepy_int(args[2], (tepy_site){"plan_ports", "end"}, 0, INT32_MAX, &end) != 0) {
        return NULL;
    }
    ports = PyMem_Calloc((size_t)plan->info.buffer_count + 1, sizeof *ports);
    if (ports == NULL) return PyErr_NoMemory();
    st = te_plan_ports(plan->plan, (int32_t)first, (int32_t)end, ports);
    made = st == TE_OK ? PyBytes_FromStringAndSize((const char *)ports, plan->info.buffer_count)
                       : tepy_raise(st);
    PyMem_Free(ports);
    return made;
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
