/* SPDX-License-Identifier: Apache-2.0
 *
 * state.c - what is made of the lists of objects that the module keeps.
 */
#include "python/state.h"

int tepy_state_verify(const tepy_state *state, tepy_stage stage)
{
#define REQUIRE(reference, name, when)                                                             \
    if (stage == TEPY_##when && (reference) == NULL) {                                             \
        PyErr_SetString(PyExc_SystemError,                                                         \
                        "_core: reference " #name " was not made when the module was");            \
        return -1;                                                                                 \
    }
#define X(name, when, ...) REQUIRE(state->name, name, when)
    TEPY_STATE_REFS(X)
#undef X
#define X(name, count, when)                                                                       \
    for (int i = 0; i < (count); i++) REQUIRE(state->name[i], name, when)
    TEPY_STATE_ARRAYS(X)
#undef X
    return 0;
}

/* All references are the first members of the state, one behind the other. */
#define REFERENCES (offsetof(tepy_state, exchange) / sizeof(PyObject *))
#define X(name, ...) +1
#define Y(name, count, ...) +(count)
_Static_assert(REFERENCES == 0 TEPY_STATE_REFS(X) TEPY_STATE_ARRAYS(Y), "and nothing else is");
#undef X
#undef Y

int tepy_state_visit(tepy_state *state, visitproc visit, void *arg)
{
    PyObject **references = (PyObject **)(void *)state;
    for (size_t i = 0; i < REFERENCES; i++) Py_VISIT(references[i]);
    return 0;
}

void tepy_state_clear(tepy_state *state)
{
    PyObject **references = (PyObject **)(void *)state;
    state->exchange = NULL; /* its capsule goes below */
    for (size_t i = 0; i < REFERENCES; i++) Py_CLEAR(references[i]);
}
