/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.cuh - what softmax and its gradient share: how rows are distributed to teams.
 */
#ifndef TE_DEVICE_SOFTMAX_CUH
#define TE_DEVICE_SOFTMAX_CUH

#include "softmax.h"
#include "keys.cuh"
#include "random.cuh"
#include "reduce.cuh"

/* The row of a team of threads. */
struct te_softmax_place {
    te_index outer, middle, inner;
    bool exists;

    __device__ __forceinline__ te_softmax_place(const te_softmax_walk &walk)
        : outer(walk.outer + blockIdx.z), middle(walk.middle + blockIdx.y),
          inner((te_index)blockIdx.x * blockDim.y + threadIdx.y), exists(inner < walk.inner)
    {
        if (!exists) inner = 0;
    }

    __device__ __forceinline__ te_index along(const te_index strides[3]) const
    {
        return outer * strides[0] + middle * strides[1] + inner * strides[2];
    }

    /* Where key `key` of the row is in a tensor of elements of `bytes`. */
    __device__ __forceinline__ unsigned char *at(const te_view4 &view, int bytes,
                                                 te_index key) const
    {
        return view.data + (along(view.strides) + key) * bytes;
    }
};

/* A thread's first key in a row; `output` is the line that is written. */
template <typename T, int LANES, int KEYS, bool ALIGNED>
__device__ __forceinline__ int te_softmax_start(const void *output)
{
    const int lane = (int)threadIdx.x;
    const int start = lane / LANES * (LANES * KEYS) + lane % LANES * (16 / T::bytes);
    return ALIGNED ? start : start - (int)((size_t)output & 15U) / T::bytes;
}

/* What the warps of a block show each other, where a row has several. */
typedef float te_softmax_board[TE_SOFTMAX_WARPS];

/* Every lane gets the value of one of the block's warps, `nothing` where there are fewer than
 * TE_SOFTMAX_WARPS. */
__device__ __forceinline__ float te_softmax_show(te_softmax_board &board, float value,
                                                 float nothing)
{
    const unsigned lane = threadIdx.x & (TE_SOFTMAX_WARPS - 1);
    if ((threadIdx.x & 31U) == 0U) board[threadIdx.x >> 5] = value;
    __syncthreads();
    return lane < blockDim.x >> 5 ? board[lane] : nothing;
}

/* The sum over a team, in the same order for each of its threads. */
template <int LANES>
__device__ __forceinline__ float te_softmax_sum(te_softmax_board &board, float value)
{
    value = te_lanes_sum<LANES>(value);
    if (LANES == 32 && blockDim.x > 32U)
        value = te_lanes_sum<TE_SOFTMAX_WARPS>(te_softmax_show(board, value, 0.0F));
    return value;
}

#endif
