/* SPDX-License-Identifier: Apache-2.0
 *
 * driver.c - opens the CUDA driver, and makes a device's primary context current around calls.
 */
#include "cuda/api.h"

#include <dlfcn.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"

te_cuda_api te_cuda_functions;

TE_PROCESS_LOCK(api_lock);
static int api_ready; /* guarded by api_lock */

/* A function pointer travels through void * by its bytes: ISO C has no such cast. */
static te_status load_symbols(void *library, te_cuda_api *api)
{
    static const struct {
        const char *name;
        size_t offset;
    } symbols[] = {
#define X(name) {#name, offsetof(te_cuda_api, name)},
        TE_CUDA_SYMBOLS(X)
#undef X
    };
    CUresult (*find)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    void *address = dlsym(library, "cuGetProcAddress_v2");
    TE_FAIL_IF(address == NULL, TE_ERROR_DEVICE,
               "the CUDA driver is older than version 12.0: update it");
    memcpy(&find, &address, sizeof find);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        CUresult result = find(symbols[i].name, &address, TE_CUDA_API_VERSION, 0, NULL);
        TE_FAIL_IF(result != CUDA_SUCCESS || address == NULL, TE_ERROR_DEVICE,
                   "the CUDA driver lacks %s of version 12.0 (error %d)", symbols[i].name,
                   (int)result);
        memcpy((char *)api + symbols[i].offset, &address, sizeof address);
    }
    return TE_OK;
}

te_status te_cuda_load_api(void)
{
    te_status st = TE_OK;
    te_cuda_api api;
    void *library = NULL;
    (void)pthread_mutex_lock(&api_lock);
    if (api_ready) goto done;
    library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) {
        const char *reason = dlerror();
        st = TE_FAIL(TE_ERROR_DEVICE, "no CUDA driver: %s",
                     reason != NULL ? reason : "libcuda.so.1");
        goto done;
    }
    TE_TRY_DONE(load_symbols(library, &api));
    te_cuda_functions = api;
    TE_TRY_DONE(TE_CU(cuInit, 0));
    api_ready = 1;
    library = NULL; /* stays open as long as the process */
done:
    (void)pthread_mutex_unlock(&api_lock);
    if (library != NULL) (void)dlclose(library);
    return st;
}

te_status te_cuda_check(CUresult result, const char *call, const char *file, int line)
{
    const char *name = NULL, *description = NULL, *hint = "";
    if (result == CUDA_SUCCESS) return TE_OK;
    if (result == CUDA_ERROR_NOT_INITIALIZED && te_fork_generation() > 0) {
        hint = ": CUDA can not be used in a child forked from a process that used it: start it "
               "with spawn";
    }
    (void)te_cuda_functions.cuGetErrorName(result, &name);
    (void)te_cuda_functions.cuGetErrorString(result, &description);
    return te_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? TE_ERROR_MEMORY : TE_ERROR_DEVICE, file,
                   line, "%s: %s (%d): %s%s", call, name != NULL ? name : "unknown error",
                   (int)result, description != NULL ? description : "no description", hint);
}

te_status te_cuda_enter(te_cuda_state *cuda, te_cuda_scope *scope)
{
    CUcontext current = NULL;
    scope->pushed = 0;
    TE_TRY(TE_CU(cuCtxGetCurrent, &current));
    if (current == cuda->context) return TE_OK;
    TE_TRY(TE_CU(cuCtxPushCurrent, cuda->context));
    scope->pushed = current != NULL; /* a thread that had none keeps it, as the runtime does it */
    return TE_OK;
}

void te_cuda_leave(te_cuda_state *cuda, te_cuda_scope *scope)
{
    CUcontext popped = NULL;
    (void)cuda;
    if (scope->pushed) (void)te_cuda_functions.cuCtxPopCurrent(&popped);
    scope->pushed = 0;
}

te_status te_cuda_relax_capture(te_cuda_relaxed *relaxed)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    relaxed->changed = 0;
    TE_TRY(TE_CU(cuThreadExchangeStreamCaptureMode, &mode));
    relaxed->mode = (int)mode;
    relaxed->changed = 1;
    return TE_OK;
}

void te_cuda_restore_capture(te_cuda_relaxed *relaxed)
{
    CUstreamCaptureMode mode = (CUstreamCaptureMode)relaxed->mode;
    if (relaxed->changed) (void)te_cuda_functions.cuThreadExchangeStreamCaptureMode(&mode);
    relaxed->changed = 0;
}

int te_cuda_compute_capability(const te_cuda_state *cuda)
{
    return cuda->capability_major * 10 + cuda->capability_minor;
}

int te_cuda_shared_limit(const te_cuda_state *cuda)
{
    return cuda->shared_limit;
}

/* An error (the legacy stream while another one is captured) is reported by the call that follows.
 */
int te_cuda_is_capturing(te_cuda_state *cuda, void *stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    (void)cuda;
    if (te_cuda_functions.cuStreamIsCapturing((CUstream)stream, &status) != CUDA_SUCCESS) return 0;
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
}
