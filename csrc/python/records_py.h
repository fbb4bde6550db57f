/* SPDX-License-Identifier: Apache-2.0
 *
 * records_py.h - structs of the C API as Python objects, by the names of their members.
 */
#ifndef TE_PYTHON_RECORDS_PY_H
#define TE_PYTHON_RECORDS_PY_H

#include "python/args.h"

/* Fills a struct, which te_record_initial has filled before, from a dict (what it lacks stays as it
 * is) or from an object with an attribute for each member. An extent may be an int, a constant.
 * What the struct has got is the caller's to release, on failure too. */
int tepy_take_record(const char *function, const te_record *record, PyObject *object, void *memory);
/* New reference: a struct as a named tuple. */
PyObject *tepy_give_record(const tepy_state *state, te_record_number number, const void *memory);

#endif
