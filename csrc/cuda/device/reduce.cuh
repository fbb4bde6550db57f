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

/* Sum over so many neighbouring lanes, a power of two, in the same order for each of them. */
template <int LANES> __device__ __forceinline__ float te_lanes_sum(float value)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1)
        value += __shfl_xor_sync(0xffffffffU, value, step);
    return value;
}

/* What a team adds up: a float, or two of them at once. */
__device__ __forceinline__ void te_add_lane(float &value, int step)
{
    value += __shfl_xor_sync(0xffffffffU, value, step);
}
__device__ __forceinline__ void te_add_lane(float2 &value, int step)
{
    te_add_lane(value.x, step);
    te_add_lane(value.y, step);
}
__device__ __forceinline__ void te_add(float &value, float4 four)
{
    value += (four.x + four.y) + (four.z + four.w);
}
__device__ __forceinline__ void te_add(float2 &value, float4 two)
{
    value.x += two.x + two.z;
    value.y += two.y + two.w;
}

/* How the threads of a block make teams. A barrier whose number the compiler does not know takes
 * all 16 of a block, and a multiprocessor has 64 of them or fewer: only a few blocks with such
 * teams can be there at once. */
enum te_team_kind {
    TE_TEAM_LANES, /* neighbouring lanes of a warp, a power of two */
    TE_TEAM_BLOCK, /* a warp, or the whole block */
    TE_TEAM_WARPS  /* a warp, or several: at most 15 teams then */
};
enum { TE_TEAM_SCRATCH = 2 * 128 }; /* floats, at 16 bytes, of a block of at most 1024 threads */

/* Threads that share a row. Sums of V, float or float2, are made in the same order for every
 * thread, so that all of them get the same bits. */
template <te_team_kind KIND, typename V> struct te_team {
    static constexpr int per_load = 16 / (int)sizeof(V); /* warps whose sums are read at once */
    static constexpr int turns_apart = 512 / (int)sizeof(V);
    int lanes, lane, team; /* threads of a team; the place in it; the team's place in the block */
    int turn;              /* 0 or turns_apart */
    V *own;                /* the team's sums of a turn: of each warp, then 0 */

    __device__ __forceinline__ te_team(int lanes_, float *scratch)
        : lanes(lanes_), turn(0), own(nullptr)
    {
        team = threadIdx.x / lanes;
        lane = threadIdx.x - team * lanes;
        if constexpr (KIND != TE_TEAM_LANES) {
            const int places = (lanes / 32 + per_load - 1) & -per_load;
            const int place = places - per_load + lane;
            own = (V *)scratch + (KIND == TE_TEAM_WARPS ? team * places : 0);
            if (lane < per_load && place >= lanes / 32) own[place] = own[turns_apart + place] = V();
        }
    }

    /* Adds up over the team; every thread of its warps takes part. A turn's place is written again
     * after the barrier of the other turn, which comes after everybody's reading. */
    __device__ __forceinline__ void sum(V &value)
    {
        if constexpr (KIND == TE_TEAM_LANES) {
            for (int step = lanes >> 1; step > 0; step >>= 1) te_add_lane(value, step);
        } else {
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) te_add_lane(value, step);
            if (lanes > 32) sum_warps(value);
        }
    }

  private:
    __device__ __forceinline__ void sum_warps(V &value)
    {
        if ((lane & 31) == 0) own[turn + (lane >> 5)] = value;
        if constexpr (KIND == TE_TEAM_BLOCK)
            __syncthreads();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(lanes) : "memory");
        value = V();
#pragma unroll 1
        for (int i = 0; i < lanes >> 5; i += per_load)
            te_add(value, *(const float4 *)(own + turn + i));
        turn ^= turns_apart;
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
