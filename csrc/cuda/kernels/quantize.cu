/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.cu - per-tensor cast to FP8 with everything that needs the same read of the input:
 * row-wise bytes, transposed bytes, max|x| and column sums; and the partial maxima of current
 * scaling.
 */
#include "plain_source.cuh"
#include "scaled_cast.cuh"
#include "matrix.cuh"

/* Decoding 16 bits again costs less than 32 registers. */
template <typename T> struct te_repeats<te_plain_source<T>> {
    static constexpr bool value = T::bytes == 2;
};

/* Enough blocks per multiprocessor to cover the latency of memory, as many as need no spills. */
#define X(I, i, O, o)                                                                              \
    TE_KERNEL(te_quantize_##i##_##o, te_quantize_params, (TE_TILE_THREADS, 7),                     \
              te_tile_cast<te_plain_source<te_##i>, te_##o>(p))
TE_QUANTIZE_INSTANCES(X)
#undef X

#define X(I, i, O, o)                                                                              \
    TE_KERNEL(te_quantize_scaled_##i##_##o, te_quantize_params,                                    \
              (TE_SCALED_THREADS, te_##i::bytes == 2 ? 3 : 2),                                     \
              te_scaled_cast<te_plain_source<te_##i>, te_##o>(p))
TE_QUANTIZE_SCALED_INSTANCES(X)
#undef X

/* The scales of rows before they are measured. */
extern "C" __global__ void __launch_bounds__(TE_CLEAR_THREADS)
    te_quantize_clear(const __grid_constant__ te_quantize_clear_params p)
{
    if (p.noop != nullptr && *p.noop != 0.0F) return;
    for (int form = 0; form < 2; form++)
        for (te_index i = (te_index)blockIdx.x * TE_CLEAR_THREADS + threadIdx.x; i < p.count[form];
             i += (te_index)gridDim.x * TE_CLEAR_THREADS)
            p.scales[form][i] = 0.0F;
}

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
    if (column < p.split) {
        if (p.first != nullptr) te_store_as(p.first_dtype, p.first, column, sum);
    } else if (p.second != nullptr) {
        te_store_as(p.second_dtype, p.second, column - p.split, sum);
    }
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
        for (int i = gridDim.x + threadIdx.x; i < TE_CAST_PARTIALS; i += TE_AMAX_THREADS)
            p.partials[i] = 0.0F;
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_amax_##i, te_amax_params, (TE_AMAX_THREADS), partial_amax<te_##i>(p))
TE_NUMBERS(X, )
#undef X
