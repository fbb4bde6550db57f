/* SPDX-License-Identifier: Apache-2.0
 *
 * state.c - what is made of the lists of objects that the module keeps.
 */
#include "python/state.h"

int tepy_state_verify(const tepy_state *state, tepy_stage stage)
{
#define X(name, when, ...)                                                                         \
    if (stage == TEPY_##when && state->name == NULL) {                                             \
        PyErr_SetString(PyExc_SystemError,                                                         \
                        "_core: reference " #name " was not made when the module was");            \
        return -1;                                                                                 \
    }
    TEPY_STATE_REFS(X)
#undef X
#define X(name, count, when)                                                                       \
    for (int i = 0; stage == TEPY_##when && i < (count); i++) {                                    \
        if (state->name[i] != NULL) continue;                                                      \
        PyErr_SetString(PyExc_SystemError,                                                         \
                        "_core: reference " #name " was not made when the module was");            \
        return -1;                                                                                 \
    }
    TEPY_STATE_ARRAYS(X)
#undef X
    return 0;
}

int tepy_state_visit(tepy_state *state, visitproc visit, void *arg)
{
#define X(name, ...) Py_VISIT(state->name);
    TEPY_STATE_REFS(X)
#undef X
#define X(name, count, when)                                                                       \
    for (int i = 0; i < (count); i++) Py_VISIT(state->name[i]);
    TEPY_STATE_ARRAYS(X)
#undef X
    return 0;
}

void tepy_state_clear(tepy_state *state)
{
    state->exchange = NULL; /* its capsule goes below */
#define X(name, ...) Py_CLEAR(state->name);
    TEPY_STATE_REFS(X)
#undef X
#define X(name, count, when)                                                                       \
    for (int i = 0; i < (count); i++) Py_CLEAR(state->name[i]);
    TEPY_STATE_ARRAYS(X)
#undef X
}
