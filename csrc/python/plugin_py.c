/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin_py.c - loading of plug-ins that are shared objects, and their operators as objects.
 *
 * A NativeSlot is one operator of one backend: it holds its plug-in, so that what it calls is there
 * as long as itself. The module keeps the slots of each plug-in that it has loaded, and gives the
 * same ones whenever that is loaded again.
 */
#include "python/args.h"
#include "python/dispatch_py.h"

typedef struct native_slot {
    PyObject_HEAD vectorcallfunc call;
    te_plugin *plugin; /* held; NULL: not made yet */
    const te_plugin_slot *slot;
} native_slot;

static const char *const kinds[] = {[TE_PLUGIN_VENDOR] = "vendor",
                                    [TE_PLUGIN_DEFAULT] = "default",
                                    [TE_PLUGIN_REFERENCE] = "reference"};

/* ---- calls -------------------------------------------------------------------------------- */

static PyObject *call_slot(const native_slot *self, int asked, PyObject *const *args,
                           Py_ssize_t nargs, PyObject *names)
{
    const tepy_slot_call by = {
        .slot = &self->slot->slot, .device = self->slot->device, .asked = asked};
    PyObject *module = PyType_GetModule(Py_TYPE((PyObject *)(uintptr_t)self)), *result;
    if (module == NULL) return NULL;
    (void)Py_NewRef(module); /* tensors of the caller may drop the rest */
    result = tepy_call_operator(module, self->slot->op, by, args, nargs, names);
    Py_DECREF(module);
    return result;
}

static PyObject *native_slot_vectorcall(PyObject *object, PyObject *const *args, size_t nargsf,
                                        PyObject *names)
{
    return call_slot((const native_slot *)object, 0, args, tepy_positional(nargsf), names);
}

static PyObject *native_slot_supports(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                      PyObject *names)
{
    return call_slot((const native_slot *)object, 1, args, nargs, names);
}

/* ---- the type ----------------------------------------------------------------------------- */

/* Untracked first: what a plug-in does at its end may collect garbage. */
TEPY_HOLDER(native_slot, native_slot, TEPY_NOTHING, te_plugin_release(self->plugin))

static const te_plugin_slot *slot_of(PyObject *object)
{
    return ((const native_slot *)object)->slot;
}

static PyObject *native_slot_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<%s of backend %s>", te_op_name(slot_of(object)->op),
                                slot_of(object)->backend);
}

/* What an attribute tells; `which` is the first letter of its name. */
static PyObject *get_attribute(PyObject *object, void *which)
{
    const te_plugin_slot *slot = slot_of(object);
    switch (*(const char *)which) {
    case 'o':
        return PyUnicode_FromString(te_op_name(slot->op));
    case 'b':
        return PyUnicode_FromString(slot->backend);
    case 'v':
        return Py_BuildValue("z", slot->vendor);
    case 'k':
        return PyUnicode_FromString(kinds[slot->kind]);
    case 'd':
        return PyLong_FromLong((long)slot->device);
    case 'p':
        return PyLong_FromLong((long)slot->priority);
    default:
        return PyLong_FromLongLong(te_plugin_slot_calls(slot));
    }
}

static PyGetSetDef native_slot_getset[] = {
    {"op", get_attribute, NULL, "Name of its operator in the C library.", "o"},
    {"backend", get_attribute, NULL, "Name of its backend.", "b"},
    {"vendor", get_attribute, NULL, "Whose it is, or None.", "v"},
    {"kind", get_attribute, NULL, "\"vendor\", \"default\" or \"reference\".", "k"},
    {"device", get_attribute, NULL, "DEVICE_* that it runs on.", "d"},
    {"priority", get_attribute, NULL, "The highest is asked first.", "p"},
    {"calls", get_attribute, NULL, "How often it ran without an error, in this process.", "c"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef native_slot_methods[] = {
    {"supports", (PyCFunction)(void (*)(void))native_slot_supports, METH_FASTCALL | METH_KEYWORDS,
     "supports($self, /, *args, **kwargs)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

TEPY_TYPE(native_slot, native_slot, native_slot, "NativeSlot",
          Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
          {Py_tp_doc,
           "An operator of a plug-in: a call runs it, with the arguments that the function of "
           "the operator's name takes."},
          TEPY_CALLED(native_slot), {Py_tp_repr, native_slot_repr},
          {Py_tp_methods, native_slot_methods}, {Py_tp_getset, native_slot_getset})

/* ---- for the other files ------------------------------------------------------------------ */

const te_plugin_slot *tepy_native_slot(const tepy_state *state, PyObject *object)
{
    return Py_TYPE(object) == (PyTypeObject *)state->native_slot_type ? slot_of(object) : NULL;
}

/* ---- loading ------------------------------------------------------------------------------ */

/* New reference: a slot, which holds the plug-in. */
static PyObject *make_slot(const tepy_state *state, te_plugin *plugin, const te_plugin_slot *slot)
{
    native_slot *made = (native_slot *)TEPY_ALLOCATE((PyTypeObject *)state->native_slot_type);
    if (made == NULL) return NULL;
    te_plugin_retain(plugin);
    made->call = native_slot_vectorcall;
    made->plugin = plugin;
    made->slot = slot;
    return (PyObject *)made;
}

/* New reference: a tuple of the slots of a plug-in. */
static PyObject *make_slots(const tepy_state *state, te_plugin *plugin)
{
    const Py_ssize_t count = (Py_ssize_t)te_plugin_slot_count(plugin);
    PyObject *slots = PyTuple_New(count);
    for (Py_ssize_t i = 0; slots != NULL && i < count; i++) {
        tepy_fill(&slots, i, make_slot(state, plugin, te_plugin_slot_at(plugin, (size_t)i)));
    }
    return slots;
}

/* New reference: those that the module has of a plug-in, or made now. */
static PyObject *slots_of(tepy_state *state, te_plugin *plugin)
{
    PyObject *key = PyLong_FromVoidPtr(plugin), *slots = NULL;
    if (key == NULL) return NULL;
    if (state->plugins == NULL) state->plugins = PyDict_New();
    if (state->plugins == NULL) goto done;
    slots = PyDict_GetItemWithError(state->plugins, key);
    Py_XINCREF(slots);
    if (slots != NULL || PyErr_Occurred()) goto done;
    slots = make_slots(state, plugin);
    /* Without slots nobody would hold the plug-in, and another one might get its address. */
    if (slots != NULL && PyTuple_Size(slots) > 0 &&
        PyDict_SetItem(state->plugins, key, slots) != 0) {
        Py_CLEAR(slots);
    }
done:
    Py_DECREF(key);
    return slots;
}

PyObject *tepy_load_plugin(PyObject *module, PyObject *arg)
{
    const tepy_site site = {"load_plugin", "path"};
    te_plugin *plugin = NULL;
    PyObject *bytes = NULL, *slots = NULL;
    const char *path = NULL;
    te_status st;
    if (tepy_path(arg, site, &bytes, &path) != 0) return NULL;
    if (path == NULL) return TEPY_FAIL(PyExc_TypeError, site, "expected a path, got None");
    Py_BEGIN_ALLOW_THREADS; /* it may wait for another thread's loading, and take the GIL itself */
    st = te_plugin_load(path, &plugin);
    Py_END_ALLOW_THREADS;
    if (tepy_check(st) == 0) slots = slots_of(tepy_state_of(module), plugin);
    te_plugin_release(plugin);
    Py_DECREF(bytes);
    return slots;
}
