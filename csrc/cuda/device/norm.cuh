/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.cuh - the columns' side of a norm: gamma and beta of 8 neighbouring columns.
 */
#ifndef TE_DEVICE_NORM_CUH
#define TE_DEVICE_NORM_CUH

#include "cast.cuh"
#include "cuda/kernels/norm.h"

/* The factors of columns column .. column + 7; 0 from `columns` on, whatever they are. */
__device__ __forceinline__ void te_load_weight(const te_norm_factors &f, te_index column,
                                               te_index columns, float w[8])
{
    const te_index left = columns - column;
    if (f.gamma != nullptr) {
        te_load_values(f.dtype, f.gamma, f.aligned != 0, column, left, w);
        if (!f.zero_centered) return;
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) w[j] = 0.0F;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = j < left ? 1.0F + w[j] : 0.0F;
}

__device__ __forceinline__ void te_load_bias(const te_norm_factors &f, te_index column,
                                             te_index columns, float b[8])
{
    if (f.beta != nullptr) {
        te_load_values(f.dtype, f.beta, f.aligned != 0, column, columns - column, b);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) b[j] = 0.0F;
    }
}

#endif
