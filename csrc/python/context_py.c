/* SPDX-License-Identifier: Apache-2.0
 *
 * context_py.c - the Context type: a te_context behind an object with an explicit close.
 *
 * A context counts the calls that use it, because a call may run without the GIL: closing one in
 * use is refused instead of pulling it from under another thread.
 */
#include "python/args.h"
#include "python/types.h"

TEPY_HOLDER(context, tepy_context, TEPY_NOTHING, te_context_destroy(self->context))

/* Where the program goes without CUDA an exception says so. */
static int may_use(const tepy_state *state, te_device device)
{
    PyObject *check = state->before_cuda, *done;
    if (device.type != TE_DEVICE_CUDA || check == NULL) return 0;
    Py_INCREF(check);
    done = PyObject_CallNoArgs(check);
    Py_DECREF(check);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *tepy_meet_devices(PyObject *module, PyObject *meet)
{
    if (tepy_require_callable(meet, (tepy_site){"meet_devices", "meet"}) != 0) return NULL;
    tepy_set(&tepy_state_of(module)->meet_device, Py_NewRef(meet));
    return Py_NewRef(Py_None);
}

PyObject *tepy_add_device_type(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const char *name = tepy_text(args[0], (tepy_site){"add_device_type", "name"}, NULL);
    te_device_type type = TE_DEVICE_ANY;
    int64_t dlpack = 0;
    if (name == NULL ||
        tepy_int(args[1], (tepy_site){"add_device_type", "dlpack"}, 1, INT32_MAX, &dlpack) != 0 ||
        tepy_check(te_device_type_add(name, (int32_t)dlpack, &type)) != 0) {
        return NULL;
    }
    return PyLong_FromLong((long)type);
}

PyObject *tepy_device_is_met(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    const tepy_site site = {"device_is_met", "device_type"};
    tepy_state *state = tepy_state_of(module);
    te_device device;
    if (tepy_device_args("device_is_met", args[0], NULL, &device) != 0 ||
        tepy_text(args[1], (tepy_site){"device_is_met", "torch_name"}, NULL) == NULL ||
        tepy_require_callable(args[2], (tepy_site){"device_is_met", "stream"}) != 0) {
        return NULL;
    }
    if (device.type < TE_DEVICE_OTHER || te_device_type_dlpack(device.type) == 0)
        return TEPY_FAIL(PyExc_ValueError, site, "%d is no type that was added", (int)device.type);
    tepy_set(&state->device_streams[device.type], Py_NewRef(args[2]));
    tepy_set(&state->device_names[device.type], Py_NewRef(args[1]));
    return Py_NewRef(Py_None);
}

PyObject *tepy_device_type_name(PyObject *module, PyObject *arg)
{
    te_device device;
    if (tepy_device_args("device_type_name", arg, NULL, &device) != 0) return NULL;
    return PyUnicode_FromString(te_device_type_name(device.type));
}

PyObject *tepy_before_cuda(PyObject *module, PyObject *check)
{
    if (tepy_require_callable(check, (tepy_site){"before_cuda", "check"}) != 0) return NULL;
    tepy_set(&tepy_state_of(module)->before_cuda, Py_NewRef(check));
    return Py_NewRef(Py_None);
}

static tepy_context *context_make(const tepy_state *state, te_device device)
{
    te_context *context = NULL;
    tepy_context *self;
    te_status st;
    if (may_use(state, device) != 0) return NULL;
    Py_BEGIN_ALLOW_THREADS; /* opens libraries */
    st = te_context_create(device, &context);
    Py_END_ALLOW_THREADS;
    if (tepy_check(st) != 0) return NULL;
    self = (tepy_context *)TEPY_ALLOCATE((PyTypeObject *)state->context_type);
    if (self == NULL) {
        te_context_destroy(context);
        return NULL;
    }
    self->context = context;
    self->device = device;
    return self;
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device_type", "index", NULL};
    PyObject *device_type = NULL, *index = NULL, *module = PyType_GetModule(type);
    te_device device;
    if (module == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:Context", names, &device_type, &index) ||
        tepy_device_args("Context", device_type, index, &device) != 0) {
        return NULL;
    }
    return (PyObject *)context_make(tepy_state_of(module), device);
}

/* Releases the te_context; -1 where a call is running. */
static int context_shut(tepy_context *self)
{
    te_context *context = self->context;
    if (self->users > 0 && te_context_check(context) == TE_OK) { /* a fork ends the calls, too */
        PyErr_Format(PyExc_RuntimeError,
                     "close: %d calls are running on this context: join them first", self->users);
        return -1;
    }
    self->context = NULL;
    Py_BEGIN_ALLOW_THREADS;
    te_context_destroy(context);
    Py_END_ALLOW_THREADS;
    return 0;
}

static PyObject *context_close(PyObject *self, PyObject *unused)
{
    return context_shut((tepy_context *)self) == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *context_device(PyObject *self, void *unused)
{
    const tepy_context *context = (const tepy_context *)self;
    return Py_BuildValue("(ii)", (int)context->device.type, (int)context->device.index);
}

static PyObject *context_closed(PyObject *self, void *unused)
{
    return PyBool_FromLong(((tepy_context *)self)->context == NULL);
}

static PyMethodDef context_methods[] = {
    {"close", context_close, METH_NOARGS, "close($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef context_getset[] = {
    {"device", context_device, NULL, "(device type, index)", NULL},
    {"closed", context_closed, NULL, "True after close()", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

TEPY_TYPE(context, context, tepy_context, "Context", 0,
          {Py_tp_doc, "Context(device_type, index=0)\n--\n\n"}, {Py_tp_new, context_new},
          {Py_tp_methods, context_methods}, {Py_tp_getset, context_getset})

/* Neither closed nor of a process of which this one is a forked child. */
static int is_usable(const tepy_context *self)
{
    return self != NULL && self->context != NULL && te_context_check(self->context) == TE_OK;
}

/* Switches the tuning of GEMMs off (NULL), or on with the path of a file (bytes) or None. */
static int set_tuning(tepy_context *self, PyObject *setting)
{
    const char *path = NULL;
    te_status st;
    if (setting != NULL && setting != Py_None && (path = PyBytes_AsString(setting)) == NULL) {
        return -1;
    }
    Py_XINCREF(setting);
    Py_BEGIN_ALLOW_THREADS; /* reads the file */
    st = te_context_tune_gemm(self->context, setting != NULL, path);
    Py_END_ALLOW_THREADS;
    Py_XDECREF(setting);
    return tepy_check(st);
}

/* New reference to the module's own context of a device, with the settings that outlive contexts.
 */
static tepy_context *own_context(tepy_state *state, te_device device)
{
    int slot = tepy_device_slot(device);
    tepy_context *self;
    if (slot < 0) return NULL;
    self = (tepy_context *)state->contexts[slot];
    if (!is_usable(self)) {
        self = context_make(state, device);
        if (self == NULL) return NULL;
        if (state->tuning[slot] != NULL && set_tuning(self, state->tuning[slot]) != 0) {
            Py_DECREF(self);
            return NULL;
        }
        if (is_usable((tepy_context *)state->contexts[slot])) { /* another thread was first */
            Py_DECREF(self);
            return (tepy_context *)Py_NewRef(state->contexts[slot]);
        }
        tepy_set(&state->contexts[slot], (PyObject *)self);
    }
    return (tepy_context *)Py_NewRef((PyObject *)self);
}

tepy_context *tepy_context_acquire(tepy_state *state, const char *function, PyObject *given,
                                   te_device device)
{
    tepy_site site = {function, "context"};
    tepy_context *context = (tepy_context *)given;
    if (given == NULL || given == Py_None) {
        context = own_context(state, device);
        if (context == NULL) return NULL;
        context->users++;
        return context;
    }
    if ((PyObject *)Py_TYPE(given) != state->context_type)
        return TEPY_EXPECTED(site, "a Context or None", given);
    if (context->context == NULL)
        return TEPY_FAIL(PyExc_RuntimeError, site, "it is closed: make a new Context");
    if (!tepy_same(context->device, device))
        return TEPY_FAIL(
            PyExc_ValueError, site,
            "it is of %s:%d and the tensors are on %s:%d: pass a Context of their device",
            tepy_device_name(context->device), (int)context->device.index, tepy_device_name(device),
            (int)device.index);
    context->users++;
    return (tepy_context *)Py_NewRef(given);
}

void tepy_context_release(tepy_context *context)
{
    if (context == NULL) return;
    context->users--;
    Py_DECREF((PyObject *)context);
}

int tepy_context_run(tepy_state *state, const char *function, te_device device,
                     te_status (*run)(te_context *context, const void *args, void *stream),
                     const void *args)
{
    tepy_context *context = tepy_context_acquire(state, function, NULL, device);
    tepy_without_gil without = {NULL, {NULL, NULL}};
    void *stream = NULL;
    te_status st = TE_ERROR_INVALID;
    if (context == NULL) return -1;
    if (tepy_stream(state, device, &stream) == 0) {
        if (device.type == TE_DEVICE_CPU) tepy_leave_gil(&without);
        st = run(context->context, args, stream);
        tepy_retake_gil(&without);
        if (st != TE_OK) (void)tepy_raise(st);
    }
    tepy_context_release(context);
    return st == TE_OK ? 0 : -1;
}

PyObject *tepy_close_contexts(PyObject *module, PyObject *unused)
{
    tepy_state *state = tepy_state_of(module);
    for (int i = 0; i < TEPY_DEVICES; i++) {
        PyObject *context = state->contexts[i];
        int failed;
        if (context == NULL) continue;
        (void)Py_NewRef(context);
        failed = context_shut((tepy_context *)context);
        if (failed == 0 && state->contexts[i] == context) tepy_set(&state->contexts[i], NULL);
        Py_DECREF(context);
        if (failed != 0) return NULL;
    }
    return Py_NewRef(Py_None);
}

PyObject *tepy_cuda_configure(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *bytes = NULL;
    const char *path = NULL;
    int force;
    te_status st;
    force = PyObject_IsTrue(args[0]);
    if (force < 0) return NULL;
    if (nargs > 1 &&
        tepy_path(args[1], (tepy_site){"cuda_configure", "cache_dir"}, &bytes, &path) != 0) {
        return NULL;
    }
    st = te_cuda_configure(force, path);
    Py_XDECREF(bytes);
    if (st == TE_ERROR_STATE) { /* works, and keeps nothing */
        return PyErr_WarnEx(PyExc_RuntimeWarning, te_last_error(), 1) == 0 ? Py_NewRef(Py_None)
                                                                           : NULL;
    }
    return st == TE_OK ? Py_NewRef(Py_None) : tepy_raise(st);
}

PyObject *tepy_tune_gemm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_state *state = tepy_state_of(module);
    PyObject *setting = NULL;
    const char *path = NULL;
    tepy_context *context;
    te_device device;
    int enabled;
    int failed;
    if (tepy_device_args("tune_gemm", args[0], args[1], &device) != 0) {
        return NULL;
    }
    enabled = PyObject_IsTrue(args[2]);
    if (enabled < 0) return NULL;
    if (nargs > 3 &&
        tepy_path(args[3], (tepy_site){"tune_gemm", "cache_file"}, &setting, &path) != 0) {
        return NULL;
    }
    if (!enabled) Py_CLEAR(setting);
    if (enabled && setting == NULL) setting = Py_NewRef(Py_None);
    context = tepy_context_acquire(state, "tune_gemm", NULL, device);
    failed = context == NULL || set_tuning(context, setting) != 0;
    tepy_context_release(context);
    if (failed) {
        Py_XDECREF(setting);
        return NULL;
    }
    tepy_set(&state->tuning[tepy_device_slot(device)], setting);
    return Py_NewRef(Py_None);
}
