/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_make_py.c - graphs from Python: their plans, and their texts.
 */
#include "python/plan_py.h"
#include "python/records_py.h"

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
    return st == TE_OK ? tepy_plan_wrap(tepy_state_of(module), plan) : tepy_raise(st);
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
