/* SPDX-License-Identifier: Apache-2.0
 *
 * cudnn_library.h - cuDNN's backend API as a table of function pointers (library.h), and handles.
 */
#ifndef TE_CUDA_CUDNN_LIBRARY_H
#define TE_CUDA_CUDNN_LIBRARY_H

#include <cudnn_graph.h>

#include "transformer_engine.h"

#define TE_CUDNN_SYMBOLS(X)                                                                        \
    X(cudnnGetVersion)                                                                             \
    X(cudnnCreate)                                                                                 \
    X(cudnnDestroy)                                                                                \
    X(cudnnSetStream)                                                                              \
    X(cudnnGetErrorString)                                                                         \
    X(cudnnGetLastErrorString)                                                                     \
    X(cudnnBackendCreateDescriptor)                                                                \
    X(cudnnBackendDestroyDescriptor)                                                               \
    X(cudnnBackendSetAttribute)                                                                    \
    X(cudnnBackendGetAttribute)                                                                    \
    X(cudnnBackendFinalize)                                                                        \
    X(cudnnBackendExecute)

typedef struct te_cudnn_api {
#define X(name) __typeof__(&name) name;
    TE_CUDNN_SYMBOLS(X)
#undef X
} te_cudnn_api;

/* Filled by the first te_cudnn_load that succeeds, and not changed after: the library stays open as
 * long as the process. DEVICE where it is not found, or older than the oldest that is right. */
extern te_cudnn_api te_cudnn;
te_status te_cudnn_load(void);

/* TE_OK, or a failure that names the call, the library's status and its last message. What it does
 * not support is UNSUPPORTED, the rest DEVICE or MEMORY. */
te_status te_cudnn_check(cudnnStatus_t status, const char *call, const char *file, int line);

/* st = TE_CUDNN(cudnnCreate, &handle); */
#define TE_CUDNN(name, ...) te_cudnn_check(te_cudnn.name(__VA_ARGS__), #name, __FILE__, __LINE__)

#endif
