/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce.cuh - maxima over a block. Maxima of non-negative floats are maxima of their bits, whose
 * order of reduction does not show in the result.
 */
#ifndef TE_DEVICE_REDUCE_CUH
#define TE_DEVICE_REDUCE_CUH

#include "cuda/device/types.h"

/* Maximum of a non-negative float over the block, for every thread. `scratch` has a word per warp
 * and may be reused after the next barrier. */
template <int THREADS> __device__ __forceinline__ float te_block_max(float value, unsigned *scratch)
{
    unsigned bits = __reduce_max_sync(0xffffffffU, __float_as_uint(value));
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = bits;
    __syncthreads();
    bits = scratch[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; i++) bits = max(bits, scratch[i]);
    return __uint_as_float(bits);
}

/* Raises a non-negative float in memory. It only ever grows, so a stale read costs an atomic at
 * most. */
__device__ __forceinline__ void te_raise(float *slot, float value)
{
    const unsigned bits = __float_as_uint(value);
    if (bits > *(volatile unsigned *)slot) atomicMax((unsigned *)slot, bits);
}

#endif
