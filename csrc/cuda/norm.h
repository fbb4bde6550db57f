/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.h - what the norms and their gradients ask on the host.
 */
#ifndef TE_CUDA_NORM_H
#define TE_CUDA_NORM_H

#include "cuda/kernels/norm.h"
#include "cuda/launch.h"

/* Tensors may be absent; beta NULL: none. */
static inline te_norm_factors te_cuda_norm_factors(const te_tensor *gamma, const te_tensor *beta,
                                                   uint32_t flags)
{
    const void *second = beta != NULL ? beta->data : NULL;
    const te_tensor *given = te_tensor_present(gamma) || beta == NULL ? gamma : beta;
    return (te_norm_factors){
        .gamma = gamma->data,
        .beta = second,
        .dtype = te_cuda_store(given->dtype),
        .aligned = (uintptr_t)gamma->data % 16 == 0 && (uintptr_t)second % 16 == 0,
        .zero_centered = te_tensor_present(gamma) && (flags & TE_NORM_ZERO_CENTERED) != 0};
}

/* What multiplies sums over a row. */
static inline float te_cuda_norm_inverse(te_norm_kind kind, int64_t columns)
{
    return kind == TE_NORM_L2 ? 1.0F : 1.0F / (float)columns;
}

#endif
