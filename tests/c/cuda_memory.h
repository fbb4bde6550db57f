/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_memory.h - device memory, streams and capture for the C tests, without CUDA headers: the driver
 * is opened by name and its few functions are declared here. Test programs end at the first failure.
 */
#ifndef TE_TESTS_CUDA_MEMORY_H
#define TE_TESTS_CUDA_MEMORY_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define SKIPPED 77

typedef unsigned long long device_address;

static struct {
    int (*init)(unsigned flags);
    int (*count)(int *count);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*synchronize)(void);
    int (*allocate)(device_address *address, size_t bytes);
    int (*release)(device_address address);
    int (*upload)(device_address to, const void *from, size_t bytes);
    int (*download)(void *to, device_address from, size_t bytes);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*capture_begin)(void *stream, int mode);
    int (*capture_end)(void *stream, void **graph);
    int (*instantiate)(void **executable, void *graph, unsigned long long flags);
    int (*launch)(void *executable, void *stream);
    int (*executable_destroy)(void *executable);
    int (*graph_destroy)(void *graph);
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
    static const struct {
        void *slot;
        const char *name;
    } symbols[] = {
        {&cuda.init, "cuInit"},
        {&cuda.count, "cuDeviceGetCount"},
        {&cuda.retain, "cuDevicePrimaryCtxRetain"},
        {&cuda.set_current, "cuCtxSetCurrent"},
        {&cuda.synchronize, "cuCtxSynchronize"},
        {&cuda.allocate, "cuMemAlloc_v2"},
        {&cuda.release, "cuMemFree_v2"},
        {&cuda.upload, "cuMemcpyHtoD_v2"},
        {&cuda.download, "cuMemcpyDtoH_v2"},
        {&cuda.stream_create, "cuStreamCreate"},
        {&cuda.stream_destroy, "cuStreamDestroy_v2"},
        {&cuda.stream_synchronize, "cuStreamSynchronize"},
        {&cuda.capture_begin, "cuStreamBeginCapture_v2"},
        {&cuda.capture_end, "cuStreamEndCapture"},
        {&cuda.instantiate, "cuGraphInstantiateWithFlags"},
        {&cuda.launch, "cuGraphLaunch"},
        {&cuda.executable_destroy, "cuGraphExecDestroy"},
        {&cuda.graph_destroy, "cuGraphDestroy"},
    };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL;
    int devices = 0;
    if (driver == NULL) {
        (void)printf("no CUDA driver\n");
        exit(SKIPPED);
    }
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; ++i) {
        void *found = dlsym(driver, symbols[i].name);
        cuda_expect(found == NULL, symbols[i].name);
        *(void **)symbols[i].slot = found;
    }
    if (cuda.init(0) != 0 || cuda.count(&devices) != 0 || devices == 0) {
        (void)printf("no CUDA device\n");
        exit(SKIPPED);
    }
    cuda_expect(cuda.retain(&context, 0), "cuDevicePrimaryCtxRetain");
    cuda_expect(cuda.set_current(context), "cuCtxSetCurrent");
}

/* One device buffer handed out in pieces of 256 bytes; reset between cases. */
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
