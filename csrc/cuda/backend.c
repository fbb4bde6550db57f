/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.c - the CUDA backend: its slots of the operator table, and how the core opens a device.
 */
#include "core/context.h"
#include "cuda/driver.h"
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
            [TE_OP_SOFTMAX] = {.function = te_cuda_softmax},
            [TE_OP_SOFTMAX_BACKWARD] = {.function = te_cuda_softmax_backward},
            [TE_OP_DROPOUT_ADD] = {.function = te_cuda_dropout_add},
            [TE_OP_DROPOUT_BACKWARD] = {.function = te_cuda_dropout_backward,
                                        .workspace = te_cuda_dropout_backward_workspace},
            [TE_OP_ROPE] = {.function = te_cuda_rope},
        },
};

const te_device_driver *te_cuda_driver(void)
{
    static const te_device_driver driver = {te_cuda_open, te_cuda_close, &backend,
                                            te_cuda_tune_gemm};
    return &driver;
}
