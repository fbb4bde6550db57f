/* SPDX-License-Identifier: Apache-2.0
 *
 * image.c - from the name of a kernel to its launch: loads the embedded image at first use, or
 * compiles the embedded source where the driver refuses the image.
 */
#include "cuda/api.h"

#include <stdlib.h>
#include <string.h>

#include "core/counters.h"
#include "core/status.h"
#include "cuda/images.h"
#include "cuda/nvrtc.h"

te_status te_cuda_images_open(te_cuda_state *cuda)
{
    /* One more, so that no request is of 0 bytes. */
    cuda->libraries = calloc((size_t)te_device_image_count + 1, sizeof *cuda->libraries);
    if (cuda->libraries == NULL || pthread_mutex_init(&cuda->lock, NULL) != 0) {
        free(cuda->libraries);
        cuda->libraries = NULL;
        return TE_FAIL(TE_ERROR_MEMORY, "no memory for %d device images", te_device_image_count);
    }
    return TE_OK;
}

void te_cuda_images_close(te_cuda_state *cuda)
{
    if (cuda->libraries == NULL) return;
    for (int i = 0; i < te_device_image_count; i++) {
        if (cuda->libraries[i] != NULL) {
            (void)te_cuda_functions.cuLibraryUnload(cuda->libraries[i]);
        }
    }
    free(cuda->libraries);
    (void)pthread_mutex_destroy(&cuda->lock);
}

static te_status get_function(CUlibrary library, const char *name, CUfunction *function)
{
    CUkernel kernel = NULL;
    TE_TRY(te_cuda_check(te_cuda_functions.cuLibraryGetKernel(&kernel, library, name), name,
                         __FILE__, __LINE__));
    return TE_CU(cuKernelGetFunction, function, kernel);
}

/* Loads an image and, so that a refusal shows now, resolves one of its kernels. */
static te_status load_image(const void *image, const char *name, CUlibrary *library,
                            CUfunction *function)
{
    te_status st = TE_OK;
    CUlibrary loaded = NULL;
    TE_TRY_DONE(TE_CU(cuLibraryLoadData, &loaded, image, NULL, NULL, 0, NULL, NULL, 0));
    TE_TRY_DONE(get_function(loaded, name, function));
    *library = loaded;
    loaded = NULL;
done:
    if (loaded != NULL) (void)te_cuda_functions.cuLibraryUnload(loaded);
    return st;
}

static te_status load_from_source(te_cuda_state *cuda, const te_device_image *image,
                                  const char *name, CUlibrary *library, CUfunction *function)
{
    te_status st = TE_OK;
    te_cuda_code code = {0};
    const te_cuda_source source = {image->name, image->source, image->source_size,
                                   cuda->capability_major, cuda->capability_minor};
    TE_TRY_DONE(te_cuda_compile(&source, 1, &code));
    st = load_image(code.data, name, library, function);
    if (st != TE_OK && code.cached) { /* a cache from a machine that is no more */
        te_cuda_code_free(&code);
        TE_TRY_DONE(te_cuda_compile(&source, 0, &code));
        st = load_image(code.data, name, library, function);
    }
done:
    te_cuda_code_free(&code);
    if (st == TE_OK) te_count_fallback(TE_FALLBACK_KERNEL_FROM_SOURCE);
    return st;
}

/* Under cuda->lock. */
static te_status resolve(te_cuda_state *cuda, int index, const char *name, CUfunction *function)
{
    const te_device_image *image = &te_device_images[index];
    CUlibrary *library = &cuda->libraries[index];
    char refusal[256] = "it was built without one";
    if (*library != NULL) return get_function(*library, name, function);
    if (image->fatbin != NULL && !te_cuda_source_forced()) {
        te_status st = load_image(image->fatbin, name, library, function);
        if (st != TE_ERROR_DEVICE) return st;
        (void)strncpy(refusal, te_last_error(), sizeof refusal - 1);
        refusal[sizeof refusal - 1] = '\0';
    }
    TE_FAIL_IF(image->source == NULL, TE_ERROR_DEVICE, "no device code for %s, and no source: %s",
               name, refusal);
    return load_from_source(cuda, image, name, library, function);
}

/* Without this a launch may ask for 48 KiB of dynamic shared memory at most. */
static te_status allow_shared(const te_cuda_state *cuda, CUfunction function)
{
    int fixed = 0;
    TE_TRY(TE_CU(cuFuncGetAttribute, &fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function));
    return TE_CU(cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                 cuda->shared_limit - fixed);
}

static size_t first_slot(const char *name)
{
    return (size_t)((uintptr_t)name * 0x9e3779b97f4a7c15ULL >> 40) % TE_CUDA_KERNEL_SLOTS;
}

static int lookup(te_cuda_state *cuda, const char *name, CUfunction *function)
{
    size_t slot = first_slot(name);
    for (int i = 0; i < TE_CUDA_KERNEL_SLOTS; i++, slot = (slot + 1) % TE_CUDA_KERNEL_SLOTS) {
        const char *key = atomic_load_explicit(&cuda->kernels[slot].name, memory_order_acquire);
        if (key == NULL) return 0;
        if (key == name) {
            *function = cuda->kernels[slot].function;
            return 1;
        }
    }
    return 0;
}

/* Under cuda->lock. A full table costs the later kernels a search by the driver at each launch. */
static void publish(te_cuda_state *cuda, const char *name, CUfunction function)
{
    size_t slot = first_slot(name);
    for (int i = 0; i < TE_CUDA_KERNEL_SLOTS; i++, slot = (slot + 1) % TE_CUDA_KERNEL_SLOTS) {
        te_cuda_kernel *kernel = &cuda->kernels[slot];
        if (atomic_load_explicit(&kernel->name, memory_order_relaxed) != NULL) continue;
        kernel->function = function;
        atomic_store_explicit(&kernel->name, name, memory_order_release);
        return;
    }
}

static te_status find_kernel(te_cuda_state *cuda, const char *family, const char *name,
                             int dynamic_shared, CUfunction *function)
{
    te_status st = TE_OK;
    te_cuda_relaxed relaxed = {0};
    int index = 0;
    if (lookup(cuda, name, function)) return TE_OK;
    while (index < te_device_image_count && strcmp(te_device_images[index].name, family) != 0)
        index++;
    TE_FAIL_IF(index == te_device_image_count, TE_ERROR_DEVICE, "no device image %s for kernel %s",
               family, name);
    (void)pthread_mutex_lock(&cuda->lock);
    if (lookup(cuda, name, function)) goto done;
    TE_TRY_DONE(te_cuda_relax_capture(&relaxed));
    TE_TRY_DONE(resolve(cuda, index, name, function));
    if (dynamic_shared) TE_TRY_DONE(allow_shared(cuda, *function));
    publish(cuda, name, *function);
done:
    te_cuda_restore_capture(&relaxed);
    (void)pthread_mutex_unlock(&cuda->lock);
    return st;
}

static te_status launch(te_cuda_state *cuda, const te_cuda_call *call, void *stream)
{
    const te_cuda_dims *dims = &call->dims;
    CUfunction function = NULL;
    CUresult result;
    size_t params_size = call->params_size;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, (void *)(uintptr_t)call->params,
                     CU_LAUNCH_PARAM_BUFFER_SIZE, &params_size, CU_LAUNCH_PARAM_END};
    const CUlaunchConfig config = {.gridDimX = dims->grid_x,
                                   .gridDimY = dims->grid_y,
                                   .gridDimZ = dims->grid_z,
                                   .blockDimX = dims->block_x,
                                   .blockDimY = dims->block_y,
                                   .blockDimZ = dims->block_z,
                                   .sharedMemBytes = dims->shared_bytes,
                                   .hStream = (CUstream)stream};
    TE_FAIL_IF(call->name == NULL, TE_ERROR_UNSUPPORTED, "%s: no kernel for these dtypes",
               call->family);
    TE_TRY(find_kernel(cuda, call->family, call->name, dims->shared_bytes > 0, &function));
    result = te_cuda_functions.cuLaunchKernelEx(&config, function, NULL, extra);
    return result == CUDA_SUCCESS ? TE_OK : te_cuda_check(result, call->name, __FILE__, __LINE__);
}

te_status te_cuda_run(te_cuda_state *cuda, const te_cuda_call *calls, int count, void *stream)
{
    te_status st = TE_OK;
    te_cuda_scope scope;
    TE_TRY(te_cuda_enter(cuda, &scope));
    for (int i = 0; i < count && st == TE_OK; i++) st = launch(cuda, &calls[i], stream);
    te_cuda_leave(cuda, &scope);
    return st;
}
