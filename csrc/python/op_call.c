/* SPDX-License-Identifier: Apache-2.0
 *
 * op_call.c - one call of an operator from Python: tensors, workspace, context, stream.
 */
#include "python/op_call.h"

#include <string.h>

int tepy_op_begin(tepy_op_call *call, PyObject *module, const char *function)
{
    memset(call, 0, sizeof *call);
    call->state = tepy_state_of(module);
    call->function = function;
    return tepy_require_torch(call->state, function);
}

PyObject *tepy_op_end(tepy_op_call *call, int failed)
{
    for (int i = 0; i < call->held_count; i++) Py_DECREF(call->held[i]);
    return failed ? NULL : Py_NewRef(Py_None);
}

static void hold(tepy_op_call *call, PyObject *held)
{
    if (held != NULL) call->held[call->held_count++] = held;
}

int tepy_op_take(tepy_op_call *call, PyObject *object, const tepy_want *want, te_tensor *view)
{
    PyObject *held = NULL;
    int result;
    if (object == NULL || object == Py_None) return 0; /* absent: the struct is zero there */
    result = tepy_view(call->state, object, want, view, &held);
    hold(call, held);
    if (result != 0) return -1;
    if (call->device_known) return tepy_same_device(want->site, view->device, call->device);
    call->device = view->device;
    call->device_known = 1;
    return 0;
}

int tepy_op_matrix(tepy_op_call *call, PyObject *object, const char *name, tepy_access access,
                   te_tensor *view)
{
    tepy_want want = {{call->function, name}, TEPY_ROWS, access, NULL};
    return tepy_op_take(call, object, &want, view);
}

int tepy_op_vector(tepy_op_call *call, PyObject *object, const char *name, tepy_access access,
                   te_tensor *view)
{
    tepy_want want = {{call->function, name}, TEPY_VECTOR, access, NULL};
    return tepy_op_take(call, object, &want, view);
}

int tepy_op_elements(tepy_op_call *call, PyObject *object, const char *name, te_dtype dtype,
                     int64_t count, void **data)
{
    tepy_elements want = {{call->function, name}, dtype, count, call->device};
    PyObject *held = NULL;
    int result;
    *data = NULL;
    if (object == NULL || object == Py_None) return 0;
    result = tepy_view_elements(call->state, object, &want, data, &held);
    hold(call, held);
    return result;
}

int tepy_op_floats(tepy_op_call *call, PyObject *object, const char *name, int64_t count,
                   float **data)
{
    void *elements = NULL;
    int result = tepy_op_elements(call, object, name, TE_DTYPE_F32, count, &elements);
    *data = elements;
    return result;
}

int tepy_op_scalar(tepy_op_call *call, PyObject *object, const char *name, const float **data)
{
    float *value = NULL;
    int result = tepy_op_floats(call, object, name, 1, &value);
    *data = value;
    return result;
}

static int make_workspace(tepy_op_call *call, tepy_context *context, te_op op, const void *args,
                          const tepy_workspace *fields)
{
    size_t bytes = 0;
    int64_t length;
    PyObject *tensor;
    tepy_want want = {{call->function, "workspace"}, TEPY_VECTOR, TEPY_WRITE, NULL};
    te_tensor view;
    te_status st;
    Py_BEGIN_ALLOW_THREADS; /* may ask a vendor library, or a Python backend */
    st = te_op_workspace(context->context, op, args, &bytes);
    Py_END_ALLOW_THREADS;
    if (st != TE_OK) {
        (void)tepy_raise(st);
        return -1;
    }
    if (bytes == 0) return 0;
    length = (int64_t)bytes;
    tensor = tepy_empty(call->state, call->device, TE_DTYPE_U8, &length, 1);
    if (tensor == NULL) return -1;
    hold(call, tensor);
    if (tepy_op_take(call, tensor, &want, &view) != 0) return -1;
    *fields->data = view.data;
    *fields->size = bytes;
    return 0;
}

int tepy_op_run(tepy_op_call *call, te_op op, const void *args, const tepy_workspace *fields)
{
    tepy_context *context =
        tepy_context_acquire(call->state, call->function, call->given_context, call->device);
    tepy_without_gil without = {NULL, {NULL, NULL}};
    void *stream = NULL;
    int failed = -1;
    te_status st;
    if (context == NULL) return -1;
    if ((fields != NULL && make_workspace(call, context, op, args, fields) != 0) ||
        tepy_stream(call->state, call->device, &stream) != 0) {
        goto done;
    }
    /* CPU kernels run in the call; a first CUDA call loads libraries */
    if (!call->keep_gil || call->device.type == TE_DEVICE_CPU) tepy_leave_gil(&without);
    st = te_op_run(context->context, op, args, stream);
    tepy_retake_gil(&without);
    if (st == TE_OK) {
        failed = 0;
    } else {
        (void)tepy_raise(st);
    }
done:
    tepy_context_release(context);
    return failed;
}

int tepy_op_require(const tepy_op_call *call, PyObject *object, const char *name)
{
    if (object != Py_None) return 0;
    return tepy_fail(PyExc_TypeError, (tepy_site){call->function, name},
                     "expected a torch.Tensor, got None");
}
