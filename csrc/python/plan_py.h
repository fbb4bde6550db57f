/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_py.h - the Plan type: what run() knows of a plan, worked out once so that a call compares no
 * strings.
 */
#ifndef TE_PYTHON_PLAN_PY_H
#define TE_PYTHON_PLAN_PY_H

#include "python/args.h"

typedef struct tepy_plan {
    PyObject_HEAD te_plan *plan; /* held */
    te_plan_info info;
    int makes_saved;       /* a forward: the packed saved buffer is a result, not an argument */
    unsigned char *parted; /* of each argument: it is read by parts, which lie in a dense buffer */
    te_sizes seen_sizes;   /* of the last run, on seen_device: that one found its caches filled */
    te_device seen_device;
} tepy_plan;

/* The argument, borrowed; NULL with an exception. */
tepy_plan *tepy_plan_of(const tepy_state *state, PyObject *object, const char *function);

/* How the tensor of an argument is read. */
static inline tepy_spec tepy_argument_spec(const char *function, const tepy_plan *plan, int32_t at)
{
    const te_buffer_info *info = &plan->info.buffers[at];
    tepy_spec spec = {.site = {function, info->name}, .form = TEPY_MATRIX, .access = TEPY_READ};
    if (info->ndim == 1) spec.form = TEPY_VECTOR;
    if (info->ndim > 2) spec.form = info->dtype == TE_DTYPE_U8 ? TEPY_MASK : TEPY_DIMS;
    if (info->leading && info->ndim < 3) spec.form = TEPY_ROWS;
    spec.dense = plan->parted[at];
    spec.aligned = spec.dense || (info->leading && info->ndim > 2);
    if (info->written || info->role == TE_ROLE_OUTPUT) spec.access = TEPY_WRITE;
    return spec;
}

#endif
