/* SPDX-License-Identifier: Apache-2.0
 *
 * dequantize.cu - FP8 to high precision, from row-wise or from transposed bytes. Both
 * write 16 bytes per thread; the transposed source goes through the byte tile of tile.cuh.
 */
#include "dequantize.h"
#include "core/scaling_math.h"
#include "tile.cuh"
#include "matrix.cuh"

/* The inverse scale of an element of the input. */
static __device__ __forceinline__ float scale_at(const te_dequantize_params &p, te_index row,
                                                 te_index column)
{
    return p.scale_inv[(row >> p.across_log2) * p.across_step +
                       (column >> p.along_log2) * p.along_step];
}

template <typename TI, typename TO>
static __device__ __forceinline__ void dequantize(const te_dequantize_params &p)
{
    constexpr int elements = 16 / TO::bytes; /* they share a scale */
    for (te_index tile = blockIdx.x; tile < p.walk.tiles; tile += gridDim.x) {
        te_vector<TI, elements> in[TE_MATRIX_UNROLL];
        te_place at(p.walk, tile, elements);
        if (at.row >= p.output.rows) continue;
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++)
            in[i].load(te_at<TI>(p.input, at.row, at.column + i * at.step), p.input_aligned != 0,
                       p.output.columns - at.column - i * at.step);
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++) {
            const te_index column = at.column + i * at.step;
            te_vector<TO, elements> out;
            if (column >= p.output.columns) break;
            const float scale_inv = scale_at(p, at.row, column);
            out.clear();
#pragma unroll
            for (int j = 0; j < elements; j++)
                out.put(j, te_encode<TO>(te_scaled_value(in[i].value(j), scale_inv, p.limit)));
            out.store(te_at<TO>(p.output, at.row, at.column + i * at.step), p.output_aligned != 0,
                      p.output.columns - at.column - i * at.step);
        }
    }
}

template <typename TI, typename TO>
static __device__ __forceinline__ void dequantize_transposed(const te_dequantize_params &p)
{
    constexpr int elements = 16 / TO::bytes, pieces = TE_TILE / elements;
    __shared__ __align__(16) unsigned tile[TE_TILE_WORDS];
    const te_index row = (te_index)blockIdx.x * TE_TILE;
    for (te_index column = (te_index)blockIdx.y * TE_TILE; column < p.output.columns;
         column += (te_index)gridDim.y * TE_TILE) {
        te_vector<TI, 8> in[4];
        te_tile_load<TI>(p.input, p.input_aligned != 0, column, row, p.output.columns,
                         p.output.rows, in);
        te_tile_put<TI>(tile, in);
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < TE_TILE * pieces; i += TE_TILE_THREADS) {
            const int line = i / pieces, at = i % pieces * elements;
            te_vector<TI, elements> bytes;
            te_vector<TO, elements> out;
            bytes.load_aligned(tile + te_tile_word(line, at >> 2));
            out.clear();
            if (row + line >= p.output.rows) continue;
#pragma unroll
            for (int j = 0; j < elements; j++)
                if (column + at + j < p.output.columns)
                    out.put(
                        j, te_encode<TO>(te_scaled_value(
                               bytes.value(j), scale_at(p, column + at + j, row + line), p.limit)));
            out.store(te_at<TO>(p.output, row + line, column + at), p.output_aligned != 0,
                      p.output.columns - column - at);
        }
        __syncthreads();
    }
}

#define X(O, o, I, i)                                                                              \
    TE_KERNEL(te_dequantize_##i##_##o, te_dequantize_params, (TE_MATRIX_THREADS),                  \
              dequantize<te_##i, te_##o>(p))                                                       \
    TE_KERNEL(te_dequantize_transposed_##i##_##o, te_dequantize_params, (TE_TILE_THREADS),         \
              dequantize_transposed<te_##i, te_##o>(p))
TE_DEQUANTIZE_INSTANCES(X)
#undef X
