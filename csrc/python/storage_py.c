/* SPDX-License-Identifier: Apache-2.0
 *
 * storage_py.c - tensors over memory that is there: lent to Python functions, and parts of one
 * tensor with storages of their own.
 *
 * torch's views share a storage, and what saves tensors goes by storages: it writes a shared one
 * whole for each view, or keeps one view and drops the others. A part made here is a storage that
 * begins and ends with it. All parts keep the tensor alive whose memory they are in.
 */
#include "python/args.h"

#include <stdlib.h>
#include <string.h>

#define MAX_DIMS 8

typedef struct part {
    tepy_dl_managed managed; /* first: the deleter gets its address */
    PyObject *whole;         /* owns the memory; NULL: the caller does */
    int64_t shape[MAX_DIMS], strides[MAX_DIMS];
} part;

/* Runs wherever the last reference to the storage goes, without the GIL too. */
static void release(tepy_dl_managed *managed)
{
    part *self = (part *)managed;
    if (self->whole != NULL &&
        Py_IsInitialized()) { /* else the object is gone with its interpreter */
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF(self->whole);
        PyGILState_Release(gil);
    }
    free(self);
}

/* Where the memory of `whole` begins and how it is laid out; -1 where it can not be divided. */
static int dense_view(const tepy_state *state, PyObject *whole, tepy_dl_tensor *view)
{
    const tepy_site site = {"split_storage", "tensor"};
    if ((PyObject *)Py_TYPE(whole) != state->tensor_type) {
        return tepy_expected(site, "a plain torch.Tensor", whole);
    }
    memset(view, 0, sizeof *view);
    if (state->exchange->view(whole, view) != 0) {
        return tepy_fail_from_current(PyExc_TypeError, site, "pass a dense tensor with memory");
    }
    if (view->ndim < 1 || view->ndim > MAX_DIMS) {
        return tepy_fail(PyExc_ValueError, site, "%d dims, expected 1 to %d", (int)view->ndim,
                         MAX_DIMS);
    }
    if (tepy_dl_is_dense(view)) return 0;
    return tepy_fail(PyExc_ValueError, site, "not contiguous: call .contiguous()");
}

/* New reference: a tensor of this shape over memory that `whole` keeps, or the caller where it is
 * NULL. */
static PyObject *lend(const tepy_state *state, PyObject *whole, const tepy_dl_tensor *view)
{
    void *object = NULL;
    part *self = calloc(1, sizeof *self);
    if (self == NULL) return PyErr_NoMemory();
    self->whole = Py_XNewRef(whole);
    self->managed.version = (tepy_dl_version){1, 0};
    self->managed.deleter = release;
    self->managed.tensor = *view;
    self->managed.tensor.shape = self->shape;
    self->managed.tensor.strides = self->strides;
    for (int32_t i = 0; i < view->ndim; i++) {
        self->shape[i] = view->shape[i];
        self->strides[i] = view->strides[i];
    }
    if (state->exchange->object_from_managed(&self->managed, &object) != 0) {
        release(&self->managed); /* it is taken over by success alone */
        return NULL;
    }
    return (PyObject *)object;
}

/* New reference: `rows` rows of `whole` from byte `offset` on. */
static PyObject *make_part(const tepy_state *state, PyObject *whole, const tepy_dl_tensor *view,
                           int64_t rows, uint64_t offset)
{
    int64_t shape[MAX_DIMS], strides[MAX_DIMS], stride = 1;
    tepy_dl_tensor tensor = *view;
    tensor.data = (char *)view->data + view->byte_offset + offset;
    tensor.byte_offset = 0;
    tensor.shape = shape;
    tensor.strides = strides;
    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        shape[i] = i == 0 ? rows : view->shape[i];
        strides[i] = stride;
        stride *= shape[i];
    }
    return lend(state, whole, &tensor);
}

PyObject *tepy_share(const tepy_state *state, PyObject *whole, const te_tensor *view)
{
    static const tepy_dl_dtype dtypes[TE_DTYPE_COUNT] = {
#define X(NAME, name, bits, dlpack, cuda, max) [TE_DTYPE_##NAME] = {dlpack, bits, 1},
        TE_DTYPES(X)
#undef X
    };
    te_tensor own = *view;
    tepy_dl_tensor tensor = {.data = view->data,
                             .ndim = view->ndim,
                             .dtype = dtypes[view->dtype],
                             .shape = own.shape,
                             .strides = own.strides};
    tensor.device.type = te_device_type_dlpack(view->device.type);
    tensor.device.index = view->device.index;
    return lend(state, whole, &tensor);
}

PyObject *tepy_split_storage(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_site site = {"split_storage", "rows"};
    tepy_state *state = tepy_state_of(module);
    tepy_dl_tensor view;
    int64_t taken = 0, row_bytes;
    Py_ssize_t count;
    PyObject *parts;
    if (dense_view(state, args[0], &view) != 0) {
        return NULL;
    }
    if (!PyTuple_Check(args[1])) return TEPY_EXPECTED(site, "a tuple of int", args[1]);
    count = PyTuple_Size(args[1]);
    row_bytes = view.dtype.bits * view.dtype.lanes / 8;
    for (int32_t i = 1; i < view.ndim; i++) row_bytes *= view.shape[i];
    parts = PyTuple_New(count);
    for (Py_ssize_t i = 0; parts != NULL && i < count; i++) {
        int64_t rows = 0;
        PyObject *given = PyTuple_GetItem(args[1], i), *made = NULL;
        if (tepy_int(given, site, 1, view.shape[0] - taken, &rows) == 0) {
            made = make_part(state, args[0], &view, rows, (uint64_t)(taken * row_bytes));
        }
        tepy_fill(&parts, i, made);
        taken += rows;
    }
    return parts;
}

/* Dense, of the same kind of elements and of this address and number of rows? */
static int is_part(const tepy_dl_tensor *whole, const tepy_dl_tensor *part, const char *address,
                   int64_t rows, int64_t *bytes)
{
    if (part->ndim != whole->ndim || part->shape[0] != rows || part->data == NULL ||
        (const char *)part->data + part->byte_offset != address ||
        part->dtype.code != whole->dtype.code || part->dtype.bits != whole->dtype.bits ||
        part->device.type != whole->device.type || part->device.index != whole->device.index ||
        !tepy_dl_is_dense(part)) {
        return 0;
    }
    *bytes = tepy_dl_elements(part) * (part->dtype.bits * part->dtype.lanes / 8);
    return 1;
}

PyObject *tepy_lie_in(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    tepy_dl_tensor whole;
    const char *address;
    Py_ssize_t count;
    if (dense_view(state, args[0], &whole) != 0) {
        return NULL;
    }
    if (!PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) ||
        PyTuple_Size(args[1]) != PyTuple_Size(args[2]))
        return TEPY_FAIL(PyExc_TypeError, (tepy_site){"lie_in", "parts"},
                         "expected as many tensors as rows, in tuples");
    count = PyTuple_Size(args[1]);
    address = (const char *)whole.data + whole.byte_offset;
    for (Py_ssize_t i = 0; i < count; i++) {
        tepy_dl_tensor part;
        int64_t rows = 0, bytes = 0;
        if (tepy_int(PyTuple_GetItem(args[2], i), (tepy_site){"lie_in", "rows"}, 0, INT64_MAX,
                     &rows) != 0) {
            return NULL;
        }
        if (state->exchange->view(PyTuple_GetItem(args[1], i), &part) != 0) {
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
        if (!is_part(&whole, &part, address, rows, &bytes)) Py_RETURN_FALSE;
        address += bytes;
    }
    Py_RETURN_TRUE;
}
