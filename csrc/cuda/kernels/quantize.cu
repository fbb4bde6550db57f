/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.cu - per-tensor cast to FP8 with everything that wants the same read of the input:
 * row-wise bytes, transposed bytes, max|x| and column sums; and the partial maxima of current
 * scaling.
 *
 * Tiles of 64 x 64 with 32 elements per thread keep a small weight on many multiprocessors and give
 * 64-byte pieces of every output row. A block goes down `depth` tiles: the lines of the transposed
 * output are then completed by the block that began them, and column sums, the maximum and the
 * scale are worked out once. The loads of the next tile are issued before the current one is
 * stored.
 */
#include "quantize.h"
#include "tile.cuh"
#include "matrix.cuh"
#include "reduce.cuh"
#include "core/scaling_math.h"

/* The scale of this call; ends in a barrier where it used `scratch`. */
static __device__ __forceinline__ float read_scale(const te_quantize_params &p, unsigned *scratch)
{
    float amax = 0.0F;
    if (p.scale != nullptr) return *p.scale;
    if (p.partials == nullptr) return 1.0F;
#pragma unroll
    for (int i = 0; i < TE_QUANTIZE_PARTIALS / TE_TILE_THREADS / 4; i++) {
        te_vector<te_f32, 4> part;
        part.load(p.partials + 4 * (threadIdx.x + i * TE_TILE_THREADS), p.partials_aligned != 0, 4);
#pragma unroll
        for (int j = 0; j < 4; j++) amax = fmaxf(amax, part.value(j));
    }
    amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
    __syncthreads();
    return te_current_scale(amax, p.fp8_max, p.epsilon, p.power_2);
}

template <typename T>
static __device__ __forceinline__ void load_rows(const te_quantize_params &p, te_index row,
                                                 te_index column, te_vector<T, 8> rows[4])
{
    const te_index left = p.input.columns - column;
    if (p.input_aligned && row + 4 <= p.input.rows && left >= 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i].load_aligned(te_at<T>(p.input, row + i, column));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        rows[i].load(te_at<T>(p.input, row + i, column), false, row + i < p.input.rows ? left : 0);
}

/* Clears what lies outside the input: padding is zero whatever the scale. */
template <typename T>
static __device__ __forceinline__ void clear_padding(const te_view &input, te_index row,
                                                     te_index column, te_vector<T, 8> rows[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const te_index count = input.columns - column - half * 4;
            if (row + i >= input.rows || count <= 0)
                rows[i].word[half] = 0U;
            else if (count < 4)
                rows[i].word[half] &= (1U << ((int)count * 8)) - 1U;
        }
}

template <typename T>
static __device__ __forceinline__ void store_rows(const te_quantize_params &p, te_index row,
                                                  te_index column, const te_vector<T, 8> rows[4])
{
    const te_index left = p.rowwise.columns - column;
    if (p.rowwise_aligned && row + 4 <= p.rowwise.rows && left >= 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i].store_aligned(te_at<T>(p.rowwise, row + i, column));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (row + i < p.rowwise.rows)
            rows[i].store(te_at<T>(p.rowwise, row + i, column), false, left);
}

/* Adds what the 16 row groups of the block have summed and hands the columns on. */
static __device__ __forceinline__ void finish_sums(const te_quantize_params &p, float *scratch,
                                                   const float sums[8])
{
    const te_index column = (te_index)blockIdx.x * TE_TILE + threadIdx.x;
    float *line = scratch + (te_tile_row() >> 2) * TE_TILE + te_tile_column();
    __syncthreads();
    *(float4 *)line = make_float4(sums[0], sums[1], sums[2], sums[3]);
    *(float4 *)(line + 4) = make_float4(sums[4], sums[5], sums[6], sums[7]);
    __syncthreads();
    if (threadIdx.x >= TE_TILE || column >= p.input.columns) return;
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < TE_TILE / 4; i++) sum += scratch[i * TE_TILE + threadIdx.x];
    if (p.sums != nullptr)
        p.sums[blockIdx.y * p.input.columns + column] = sum;
    else
        te_store_as(p.bias_dtype, p.bias_grad, column, sum);
}

/* Casts the thread's rows; padding becomes 0. */
template <typename TI, typename TO>
static __device__ __forceinline__ void
cast_rows(const te_quantize_params &p, float scale, te_index row, te_index column,
          const te_vector<TI, 8> in[4], te_vector<TO, 8> out[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = half * 4;
            out[i].word[half] =
                te_fp8_word<TO>(in[i].value(j) * scale, in[i].value(j + 1) * scale,
                                in[i].value(j + 2) * scale, in[i].value(j + 3) * scale);
        }
    if (row + 4 > p.input.rows || column + 8 > p.input.columns)
        clear_padding<TO>(p.input, row, column, out);
}

template <typename TI, typename TO>
static __device__ __forceinline__ void quantize(const te_quantize_params &p)
{
    constexpr bool casts = TO::casts;
    __shared__ __align__(16) unsigned tiles[2][TE_TILE_WORDS];
    __shared__ unsigned scratch[TE_TILE_THREADS / 32];
    const te_index column = (te_index)blockIdx.x * TE_TILE + te_tile_column();
    const te_index first = (te_index)blockIdx.y * p.depth * TE_TILE;
    const bool sums_wanted = p.sums != nullptr || p.bias_grad != nullptr;
    te_index end = first + (te_index)p.depth * TE_TILE;
    const te_index rows =
        max(p.input.rows, p.columnwise.data != nullptr ? p.columnwise.columns : 0);
    float amax = 0.0F, scale = 1.0F, sums[8] = {};
    te_vector<TI, 8> in[4];

    /* The first loads come before anything waits for the flag or the scale. */
    load_rows<TI>(p, first + te_tile_row(), column, in);
    if (p.noop != nullptr && *p.noop != 0.0F) return;
    if (casts || p.scale_pair != nullptr) scale = read_scale(p, scratch);
    if (p.scale_pair != nullptr && (blockIdx.x | blockIdx.y | threadIdx.x) == 0) {
        p.scale_pair[0] = __fdiv_rn(1.0F, scale);
        p.scale_pair[1] = scale;
    }

    end = min(end, rows);
    int buffer = 0;
    for (te_index top = first; top < end; top += TE_TILE, buffer ^= 1) {
        const te_index row = top + te_tile_row();
        te_vector<TO, 8> out[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float value = in[i].value(j);
                amax = fmaxf(amax, fabsf(value));
                sums[j] += value;
            }
        if constexpr (casts) cast_rows<TI, TO>(p, scale, row, column, in, out);
        if (top + TE_TILE < end) load_rows<TI>(p, row + TE_TILE, column, in);
        if constexpr (casts) {
            if (p.rowwise.data != nullptr) store_rows<TO>(p, row, column, out);
            if (p.columnwise.data != nullptr) { /* two buffers: one barrier per tile is enough */
                te_tile_put<TO>(tiles[buffer], out);
                __syncthreads();
                te_tile_store<TO>(tiles[buffer], p.columnwise, p.columnwise_aligned != 0,
                                  (te_index)blockIdx.x * TE_TILE, top);
            }
        }
    }
    if (sums_wanted) finish_sums(p, (float *)tiles[0], sums);
    if (p.amax != nullptr) {
        amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
        if (threadIdx.x == 0) te_raise(p.amax, amax);
    }
}

/* Enough blocks per multiprocessor to cover the latency of memory, as many as need no spills. */
#define X(I, i, O, o)                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_TILE_THREADS, 7)                               \
        te_quantize_##i##_##o(const __grid_constant__ te_quantize_params p)                        \
    {                                                                                              \
        quantize<te_##i, te_##o>(p);                                                               \
    }
TE_QUANTIZE_INSTANCES(X)
#undef X

/* Adds the column sums of the row groups: 8 threads per column, each every eighth group, then in
 * order. */
extern "C" __global__ void __launch_bounds__(TE_SUMS_THREADS)
    te_quantize_sums(const __grid_constant__ te_quantize_sums_params p)
{
    constexpr int lines = TE_SUMS_THREADS / TE_SUMS_COLUMNS;
    __shared__ float part[lines][TE_SUMS_COLUMNS];
    const int lane = threadIdx.x % TE_SUMS_COLUMNS, line = threadIdx.x / TE_SUMS_COLUMNS;
    const te_index column = (te_index)blockIdx.x * TE_SUMS_COLUMNS + lane;
    float sum = 0.0F;
    if (p.noop != nullptr && *p.noop != 0.0F) return;
    if (column < p.columns)
#pragma unroll 8
        for (te_index group = line; group < p.groups; group += lines)
            sum += p.sums[group * p.columns + column];
    part[line][lane] = sum;
    __syncthreads();
    if (line != 0 || column >= p.columns) return;
#pragma unroll
    for (int i = 1; i < lines; i++) sum += part[i][lane];
    te_store_as(p.bias_dtype, p.bias_grad, column, sum);
}

template <typename T> static __device__ __forceinline__ void partial_amax(const te_amax_params &p)
{
    constexpr int elements = 16 / T::bytes;
    __shared__ unsigned scratch[TE_AMAX_THREADS / 32];
    float amax = 0.0F;
    for (te_index tile = blockIdx.x; tile < p.walk.tiles; tile += gridDim.x) {
        te_vector<T, elements> in[TE_MATRIX_UNROLL];
        te_place at(p.walk, tile, elements);
        if (at.row >= p.input.rows) continue;
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++, at.column += at.step)
            in[i].load(te_at<T>(p.input, at.row, at.column), p.aligned != 0,
                       p.input.columns - at.column);
#pragma unroll
        for (int i = 0; i < TE_MATRIX_UNROLL; i++)
#pragma unroll
            for (int j = 0; j < elements; j++) amax = fmaxf(amax, fabsf(in[i].value(j)));
    }
    amax = te_block_max<TE_AMAX_THREADS>(amax, scratch);
    if (threadIdx.x == 0) p.partials[blockIdx.x] = amax;
    if (blockIdx.x == 0) /* the entries that have no block */
        for (int i = gridDim.x + threadIdx.x; i < TE_QUANTIZE_PARTIALS; i += TE_AMAX_THREADS)
            p.partials[i] = 0.0F;
}

#define X(I, i)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TE_AMAX_THREADS)                                  \
        te_amax_##i(const __grid_constant__ te_amax_params p)                                      \
    {                                                                                              \
        partial_amax<te_##i>(p);                                                                   \
    }
TE_AMAX_INSTANCES(X)
#undef X
