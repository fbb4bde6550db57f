/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt_library.h - cuBLASLt as a table of function pointers (library.h).
 */
#ifndef TE_CUDA_CUBLASLT_LIBRARY_H
#define TE_CUDA_CUBLASLT_LIBRARY_H

#include <cublasLt.h>

#include "transformer_engine.h"

/* Descriptors live in memory of ours (the *_internal functions behind the header's inline
 * initialisers), so a call allocates nothing. */
#define TE_CUBLASLT_SYMBOLS(X)                                                                     \
    X(cublasLtCreate)                                                                              \
    X(cublasLtDestroy)                                                                             \
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
    void *library; /* dlopen handle */
#define X(name) __typeof__(&name) name;
    TE_CUBLASLT_SYMBOLS(X)
#undef X
} te_cublaslt_api;

/* Fills the table; DEVICE with the loader's text where no usable library is found. */
te_status te_cublaslt_load(te_cublaslt_api *api);
void te_cublaslt_unload(te_cublaslt_api *api);

/* TE_OK, or DEVICE naming the call and the library's status. */
te_status te_cublaslt_check(const te_cublaslt_api *api, cublasStatus_t status, const char *call,
                            const char *file, int line);

/* st = TE_CUBLASLT(api, cublasLtCreate, &handle); */
#define TE_CUBLASLT(api, name, ...)                                                                \
    te_cublaslt_check((api), (api)->name(__VA_ARGS__), #name, __FILE__, __LINE__)

#endif
