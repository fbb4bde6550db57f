/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.h - the CUDA driver as the rest of csrc/cuda sees it: a per-device state, the current
 * context, and launches of embedded kernels by name. Nothing CUDA is linked: libcuda is opened at
 * the first use of a device, its symbols come from cuGetProcAddress at a fixed version.
 */
#ifndef TE_CUDA_DRIVER_H
#define TE_CUDA_DRIVER_H

#include "transformer_engine.h"

/* Host objects of one device; what te_context_state() returns for a CUDA context. */
typedef struct te_cuda_state te_cuda_state;

/* Makes the device's primary context current for this thread, remembering what was; every entry
 * that calls the driver or a vendor library runs between enter and leave. Cheap when already
 * current. */
typedef struct te_cuda_scope {
    int pushed;
} te_cuda_scope;
te_status te_cuda_enter(te_cuda_state *cuda, te_cuda_scope *scope);
void te_cuda_leave(te_cuda_state *cuda, te_cuda_scope *scope);

/* Between these two this thread may make calls that a stream capture of its own would otherwise
 * forbid: loading of code, allocations inside a vendor library. */
typedef struct te_cuda_relaxed {
    int mode, changed;
} te_cuda_relaxed;
te_status te_cuda_relax_capture(te_cuda_relaxed *relaxed);
void te_cuda_restore_capture(te_cuda_relaxed *relaxed);

/* 90 for compute capability 9.0. */
int te_cuda_compute_capability(const te_cuda_state *cuda);
/* Bytes of shared memory that a block can have, static and dynamic. */
int te_cuda_shared_limit(const te_cuda_state *cuda);

typedef struct te_cuda_dims {
    uint32_t grid_x, grid_y, grid_z, block_x, block_y, block_z;
    uint32_t shared_bytes; /* dynamic shared memory: 0 at every launch of a kernel, or at none */
} te_cuda_dims;

/* A launch of kernel `name` (a string literal: its address is the cache key) of image `family`
 * (csrc/cuda/kernels/<family>.cu) with one by-value parameter struct. The image is loaded at first
 * use: embedded binary, else NVRTC on the embedded source. A NULL name, of dtypes that a table of
 * names lacks, is UNSUPPORTED. te_cuda_run enters, launches in order until one fails, and leaves.
 */
typedef struct te_cuda_call {
    const char *family, *name;
    te_cuda_dims dims;
    const void *params;
    size_t params_size;
} te_cuda_call;
te_status te_cuda_run(te_cuda_state *cuda, const te_cuda_call *calls, int count, void *stream);

/* True while the stream is being captured into a graph. */
int te_cuda_is_capturing(te_cuda_state *cuda, void *stream);

#endif
