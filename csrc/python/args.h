/* SPDX-License-Identifier: Apache-2.0
 *
 * args.h - from Python arguments to C values: integers in a range, and tensors as borrowed views.
 *
 * A function that fails returns -1 with an exception whose text names function, argument, value and
 * fix. Nothing here keeps a tensor: a view lives as long as the argument, or as the copy in `held`.
 */
#ifndef TE_PYTHON_ARGS_H
#define TE_PYTHON_ARGS_H

#include "python/state.h"

/* What becomes of a tensor that has no legal view. */
typedef enum tepy_access {
    TEPY_READ, /* it is copied */
    TEPY_WRITE /* it is refused: writes would go to the copy */
} tepy_access;

/* How the dims of a tensor are read. */
typedef enum tepy_form {
    TEPY_ROWS,   /* matrix [product of the leading dims, last dim]; at least one dim */
    TEPY_MATRIX, /* two dims */
    TEPY_VECTOR, /* one dim */
    TEPY_FLAT,   /* any dims, dense: a vector of all elements */
    TEPY_DIMS,   /* up to TE_MAX_DIMS dims as they are, with strides; unit last stride */
    TEPY_MASK    /* the same of u8; a bool tensor is read as u8 */
} tepy_form;

/* What an argument has to be, and where it stands. */
typedef struct tepy_spec {
    tepy_site site;
    tepy_form form;
    tepy_access access;
    te_leading *leading; /* filled where not NULL; torch allows no more dims */
    /* It is copied too where it is not dense; on CUDA, where a line of the last dim does not begin
     * at 16 bytes in memory of its own. */
    int dense, aligned;
} tepy_spec;

/* View of a tensor object. *held, where it becomes not NULL, is a new reference that the view
 * needs. */
int tepy_view(const tepy_state *state, PyObject *object, const tepy_spec *spec, te_tensor *view,
              PyObject **held);
/* The first `count` elements of a dense tensor of `dtype` on `device`. */
typedef struct tepy_elements {
    tepy_site site;
    te_dtype dtype;
    int64_t count;
    te_device device;
} tepy_elements;

int tepy_view_elements(const tepy_state *state, PyObject *object, const tepy_elements *spec,
                       void **data, PyObject **held);
/* The same where there is an object; for None *data becomes NULL. */
int tepy_view_optional(const tepy_state *state, PyObject *object, const tepy_elements *spec,
                       void **data, PyObject **held);
/* A whole number (anything with __index__) from low to high. */
int tepy_int(PyObject *object, tepy_site site, int64_t low, int64_t high, int64_t *value);
int tepy_float(PyObject *object, tepy_site site, double *value);
/* A file name, or None: *bytes (a new reference) holds what *path points to; both NULL for None. */
int tepy_path(PyObject *object, tepy_site site, PyObject **bytes, const char **path);
int tepy_require_callable(PyObject *object, tepy_site site);
/* The same; None will do. */
int tepy_optional_callable(PyObject *object, tepy_site site);
/* The characters of a str, as long as it; *length, where not NULL, their number. NULL with an
 * exception. */
const char *tepy_text(PyObject *object, tepy_site site, Py_ssize_t *length);
/* Number of positional arguments from low to high. */
int tepy_count(const char *function, Py_ssize_t nargs, Py_ssize_t low, Py_ssize_t high);
/* (device type, index) as two integers. */
int tepy_device_args(const char *function, PyObject *type, PyObject *index, te_device *device);
int tepy_same_device(tepy_site site, te_device device, te_device expected);
/* Whether a type of device is one that meet_device has made known, or one of ours: others may be
 * there by a plug-in in C alone. */
static inline int tepy_is_met(const tepy_state *state, int32_t type)
{
    return type >= 0 && (type < TE_DEVICE_OTHER || state->device_names[type] != NULL);
}

/* The device of a tensor, whose type is met if it was not yet; -1 with an exception. */
int tepy_device_of(const tepy_state *state, PyObject *tensor, const tepy_dl_device *given,
                   tepy_site site, te_device *device);
/* Native handle of torch's current stream; NULL for the CPU, and where torch tells no handle. */
int tepy_stream(const tepy_state *state, te_device device, void **stream);

static inline int tepy_same(te_device a, te_device b)
{
    return a.type == b.type && a.index == b.index;
}

/* "cuda", to print with the index. */
static inline const char *tepy_device_name(te_device device)
{
    return te_device_type_name(device.type);
}

#endif
