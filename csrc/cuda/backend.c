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

static const te_backend backend = {
    .size = sizeof(te_backend),
    .name = "cuda",
    .device = TE_DEVICE_CUDA,
    .priority = 0,
    .slots =
        {
            [TE_OP_QUANTIZE] = {.function = te_cuda_quantize,
                                .workspace = te_cuda_quantize_workspace},
            [TE_OP_DEQUANTIZE] = {.function = te_cuda_dequantize},
            [TE_OP_AMAX] = {.function = te_cuda_amax},
            [TE_OP_TRANSPOSE] = {.function = te_cuda_transpose},
            [TE_OP_GEMM] = {.function = te_cuda_gemm,
                            .supports = te_cuda_gemm_supports,
                            .workspace = te_cuda_gemm_workspace},
            [TE_OP_SCALING_UPDATE] = {.function = te_cuda_scaling_update},
            [TE_OP_FILL] = {.function = te_cuda_fill},
            [TE_OP_CAST] = {.function = te_cuda_cast},
            [TE_OP_NORM] = {.function = te_cuda_norm, .workspace = te_cuda_norm_workspace},
            [TE_OP_NORM_BACKWARD] = {.function = te_cuda_norm_backward,
                                     .workspace = te_cuda_norm_backward_workspace},
            [TE_OP_ACTIVATION] = {.function = te_cuda_activation},
            [TE_OP_ACTIVATION_BACKWARD] = {.function = te_cuda_activation_backward,
                                           .workspace = te_cuda_activation_backward_workspace},
            [TE_OP_SOFTCAP] = {.function = te_cuda_softcap},
            [TE_OP_SOFTMAX] = {.function = te_cuda_softmax},
            [TE_OP_SOFTMAX_BACKWARD] = {.function = te_cuda_softmax_backward},
            [TE_OP_DROPOUT_ADD] = {.function = te_cuda_dropout_add},
            [TE_OP_DROPOUT_BACKWARD] = {.function = te_cuda_dropout_backward,
                                        .workspace = te_cuda_dropout_backward_workspace},
            [TE_OP_ROPE] = {.function = te_cuda_rope},
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
    if (cuda->capability_major < 8) {
        return TE_FAIL(TE_ERROR_DEVICE, "compute capability %d.%d, at least 8.0 is needed",
                       cuda->capability_major, cuda->capability_minor);
    }
    return TE_OK;
}

/* Failures are passed over: at the end of a process the driver may be gone before its callers. */
static void close_device(void *state)
{
    te_cuda_state *cuda = state;
    te_cuda_scope scope = {0};
    if (cuda == NULL) return;
    if (cuda->context != NULL && te_cuda_enter(cuda, &scope) == TE_OK) {
        te_cublaslt_destroy(cuda->cublaslt);
        te_cuda_images_close(cuda);
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

const te_device_driver *te_cuda_driver(void)
{
    static const te_device_driver driver = {open_device, close_device, &backend, te_cuda_tune_gemm};
    return &driver;
}
