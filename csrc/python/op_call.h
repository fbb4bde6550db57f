/* SPDX-License-Identifier: Apache-2.0
 *
 * op_call.h - one call of an operator from Python: a function of ops_py.c or layer_ops_py.c begins
 * it, takes its tensors (all on one device), runs the operator and ends it, which drops every
 * reference that the call held. Functions that return int give -1 with an exception.
 */
#ifndef TE_PYTHON_OP_CALL_H
#define TE_PYTHON_OP_CALL_H

#include "python/args.h"

#define TEPY_MAX_HELD 16

typedef struct tepy_op_call {
    tepy_state *state;
    const char *function;
    PyObject *given_context;
    te_device device; /* of the first tensor; all are on it */
    int device_known;
    int keep_gil; /* on CUDA, where the call is a launch and its device is warm */
    int held_count;
    PyObject *held[TEPY_MAX_HELD];
} tepy_op_call;

int tepy_op_begin(tepy_op_call *call, PyObject *module, const char *function);
/* None, or NULL where the call failed. Every begun call ends here once it may hold something. */
PyObject *tepy_op_end(tepy_op_call *call, int failed);

/* What is required was given: parsing lets None through. */
int tepy_op_require(const tepy_op_call *call, PyObject *object, const char *name);
/* Views; NULL and None leave the view as it is (zero: absent). */
int tepy_op_take(tepy_op_call *call, PyObject *object, const tepy_want *want, te_tensor *view);
int tepy_op_matrix(tepy_op_call *call, PyObject *object, const char *name, tepy_access access,
                   te_tensor *view);
int tepy_op_vector(tepy_op_call *call, PyObject *object, const char *name, tepy_access access,
                   te_tensor *view);
/* Pointers to the first `count` elements, NULL for NULL and None. They come after a tensor, which
 * says the device. */
int tepy_op_elements(tepy_op_call *call, PyObject *object, const char *name, te_dtype dtype,
                     int64_t count, void **data);
int tepy_op_floats(tepy_op_call *call, PyObject *object, const char *name, int64_t count,
                   float **data);
int tepy_op_scalar(tepy_op_call *call, PyObject *object, const char *name, const float **data);

/* Where an args struct keeps its workspace. */
typedef struct tepy_workspace {
    void **data;
    size_t *size;
} tepy_workspace;

/* Runs the operator on torch's current stream; workspace may be NULL where it has none. */
int tepy_op_run(tepy_op_call *call, te_op op, const void *args, const tepy_workspace *workspace);

#endif
