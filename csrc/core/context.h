/* SPDX-License-Identifier: Apache-2.0
 *
 * context.h - the per-device context and how a built-in device attaches its state.
 *
 * The operator table below it is in backend.h. A device's driver (csrc/cpu, csrc/cuda) provides a
 * te_device_driver: it opens the device, and fills the built-in backend.
 */
#ifndef TE_CORE_CONTEXT_H
#define TE_CORE_CONTEXT_H

#include "transformer_engine.h"

typedef struct te_device_driver {
    /* Makes the device's state; NULL state is legal. Runs without any lock of the core held. */
    te_status (*open)(int32_t index, void **state);
    void (*close)(void *state); /* NULL state is legal */
    const te_backend *backend;  /* the built-in backend, priority 0; NULL: there is none */
    /* Behind te_context_tune_gemm; NULL: the device has nothing to tune. */
    te_status (*tune_gemm)(void *state, int32_t enabled, const char *cache_file);
    /* Behind te_update and te_l2norm; NULL: the device has no kernel for them. */
    te_status (*update)(te_context *context, const te_update_args *args, void *stream);
    te_status (*l2norm)(te_context *context, const te_l2norm_args *args, void *stream);
    te_status (*current)(int32_t *index); /* behind te_device_current; NULL: nobody can say */
} te_device_driver;

/* NULL where the library was built without the device. */
const te_device_driver *te_cpu_driver(void);
const te_device_driver *te_cuda_driver(void);
/* The same of any type; NULL also of a type that is not there. */
const te_device_driver *te_driver_of(te_device_type type);

const te_device_driver *te_context_driver(const te_context *context);
/* What the driver's open made. */
void *te_context_state(const te_context *context);

/* Plan scratch sizes remembered per context (plan.c), for one operator table and selection: another
 * backend may need another workspace. lookup returns 1 and the bytes, or 0. */
typedef struct te_scratch_key {
    int64_t plan;
    te_sizes sizes;
    int64_t table;     /* te_op_table_number */
    int64_t selection; /* its number; 0: none */
    int64_t consumes_saved;
} te_scratch_key;
int te_context_scratch_lookup(te_context *context, const te_scratch_key *key, size_t *bytes);
void te_context_scratch_store(te_context *context, const te_scratch_key *key, size_t bytes);

#endif
