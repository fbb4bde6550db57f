/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin_py.h - operators of loaded plug-ins as objects.
 */
#ifndef TE_PYTHON_PLUGIN_PY_H
#define TE_PYTHON_PLUGIN_PY_H

#include "transformer_engine_plugin.h"

#include "python/state.h"

/* Creates the type of NativeSlot; new reference. */
PyObject *tepy_native_slot_make_type(PyObject *module);
/* The slot of a NativeSlot of this module, which keeps it; NULL for other objects. */
const te_plugin_slot *tepy_native_slot(const tepy_state *state, PyObject *object);

#endif
