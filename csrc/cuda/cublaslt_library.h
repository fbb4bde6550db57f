/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt_library.h - cuBLASLt as a table of function pointers (library.h), and its handles.
 */
#ifndef TE_CUDA_CUBLASLT_LIBRARY_H
#define TE_CUDA_CUBLASLT_LIBRARY_H

#include <cublasLt.h>
#include <cuda.h>

#include "transformer_engine.h"

/* Descriptors live in memory of ours (the *_internal functions behind the header's inline
 * initialisers), so a call allocates nothing. */
#define TE_CUBLASLT_SYMBOLS(X)                                                                     \
    X(cublasLtCreate)                                                                              \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtGetStatusName)                                                                       \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoCheck)                                                                     \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescInit_internal)                                                             \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutInit_internal)                                                           \
    X(cublasLtMatmulPreferenceInit_internal)                                                       \
    X(cublasLtMatmulPreferenceSetAttribute)

typedef struct te_cublaslt_api {
#define X(name) __typeof__(&name) name;
    TE_CUBLASLT_SYMBOLS(X)
#undef X
} te_cublaslt_api;

/* Filled before the first handle is given, and not changed after: the library stays open as long
 * as the process. */
extern te_cublaslt_api te_cublaslt_functions;

/* The handle of a device's context, which is current; made at first use and shared by all that ask.
 * It is never destroyed: cublasLtDestroy waits for the device, which invalidates whatever graph any
 * thread of the process captures, in every capture mode. DEVICE with the loader's text where no
 * usable library is found. */
te_status te_cublaslt_handle(CUcontext context, cublasLtHandle_t *handle);

/* TE_OK, or DEVICE naming the call and the library's status. */
te_status te_cublaslt_check(cublasStatus_t status, const char *call, const char *file, int line);

/* st = TE_CUBLASLT(cublasLtCreate, &handle); */
#define TE_CUBLASLT(name, ...)                                                                     \
    te_cublaslt_check(te_cublaslt_functions.name(__VA_ARGS__), #name, __FILE__, __LINE__)

#endif
