/* SPDX-License-Identifier: Apache-2.0
 *
 * api.h - the driver functions this library calls, as a table of pointers, and the state of a
 * device. For the files of csrc/cuda that call the driver themselves; the others use driver.h.
 */
#ifndef TE_CUDA_API_H
#define TE_CUDA_API_H

#include <pthread.h>
#include <stdatomic.h>

#include <cuda.h>

#include "cuda/driver.h"

/* The version whose functions cuGetProcAddress hands out: the interface stays that of CUDA 12.0,
 * whatever the driver and the headers are. */
#define TE_CUDA_API_VERSION 12000

#define TE_CUDA_SYMBOLS(X)                                                                         \
    X(cuInit)                                                                                      \
    X(cuGetErrorName)                                                                              \
    X(cuGetErrorString)                                                                            \
    X(cuDeviceGetCount)                                                                            \
    X(cuDeviceGet)                                                                                 \
    X(cuDeviceGetAttribute)                                                                        \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDevicePrimaryCtxRelease)                                                                   \
    X(cuDeviceGetName)                                                                             \
    X(cuEventCreate)                                                                               \
    X(cuEventDestroy)                                                                              \
    X(cuEventRecord)                                                                               \
    X(cuEventSynchronize)                                                                          \
    X(cuEventElapsedTime)                                                                          \
    X(cuCtxGetCurrent)                                                                             \
    X(cuCtxGetDevice)                                                                              \
    X(cuCtxPushCurrent)                                                                            \
    X(cuCtxPopCurrent)                                                                             \
    X(cuCtxSynchronize)                                                                            \
    X(cuMemsetD8Async)                                                                             \
    X(cuStreamIsCapturing)                                                                         \
    X(cuThreadExchangeStreamCaptureMode)                                                           \
    X(cuLibraryLoadData)                                                                           \
    X(cuLibraryUnload)                                                                             \
    X(cuLibraryGetKernel)                                                                          \
    X(cuKernelGetFunction)                                                                         \
    X(cuFuncGetAttribute)                                                                          \
    X(cuFuncSetAttribute)                                                                          \
    X(cuLaunchKernelEx)

/* Some of these names are macros of cuda.h that add a version; the member gets the same ending. */
typedef struct te_cuda_api {
#define X(name) __typeof__(&name) name;
    TE_CUDA_SYMBOLS(X)
#undef X
} te_cuda_api;

/* Filled by the first te_cuda_load_api that succeeds, and not changed after. */
extern te_cuda_api te_cuda_functions;
te_status te_cuda_load_api(void);

/* TE_OK, or DEVICE with the driver's name and description of the error and the call. */
te_status te_cuda_check(CUresult result, const char *call, const char *file, int line);

/* st = TE_CU(cuCtxPopCurrent, &context); */
#define TE_CU(name, ...)                                                                           \
    te_cuda_check(te_cuda_functions.name(__VA_ARGS__), #name, __FILE__, __LINE__)

/* Handles of kernels by the address of their name. Open addressing; a key is published after its
 * value, and entries are never removed, so readers take no lock. */
#define TE_CUDA_KERNEL_SLOTS 256

typedef struct te_cuda_kernel {
    _Atomic(const char *) name;
    CUfunction function;
} te_cuda_kernel;

struct te_cuda_state {
    CUdevice device;
    CUcontext context; /* the primary context, retained */
    int capability_major, capability_minor;
    int shared_limit; /* bytes of shared memory of a block, static and dynamic */
    struct te_cublaslt *cublaslt;
    _Atomic(struct te_sdpa_plans *) sdpa;
    pthread_mutex_t lock; /* guards what follows, for writing */
    CUlibrary *libraries; /* one per image, NULL until loaded */
    te_cuda_kernel kernels[TE_CUDA_KERNEL_SLOTS];
};

/* image.c: the device images of a state. */
te_status te_cuda_images_open(te_cuda_state *cuda);
void te_cuda_images_close(te_cuda_state *cuda);

#endif
