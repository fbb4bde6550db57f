/* SPDX-License-Identifier: Apache-2.0
 *
 * plain_source.cuh - a matrix as the source of a cast (tile_cast.cuh).
 */
#ifndef TE_DEVICE_PLAIN_SOURCE_CUH
#define TE_DEVICE_PLAIN_SOURCE_CUH

#include "cuda/kernels/quantize.h"
#include "tile_cast.cuh"

/* The input as it is. */
template <typename T> struct te_plain_source {
    typedef te_quantize_params params;
    static constexpr int outputs = 1;
    static constexpr bool pads = false, writes = false, adds = true;
    te_index column;
    te_vector<T, 8> in[4];

    __device__ __forceinline__ te_plain_source(const params &, te_index at) : column(at)
    {
    }

    __device__ __forceinline__ void fetch(const params &p, te_index row)
    {
        te_fetch_rows<T>(p.input, p.input_aligned != 0, row, column, in);
    }

    __device__ __forceinline__ void values(const params &, int i, float v[1][8]) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) v[0][j] = in[i].value(j);
    }

    __device__ __forceinline__ void forget()
    {
#pragma unroll
        for (int i = 0; i < 4; i++) in[i].forget();
    }
};

#endif
