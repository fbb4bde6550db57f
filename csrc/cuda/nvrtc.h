/* SPDX-License-Identifier: Apache-2.0
 *
 * nvrtc.h - device code compiled at run time, and its cache on disk.
 */
#ifndef TE_CUDA_NVRTC_H
#define TE_CUDA_NVRTC_H

#include "transformer_engine.h"

typedef struct te_cuda_source {
    const char *name; /* for messages and the name of the cache file */
    const char *text; /* self-contained CUDA C, zero-terminated */
    size_t size;      /* bytes of text */
    int major, minor; /* compute capability to compile for */
} te_cuda_source;

typedef struct te_cuda_code {
    void *data; /* what cuLibraryLoadData takes; owned */
    size_t size;
    int cached; /* it came from the disk */
} te_cuda_code;

/* Compiles with the process's NVRTC (or takes the result of an earlier time from the cache, if
 * use_cache), without touching a device. DEVICE with NVRTC's log where that fails. */
te_status te_cuda_compile(const te_cuda_source *source, int use_cache, te_cuda_code *code);
void te_cuda_code_free(te_cuda_code *code);

/* te_cuda_configure asked for the source even where an image would load. */
int te_cuda_source_forced(void);

#endif
