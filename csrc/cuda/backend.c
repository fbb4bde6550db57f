/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.c - the CUDA backend: its slots of the operator table, and how the core opens a device.
 */
#include <stdlib.h>

#include "core/context.h"
#include "core/status.h"
#include "cuda/api.h"
#include "cuda/gemm_cublaslt.h"
#include "cuda/ops.h"
#include "cuda/sdpa_plans.h"

static const te_backend backend = {
    .size = sizeof(te_backend),
    .name = "cuda",
    .device = TE_DEVICE_CUDA,
    .priority = 0,
    .slots =
        {
#define X(NAME, name) [TE_OP_##NAME].function = te_cuda_##name,
            TE_OPS(X)
#undef X
#define X(NAME, name) [TE_OP_##NAME].workspace = te_cuda_##name##_workspace,
                TE_CUDA_WORKSPACES(X)
#undef X
#define X(NAME, name) [TE_OP_##NAME].supports = te_cuda_##name##_supports,
                    TE_CUDA_SUPPORTS(X)
#undef X
        },
};

static te_status read_attributes(te_cuda_state *cuda)
{
    const struct {
        CUdevice_attribute attribute;
        int *value;
    } required[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &cuda->capability_major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &cuda->capability_minor},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &cuda->shared_limit},
    };
    for (size_t i = 0; i < sizeof required / sizeof *required; i++) {
        TE_TRY(TE_CU(cuDeviceGetAttribute, required[i].value, required[i].attribute, cuda->device));
    }
    TE_FAIL_IF(cuda->capability_major < 8, TE_ERROR_DEVICE,
               "compute capability %d.%d, at least 8.0 is needed", cuda->capability_major,
               cuda->capability_minor);
    return TE_OK;
}

/* Failures are passed over: at the end of a process the driver may be gone before its callers. A
 * context may be garbage that is collected while its thread captures a graph, which stays valid. */
static void close_device(void *state)
{
    te_cuda_state *cuda = state;
    te_cuda_scope scope = {0};
    te_cuda_relaxed relaxed = {0};
    if (cuda == NULL) return;
    if (cuda->context != NULL && te_cuda_enter(cuda, &scope) == TE_OK) {
        (void)te_cuda_relax_capture(&relaxed);
        te_cublaslt_destroy(cuda->cublaslt);
        te_sdpa_close(cuda->sdpa);
        te_cuda_images_close(cuda);
        te_cuda_restore_capture(&relaxed);
        te_cuda_leave(cuda, &scope);
    } else {
        te_cuda_images_close(cuda);
    }
    if (cuda->context != NULL) {
        (void)te_cuda_functions.cuDevicePrimaryCtxRelease(cuda->device);
    }
    free(cuda);
}

static te_status open_device(int32_t index, void **state)
{
    te_status st = TE_OK;
    te_cuda_state *cuda = NULL;
    int count = 0;
    *state = NULL;
    TE_TRY_DONE(te_cuda_load_api());
    TE_TRY_DONE(TE_CU(cuDeviceGetCount, &count));
    if (index < 0 || index >= count) {
        st = TE_FAIL(TE_ERROR_DEVICE, "CUDA device %d does not exist: there are %d", (int)index,
                     count);
        goto done;
    }
    cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for the state of CUDA device %d", (int)index);
        goto done;
    }
    TE_TRY_DONE(TE_CU(cuDeviceGet, &cuda->device, index));
    TE_TRY_DONE(read_attributes(cuda));
    TE_TRY_DONE(te_cuda_images_open(cuda));
    TE_TRY_DONE(TE_CU(cuDevicePrimaryCtxRetain, &cuda->context, cuda->device));
    *state = cuda;
    cuda = NULL;
done:
    close_device(cuda);
    return st;
}

/* A CUdevice is its ordinal. */
static te_status current_device(int32_t *index)
{
    CUdevice device = 0;
    TE_TRY(te_cuda_load_api());
    TE_TRY(TE_CU(cuCtxGetDevice, &device));
    *index = device;
    return TE_OK;
}

const te_device_driver *te_cuda_driver(void)
{
    static const te_device_driver driver = {open_device,       close_device,   &backend,
                                            te_cuda_tune_gemm, te_cuda_update, te_cuda_l2norm,
                                            current_device};
    return &driver;
}
