/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_make_py.c - making plans: tuples become the description of a graph.
 */
#include "python/plan_py.h"

#include <stdarg.h>
#include <string.h>

/* A graph and the memory of its lists. */
typedef struct graph_memory {
    te_graph_desc graph;
    te_value_desc *values;
    te_node_desc *nodes;
} graph_memory;

static int copy_name(char *to, const char *name, const char *what)
{
    if (strlen(name) < TE_NAME_BYTES) {
        (void)strncpy(to, name, TE_NAME_BYTES);
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "make_plan: %s: %s has more than %d characters", what, name,
                 TE_NAME_BYTES - 1);
    return -1;
}

/* PyArg_ParseTuple for an item that may be anything. */
static int parse(PyObject *item, const char *what, const char *format, ...)
{
    tepy_site site = {"make_plan", what};
    va_list arguments;
    int parsed;
    if (!PyTuple_Check(item)) {
        return tepy_fail(PyExc_TypeError, site, "expected a tuple, got %R", Py_TYPE(item));
    }
    va_start(arguments, format);
    parsed = PyArg_VaParse(item, format, arguments);
    va_end(arguments);
    if (parsed) return 0;
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        (void)tepy_fail_from_current(PyExc_ValueError, site, "a number is out of range");
    }
    return -1;
}

/* For "O&", which unlike "I" lets nothing wrap around. */
static int take_bits(PyObject *object, void *to)
{
    int64_t bits = 0;
    if (tepy_int(object, (tepy_site){"make_plan", "flags"}, 0, UINT32_MAX, &bits) != 0) return 0;
    *(uint32_t *)to = (uint32_t)bits;
    return 1;
}

/* An int is a constant; (symbol, multiply, align) is a multiple of a symbol. */
static int take_extent(PyObject *object, te_extent *extent)
{
    long long value = 0;
    extent->align = 1;
    if (PyTuple_Check(object)) {
        if (parse(object, "shape", "iLi:make_plan", &extent->symbol, &value, &extent->align) != 0) {
            return -1;
        }
        extent->multiply = value;
        return 0;
    }
    return tepy_int(object, (tepy_site){"make_plan", "shape"}, 1, INT32_MAX, &extent->add);
}

static int take_value(PyObject *item, te_value_desc *value)
{
    const char *name;
    PyObject *shape;
    Py_ssize_t ndim;
    if (parse(item, "values", "sO&iiO!:make_plan", &name, take_bits, &value->flags, &value->dtype,
              &value->grad_dtype, &PyTuple_Type, &shape) != 0 ||
        copy_name(value->name, name, "values") != 0) {
        return -1;
    }
    ndim = PyTuple_Size(shape);
    if (ndim < 1 || ndim > TE_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "make_plan: %s: %zd dims, expected 1 to %d", name, ndim,
                     TE_MAX_DIMS);
        return -1;
    }
    value->ndim = (int32_t)ndim;
    for (Py_ssize_t i = 0; i < ndim; i++) {
        if (take_extent(PyTuple_GetItem(shape, i), &value->shape[i]) != 0) return -1;
    }
    return 0;
}

/* The items of a tuple as a list of that node, freed with it. NULL where one of them is wrong. */
static void *take_list(PyObject *items, int32_t *count, size_t size,
                       int (*take)(PyObject *item, void *to))
{
    Py_ssize_t items_count = PyTuple_Size(items);
    char *list = items_count > INT32_MAX ? NULL : PyMem_Calloc((size_t)items_count + 1, size);
    if (list == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < items_count; i++) {
        if (take(PyTuple_GetItem(items, i), list + (size_t)i * size) == 0) continue;
        PyMem_Free(list);
        return NULL;
    }
    *count = (int32_t)items_count;
    return list;
}

static int take_input(PyObject *item, void *to)
{
    int64_t value = -1;
    const tepy_site site = {"make_plan", "inputs"};
    if (tepy_int(item, site, -1, TE_GRAPH_VALUES, &value) != 0) return -1;
    *(int32_t *)to = (int32_t)value;
    return 0;
}

static int take_number(PyObject *item, void *to)
{
    double value = PyFloat_AsDouble(item);
    if (value == -1.0 && PyErr_Occurred()) return -1;
    *(double *)to = value;
    return 0;
}

static int take_slice(PyObject *item, void *to)
{
    te_slice *slice = to;
    long long offset = 0, stride = 0, together = 1;
    if (parse(item, "slices", "iiLL|L:make_plan", &slice->heads, &slice->channels, &offset, &stride,
              &together) != 0) {
        return -1;
    }
    slice->offset = offset;
    slice->stride = stride;
    slice->together = together;
    return 0;
}

static int take_node(PyObject *item, te_node_desc *node)
{
    const char *name;
    PyObject *inputs, *numbers, *slices, *external;
    te_quantization *q = &node->quantization;
    te_operand_cast *input = &q->casts[TE_INPUT_OPERAND], *weight = &q->casts[TE_WEIGHT_OPERAND];
    te_operand_cast *grad = &q->casts[TE_GRAD_OPERAND];
    if (parse(item, "nodes", "siiO&O!iO!O!((iifO&i)(iifO&i)(iifO&i)i)i(ii)iO!:make_plan", &name,
              &node->kind, &node->variant, take_bits, &node->flags, &PyTuple_Type, &inputs,
              &node->output, &PyTuple_Type, &numbers, &PyTuple_Type, &slices, &input->recipe,
              &input->dtype, &input->amax_epsilon, take_bits, &input->options, &input->margin,
              &weight->recipe, &weight->dtype, &weight->amax_epsilon, take_bits, &weight->options,
              &weight->margin, &grad->recipe, &grad->dtype, &grad->amax_epsilon, take_bits,
              &grad->options, &grad->margin, &q->backward, &node->owner, &node->slots[0],
              &node->slots[1], &node->gather, &PyTuple_Type, &external) != 0) {
        return -1;
    }
    node->inputs = take_list(inputs, &node->input_count, sizeof(int32_t), take_input);
    if (node->inputs == NULL) return -1;
    node->numbers = take_list(numbers, &node->number_count, sizeof(double), take_number);
    if (node->numbers == NULL) return -1;
    node->slices = take_list(slices, &node->slice_count, sizeof(te_slice), take_slice);
    if (node->slices == NULL) return -1;
    node->external = take_list(external, &node->external_count, sizeof(int32_t), take_input);
    return node->external == NULL ? -1 : copy_name(node->name, name, "nodes");
}

/* Each item of a tuple into its struct: new, zeroed memory, for its bytes are hashed. */
static int take_lists(graph_memory *memory, PyObject *values, PyObject *nodes)
{
    Py_ssize_t value_count = PyTuple_Size(values), node_count = PyTuple_Size(nodes);
    if (value_count > TE_GRAPH_VALUES || node_count > TE_GRAPH_NODES) {
        PyErr_Format(PyExc_ValueError,
                     "make_plan: %zd values and %zd nodes, expected at most %d and %d", value_count,
                     node_count, TE_GRAPH_VALUES, TE_GRAPH_NODES);
        return -1;
    }
    memory->values = PyMem_Calloc((size_t)value_count + 1, sizeof *memory->values);
    memory->nodes = PyMem_Calloc((size_t)node_count + 1, sizeof *memory->nodes);
    if (memory->values == NULL || memory->nodes == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    memory->graph = (te_graph_desc){.size = sizeof memory->graph,
                                    .values = memory->values,
                                    .nodes = memory->nodes,
                                    .value_count = (int32_t)value_count,
                                    .node_count = (int32_t)node_count};
    for (Py_ssize_t i = 0; i < value_count; i++) {
        if (take_value(PyTuple_GetItem(values, i), &memory->values[i]) != 0) return -1;
    }
    for (Py_ssize_t i = 0; i < node_count; i++) {
        if (take_node(PyTuple_GetItem(nodes, i), &memory->nodes[i]) != 0) return -1;
    }
    return 0;
}

static void free_lists(const graph_memory *memory)
{
    for (int32_t n = 0; memory->nodes != NULL && n < memory->graph.node_count; n++) {
        PyMem_Free((void *)memory->nodes[n].inputs);
        PyMem_Free((void *)memory->nodes[n].numbers);
        PyMem_Free((void *)memory->nodes[n].slices);
        PyMem_Free((void *)memory->nodes[n].external);
    }
    PyMem_Free(memory->nodes);
    PyMem_Free(memory->values);
}

PyObject *tepy_make_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    graph_memory memory = {.values = NULL, .nodes = NULL};
    int64_t direction = 0, flags = 0;
    te_plan *plan = NULL;
    te_status st = TE_ERROR_CALLBACK; /* an exception is set */
    if (tepy_count("make_plan", nargs, 4, 4) != 0 ||
        tepy_int(args[0], (tepy_site){"make_plan", "direction"}, 0, TE_DIRECTION_COUNT - 1,
                 &direction) != 0 ||
        tepy_int(args[1], (tepy_site){"make_plan", "flags"}, 0, UINT32_MAX, &flags) != 0) {
        return NULL;
    }
    if (!PyTuple_Check(args[2]) || !PyTuple_Check(args[3])) {
        PyErr_Format(PyExc_TypeError, "make_plan: values: %R, nodes: %R, expected tuples",
                     Py_TYPE(args[2]), Py_TYPE(args[3]));
        return NULL;
    }
    if (take_lists(&memory, args[2], args[3]) == 0) {
        memory.graph.flags = (uint32_t)flags;
        st = te_plan_make(&memory.graph, (te_direction)direction, &plan);
    }
    free_lists(&memory);
    return st == TE_OK ? tepy_plan_wrap(tepy_state_of(module), plan) : tepy_raise(st);
}
