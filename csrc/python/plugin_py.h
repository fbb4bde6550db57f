/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin_py.h - operators of loaded plug-ins as objects.
 */
#ifndef TE_PYTHON_PLUGIN_PY_H
#define TE_PYTHON_PLUGIN_PY_H

#include "python/state.h"

/* Creates the type of NativeSlot; new reference. */
PyObject *tepy_native_slot_make_type(PyObject *module);
/* Whether an object is one of this module. */
int tepy_is_native_slot(const tepy_state *state, PyObject *object);
/* The slot of a NativeSlot, which keeps it, and the device and operator that it is of. NULL and -1
 * with TypeError for other objects. */
const te_op_slot *tepy_native_slot(PyObject *object);
te_device_type tepy_native_slot_device(PyObject *object);
int tepy_native_slot_op(PyObject *object);

#endif
