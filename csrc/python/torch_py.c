/* SPDX-License-Identifier: Apache-2.0
 *
 * torch_py.c - what the module takes from torch: allocation, classes, dtypes and the DLPack
 * exchange table. The module never imports torch itself: transformer_engine.pytorch hands it over
 * once.
 */
#include "python/args.h"

#include <string.h>

/* Attributes of torch, by te_dtype. */
static const char *const dtype_attribute[TE_DTYPE_COUNT] = {
    [TE_DTYPE_F32] = "float32",      [TE_DTYPE_F16] = "float16",
    [TE_DTYPE_BF16] = "bfloat16",    [TE_DTYPE_E4M3] = "float8_e4m3fn",
    [TE_DTYPE_E5M2] = "float8_e5m2", [TE_DTYPE_U8] = "uint8",
    [TE_DTYPE_I32] = "int32",        [TE_DTYPE_I64] = "int64",
};

int tepy_require_torch(const tepy_state *state, const char *function)
{
    if (state->exchange != NULL) return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "%s: no tensor library is bound: import transformer_engine.pytorch first",
                 function);
    return -1;
}

#define NO_SLOT (-1)

static int slot_of(te_device device)
{
    if (device.type == TE_DEVICE_CPU && device.index == 0) return 0;
    if (device.type > TE_DEVICE_CPU && device.type < TE_DEVICE_COUNT && device.index >= 0 &&
        device.index < TE_DEVICE_INDICES) {
        return 1 + ((int)device.type - 1) * TE_DEVICE_INDICES + device.index;
    }
    return NO_SLOT;
}

int tepy_device_slot(te_device device)
{
    const int slot = slot_of(device);
    if (slot != NO_SLOT) return slot;
    PyErr_Format(PyExc_ValueError, "device (%d, %d) does not exist", (int)device.type,
                 (int)device.index);
    return -1;
}

/* The table of major version 1, which may stand behind a newer one; NULL with an exception. */
static const tepy_dl_exchange *find_exchange(PyObject *capsule)
{
    const tepy_dl_exchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table == NULL) return NULL;
    while (table != NULL && table->version.major != 1) table = table->previous;
    if (table == NULL || table->view == NULL || table->current_stream == NULL ||
        table->object_from_managed == NULL) {
        PyErr_SetString(
            PyExc_ImportError,
            "bind_torch: this torch has no DLPack 1 exchange table with views and streams: "
            "install torch >= 2.10");
        return NULL;
    }
    return table;
}

/* X(name, owner, attribute): what bind_torch takes over, from torch and what it has found there. */
#define TAKEN(X)                                                                                   \
    X(empty, torch, "empty")                                                                       \
    X(empty_like, torch, "empty_like")                                                             \
    X(device_type, torch, "device")                                                                \
    X(tensor_type, torch, "Tensor")                                                                \
    X(dtype_getter, found->tensor_type, "dtype")                                                   \
    X(is_neg, found->tensor_type, "is_neg")                                                        \
    X(parameter_type, nn, "Parameter")

/* The same before it changes the state. */
typedef struct binding {
#define X(name, owner, attribute) PyObject *name;
    TAKEN(X)
#undef X
    PyObject *exchange_capsule, *dtypes[TE_DTYPE_COUNT];
} binding;

static int collect(binding *found, PyObject *torch)
{
    PyObject *nn = PyObject_GetAttrString(torch, "nn");
    int result = -1;
    if (nn == NULL) return -1;
#define X(name, owner, attribute)                                                                  \
    if ((found->name = PyObject_GetAttrString(owner, attribute)) == NULL) goto done;
    TAKEN(X)
#undef X
    for (int i = 0; i < TE_DTYPE_COUNT; i++) {
        found->dtypes[i] = PyObject_GetAttrString(torch, dtype_attribute[i]);
        if (found->dtypes[i] == NULL) goto done;
    }
    if (!PyType_Check(found->tensor_type) || !PyType_Check(found->parameter_type) ||
        !PyCallable_Check(found->empty) || !PyCallable_Check(found->device_type)) {
        PyErr_SetString(PyExc_TypeError,
                        "bind_torch: torch_module: this is not torch: pass the imported module");
        goto done;
    }
    found->exchange_capsule =
        PyObject_GetAttrString(found->tensor_type, "__dlpack_c_exchange_api__");
    if (found->exchange_capsule == NULL) {
        PyErr_SetString(
            PyExc_ImportError,
            "bind_torch: torch.Tensor has no __dlpack_c_exchange_api__: install torch >= 2.10");
        goto done;
    }
    result = 0;
done:
    Py_DECREF(nn);
    return result;
}

PyObject *tepy_bind_torch(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    binding found;
    PyObject *classify = nargs > 1 ? args[1] : Py_None;
    const tepy_dl_exchange *exchange;
    PyObject *result = NULL;
    memset(&found, 0, sizeof found);
    if (classify != Py_None && !PyCallable_Check(classify))
        return TEPY_EXPECTED((tepy_site){"bind_torch", "classify"}, "a callable or None", classify);
    if (collect(&found, args[0]) != 0) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            (void)tepy_fail_from_current(PyExc_TypeError, (tepy_site){"bind_torch", "torch_module"},
                                         "this is not torch: pass the imported module");
        }
        goto done;
    }
    exchange = find_exchange(found.exchange_capsule);
    if (exchange == NULL) goto done;
    /* From here on nothing fails. tepy_set leaves the old objects' destructors a consistent state.
     */
    state->exchange = exchange;
#define X(name, ...) (tepy_set(&state->name, found.name), found.name = NULL);
    TAKEN(X)
    X(exchange_capsule)
    for (int i = 0; i < TE_DTYPE_COUNT; i++) {
        X(dtypes[i])
    }
#undef X
    tepy_set(&state->classify, Py_NewRef(classify));
    for (int i = 0; i < TEPY_DEVICES; i++) tepy_set(&state->devices[i], NULL);
    for (int i = 0; i < TEPY_DEVICES * TE_DTYPE_COUNT; i++) tepy_set(&state->empty_kwargs[i], NULL);
    if (tepy_state_verify(state, TEPY_BIND) == 0) result = Py_NewRef(Py_None);
done:
#define X(name, ...) Py_XDECREF(found.name);
    TAKEN(X)
#undef X
    Py_XDECREF(found.exchange_capsule);
    for (int i = 0; i < TE_DTYPE_COUNT; i++) Py_XDECREF(found.dtypes[i]);
    return result;
}

#define DTYPES_EXPECTED                                                                            \
    " is not supported, expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8, "  \
    "int32 or int64 of torch"

PyObject *tepy_dtype_code(PyObject *module, PyObject *arg)
{
    tepy_state *state = tepy_state_of(module);
    tepy_site site = {"dtype_code", "dtype"};
    if (tepy_require_torch(state, "dtype_code") != 0) return NULL;
    for (int i = 0; i < TE_DTYPE_COUNT; i++) {
        if (arg == state->dtypes[i]) return PyLong_FromLong(i);
    }
    if (Py_TYPE(arg) == Py_TYPE(state->dtypes[0])) {
        (void)tepy_fail(PyExc_TypeError, site, "%R" DTYPES_EXPECTED, arg);
    } else {
        (void)tepy_fail_showing(PyExc_TypeError, site, "%U" DTYPES_EXPECTED, arg);
    }
    return NULL;
}

PyObject *tepy_torch_dtype(PyObject *module, PyObject *arg)
{
    tepy_state *state = tepy_state_of(module);
    int64_t code = 0;
    if (tepy_require_torch(state, "torch_dtype") != 0 ||
        tepy_int(arg, (tepy_site){"torch_dtype", "code"}, 0, TE_DTYPE_COUNT - 1, &code) != 0) {
        return NULL;
    }
    return Py_NewRef(state->dtypes[code]);
}

PyObject *tepy_dtype_names(PyObject *module, PyObject *unused)
{
    return TEPY_NAMES(TE_DTYPES);
}

/* Borrowed: torch.device of a slot. */
static PyObject *device_object(tepy_state *state, te_device device, int slot)
{
    PyObject *object;
    if (state->devices[slot] != NULL) return state->devices[slot];
    if (device.type == TE_DEVICE_CPU) {
        object = PyObject_CallFunction(state->device_type, "s", "cpu");
    } else if (state->device_names[device.type] == NULL) {
        object = PyObject_CallFunction(state->device_type, "si", te_device_type_name(device.type),
                                       (int)device.index);
    } else {
        object = PyObject_CallFunction(state->device_type, "Oi", state->device_names[device.type],
                                       (int)device.index);
    }
    if (object != NULL) tepy_set(&state->devices[slot], object);
    return object;
}

/* Borrowed: keyword arguments of torch.empty. */
static PyObject *empty_kwargs(tepy_state *state, te_device device, te_dtype dtype)
{
    int slot = tepy_device_slot(device);
    PyObject **entry, *kwargs, *torch_device;
    if (slot < 0) return NULL;
    entry = &state->empty_kwargs[slot * TE_DTYPE_COUNT + (int)dtype];
    if (*entry != NULL) return *entry;
    torch_device = device_object(state, device, slot);
    if (torch_device == NULL) return NULL;
    kwargs = Py_BuildValue("{OOOO}", state->keys[TEPY_KEY_DTYPE], state->dtypes[dtype],
                           state->keys[TEPY_KEY_DEVICE], torch_device);
    if (kwargs != NULL) tepy_set(entry, kwargs);
    return kwargs;
}

PyObject *tepy_empty(tepy_state *state, te_device device, te_dtype dtype, const int64_t *shape,
                     int32_t ndim)
{
    PyObject *kwargs = empty_kwargs(state, device, dtype);
    PyObject *args, *tensor;
    if (kwargs == NULL) return NULL;
    /* Sizes one by one: torch parses them faster than a tuple in a tuple. */
    args = PyTuple_New(ndim);
    for (int32_t i = 0; args != NULL && i < ndim; i++) {
        tepy_fill(&args, i, PyLong_FromLongLong(shape[i]));
    }
    if (args == NULL) return NULL;
    tensor = PyObject_Call(state->empty, args, kwargs);
    Py_DECREF(args);
    return tensor;
}

int tepy_fresh_data(const tepy_state *state, PyObject *tensor, tepy_site site, te_device device,
                    int64_t bytes, void **data)
{
    tepy_dl_tensor dl;
    int64_t elements;
    int32_t type;
    int is_there;
    if (state->exchange->view(tensor, &dl) != 0)
        return tepy_fail_from_current(PyExc_TypeError, site,
                                      "torch.empty gave a tensor that has no memory to write");
    elements = tepy_dl_elements(&dl);
    if (dl.data == NULL && elements > 0)
        return tepy_fail(PyExc_TypeError, site,
                         "torch.empty gave %R without memory (a fake tensor mode is on): trace "
                         "through the registered operators instead",
                         Py_TYPE(tensor));
    type = te_device_type_of_dlpack(dl.device.type);
    is_there =
        type == (int32_t)device.type && (type == TE_DEVICE_CPU || dl.device.index == device.index);
    *data = dl.data == NULL ? NULL : (char *)dl.data + dl.byte_offset;
    if (is_there && elements * dl.dtype.bits / 8 >= bytes) return 0;
    return tepy_fail(PyExc_ValueError, site,
                     "torch.empty gave another tensor than was asked for, %lld elements of DLPack "
                     "device %d: leave the mode of torch that changes its results",
                     (long long)elements, (int)dl.device.type);
}

/* ---- what a call is found by ------------------------------------------------------------------
 */

/* The slot of a tensor's device; NO_SLOT where its type was not met. */
static int number_of(const tepy_state *state, const tepy_dl_device *device)
{
    const int32_t type = te_device_type_of_dlpack(device->type);
    if (!tepy_is_met(state, type)) return NO_SLOT;
    return type == TE_DEVICE_CPU ? 0 : slot_of((te_device){(te_device_type)type, device->index});
}

#define BY_ITSELF 1 /* the outcome for a call that has to be decided by itself */

/* A tensor's view, after its type of device is met. BY_ITSELF for one without memory; -1 with an
 * exception. */
static int view_met(const tepy_state *state, PyObject *tensor, tepy_site site, tepy_dl_tensor *dl)
{
    te_device device;
    if (state->exchange->view(tensor, dl) != 0) {
        PyErr_Clear();
        return BY_ITSELF;
    }
    return tepy_device_of(state, tensor, &dl->device, site, &device);
}

/* Borrowed: the item of a dict that a place (dict, key) names, or None for None; NULL where there
 * is none. */
static PyObject *at_place(PyObject *place)
{
    PyObject *items;
    if (place == Py_None) return Py_None;
    if (!PyTuple_Check(place) || PyTuple_Size(place) != 2) return NULL;
    items = PyTuple_GetItem(place, 0);
    return PyDict_Check(items) ? PyDict_GetItemWithError(items, PyTuple_GetItem(place, 1)) : NULL;
}

#define MOST_TENSORS 62 /* of a call: the bits have to fit */

/* What a call is found by, beside its input. */
typedef struct call_facts {
    int64_t flags; /* bits: which tensors require a gradient */
    int is_mixed;  /* dtypes differ */
    uint8_t dtypes[MOST_TENSORS][2];
} call_facts;

/* Puts the tensors of a call into `tensors`, whose input's view is given; -1 without an exception
 * or with one where a call has to be decided by itself. */
static int look_at(const tepy_state *state, PyObject *const *args, PyObject *tensors,
                   const tepy_dl_tensor *inp, call_facts *facts)
{
    Py_ssize_t count = PyTuple_Size(tensors);
    if (count > MOST_TENSORS) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *place = i == 0 ? NULL : PyTuple_GetItem(args[1], i - 1);
        PyObject *tensor = i == 0 ? args[0] : at_place(place);
        PyObject *flag;
        tepy_dl_tensor dl;
        if (tensor == NULL || PyTuple_SetItem(tensors, i, Py_NewRef(tensor)) != 0) return -1;
        if (place == Py_None) continue;
        if (i > 0 && state->exchange->view(tensor, &dl) != 0) return -1;
        flag = PyObject_GetAttr(tensor, state->keys[TEPY_KEY_REQUIRES_GRAD]);
        if (flag == NULL) return -1;
        facts->flags = (int64_t)((uint64_t)facts->flags << 1 | (flag == Py_True));
        Py_DECREF(flag);
        if (i == 0) continue;
        if (number_of(state, &dl.device) != number_of(state, &inp->device)) return -1;
        facts->is_mixed |= dl.dtype.code != inp->dtype.code || dl.dtype.bits != inp->dtype.bits;
        facts->dtypes[i][0] = dl.dtype.code;
        facts->dtypes[i][1] = dl.dtype.bits;
    }
    return inp->ndim > 0 ? 0 : -1;
}

/* New: None, or the dtypes of a call's tensors where they differ. */
static PyObject *mixed_dtypes(const call_facts *facts, Py_ssize_t count)
{
    if (!facts->is_mixed) return Py_NewRef(Py_None);
    return PyBytes_FromStringAndSize((const char *)facts->dtypes, 2 * count);
}

PyObject *tepy_tensors_of_call(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_state *state = tepy_state_of(module);
    const tepy_site site = {"tensors_of_call", "inp"};
    PyObject *tensors;
    tepy_dl_tensor inp;
    call_facts facts;
    int outcome = BY_ITSELF;
    if (!PyTuple_Check(args[1]))
        return TEPY_EXPECTED((tepy_site){"tensors_of_call", "places"}, "a tuple", args[1]);
    if ((PyObject *)Py_TYPE(args[0]) == state->tensor_type)
        outcome = view_met(state, args[0], site, &inp);
    if (outcome < 0) return NULL;
    tensors = PyTuple_New(1 + PyTuple_Size(args[1]));
    if (tensors == NULL) return NULL;
    memset(&facts, 0, sizeof facts);
    if (outcome == 0 && look_at(state, args, tensors, &inp, &facts) == 0 &&
        number_of(state, &inp.device) != NO_SLOT) {
        const int device = number_of(state, &inp.device);
        return Py_BuildValue("((iiLLN)N)", inp.dtype.code << 8 | inp.dtype.bits, device,
                             (long long)inp.shape[inp.ndim - 1], (long long)facts.flags,
                             mixed_dtypes(&facts, PyTuple_Size(tensors)), tensors);
    }
    PyErr_Clear();
    Py_DECREF(tensors);
    return Py_BuildValue("(O())", Py_None);
}

/* What is told of a tensor of heads, [.., heads, channels] behind one or two leading dims, or with
 * one more dim where it holds several of queries, keys and values. Lengths are not, for they change
 * all the time, but what of them an attention depends on. */
typedef struct heads_facts {
    int32_t dtype, device, dims;
    int32_t leading; /* bits: lengths like the first tensor's, like the last one's; 0, 1 or more */
    int32_t flags;   /* bits: a gradient is required; dense */
    int32_t inner[3];
} heads_facts;

static int32_t leading_bits(const tepy_dl_tensor *dl, const tepy_dl_tensor *first,
                            const tepy_dl_tensor *last, int count)
{
    uint32_t bits = 0;
    for (int i = 0; i < count; i++) {
        int64_t length = dl->shape[i];
        bits = bits << 4 | (length == first->shape[i]) << 3U | (length == last->shape[i]) << 2U |
               (uint32_t)(length < 2 ? length : 2);
    }
    return (int32_t)bits;
}

/* BY_ITSELF where the tensor is no plain one of heads with memory, -1 with an exception. */
static int tell_heads(const tepy_state *state, PyObject *tensor, tepy_dl_tensor *dl,
                      heads_facts *facts)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor), *flag;
    int leading, outcome;
    if (type != state->tensor_type && type != state->parameter_type) return BY_ITSELF;
    outcome = view_met(state, tensor, (tepy_site){"facts_of_heads", "tensors"}, dl);
    if (outcome != 0) return outcome;
    if (dl->ndim < 3 || dl->ndim > 5 || number_of(state, &dl->device) == NO_SLOT) return BY_ITSELF;
    flag = PyObject_GetAttr(tensor, state->keys[TEPY_KEY_REQUIRES_GRAD]);
    if (flag == NULL) return -1;
    Py_DECREF(flag);
    leading = dl->ndim == 3 ? 1 : 2;
    facts->dtype = dl->dtype.code << 8 | dl->dtype.bits;
    facts->device = number_of(state, &dl->device);
    facts->dims = dl->ndim;
    facts->flags = (flag == Py_True) | tepy_dl_is_dense(dl) << 1;
    for (int i = leading; i < dl->ndim; i++) {
        if (dl->shape[i] > INT32_MAX) return BY_ITSELF;
        facts->inner[i - leading] = (int32_t)dl->shape[i];
    }
    return 0;
}

PyObject *tepy_facts_of_heads(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_state *state = tepy_state_of(module);
    heads_facts facts[TEPY_MOST_HEADS];
    tepy_dl_tensor dl[TEPY_MOST_HEADS];
    memset(facts, 0, sizeof facts);
    for (Py_ssize_t i = 0; i < nargs; i++) {
        const tepy_dl_tensor *last = i == 0 ? &dl[0] : &dl[i - 1];
        int leading, outcome = tell_heads(state, args[i], &dl[i], &facts[i]);
        if (outcome != 0) return outcome < 0 ? NULL : Py_NewRef(Py_None);
        leading = dl[i].ndim == 3 || dl[0].ndim == 3 || last->ndim == 3 ? 1 : 2;
        facts[i].leading = leading_bits(&dl[i], &dl[0], last, leading);
    }
    return PyBytes_FromStringAndSize((const char *)facts, nargs * (Py_ssize_t)sizeof facts[0]);
}
