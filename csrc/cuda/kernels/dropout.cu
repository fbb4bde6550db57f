/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.cu - residual + drop_path(dropout(input + bias)), and its gradient with column sums.
 *
 * A thread stays in its 16 bytes of columns and goes down the rows: the bias is read once, and a
 * column sum is a register. Four rows are being loaded at all times: the registers of a row that
 * was used take the one four further down: the random decisions cost about half the time that the
 * memory takes. Sums of the lines of a block are joined in order, and those of the groups of rows
 * by te_quantize_sums: the same bits in every run.
 */
#include "dropout.h"
#include "random.cuh"
#include "vector.cuh"

enum { ROWS = TE_DROPOUT_ROWS, MAX_LINES = TE_DROPOUT_THREADS };

/* A thread's place in its block, and the rows of its block. */
struct dropout_place {
    int lane, line, lines, lines_log2, rows;
    te_index column, row; /* row: the thread's first */

    __device__ __forceinline__ dropout_place(const te_dropout_params &p, int elements)
        : lane((int)threadIdx.x & ((1 << p.lanes_log2) - 1)),
          line((int)threadIdx.x >> p.lanes_log2), lines(TE_DROPOUT_THREADS >> p.lanes_log2),
          lines_log2(TE_DROPOUT_THREADS_LOG2 - p.lanes_log2),
          column((((te_index)blockIdx.x << p.lanes_log2) + lane) * elements)
    {
        const te_index first = (te_index)blockIdx.y * p.depth;
        rows = (int)min((te_index)p.depth, p.input.rows - first);
        row = first + line;
    }
};

/* The thread's columns of one operand, from row to row. */
template <typename T, int N> struct dropout_rows {
    typename T::raw *at; /* the thread's next row */
    te_index step;

    __device__ __forceinline__ dropout_rows(const te_view &view, const dropout_place &place)
        : at(te_at<T>(view, place.row, place.column)), step(view.stride << place.lines_log2)
    {
    }

    /* Aligned; a row that does not exist is 0. */
    __device__ __forceinline__ void load(te_vector<T, N> &row, bool exists)
    {
        row.clear();
        if (exists) row.load_aligned(at);
        at += step;
    }

    __device__ __forceinline__ void store(const te_vector<T, N> &row, bool exists)
    {
        if (exists) row.store_aligned(at);
        at += step;
    }

    /* Not aligned: all rows of a tile, of which the first `count` exist, with `left` elements each.
     * Words hold what lies beside a vector, and so they are not for the ends of the view. */
    __device__ __forceinline__ void load_tile(const te_view &view, te_vector<T, N> rows[ROWS],
                                              int count, te_index left) const
    {
        const te_index offset = (const unsigned char *)at - view.data;
        const te_index size = ((view.rows - 1) * view.stride + view.columns) * T::bytes;
        const te_index last = offset + (ROWS - 1) * step * T::bytes;
        const bool whole = count == ROWS && left >= N && offset >= 3 && last + 19 <= size;
        if (whole) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) rows[i].load_words(at + i * step);
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                rows[i].load_part(at + i * step, 0, i < count ? left : 0);
        }
    }

    __device__ __forceinline__ void store_any(const te_vector<T, N> &row, bool exists,
                                              te_index left)
    {
        if (exists && left >= N)
            row.store_words(at);
        else
            row.store_part(at, 0, exists ? left : 0);
        at += step;
    }
};

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

/* x = 0 where dropout drops, else x * factor; `index` is that of the first element. The product is
 * made in any case: a choice between it and 0 becomes a branch for each element. */
template <int N, bool ALIGNED>
static __device__ __forceinline__ void drop(const te_random &random, te_index index, unsigned limit,
                                            float factor, float *x)
{
    const unsigned kept =
        ALIGNED ? random.keep_aligned<N>(index, 0, limit) : random.keep<N>(index, limit);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float scaled = __fmul_rn(x[j], factor);
        x[j] = (kept >> j & 1U) != 0U ? scaled : 0.0F;
    }
}

template <int N> static __device__ __forceinline__ void drop_path(float factor, float *x)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float scaled = __fmul_rn(x[j], factor);
        x[j] = factor != 0.0F ? scaled : 0.0F;
    }
}

/* SUMS: the gradient, which has neither bias nor residual. DROPS: p.drops. */
template <typename T, bool SUMS, bool ALIGNED, bool DROPS>
static __device__ __forceinline__ void dropout(const te_dropout_params &p, float *paths,
                                               float *scratch)
{
    constexpr int N = 16 / T::bytes;
    const dropout_place at(p, N);
    const te_index left = p.input.columns - at.column;
    const te_index index_step = p.input.columns << at.lines_log2;
    const int tile = ROWS << at.lines_log2;
    const bool adds = !SUMS && p.residual.data != nullptr;
    dropout_rows<T, N> input(p.input, at), residual(p.residual, at), output(p.output, at);
    te_index index = at.row * p.input.columns + at.column;
    int rows = left > 0 ? at.rows - at.line : 0; /* from the thread's next on */
    te_vector<T, N> in[ROWS], rest[ROWS];
    float bias[N], sums[N] = {};
    if constexpr (ALIGNED) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            input.load(in[i], i << at.lines_log2 < rows);
            if (adds) residual.load(rest[i], i << at.lines_log2 < rows);
        }
    }
    if constexpr (!SUMS) load_bias<T, N>(p, at.column, bias);
    const te_random random(p.rng);
#pragma unroll 1
    for (int top = 0; top < at.rows; top += tile, rows -= tile) {
        if constexpr (!ALIGNED) {
            const int mine = rows > 0 ? min(((rows - 1) >> at.lines_log2) + 1, (int)ROWS) : 0;
            input.load_tile(p.input, in, mine, left);
            if (adds) residual.load_tile(p.residual, rest, mine, left);
            input.at += ROWS * input.step;
            residual.at += ROWS * residual.step;
        }
        if (p.drops_path != 0) decide_paths(p, random, at.row - at.line + top, tile, paths);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int place = i << at.lines_log2;
            float x[N];
            te_vector<T, N> result;
#pragma unroll
            for (int j = 0; j < N; j++)
                x[j] = SUMS ? in[i].value(j) : __fadd_rn(in[i].value(j), bias[j]);
            if constexpr (ALIGNED) input.load(in[i], tile + place < rows);
            if constexpr (DROPS) drop<N, ALIGNED>(random, index, p.drop_limit, p.keep_factor, x);
            if (p.drops_path != 0) drop_path<N>(paths[at.line + place], x);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if constexpr (SUMS) sums[j] += x[j];
                if (adds) x[j] = __fadd_rn(x[j], rest[i].value(j));
            }
            result.encode(x);
            if constexpr (ALIGNED)
                if (adds) residual.load(rest[i], tile + place < rows);
            if (!SUMS || p.output.data != nullptr) {
                if constexpr (ALIGNED)
                    output.store(result, place < rows);
                else
                    output.store_any(result, place < rows, left);
            }
            index += index_step;
        }
    }
    if constexpr (SUMS) finish_sums<N>(p, at, scratch, sums);
}

template <typename T, bool SUMS, bool ALIGNED>
static __device__ __forceinline__ void dropout(const te_dropout_params &p)
{
    __shared__ float paths[MAX_LINES * ROWS];
    __shared__ float scratch[SUMS ? TE_DROPOUT_THREADS * (16 / T::bytes) : 1];
    if (p.drops != 0)
        dropout<T, SUMS, ALIGNED, true>(p, paths, scratch);
    else
        dropout<T, SUMS, ALIGNED, false>(p, paths, scratch);
}

/* Blocks per multiprocessor: as many as need no spills. */
#define KERNEL(name, T, SUMS, ALIGNED, BLOCKS)                                                     \
    TE_KERNEL(name, te_dropout_params, (TE_DROPOUT_THREADS, BLOCKS), dropout<T, SUMS, ALIGNED>(p))
#define X(I, i, ...)                                                                               \
    KERNEL(te_dropout_##i, te_##i, false, true, 3)                                                 \
    KERNEL(te_dropout_any_##i, te_##i, false, false, 2)                                            \
    KERNEL(te_dropout_sums_##i, te_##i, true, true, 4)                                             \
    KERNEL(te_dropout_sums_any_##i, te_##i, true, false, 2)
TE_NUMBERS(X, )
#undef X
#undef KERNEL
