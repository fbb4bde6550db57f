/* SPDX-License-Identifier: Apache-2.0
 *
 * function_slot.c - a Python function as a slot of the operator table: it gets the args struct as a
 * dict, tensors over the memory of the caller, and writes to these.
 */
#include "python/function_slot.h"

#include <stdio.h>

/* New reference: a torch tensor over the view's memory; None for an absent one. */
static PyObject *lend_tensor(const tepy_state *state, const te_tensor *view)
{
    return view->ndim == 0 ? Py_NewRef(Py_None) : tepy_share(state, NULL, view);
}

/* New reference: the elements behind a pointer; None for NULL. */
static PyObject *lend_elements(const tepy_state *state, const void *data, te_dtype dtype,
                               int64_t count, te_device device)
{
    te_tensor view = {.data = (void *)(uintptr_t)data, .dtype = dtype, .device = device, .ndim = 1};
    if (data == NULL) return Py_NewRef(Py_None);
    view.shape[0] = count;
    view.strides[0] = 1;
    return lend_tensor(state, &view);
}

/* Puts a new reference into the dict; NULL is an error. */
static int put(PyObject *dict, PyObject *name, PyObject *value)
{
    int result = value == NULL ? -1 : PyDict_SetItem(dict, name, value);
    Py_XDECREF(value);
    return result;
}

/* New reference. */
static PyObject *lend_field(const tepy_state *state, const te_field *field, const void *args,
                            te_device device)
{
    const void *member = te_field_member(field, args);
    switch (field->kind) {
    case TE_FIELD_TENSOR:
        return lend_tensor(state, member);
    case TE_FIELD_FLOATS:
        return lend_elements(state, *(float *const *)member, TE_DTYPE_F32, field->count, device);
    case TE_FIELD_INT64S:
        return lend_elements(state, *(int64_t *const *)member, TE_DTYPE_I64, field->count, device);
    case TE_FIELD_INT64: /* more than a double holds */
        return PyLong_FromLongLong(*(const int64_t *)member);
    default:
        return tepy_number(field, te_field_number(field, args));
    }
}

/* New reference: the fields that are lent, by name, but for the workspace: a Python function
 * allocates what it needs. */
static PyObject *lend_args(const tepy_function_slot *record, const void *args, te_device device)
{
    const te_op_info *info = te_op_describe(record->op);
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        if (field->kind == TE_FIELD_WORKSPACE || (record->lent >> i & 1U) == 0) continue;
        if (put(dict, tepy_field_name(record->state, record->op, i),
                lend_field(record->state, field, args, device)) != 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* Lets the error that a function raised say of which call: the operator, and its tensors. */
static void add_note(te_op op, const void *args)
{
    PyObject *error = tepy_take_error();
    char text[600];
    const size_t length = (size_t)snprintf(text, sizeof text, "in te_%s: ", te_op_name(op));
    te_op_shapes(op, args, text + length, sizeof text - length);
    tepy_set_error_noted(error, PyUnicode_FromString(text));
}

/* The stream is torch's current one, on which the function works anyway. */
te_status tepy_call_function(void *self, te_context *context, const void *args, void *stream)
{
    const tepy_function_slot *record = self;
    const char *op = te_op_name(record->op); /* never changes, unlike the function */
    PyObject *function, *dict = NULL, *result = NULL;
    PyGILState_STATE gil;
    te_status st = TE_OK;
    gil = PyGILState_Ensure();
    function = record->function;
    if (function == NULL) {
        st = TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: the Python backend %s was unregistered", op,
                     record->backend);
        goto done;
    }
    (void)Py_NewRef(function); /* it may unregister itself */
    dict = lend_args(record, args, te_context_device(context));
    if (dict != NULL) result = PyObject_CallFunctionObjArgs(function, dict, NULL);
    if (result == NULL) {
        add_note(record->op, args);
        st = TE_FAIL(TE_ERROR_CALLBACK, "%s: the Python backend %s raised", op, record->backend);
    } else if (result == Py_NotImplemented) {
        st = TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: the Python backend %s does not take this call", op,
                     record->backend);
    }
    Py_DECREF(function);
done:
    Py_XDECREF(result);
    Py_XDECREF(dict);
    PyGILState_Release(gil);
    return st;
}
