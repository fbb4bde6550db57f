/* SPDX-License-Identifier: Apache-2.0
 *
 * operators_py.c - one function of the module per operator, for tests, tools and the parts of a
 * layer that are no plan.
 *
 * Signature, docstring, parsing and conversion come from te_op_describe: required fields are
 * positional or keywords, the others keywords with their initial values, `context` the last. What
 * an operator demands of its arguments is checked in csrc/core.
 */
#include "python/args.h"

#include <stdlib.h>
#include <string.h>

typedef struct op_call {
    tepy_state *state;
    te_op op;
    const te_op_info *info;
    const char *function;
    tepy_slot_call by;
    te_device device; /* of the first tensor; all are on it */
    int device_known;
    PyObject *values[TE_OP_MAX_FIELDS + 1]; /* by field, then the context; NULL: not given */
    PyObject *held[TE_OP_MAX_FIELDS];       /* by field: what its pointer needs, or NULL */
    te_any_args args;
} op_call;

typedef PyObject *(*operator_function)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);

/* ---- which value is whose ---- */

/* Name of an argument; NULL for a workspace, which nobody passes. */
static const char *argument_name(const te_op_info *info, int at)
{
    if (at == info->field_count) return "context";
    return info->fields[at].kind == TE_FIELD_WORKSPACE ? NULL : info->fields[at].name;
}

/* How many arguments may be positional: the required ones that the list begins with. */
static int count_positional(const te_op_info *info)
{
    int count = 0;
    while (count < info->field_count && info->fields[count].required) count++;
    return count;
}

/* The argument of this name, looked for from `from` on and around; -1 with an exception. */
static int find_argument(const op_call *call, PyObject *name, int from)
{
    const int count = call->info->field_count + 1;
    for (int step = 0; step < count; step++) { /* most keywords are interned */
        const int at = (from + step) % count;
        if (name == tepy_field_name(call->state, call->op, at) &&
            argument_name(call->info, at) != NULL) {
            return at;
        }
    }
    for (int step = 0; step < count; step++) {
        const int at = (from + step) % count;
        const char *own = argument_name(call->info, at);
        if (own != NULL && PyUnicode_CompareWithASCIIString(name, own) == 0) return at;
    }
    PyErr_Format(PyExc_TypeError, "%s: unexpected keyword argument %R", call->function, name);
    return -1;
}

/* Fills call->values from the arrays of a vectorcall. */
static int sort_values(op_call *call, PyObject *const *given, Py_ssize_t nargs, PyObject *names)
{
    const te_op_info *info = call->info;
    const Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    int next = (int)nargs;
    if (tepy_count(call->function, nargs, 0, count_positional(info)) != 0) return -1;
    for (int i = 0; i < next; i++) call->values[i] = given[i];
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(names, i); /* borrowed */
        const int at = name == NULL ? -1 : find_argument(call, name, next);
        if (at < 0) return -1;
        if (call->values[at] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s: %U: given by name and position", call->function,
                         name);
            return -1;
        }
        call->values[at] = given[nargs + i];
        next = at + 1;
    }
    for (int i = 0; i < info->field_count; i++) {
        if (!info->fields[i].required || call->values[i] != NULL) continue;
        PyErr_Format(PyExc_TypeError, "%s: %s: missing required argument", call->function,
                     info->fields[i].name);
        return -1;
    }
    return 0;
}

/* ---- from a value to its field ---- */

static int take_tensor(op_call *call, int at, tepy_site site, te_tensor *view)
{
    static const tepy_form forms[] = {
        [TE_FORM_MATRIX] = TEPY_ROWS, [TE_FORM_VECTOR] = TEPY_VECTOR, [TE_FORM_DIMS] = TEPY_DIMS};
    const te_field *field = &call->info->fields[at];
    const tepy_spec spec = {
        .site = site,
        .form = field->dtypes == TE_DTYPES_MASK ? TEPY_MASK : forms[field->form],
        .access = field->access == TE_ACCESS_READ ? TEPY_READ : TEPY_WRITE,
    };
    if (tepy_view(call->state, call->values[at], &spec, view, &call->held[at]) != 0) return -1;
    if (call->device_known) return tepy_same_device(site, view->device, call->device);
    call->device = view->device;
    call->device_known = 1;
    return 0;
}

/* Lists begin with a tensor, so that the device is known here. */
static int take_elements(op_call *call, int at, tepy_site site, void *member)
{
    const te_field *field = &call->info->fields[at];
    const tepy_elements spec = {site, field->kind == TE_FIELD_INT64S ? TE_DTYPE_I64 : TE_DTYPE_F32,
                                field->count, call->device};
    void *data = NULL;
    if (tepy_view_elements(call->state, call->values[at], &spec, &data, &call->held[at]) != 0) {
        return -1;
    }
    memcpy(member, &data, sizeof data); /* float * and int64_t * look alike */
    return 0;
}

static int take_number(op_call *call, const te_field *field, PyObject *value, tepy_site site)
{
    double number = 0.0;
    int64_t whole = 0;
    int truth = 0;
    switch (field->kind) {
    case TE_FIELD_FLOAT:
    case TE_FIELD_DOUBLE:
        if (tepy_float(value, site, &number) != 0) return -1;
        break;
    case TE_FIELD_BIT:
        if ((truth = PyObject_IsTrue(value)) < 0) return -1;
        number = (double)truth;
        break;
    case TE_FIELD_INT64: /* more than a double holds */
        return tepy_int(value, site, INT64_MIN, INT64_MAX,
                        (int64_t *)((char *)&call->args + field->offset));
    default:
        if (tepy_int(value, site, INT32_MIN, INT32_MAX, &whole) != 0) return -1;
        number = (double)whole;
    }
    te_field_set_number(field, &call->args, number);
    return 0;
}

static int take_value(op_call *call, int at)
{
    const te_field *field = &call->info->fields[at];
    const tepy_site site = {call->function, field->name};
    const int is_tensor = field->kind == TE_FIELD_TENSOR;
    void *member = (char *)&call->args + field->offset;
    PyObject *value = call->values[at];
    if (value == NULL) return 0;
    if (!is_tensor && field->kind != TE_FIELD_FLOATS && field->kind != TE_FIELD_INT64S) {
        return take_number(call, field, value, site);
    }
    if (value == Py_None) {
        if (!field->required) return 0; /* absent: the struct is zero there */
        return tepy_fail(PyExc_TypeError, site, "expected a torch.Tensor, got None");
    }
    return is_tensor ? take_tensor(call, at, site, member) : take_elements(call, at, site, member);
}

/* ---- the call ---- */

static te_status workspace_of(const op_call *call, te_context *context, size_t *bytes)
{
    const tepy_slot_call *by = &call->by;
    return by->slot != NULL
               ? te_slot_workspace(by->slot, context, call->op, &call->args, bytes)
               : te_op_workspace_selected(context, by->selection, call->op, &call->args, bytes);
}

static te_status run_by(const op_call *call, te_context *context, void *stream)
{
    const tepy_slot_call *by = &call->by;
    return by->slot != NULL
               ? te_slot_run(by->slot, context, call->op, &call->args, stream)
               : te_op_run_selected(context, by->selection, call->op, &call->args, stream);
}

/* Asks how much workspace the call needs, and lends it a tensor of that size. */
static int make_workspace(op_call *call, te_context *context)
{
    const int at = call->info->field_count - 1; /* the last field */
    const te_field *field = &call->info->fields[at];
    struct {
        void *data;
        size_t size;
    } workspace = {NULL, 0};
    int64_t length;
    const te_status st = workspace_of(call, context, &workspace.size);
    if (tepy_check(st) != 0) return -1;
    if (workspace.size == 0) return 0;
    length = (int64_t)workspace.size;
    call->held[at] = tepy_empty(call->state, call->device, TE_DTYPE_U8, &length, 1);
    if (call->held[at] == NULL ||
        tepy_fresh_data(call->state, call->held[at], (tepy_site){call->function, field->name},
                        call->device, length, &workspace.data) != 0) {
        return -1;
    }
    memcpy((char *)&call->args + field->offset, &workspace, sizeof workspace);
    return 0;
}

_Static_assert(TE_OP_COUNT <= 64, "ops_met has a bit per operator");

/* Runs the operator on torch's current stream. On the CPU the kernel runs in the call, without the
 * GIL; on CUDA only the first call of an operator on a context waits for anything (libraries and
 * device code are loaded), the others are a launch. */
static int run(op_call *call, tepy_context *context)
{
    const uint64_t bit = UINT64_C(1) << call->op;
    tepy_without_gil without = {NULL, {NULL, NULL}};
    void *stream = NULL;
    te_status st;
    if (make_workspace(call, context->context) != 0 ||
        tepy_stream(call->state, call->device, &stream) != 0) {
        return -1;
    }
    if (call->device.type == TE_DEVICE_CPU || (context->ops_met & bit) == 0) {
        tepy_leave_gil(&without);
    }
    st = run_by(call, context->context, stream);
    tepy_retake_gil(&without);
    if (tepy_check(st) != 0) return -1;
    context->ops_met |= bit;
    return 1;
}

/* Whether the slot takes the call: 1, 0, or -1 with an exception. */
static int ask(const op_call *call, te_context *context)
{
    const te_status st = te_slot_supports(call->by.slot, context, call->op, &call->args);
    if (st == TE_OK || st == TE_ERROR_UNSUPPORTED) return st == TE_OK;
    return tepy_check(st);
}

/* Whether the tensors are where the slot runs; 1, 0, or -1 with an exception. */
static int reaches(const op_call *call)
{
    const te_device slot = {call->by.device, 0};
    if (call->by.slot == NULL || slot.type == call->device.type) return 1;
    if (call->by.asked) return 0;
    PyErr_Format(PyExc_NotImplementedError, "%s: this slot is of %s, and the tensors are on %s",
                 call->function, tepy_device_name(slot), tepy_device_name(call->device));
    return -1;
}

/* Runs it, or asks whether it would: 1, 0, or -1 with an exception. */
static int perform(op_call *call)
{
    int result = reaches(call);
    tepy_context *context;
    if (result <= 0) return result;
    context = tepy_context_acquire(call->state, call->function,
                                   call->values[call->info->field_count], call->device);
    if (context == NULL) return -1;
    result = call->by.asked ? ask(call, context->context) : run(call, context);
    tepy_context_release(context);
    return result;
}

/* Fills the args; what `held` has got is the caller's to drop, on failure too. */
static int take_values(op_call *call, PyObject *const *given, Py_ssize_t nargs, PyObject *names)
{
    if (sort_values(call, given, nargs, names) != 0) return -1;
    te_op_initial(call->op, &call->args);
    for (int i = 0; i < call->info->field_count; i++) {
        if (take_value(call, i) != 0) return -1;
    }
    return 0;
}

PyObject *tepy_call_operator(PyObject *module, te_op op, tepy_slot_call by, PyObject *const *given,
                             Py_ssize_t nargs, PyObject *names)
{
    op_call call = {.state = tepy_state_of(module),
                    .op = op,
                    .info = te_op_describe(op),
                    .function = te_op_name(op),
                    .by = by};
    int result = -1;
    if (tepy_require_torch(call.state, call.function) != 0) return NULL;
    if (take_values(&call, given, nargs, names) == 0) result = perform(&call);
    for (int i = 0; i < call.info->field_count; i++) Py_XDECREF(call.held[i]);
    if (result < 0) return NULL;
    return by.asked ? PyBool_FromLong(result) : Py_NewRef(Py_None);
}

int tepy_take_args(PyObject *module, te_op op, PyObject *first, PyObject *fields, void *args,
                   PyObject **held)
{
    op_call call = {.state = tepy_state_of(module),
                    .op = op,
                    .info = te_op_describe(op),
                    .function = te_op_name(op)};
    PyObject *given[TE_OP_MAX_FIELDS + 1] = {first}, *own, *names, *name, *value;
    Py_ssize_t at = 0, count = 0;
    int failed;
    if (!PyDict_Check(fields) || PyDict_Size(fields) > TE_OP_MAX_FIELDS) {
        return tepy_fail(PyExc_TypeError, (tepy_site){call.function, "fields"},
                         "expected a dict of the operator's fields");
    }
    own = PyDict_Copy(fields); /* holds the values, whatever becomes of the caller's dict */
    *held = PyList_New(0);
    names = PyTuple_New(PyDict_Size(fields));
    if (own == NULL || *held == NULL || names == NULL || PyList_Append(*held, own) != 0) {
        Py_XDECREF(own);
        Py_XDECREF(names);
        return -1;
    }
    Py_DECREF(own);
    while (PyDict_Next(own, &at, &name, &value)) {
        given[1 + count] = value;
        (void)PyTuple_SetItem(names, count++, Py_NewRef(name));
    }
    failed = take_values(&call, given, 1, names) != 0;
    Py_DECREF(names);
    memcpy(args, &call.args, call.info->size);
    for (int i = 0; i < call.info->field_count; i++) {
        if (call.held[i] == NULL) continue;
        failed |= PyList_Append(*held, call.held[i]) != 0;
        Py_DECREF(call.held[i]);
    }
    return failed ? -1 : 0;
}

#define X(NAME, name)                                                                              \
    static PyObject *call_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs,        \
                                 PyObject *names)                                                  \
    {                                                                                              \
        return tepy_call_operator(module, TE_OP_##NAME, (tepy_slot_call){.slot = NULL}, args,      \
                                  nargs, names);                                                   \
    }
TE_OPS(X)
#undef X

/* ---- what the fields are, for Python ---- */

PyObject *tepy_number(const te_field *field, double value)
{
    switch (field->kind) {
    case TE_FIELD_FLOAT:
    case TE_FIELD_DOUBLE:
        return PyFloat_FromDouble(value);
    case TE_FIELD_INT32:
    case TE_FIELD_INT64:
    case TE_FIELD_ENUM:
        return PyLong_FromDouble(value);
    case TE_FIELD_BIT:
        return PyBool_FromLong(value != 0.0);
    default:
        return Py_NewRef(Py_None);
    }
}

/* New reference: "quantize($module, /, input, *, mode=0, ..., context=None)", "--", the summary. */
static PyObject *make_doc(te_op op)
{
    const te_op_info *info = te_op_describe(op);
    const int positional = count_positional(info);
    PyObject *doc = PyUnicode_FromFormat("%s($module, /", te_op_name(op));
    for (int i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        PyObject *value;
        if (i == positional) PyUnicode_AppendAndDel(&doc, PyUnicode_FromString(", *"));
        if (argument_name(info, i) == NULL) continue;
        if (field->required) {
            PyUnicode_AppendAndDel(&doc, PyUnicode_FromFormat(", %s", field->name));
            continue;
        }
        value = tepy_number(field, field->initial);
        PyUnicode_AppendAndDel(
            &doc, value == NULL ? NULL : PyUnicode_FromFormat(", %s=%R", field->name, value));
        Py_XDECREF(value);
    }
    PyUnicode_AppendAndDel(&doc, PyUnicode_FromFormat("%s, context=None)\n--\n\n%s",
                                                      positional == info->field_count ? ", *" : "",
                                                      info->summary));
    return doc;
}

/* Fills `field_names` of an operator; -1 with an exception. */
static int intern_names(tepy_state *state, te_op op)
{
    const te_op_info *info = te_op_describe(op);
    PyObject *names = PyTuple_New(info->field_count + 1);
    for (int i = 0; names != NULL && i <= info->field_count; i++) {
        const char *own = i == info->field_count ? "context" : info->fields[i].name;
        tepy_fill(&names, i, PyUnicode_InternFromString(own));
    }
    tepy_set(&state->field_names[op], names);
    return names == NULL ? -1 : 0;
}

int tepy_operators_add(PyObject *module)
{
    static const operator_function functions[] = {
#define X(NAME, name) call_##name,
        TE_OPS(X)
#undef X
    };
    tepy_state *state = tepy_state_of(module);
    state->operators = calloc(TE_OP_COUNT + 1, sizeof *state->operators);
    if (state->operators == NULL) return tepy_no_memory();
    for (int op = 0; op < TE_OP_COUNT; op++) {
        PyObject *doc;
        const char *text;
        char *copy;
        if (intern_names(state, (te_op)op) != 0) return -1;
        doc = make_doc((te_op)op);
        text = doc == NULL ? NULL : PyUnicode_AsUTF8AndSize(doc, NULL);
        copy = text == NULL ? NULL : strdup(text);
        Py_XDECREF(doc);
        if (copy == NULL) {
            if (text != NULL) (void)PyErr_NoMemory();
            return -1;
        }
        state->operators[op] =
            (PyMethodDef){te_op_name((te_op)op), (PyCFunction)(void (*)(void))functions[op],
                          METH_FASTCALL | METH_KEYWORDS, copy};
    }
    return PyModule_AddFunctions(module, state->operators);
}

void tepy_operators_free(tepy_state *state)
{
    for (int op = 0; state->operators != NULL && op < TE_OP_COUNT; op++) {
        free((void *)(uintptr_t)state->operators[op].ml_doc);
    }
    free(state->operators);
    state->operators = NULL;
}

int tepy_op_by_name(PyObject *name, tepy_site site)
{
    if (!PyUnicode_Check(name)) {
        return tepy_fail_showing(PyExc_TypeError, site, "%U is not an operator name", name);
    }
    for (int op = 0; op < TE_OP_COUNT; op++) {
        if (PyUnicode_CompareWithASCIIString(name, te_op_name((te_op)op)) == 0) return op;
    }
    return tepy_fail_showing(PyExc_ValueError, site,
                             "there is no operator %U: op_names() lists them", name);
}

PyObject *tepy_op_fields(PyObject *module, PyObject *name)
{
    static const char *const types[] = {
        [TE_FIELD_TENSOR] = "tensor", [TE_FIELD_FLOATS] = "tensor", [TE_FIELD_INT64S] = "tensor",
        [TE_FIELD_FLOAT] = "float",   [TE_FIELD_DOUBLE] = "float",  [TE_FIELD_INT32] = "int",
        [TE_FIELD_INT64] = "int",     [TE_FIELD_ENUM] = "int",      [TE_FIELD_BIT] = "bool"};
    static const char *const accesses[] = {
        [TE_ACCESS_READ] = "read", [TE_ACCESS_WRITE] = "write", [TE_ACCESS_UPDATE] = "update"};
    const int op = tepy_op_by_name(name, (tepy_site){"op_fields", "name"});
    const te_op_info *info = op < 0 ? NULL : te_op_describe((te_op)op);
    PyObject *list, *tuple;
    if (info == NULL) return NULL;
    list = PyList_New(0);
    for (int i = 0; list != NULL && i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        PyObject *entry;
        if (argument_name(info, i) == NULL) continue;
        entry = Py_BuildValue("(sssO)", field->name, types[field->kind], accesses[field->access],
                              field->required ? Py_True : Py_False);
        if (entry == NULL || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}
