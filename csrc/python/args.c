/* SPDX-License-Identifier: Apache-2.0
 *
 * args.c - integers, floats and tensor views from Python objects.
 *
 * Order in a view: the class first (only Tensor and Parameter have memory that DLPack may be
 * trusted with; the exchange API gives NULL data for wrapper subclasses and fake tensors), then
 * DLPack's view, then the negative bit, which DLPack ignores, then the strides.
 */
#include "python/args.h"

#include <string.h>

int tepy_int(PyObject *object, tepy_site site, int64_t low, int64_t high, int64_t *value)
{
    PyObject *index = PyLong_Check(object) ? Py_NewRef(object) : PyNumber_Index(object);
    int overflow = 0, result = 0;
    if (index == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        return tepy_expected(site, "an int", object);
    }
    *value = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (*value == -1 && PyErr_Occurred()) {
        result = -1;
    } else if (overflow != 0 || *value < low || *value > high) {
        result = tepy_fail(PyExc_ValueError, site, "%R is out of range, expected %lld to %lld",
                           index, (long long)low, (long long)high);
    }
    Py_DECREF(index);
    return result;
}

int tepy_float(PyObject *object, tepy_site site, double *value)
{
    *value = PyFloat_AsDouble(object);
    if (*value != -1.0 || !PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    PyErr_Clear();
    return tepy_expected(site, "a float", object);
}

int tepy_path(PyObject *object, tepy_site site, PyObject **bytes, const char **path)
{
    *bytes = NULL;
    *path = NULL;
    if (object == Py_None) return 0;
    if (!PyUnicode_FSConverter(object, bytes)) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        return tepy_expected(site, "a path or None", object);
    }
    *path = PyBytes_AsString(*bytes);
    if (*path != NULL) return 0;
    Py_CLEAR(*bytes);
    return -1;
}

int tepy_require_callable(PyObject *object, tepy_site site)
{
    if (PyCallable_Check(object)) return 0;
    return tepy_expected(site, "a callable", object);
}

int tepy_optional_callable(PyObject *object, tepy_site site)
{
    return object == Py_None ? 0 : tepy_require_callable(object, site);
}

const char *tepy_text(PyObject *object, tepy_site site, Py_ssize_t *length)
{
    if (PyUnicode_Check(object)) return PyUnicode_AsUTF8AndSize(object, length);
    return TEPY_EXPECTED(site, "a str", object);
}

int tepy_count(const char *function, Py_ssize_t nargs, Py_ssize_t low, Py_ssize_t high)
{
    if (nargs >= low && nargs <= high) return 0;
    if (low == high) {
        PyErr_Format(PyExc_TypeError, "%s: expected %zd positional arguments, got %zd", function,
                     low, nargs);
    } else {
        PyErr_Format(PyExc_TypeError, "%s: expected %zd to %zd positional arguments, got %zd",
                     function, low, high, nargs);
    }
    return -1;
}

int tepy_device_args(const char *function, PyObject *type, PyObject *index, te_device *device)
{
    int64_t value = 0;
    if (tepy_int(type, (tepy_site){function, "device_type"}, 0, TE_DEVICE_COUNT - 1, &value) != 0) {
        return -1;
    }
    device->type = (te_device_type)value;
    device->index = 0;
    if (index == NULL) return 0;
    if (tepy_int(index, (tepy_site){function, "device_index"}, 0,
                 device->type == TE_DEVICE_CPU ? 0 : TE_DEVICE_INDICES - 1, &value) != 0) {
        return -1;
    }
    device->index = (int32_t)value;
    return 0;
}

int tepy_same_device(tepy_site site, te_device device, te_device expected)
{
    if (tepy_same(device, expected)) return 0;
    return tepy_fail(PyExc_ValueError, site,
                     "it is on %s:%d and the call runs on %s:%d: move it there with .to(\"%s:%d\")",
                     tepy_device_name(device), (int)device.index, tepy_device_name(expected),
                     (int)expected.index, tepy_device_name(expected), (int)expected.index);
}

/* Torch's exchange table is not asked: that of 2.11 gives NULL for all devices but CUDA's, that of
 * 2.13 fails for a device whose package tells no handles. */
static int stream_of_other(const tepy_state *state, te_device device, void **stream)
{
    PyObject *ask = state->device_streams[device.type], *handle;
    if (ask == NULL) return 0; /* the type was not met, so there is no tensor of it */
    Py_INCREF(ask);            /* it may be replaced meanwhile */
    handle = PyObject_CallFunction(ask, "i", (int)device.index);
    Py_DECREF(ask);
    if (handle == NULL) return -1;
    *stream = PyLong_AsVoidPtr(handle);
    Py_DECREF(handle);
    return *stream == NULL && PyErr_Occurred() != NULL ? -1 : 0;
}

int tepy_stream(const tepy_state *state, te_device device, void **stream)
{
    *stream = NULL;
    if (device.type == TE_DEVICE_CPU) return 0;
    if (device.type != TE_DEVICE_CUDA) return stream_of_other(state, device, stream);
    return state->exchange->current_stream(te_device_type_dlpack(device.type), device.index,
                                           stream);
}

int tepy_device_of(const tepy_state *state, PyObject *tensor, const tepy_dl_device *given,
                   tepy_site site, te_device *device)
{
    int32_t type = te_device_type_of_dlpack(given->type);
    if (!tepy_is_met(state, type) && state->meet_device != NULL) {
        PyObject *meet = Py_NewRef(state->meet_device); /* it may be replaced meanwhile */
        PyObject *met = PyObject_CallFunction(meet, "Oi", tensor, (int)given->type);
        Py_DECREF(meet);
        if (met == NULL) return -1;
        Py_DECREF(met);
        type = te_device_type_of_dlpack(given->type);
    }
    if (type < 0)
        return tepy_fail(PyExc_TypeError, site,
                         "the type of its device, %d of DLPack, is not known", (int)given->type);
    *device = (te_device){(te_device_type)type, type == TE_DEVICE_CPU ? 0 : given->index};
    return 0;
}

/* The plain tensor behind an object: the object itself, or what classify makes of it (in *held). */
static PyObject *plain_tensor(const tepy_state *state, PyObject *object, tepy_site site,
                              PyObject **held)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    PyObject *plain;
    int instance;
    if (type == state->tensor_type || type == state->parameter_type) return object;
    instance = PyObject_IsInstance(object, state->tensor_type);
    if (instance < 0) return NULL;
    if (instance == 0) return TEPY_EXPECTED(site, "a torch.Tensor", object);
    if (state->classify == Py_None)
        return TEPY_FAIL(PyExc_TypeError, site,
                         "tensors of %R are not supported: pass a plain torch.Tensor", type);
    plain = PyObject_CallFunctionObjArgs(state->classify, object, NULL);
    if (plain == NULL) return NULL;
    type = (PyObject *)Py_TYPE(plain);
    if (type != state->tensor_type && type != state->parameter_type) {
        (void)tepy_fail(PyExc_TypeError, site,
                        "classify gave %R for %R: it must give a plain torch.Tensor", type,
                        Py_TYPE(object));
        Py_DECREF(plain);
        return NULL;
    }
    tepy_set(held, plain);
    return plain;
}

/* Replaces the tensor by what its method gives: a copy without the trait that was in the way. */
static PyObject *replace(PyObject *tensor, const char *method, PyObject **held)
{
    PyObject *copy = PyObject_CallMethod(tensor, method, NULL);
    if (copy != NULL) tepy_set(held, copy);
    return copy;
}

static int dtype_of(tepy_dl_dtype dtype, tepy_form form, te_dtype *out)
{
    if (dtype.lanes != 1) return -1;
    if (form == TEPY_MASK && dtype.code == TEPY_DL_BOOL && dtype.bits == 8) {
        *out = TE_DTYPE_U8; /* one byte, 0 or 1 */
        return 0;
    }
    switch (dtype.code << 8 | dtype.bits) {
#define X(NAME, name, bits, dlpack, cuda, max)                                                     \
    case (dlpack) << 8 | (bits):                                                                   \
        *out = TE_DTYPE_##NAME;                                                                    \
        return 0;
        TE_DTYPES(X)
#undef X
    default:
        return -1;
    }
}

/* DLPack's view, with the checks that do not depend on the form. */
static int raw_view(const tepy_state *state, PyObject *tensor, const tepy_spec *spec,
                    tepy_dl_tensor *dl, te_tensor *view)
{
    const tepy_site site = spec->site;
    PyObject *torch_dtype;
    memset(dl, 0, sizeof *dl);
    if (state->exchange->view(tensor, dl) != 0) {
        return tepy_fail_from_current(PyExc_TypeError, site,
                                      "it has no memory to read (meta, sparse or transformed): "
                                      "pass a plain dense tensor (parameters "
                                      "made on the meta device get memory by reset_parameters())");
    }
    if (dtype_of(dl->dtype, spec->form, &view->dtype) != 0) {
        torch_dtype = PyObject_GetAttrString(tensor, "dtype");
        if (torch_dtype == NULL) return -1;
        (void)tepy_fail(PyExc_TypeError, site, "dtype %R is not supported", torch_dtype);
        Py_DECREF(torch_dtype);
        return -1;
    }
    if (tepy_device_of(state, tensor, &dl->device, site, &view->device) != 0) return -1;
    if (dl->data == NULL && tepy_dl_elements(dl) > 0) {
        return tepy_fail(
            PyExc_TypeError, site,
            "this %R has a shape and no memory (fake, wrapped or transformed tensor): pass "
            "a plain tensor with data",
            Py_TYPE(tensor));
    }
    view->data = dl->data == NULL ? NULL : (char *)dl->data + dl->byte_offset;
    return 0;
}

/* Reads the dims as those of a matrix. Returns 1 where the strides are those of no such view. */
static int fold(const tepy_dl_tensor *dl, te_tensor *view)
{
    int32_t last = dl->ndim - 1;
    int64_t columns = dl->shape[last];
    int64_t rows = 1;
    int64_t row_stride = columns;
    int dense = columns <= 1 || tepy_dl_stride(dl, last) == 1;
    for (int32_t i = last - 1; i >= 0; i--) {
        if (dl->shape[i] != 1) {
            int64_t stride = tepy_dl_stride(dl, i);
            if (rows == 1) {
                row_stride = stride;
            } else if (stride != row_stride * rows) {
                dense = 0;
            }
        }
        rows *= dl->shape[i];
    }
    if (rows == 0 || columns == 0) {
        dense = 1;
        row_stride = columns;
    }
    view->ndim = 2;
    view->shape[0] = rows;
    view->shape[1] = columns;
    view->strides[0] = rows > 1 ? row_stride : columns;
    view->strides[1] = 1;
    return !dense || view->strides[0] < columns;
}

/* Takes the dims as they are. Returns 1 where the last stride is not 1 or a stride is negative.
 * Strides that reach nothing (one element, no elements) become those of a dense tensor. */
static int keep_dims(const tepy_dl_tensor *dl, te_tensor *view)
{
    const int64_t elements = tepy_dl_elements(dl);
    int64_t dense = 1;
    int strange = 0;
    view->ndim = dl->ndim;
    for (int32_t i = dl->ndim - 1; i >= 0; i--) {
        int64_t stride = elements > 0 && dl->shape[i] > 1 ? tepy_dl_stride(dl, i) : dense;
        strange |= stride < 0 || (i == dl->ndim - 1 && stride != 1);
        view->shape[i] = dl->shape[i];
        view->strides[i] = stride;
        dense = stride * (dl->shape[i] > 0 ? dl->shape[i] : 1);
    }
    return strange;
}

/* A vector of all elements. Returns 1 where the tensor is not dense. */
static int flatten(const tepy_dl_tensor *dl, te_tensor *view)
{
    view->ndim = 1;
    view->shape[0] = tepy_dl_elements(dl);
    view->strides[0] = 1;
    return view->shape[0] > 0 && !tepy_dl_is_dense(dl);
}

static int is_dims(tepy_form form)
{
    return form == TEPY_DIMS || form == TEPY_MASK;
}

static int fit(const tepy_dl_tensor *dl, tepy_form form, te_tensor *view)
{
    if (form == TEPY_FLAT || form == TEPY_VECTOR) return flatten(dl, view);
    return is_dims(form) ? keep_dims(dl, view) : fold(dl, view);
}

static int check_form(const tepy_dl_tensor *dl, const tepy_spec *spec)
{
    te_leading *leading = spec->leading;
    const int32_t inner = is_dims(spec->form) ? 2 : 1;
    if (spec->form == TEPY_FLAT) return 0;
    if (is_dims(spec->form) && (dl->ndim < 1 || dl->ndim > TE_MAX_DIMS)) {
        return tepy_fail(PyExc_ValueError, spec->site, "it has %d dims, expected 1 to %d",
                         (int)dl->ndim, TE_MAX_DIMS);
    }
    if (spec->form == TEPY_VECTOR   ? dl->ndim != 1
        : spec->form == TEPY_MATRIX ? dl->ndim != 2
                                    : dl->ndim < 1) {
        return tepy_fail(PyExc_ValueError, spec->site, "it has %d dims, expected %s", (int)dl->ndim,
                         spec->form == TEPY_VECTOR   ? "1: reshape it"
                         : spec->form == TEPY_MATRIX ? "2: reshape it"
                                                     : "at least 1");
    }
    if (dl->ndim > TE_MAX_LEADING) {
        return tepy_fail(PyExc_ValueError, spec->site, "it has %d dims, expected at most %d",
                         (int)dl->ndim, TE_MAX_LEADING);
    }
    if (leading != NULL) {
        leading->count = dl->ndim < inner ? 0 : dl->ndim - inner;
        for (int32_t i = 0; i < leading->count; i++) leading->dims[i] = dl->shape[i];
    }
    return 0;
}

/* Whether a view with legal strides is still to be copied. */
static int is_unfit(const tepy_spec *spec, const te_tensor *view)
{
    const int aligned = spec->aligned && view->device.type == TE_DEVICE_CUDA;
    const int64_t bytes = (int64_t)te_dtype_bytes(view->dtype);
    int64_t dense = 1;
    if (aligned && ((uintptr_t)view->data & 15U) != 0) return 1;
    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        if (spec->dense && view->shape[i] > 1 && view->strides[i] != dense) return 1;
        if (aligned && i < view->ndim - 1 &&
            (view->strides[i] <= 0 || view->strides[i] * bytes % 16 != 0)) {
            return 1;
        }
        dense *= view->shape[i];
    }
    return 0;
}

int tepy_view(const tepy_state *state, PyObject *object, const tepy_spec *spec, te_tensor *view,
              PyObject **held)
{
    PyObject *tensor = plain_tensor(state, object, spec->site, held);
    PyObject *negative;
    tepy_dl_tensor dl;
    if (tensor == NULL || raw_view(state, tensor, spec, &dl, view) != 0) return -1;
    if (te_dtype_is_high_precision(view->dtype)) { /* the others can not be negated lazily */
        negative = PyObject_CallFunctionObjArgs(state->is_neg, tensor, NULL);
        if (negative == NULL) return -1;
        Py_DECREF(negative); /* True and False outlive this */
        if (negative == Py_True) {
            if (spec->access == TEPY_WRITE) {
                return tepy_fail(PyExc_ValueError, spec->site,
                                 "its negative bit is set and it is written to: pass "
                                 "tensor.resolve_neg()");
            }
            tensor = replace(tensor, "resolve_neg", held);
            if (tensor == NULL || raw_view(state, tensor, spec, &dl, view) != 0) return -1;
        }
    }
    if (check_form(&dl, spec) != 0) return -1;
    for (int i = 0; i < 2; i++) { /* what is contiguous may begin at a wrong place: it is cloned */
        if (fit(&dl, spec->form, view) == 0 && !is_unfit(spec, view)) return 0;
        if (spec->access == TEPY_WRITE) {
            return tepy_fail(PyExc_ValueError, spec->site,
                             "its strides are not those of %s and it is written to: pass a "
                             "contiguous tensor",
                             spec->form == TEPY_FLAT ? "a dense tensor"
                             : is_dims(spec->form)   ? "a tensor with a unit last stride"
                                                     : "a matrix with dense rows");
        }
        tensor = replace(tensor, i == 0 ? "contiguous" : "clone", held);
        if (tensor == NULL || raw_view(state, tensor, spec, &dl, view) != 0) return -1;
    }
    (void)fit(&dl, spec->form, view);
    return 0;
}

int tepy_view_elements(const tepy_state *state, PyObject *object, const tepy_elements *spec,
                       void **data, PyObject **held)
{
    const tepy_spec plain = {.site = spec->site, .form = TEPY_VECTOR, .access = TEPY_WRITE};
    PyObject *tensor = plain_tensor(state, object, spec->site, held);
    tepy_dl_tensor dl;
    te_tensor view;
    if (tensor == NULL || raw_view(state, tensor, &plain, &dl, &view) != 0) return -1;
    for (int32_t i = 0; i < dl.ndim; i++) {
        if (spec->count > 1 && dl.shape[i] > 1 && (dl.ndim > 1 || tepy_dl_stride(&dl, i) != 1)) {
            return tepy_fail(PyExc_ValueError, spec->site, "expected a dense tensor of one dim");
        }
    }
    if (view.dtype != spec->dtype) {
        return tepy_fail(PyExc_TypeError, spec->site,
                         "dtype %s, expected %s: convert it with .to()", te_dtype_name(view.dtype),
                         te_dtype_name(spec->dtype));
    }
    if (tepy_dl_elements(&dl) < spec->count) {
        return tepy_fail(PyExc_ValueError, spec->site, "%lld elements, expected at least %lld",
                         (long long)tepy_dl_elements(&dl), (long long)spec->count);
    }
    if (tepy_same_device(spec->site, view.device, spec->device) != 0) return -1;
    *data = view.data;
    return 0;
}

int tepy_view_optional(const tepy_state *state, PyObject *object, const tepy_elements *spec,
                       void **data, PyObject **held)
{
    *data = NULL;
    return object == Py_None ? 0 : tepy_view_elements(state, object, spec, data, held);
}
