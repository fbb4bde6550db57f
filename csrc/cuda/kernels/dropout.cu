/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.cu - residual + drop_path(dropout(input + bias)), and its gradient with column sums.
 *
 * A thread stays in its 16 bytes of columns and goes down the rows: the bias is read once, and a
 * column sum is a register. Four rows are in flight, and the random decisions, which cost about as
 * much as the memory, are made while they are. Sums of the lines of a block are joined in order,
 * and those of the groups of rows by te_quantize_sums: the same bits in every run.
 */
#include "dropout.h"
#include "random.cuh"
#include "vector.cuh"

enum { ROWS = TE_DROPOUT_ROWS, MOST_LINES = TE_DROPOUT_THREADS };

/* A thread's place in its block. */
struct dropout_place {
    int lane, line, lines, lines_log2;
    te_index column;

    __device__ __forceinline__ dropout_place(const te_dropout_params &p, int elements)
        : lane((int)threadIdx.x & ((1 << p.lanes_log2) - 1)),
          line((int)threadIdx.x >> p.lanes_log2), lines(TE_DROPOUT_THREADS >> p.lanes_log2),
          lines_log2(TE_DROPOUT_THREADS_LOG2 - p.lanes_log2),
          column((((te_index)blockIdx.x << p.lanes_log2) + lane) * elements)
    {
    }
};

/* The thread's rows of one operand, `step` apart: the first `count` of them. */
template <typename T, int N, bool ALIGNED>
static __device__ __forceinline__ void load_rows(const te_view &from, te_index row, int step,
                                                 int count, te_index column,
                                                 te_vector<T, N> rows[ROWS])
{
    const typename T::raw *at = te_at<T>(from, row, column);
    const te_index left = from.columns - column;
#pragma unroll
    for (int i = 0; i < ROWS; i++, at += step * from.stride) {
        if constexpr (!ALIGNED)
            rows[i].load(at, false, i < count ? left : 0);
        else if (i < count)
            rows[i].load_aligned(at);
    }
}

/* The thread's part of the bias. x + -0 is x for every x, also for -0: what is absent is -0. */
template <typename T, int N>
static __device__ __forceinline__ void load_bias(const te_dropout_params &p, te_index column,
                                                 float *bias)
{
    const te_index left = p.input.columns - column;
    if (p.bias_alike != 0 && left >= N) {
        te_vector<T, N> raw;
        raw.load_aligned((const typename T::raw *)p.bias + column);
#pragma unroll
        for (int j = 0; j < N; j++) bias[j] = raw.value(j);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        bias[j] = -0.0F;
        if (p.bias != nullptr && j < left) bias[j] = te_load_as(p.bias_dtype, p.bias, column + j);
    }
}

/* What drop path multiplies the rows of a tile with, for all of the block. Ends in a barrier. */
static __device__ __forceinline__ void decide_paths(const te_dropout_params &p,
                                                    const te_random &random, te_index top, int rows,
                                                    float *paths)
{
    __syncthreads();
    for (int i = (int)threadIdx.x; i < rows; i += TE_DROPOUT_THREADS) {
        const te_index sample = (top + i) / p.sample_rows;
        const bool kept = random.keep_one(p.path_first + sample, p.path_limit);
        paths[i] = kept ? p.path_factor : 0.0F;
    }
    __syncthreads();
}

/* What the lines of the block have summed, in their order. */
template <int N>
static __device__ __forceinline__ void
finish_sums(const te_dropout_params &p, const dropout_place &at, float *scratch, const float *sums)
{
    const int width = N << p.lanes_log2;
#pragma unroll
    for (int j = 0; j < N; j++) scratch[at.line * width + at.lane * N + j] = sums[j];
    __syncthreads();
    const te_index column = (te_index)blockIdx.x * width + threadIdx.x;
    if ((int)threadIdx.x >= width || column >= p.input.columns) return;
    float sum = 0.0F;
    for (int i = 0; i < at.lines; i++) sum += scratch[i * width + threadIdx.x];
    if (p.sums != nullptr)
        p.sums[blockIdx.y * p.input.columns + column] = sum;
    else
        te_store_as(p.bias_dtype, p.bias_grad, column, sum);
}

/* x = 0 where dropout drops, else x * factor; `index` is that of the first element. */
template <int N, bool ALIGNED>
static __device__ __forceinline__ void drop(const te_dropout_params &p, const te_random &random,
                                            te_index index, float *x)
{
    const unsigned kept =
        ALIGNED ? random.keep_aligned<N>(index, p.drop_limit) : random.keep<N>(index, p.drop_limit);
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] = (kept >> j & 1U) != 0U ? __fmul_rn(x[j], p.keep_factor) : 0.0F;
}

/* x through both dropouts; `path` is where drop path's factor of the row lies. */
template <int N, bool ALIGNED>
static __device__ __forceinline__ void drop_both(const te_dropout_params &p,
                                                 const te_random &random, te_index index,
                                                 const float *path, float *x)
{
    if (p.drops != 0) drop<N, ALIGNED>(p, random, index, x);
    if (p.drops_path != 0) {
        const float factor = *path;
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = factor != 0.0F ? __fmul_rn(x[j], factor) : 0.0F;
    }
}

/* SUMS: the gradient, which has neither bias nor residual. */
template <typename T, bool SUMS, bool ALIGNED>
static __device__ __forceinline__ void dropout(const te_dropout_params &p)
{
    constexpr int N = 16 / T::bytes;
    __shared__ float paths[MOST_LINES * ROWS];
    __shared__ float scratch[SUMS ? TE_DROPOUT_THREADS * N : 1];
    const dropout_place at(p, N);
    const te_random random(p.rng);
    const te_index first = blockIdx.y * p.depth, end = min(first + p.depth, p.input.rows);
    const te_index left = p.input.columns - at.column;
    const bool adds = !SUMS && p.residual.data != nullptr;
    float bias[N], sums[N] = {};
    if constexpr (!SUMS) load_bias<T, N>(p, at.column, bias);
#pragma unroll 1
    for (te_index top = first; top < end; top += at.lines * ROWS) {
        const te_index row = top + at.line, rows = end - row;
        const int mine = rows > 0 && left > 0 /* rows of this thread */
                             ? (int)min(((rows - 1) >> at.lines_log2) + 1, (te_index)ROWS)
                             : 0;
        typename T::raw *out = te_at<T>(p.output, row, at.column);
        te_index index = row * p.input.columns + at.column;
        te_vector<T, N> in[ROWS], residual[ROWS];
        load_rows<T, N, ALIGNED>(p.input, row, at.lines, mine, at.column, in);
        if (adds) load_rows<T, N, ALIGNED>(p.residual, row, at.lines, mine, at.column, residual);
        if (p.drops_path != 0) decide_paths(p, random, top, at.lines * ROWS, paths);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            float x[N];
            te_vector<T, N> result;
            if (i >= mine) break;
#pragma unroll
            for (int j = 0; j < N; j++)
                x[j] = SUMS ? in[i].value(j) : __fadd_rn(in[i].value(j), bias[j]);
            drop_both<N, ALIGNED>(p, random, index, paths + at.line + i * at.lines, x);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if constexpr (SUMS) sums[j] += x[j];
                if (adds) x[j] = __fadd_rn(x[j], residual[i].value(j));
            }
            result.encode(x);
            if (p.output.data != nullptr) {
                if constexpr (ALIGNED)
                    result.store_aligned(out);
                else
                    result.store(out, false, left);
            }
            index += at.lines * p.input.columns;
            out += at.lines * p.output.stride;
        }
    }
    if constexpr (SUMS) finish_sums<N>(p, at, scratch, sums);
}

/* Blocks per multiprocessor: as many as need no spills. */
#define KERNEL(name, T, SUMS, ALIGNED, BLOCKS)                                                     \
    extern "C" __global__ void __launch_bounds__(TE_DROPOUT_THREADS, BLOCKS)                       \
        name(const __grid_constant__ te_dropout_params p)                                          \
    {                                                                                              \
        dropout<T, SUMS, ALIGNED>(p);                                                              \
    }
#define X(I, i)                                                                                    \
    KERNEL(te_dropout_##i, te_##i, false, true, 3)                                                 \
    KERNEL(te_dropout_any_##i, te_##i, false, false, 2)                                            \
    KERNEL(te_dropout_sums_##i, te_##i, true, true, 4)                                             \
    KERNEL(te_dropout_sums_any_##i, te_##i, true, false, 2)
TE_DROPOUT_INSTANCES(X)
#undef X
#undef KERNEL
