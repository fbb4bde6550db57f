/* SPDX-License-Identifier: Apache-2.0
 *
 * elementwise.cu - fill, cast, copy and byte transpose: everything that moves a matrix and computes
 * next to nothing. A thread has several accesses of up to 16 bytes in flight.
 */
#include "elementwise.h"
#include "tile.cuh"
#include "matrix.cuh"

template <typename TI, typename TO> struct te_converter {
    static __device__ __forceinline__ typename TO::raw run(typename TI::raw bits)
    {
        return te_encode<TO>(te_decode<TI>(bits));
    }
};
template <typename T> struct te_converter<T, T> { /* bits are kept */
    static __device__ __forceinline__ typename T::raw run(typename T::raw bits)
    {
        return bits;
    }
};

/* 16 bytes of the wider type per access. */
template <typename TI, typename TO>
static __device__ __forceinline__ void cast(const te_cast_params &p)
{
    constexpr int elements = 16 / (TI::bytes > TO::bytes ? TI::bytes : TO::bytes);
    for (te_index tile = blockIdx.x; tile < p.walk.tiles; tile += gridDim.x) {
        te_vector<TI, elements> in[TE_MATRIX_UNROLL];
        te_place at(p.walk, tile, elements);
        if (at.row >= p.output.rows) continue;
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++)
            in[i].load(te_at<TI>(p.input, at.row, at.column + i * at.step), p.input_aligned != 0,
                       at.row < p.input.rows ? p.input.columns - at.column - i * at.step : 0);
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++) {
            te_vector<TO, elements> out;
            out.clear();
#pragma unroll
            for (int j = 0; j < elements; j++) out.put(j, te_converter<TI, TO>::run(in[i].get(j)));
            out.store(te_at<TO>(p.output, at.row, at.column + i * at.step), p.output_aligned != 0,
                      p.output.columns - at.column - i * at.step);
        }
    }
}

#define X(I, i, O, o)                                                                              \
    TE_KERNEL(te_cast_##i##_##o, te_cast_params, (TE_MATRIX_THREADS), cast<te_##i, te_##o>(p))
TE_CAST_INSTANCES(X)
#undef X

template <typename T> static __device__ __forceinline__ void fill(const te_fill_params &p)
{
    constexpr int elements = 16 / T::bytes;
    te_vector<T, elements> value;
#pragma unroll
    for (int i = 0; i < 4; i++) value.word[i] = i % 2 == 0 ? p.pattern : p.pattern_high;
    for (te_index tile = blockIdx.x; tile < p.walk.tiles; tile += gridDim.x) {
        te_place at(p.walk, tile, elements);
        if (at.row >= p.output.rows) continue;
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++, at.column += at.step)
            value.store(te_at<T>(p.output, at.row, at.column), p.output_aligned != 0,
                        p.output.columns - at.column);
    }
}

#define X(BYTES)                                                                                   \
    TE_KERNEL(te_copy_##BYTES, te_cast_params, (TE_MATRIX_THREADS),                                \
              cast<te_opaque<BYTES>, te_opaque<BYTES>>(p))                                         \
    TE_KERNEL(te_fill_##BYTES, te_fill_params, (TE_MATRIX_THREADS), fill<te_opaque<BYTES>>(p))
TE_COPY_INSTANCES(X)
#undef X

extern "C" __global__ void __launch_bounds__(TE_TILE_THREADS)
    te_transpose(const __grid_constant__ te_transpose_params p)
{
    __shared__ __align__(16) unsigned tile[TE_TILE_WORDS];
    const te_index column = (te_index)blockIdx.x * TE_TILE;
    for (te_index row = (te_index)blockIdx.y * TE_TILE; row < p.output.columns;
         row += (te_index)gridDim.y * TE_TILE) {
        te_vector<te_opaque<1>, 8> bytes[4];
        te_tile_load<te_opaque<1>>(p.input, p.input_aligned != 0, row, column, p.input.rows,
                                   p.input.columns, bytes);
        te_tile_put<te_opaque<1>>(tile, bytes);
        __syncthreads();
        te_tile_store<te_opaque<1>>(tile, p.output, p.output_aligned != 0, column, row);
        __syncthreads();
    }
}
