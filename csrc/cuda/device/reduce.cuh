/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce.cuh - maxima over a block, sums over the threads of a row. Maxima of non-negative floats
 * are maxima of their bits, whose order of reduction does not show in the result.
 */
#ifndef TE_DEVICE_REDUCE_CUH
#define TE_DEVICE_REDUCE_CUH

#include "cuda/device/types.h"

/* Maximum of a non-negative float over the block, for every thread. `scratch` has a word per warp
 * and may be reused after the next barrier. THREADS 0: as many as the block has. */
template <int THREADS> __device__ __forceinline__ float te_block_max(float value, unsigned *scratch)
{
    const int warps = (THREADS > 0 ? THREADS : blockDim.x) / 32;
    unsigned bits = __reduce_max_sync(0xffffffffU, __float_as_uint(value));
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = bits;
    __syncthreads();
    bits = scratch[0];
#pragma unroll
    for (int i = 1; i < warps; i++) bits = max(bits, scratch[i]);
    return __uint_as_float(bits);
}

/* Sum over the lanes, in the same order for each of them. */
__device__ __forceinline__ float te_warp_sum(float value)
{
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(0xffffffffU, value, step);
    return value;
}

/* Threads that share a row: a power of two of neighbouring lanes of a warp, or whole warps. Sums
 * are made in the same order for every thread, so that all of them get the same bits. */
enum { TE_TEAM_SCRATCH = 2 * 2 * 32 }; /* floats of a block of at most 1024 threads */

struct te_team {
    int lanes, lane,
        team; /* threads of a team; the thread's place in it, the team's in the block */
    int turn;
    float *scratch; /* two turns of a pair of floats per warp */

    __device__ __forceinline__ te_team(int lanes_, float *scratch_)
        : lanes(lanes_), turn(0), scratch(scratch_)
    {
        team = threadIdx.x / lanes;
        lane = threadIdx.x - team * lanes;
    }

    /* Adds up a pair over the team; every thread of its warps takes part. A turn's place is written
     * again after the barrier of the other turn, which comes after everybody's reading. */
    __device__ __forceinline__ void sum(float &a, float &b)
    {
        for (int step = min(lanes, 32) >> 1; step > 0; step >>= 1) {
            a += __shfl_xor_sync(0xffffffffU, a, step);
            b += __shfl_xor_sync(0xffffffffU, b, step);
        }
        if (lanes <= 32) return;
        float2 *place = (float2 *)scratch + turn * 32;
        const int first = team * (lanes >> 5), end = first + (lanes >> 5);
        if ((threadIdx.x & 31) == 0) place[threadIdx.x >> 5] = make_float2(a, b);
        asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(lanes) : "memory");
        a = place[first].x, b = place[first].y;
#pragma unroll 4
        for (int i = first + 1; i < end; i++) a += place[i].x, b += place[i].y;
        turn ^= 1;
    }
};

/* Raises a non-negative float in memory. It only ever grows, so a stale read costs an atomic at
 * most. */
__device__ __forceinline__ void te_raise(float *slot, float value)
{
    const unsigned bits = __float_as_uint(value);
    if (bits > *(volatile unsigned *)slot) atomicMax((unsigned *)slot, bits);
}

#endif
