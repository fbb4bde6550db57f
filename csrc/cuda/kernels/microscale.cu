/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.cu - casts of a matrix to MXFP8 and NVFP4 (micro_cast.cuh), what NVFP4 measures before
 * one, and the inverse of both (arithmetic: core/microscale.h).
 */
#include "microscale.h"
#include "micro_cast.cuh"
#include "plain_source.cuh"

#define X(I, i, O, o)                                                                              \
    TE_KERNEL(te_mxfp8_##i##_##o, te_quantize_params, (TE_TILE_THREADS),                           \
              te_micro_cast<te_plain_source<te_##i>, te_mxfp8<te_##o>>(p))
TE_MXFP8_INSTANCES(X)
#undef X

/* ---- what is measured before a cast ---- */

template <typename T>
static __device__ __forceinline__ void fetch_values(const te_view &from, bool aligned, te_index row,
                                                    te_index column, float values[4][8])
{
    te_vector<T, 8> in[4];
    te_fetch_rows<T>(from, aligned, row, column, in);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) values[i][j] = in[i].value(j);
}

/* The amax of each row, as it is used. */
template <typename T>
static __device__ __forceinline__ void nvfp4_row_amax(const te_nvfp4_rows_params &p)
{
    __shared__ unsigned scratch[TE_TILE_THREADS / 32];
    if (p.noop != nullptr && *p.noop != 0.0F) return;
    for (te_index row = blockIdx.x; row < p.input.rows; row += gridDim.x) {
        float amax = 0.0F;
        for (te_index column = (te_index)threadIdx.x * 8; column < p.input.columns;
             column += TE_TILE_THREADS * 8) {
            te_vector<T, 8> in;
            in.load(te_at<T>(p.input, row, column), p.input_aligned != 0, p.input.columns - column);
#pragma unroll
            for (int j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(in.value(j)));
        }
        amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
        if (threadIdx.x == 0) p.amax[row] = te_nvfp4_amax(amax);
        __syncthreads();
    }
}

template <typename T>
static __device__ __forceinline__ void hadamard_amax(const te_hadamard_amax_params &p)
{
    __shared__ unsigned scratch[TE_TILE_THREADS / 32];
    const te_index tiles = p.row_tiles * p.column_tiles;
    float amax = 0.0F;
    for (te_index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const te_index row_tile = tile / p.column_tiles, column_tile = tile % p.column_tiles;
        float values[4][8];
        fetch_values<T>(p.input, p.input_aligned != 0, row_tile * TE_TILE + te_tile_row(),
                        column_tile * TE_TILE + te_tile_column(), values);
        te_hadamard(values, p.signs);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(values[i][j]));
    }
    amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
    if (threadIdx.x == 0) p.partials[blockIdx.x] = amax;
    if (blockIdx.x == 0) /* the entries that have no block */
        for (int i = gridDim.x + threadIdx.x; i < TE_CAST_PARTIALS; i += TE_TILE_THREADS)
            p.partials[i] = 0.0F;
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_nvfp4_##i, te_quantize_params, (TE_TILE_THREADS),                                 \
              te_micro_cast<te_plain_source<te_##i>, te_nvfp4>(p))                                 \
    TE_KERNEL(te_nvfp4_rows_##i, te_nvfp4_rows_params, (TE_TILE_THREADS),                          \
              nvfp4_row_amax<te_##i>(p))                                                           \
    TE_KERNEL(te_hadamard_amax_##i, te_hadamard_amax_params, (TE_TILE_THREADS),                    \
              hadamard_amax<te_##i>(p))
TE_NUMBERS(X, )
#undef X

/* ---- to high precision ---- */

template <typename TI, typename TO>
static __device__ __forceinline__ void mxfp8_wide(const te_micro_wide_params &p)
{
    const te_index column = (te_index)blockIdx.x * TE_TILE + te_tile_column();
    const te_view &scales = p.form.scales;
    if (column >= p.output.columns) return;
    for (te_index row = (te_index)blockIdx.y * TE_TILE + te_tile_row(); row < p.output.rows;
         row += (te_index)gridDim.y * TE_TILE) {
        te_vector<TI, 8> in[4];
        te_vector<TO, 8> out[4];
        te_fetch_rows<TI>(p.form.data, p.form.aligned != 0, row, column, in);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float values[8];
            const te_index line =
                p.by_columns ? row / TE_MXFP8_GROUP : min(row + i, p.output.rows - 1);
#pragma unroll
            for (int j = 0; j < 8; j++) { /* scales are padded beyond the columns of a thread */
                const te_index at = p.by_columns ? column + j : column / TE_MXFP8_GROUP;
                const float scale = te_e8m0_value(scales.data[line * scales.stride + at]);
                values[j] = te_saturate(in[i].value(j) * scale, p.limit);
            }
            out[i].encode(values);
        }
        te_put_rows<TO>(p.output, p.output_aligned != 0, row, column, out);
    }
}

/* What a code stands for. */
static __device__ __forceinline__ float nvfp4_value(unsigned code, float scale, float factor,
                                                    float limit)
{
    return te_saturate(te_e2m1_value(code) * scale * factor, limit);
}

/* That of a row of the matrix; rows beyond it have that of the last one. */
static __device__ __forceinline__ float nvfp4_factor(const te_micro_wide_params &p, te_index row)
{
    const te_index at = p.form.amax_per_row ? min(row, p.output.rows - 1) : 0;
    return p.form.amax != nullptr ? te_nvfp4_decode(p.form.amax[at], p.range) : 1.0F;
}

static __device__ __forceinline__ float nvfp4_scale(const te_view &scales, te_index row,
                                                    te_index group)
{
    if (row >= scales.rows || group >= scales.columns) return 0.0F;
    return te_decode<te_e4m3>(scales.data[row * scales.stride + group]);
}

template <typename TO>
static __device__ __forceinline__ void nvfp4_wide(const te_micro_wide_params &p)
{
    const te_index column = (te_index)blockIdx.x * TE_TILE + te_tile_column();
    if (column >= p.output.columns) return;
    for (te_index row = (te_index)blockIdx.y * TE_TILE + te_tile_row(); row < p.output.rows;
         row += (te_index)gridDim.y * TE_TILE) {
        te_vector<TO, 8> out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float values[8];
            te_four_bytes codes;
            const te_index left = p.form.data.columns - column / 2;
            const float factor = nvfp4_factor(p, row + i);
            const float scale = nvfp4_scale(p.form.scales, row + i, column / TE_NVFP4_GROUP);
            codes.load(te_at<te_none>(p.form.data, row + i, column / 2), p.form.aligned != 0,
                       row + i < p.output.rows ? left : 0);
#pragma unroll
            for (int j = 0; j < 8; j++)
                values[j] = nvfp4_value(codes.word[0] >> 4 * j & 15U, scale, factor, p.limit);
            out[i].encode(values);
        }
        te_put_rows<TO>(p.output, p.output_aligned != 0, row, column, out);
    }
}

template <typename TO>
static __device__ __forceinline__ void nvfp4_wide_transposed(const te_micro_wide_params &p)
{
    __shared__ float tile[TE_TILE][TE_TILE + 1];
    const int line = threadIdx.x >> 1, first = (threadIdx.x & 1) * 32;
    const te_index column = (te_index)blockIdx.x * TE_TILE;
    const float factor = nvfp4_factor(p, 0);
    for (te_index top = (te_index)blockIdx.y * TE_TILE; top < p.output.rows;
         top += (te_index)gridDim.y * TE_TILE) {
        const te_index at = (top + first) / 2;
        te_sixteen_bytes codes;
        te_vector<TO, 8> out[4];
        float scales[2];
        codes.load(te_at<te_none>(p.form.data, column + line, at), p.form.aligned != 0,
                   column + line < p.form.data.rows ? p.form.data.columns - at : 0);
#pragma unroll
        for (int i = 0; i < 2; i++)
            scales[i] =
                nvfp4_scale(p.form.scales, column + line, (top + first) / TE_NVFP4_GROUP + i);
#pragma unroll
        for (int i = 0; i < 32; i++)
            tile[first + i][line] =
                nvfp4_value(codes.word[i / 8] >> i % 8 * 4 & 15U, scales[i / 16], factor, p.limit);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) out[i].encode(&tile[te_tile_row() + i][te_tile_column()]);
        te_put_rows<TO>(p.output, p.output_aligned != 0, top + te_tile_row(),
                        column + te_tile_column(), out);
        __syncthreads();
    }
}

#define X(O, o, I, i)                                                                              \
    TE_KERNEL(te_mxfp8_wide_##i##_##o, te_micro_wide_params, (TE_TILE_THREADS),                    \
              mxfp8_wide<te_##i, te_##o>(p))
TE_MXFP8_INSTANCES(X)
#undef X
#define X(O, o, ...)                                                                               \
    TE_KERNEL(te_nvfp4_wide_##o, te_micro_wide_params, (TE_TILE_THREADS), nvfp4_wide<te_##o>(p))   \
    TE_KERNEL(te_nvfp4_wide_transposed_##o, te_micro_wide_params, (TE_TILE_THREADS),               \
              nvfp4_wide_transposed<te_##o>(p))
TE_NUMBERS(X, )
#undef X

TE_KERNEL(te_nvfp4_alpha, te_nvfp4_alpha_params, (1),
          p.out[0] = te_nvfp4_decode(*p.a, p.a_range) * te_nvfp4_decode(*p.b, p.b_range);
          p.out[1] = p.beta)
