/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_memory.h - device memory, streams and capture for the C tests, without CUDA headers: the
 * driver is opened by name, and the few functions that tests need are declared here. A test program
 * ends at the first call that fails.
 */
#ifndef TE_TESTS_CUDA_MEMORY_H
#define TE_TESTS_CUDA_MEMORY_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifndef SKIPPED
#define SKIPPED 77 /* exit status of a program that can not run here */
#endif

typedef unsigned long long device_address;

/* Member, symbol, parameters; each returns a CUresult. */
#define CUDA_MEMORY_SYMBOLS(X)                                                                     \
    X(init, cuInit, (unsigned flags))                                                              \
    X(count, cuDeviceGetCount, (int *count))                                                       \
    X(retain, cuDevicePrimaryCtxRetain, (void **context, int device))                              \
    X(set_current, cuCtxSetCurrent, (void *context))                                               \
    X(synchronize, cuCtxSynchronize, (void))                                                       \
    X(allocate, cuMemAlloc_v2, (device_address * address, size_t bytes))                           \
    X(release, cuMemFree_v2, (device_address address))                                             \
    X(upload, cuMemcpyHtoD_v2, (device_address to, const void *from, size_t bytes))                \
    X(download, cuMemcpyDtoH_v2, (void *to, device_address from, size_t bytes))                    \
    X(stream_create, cuStreamCreate, (void **stream, unsigned flags))                              \
    X(stream_destroy, cuStreamDestroy_v2, (void *stream))                                          \
    X(stream_synchronize, cuStreamSynchronize, (void *stream))                                     \
    X(capture_begin, cuStreamBeginCapture_v2, (void *stream, int mode))                            \
    X(capture_end, cuStreamEndCapture, (void *stream, void **graph))                               \
    X(instantiate, cuGraphInstantiateWithFlags,                                                    \
      (void **executable, void *graph, unsigned long long flags))                                  \
    X(launch, cuGraphLaunch, (void *executable, void *stream))                                     \
    X(executable_destroy, cuGraphExecDestroy, (void *executable))                                  \
    X(graph_destroy, cuGraphDestroy, (void *graph))

static struct {
#define X(name, symbol, parameters) int(*name) parameters;
    CUDA_MEMORY_SYMBOLS(X)
#undef X
} cuda;

static inline void cuda_expect(int result, const char *what)
{
    if (result == 0) return;
    (void)fprintf(stderr, "%s: CUDA error %d\n", what, result);
    exit(1);
}

/* Opens the driver and makes the primary context of device 0 current; ends the program with SKIPPED
 * where there is no device. */
static inline void cuda_begin(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
    int devices = 0;
    if (driver == NULL) {
        (void)printf("no CUDA driver\n");
        exit(SKIPPED);
    }
#define X(name, symbol, parameters)                                                                \
    *(void **)&cuda.name = dlsym(driver, #symbol);                                                 \
    cuda_expect(cuda.name == NULL, #symbol);
    CUDA_MEMORY_SYMBOLS(X)
#undef X
    if (cuda.init(0) != 0 || cuda.count(&devices) != 0 || devices == 0) {
        (void)printf("no CUDA device\n");
        exit(SKIPPED);
    }
    cuda_expect(cuda.retain(&context, 0), "cuDevicePrimaryCtxRetain");
    cuda_expect(cuda.set_current(context), "cuCtxSetCurrent");
}

/* One device buffer handed out in pieces of 256 bytes; set `used` to 0 to empty it. */
typedef struct cuda_arena {
    device_address base;
    size_t used, size;
} cuda_arena;

static inline cuda_arena cuda_arena_create(size_t bytes)
{
    cuda_arena arena = {0, 0, bytes};
    cuda_expect(cuda.allocate(&arena.base, bytes), "cuMemAlloc");
    return arena;
}

static inline void cuda_arena_destroy(cuda_arena *arena)
{
    cuda_expect(cuda.release(arena->base), "cuMemFree");
}

/* Address of `bytes` bytes, 256-byte aligned, plus `offset` bytes. */
static inline device_address cuda_take(cuda_arena *arena, size_t bytes, size_t offset)
{
    device_address piece = arena->base + arena->used + offset;
    arena->used += (bytes + offset + 255) / 256 * 256;
    cuda_expect(arena->used > arena->size, "arena too small");
    return piece;
}

#endif
