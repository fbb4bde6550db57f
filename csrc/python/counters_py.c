/* SPDX-License-Identifier: Apache-2.0
 *
 * counters_py.c - what really ran, as a dict.
 */
#include "python/args.h"

PyObject *tepy_counters(PyObject *module, PyObject *unused)
{
    te_counter *list = NULL;
    size_t capacity = 64, count = 0;
    PyObject *dict = NULL;
    te_status st;
    for (;;) { /* a counter may appear between two reads */
        PyMem_Free(list);
        list = PyMem_Malloc(capacity * sizeof *list);
        if (list == NULL) return PyErr_NoMemory();
        st = te_counters_read(list, capacity, &count);
        if (tepy_check(st) != 0) goto done;
        if (count <= capacity) break;
        capacity = count;
    }
    dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(list[i].value);
        if (value == NULL || PyDict_SetItemString(dict, list[i].name, value) != 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
done:
    PyMem_Free(list);
    return dict;
}

PyObject *tepy_reset_counters(PyObject *module, PyObject *unused)
{
    te_counters_reset();
    return Py_NewRef(Py_None);
}

/* ---- what functions of Python count, which run operators of the library ------------------------
 */

/* Two whole numbers below their limits, behind a device type. */
static int take_counted(const char *function, PyObject *const *args, const char *const names[2],
                        const int64_t limits[2], te_device *device, int64_t numbers[2])
{
    if (tepy_device_args(function, args[0], NULL, device) != 0) return -1;
    for (int i = 0; i < 2; i++) {
        const tepy_site site = {function, names[i]};
        if (tepy_int(args[1 + i], site, 0, limits[i] - 1, &numbers[i]) != 0) return -1;
    }
    return 0;
}

PyObject *tepy_count_gemm(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"a", "b"};
    static const int64_t limits[] = {TE_DTYPE_COUNT, TE_DTYPE_COUNT};
    int64_t dtypes[2];
    te_device device;
    if (take_counted("count_gemm", args, names, limits, &device, dtypes) != 0) return NULL;
    te_count_gemm(device.type, (te_dtype)dtypes[0], (te_dtype)dtypes[1]);
    return Py_NewRef(Py_None);
}

PyObject *tepy_count_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"dtype", "backward"};
    static const int64_t limits[] = {TE_DTYPE_COUNT, 2};
    int64_t numbers[2];
    te_device device;
    if (take_counted("count_attention", args, names, limits, &device, numbers) != 0) return NULL;
    te_count_attention(device.type, (te_dtype)numbers[0], (int)numbers[1]);
    return Py_NewRef(Py_None);
}

PyObject *tepy_count_emulated(PyObject *module, PyObject *arg)
{
    int64_t mode = 0;
    if (tepy_int(arg, (tepy_site){"count_emulated", "mode"}, 0, TE_SCALING_COUNT - 1, &mode) != 0) {
        return NULL;
    }
    te_count_emulated((te_scaling_mode)mode);
    return Py_NewRef(Py_None);
}

PyObject *tepy_count_mixed(PyObject *module, PyObject *unused)
{
    te_count_mixed();
    return Py_NewRef(Py_None);
}
