/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.cu - LayerNorm, RMSNorm and L2 norm along rows: statistics, high precision, row-wise FP8 and
 * partial maxima in one read of the input; and as a source of a kernel on tiles, for transposed
 * FP8, with the statistics of a launch before.
 *
 * A team of threads holds a row in registers, so that the variance is made of differences from the
 * mean. Of narrow rows every thread holds a piece of several, to have as many loads in flight. Rows
 * that do not fit are read in turns, most often from the cache.
 */
#include "norm.h"
#include "norm.cuh"
#include "tile_cast.cuh"

/* What is the same for all rows of a thread. */
struct te_norm_state {
    te_team team;
    float scale, amax;

    __device__ __forceinline__ te_norm_state(const te_norm_params &p, float *scratch)
        : team(p.lanes, scratch), scale(1.0F), amax(0.0F)
    {
    }
};

template <typename T> static __device__ __forceinline__ float sum_of(const te_vector<T, 8> &x)
{
    float sum = 0.0F;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += x.value(j);
    return sum;
}

/* Of the first `left` elements: the others hold 0, which is not the mean. */
template <typename T>
static __device__ __forceinline__ float squares_of(const te_vector<T, 8> &x, float mean,
                                                   te_index left)
{
    float sum = 0.0F;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float distance = x.value(j) - mean;
        sum = __fmaf_rn(distance, j < left ? distance : 0.0F, sum);
    }
    return sum;
}

/* Normalizes a vector of a row and hands it on. */
template <typename T>
static __device__ __forceinline__ void
apply(const te_norm_params &p, te_norm_state &state, const te_vector<T, 8> &x, te_index row,
      te_index column, float mean, float rsigma, const float w[8], const float b[8])
{
    const te_index left = p.input.columns - column;
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        y[j] = __fmaf_rn((x.value(j) - mean) * rsigma, w[j], b[j]);
        state.amax = fmaxf(state.amax, fabsf(y[j]));
    }
    if (p.output.data != nullptr)
        te_store_values(p.output_dtype, p.output, p.output_aligned != 0, row, column, left, y);
    if (p.to.rowwise.data != nullptr) {
        te_vector<te_any_fp8, 8> bytes;
        te_cast_vector<te_any_fp8>(y, state.scale, p.to.e5m2, bytes);
        if (left < 8) te_clear_beyond<te_any_fp8>(left, bytes);
        bytes.store(te_at<te_any_fp8>(p.to.rowwise, row, column), p.to.rowwise_aligned != 0,
                    p.to.rowwise.columns - column);
    }
}

static __device__ __forceinline__ bool applies(const te_norm_params &p)
{
    return p.output.data != nullptr || p.to.rowwise.data != nullptr || p.to.amax != nullptr ||
           p.amax_partials != nullptr;
}

/* Ends the launch: the pair and the maxima. */
static __device__ __forceinline__ void finish(const te_norm_params &p, te_norm_state &state)
{
    __shared__ unsigned maxima[32];
    if (p.to.amax == nullptr && p.amax_partials == nullptr) return;
    const float amax = te_block_max<0>(state.amax, maxima);
    if (threadIdx.x == 0 && p.to.amax != nullptr) te_raise(p.to.amax, amax);
    if (p.amax_partials == nullptr) return;
    if (threadIdx.x == 0) p.amax_partials[blockIdx.x] = amax;
    if (blockIdx.x == 0) /* the entries that have no block */
        for (int i = gridDim.x + threadIdx.x; i < TE_CAST_PARTIALS; i += blockDim.x)
            p.amax_partials[i] = 0.0F;
}

static __device__ __forceinline__ void begin(const te_norm_params &p, te_norm_state &state)
{
    __shared__ unsigned maxima[32];
    if (p.to.rowwise.data == nullptr && p.to.scale_pair == nullptr) return;
    state.scale = te_read_scale<0>(p.to, maxima);
    if (p.to.scale_pair != nullptr && (blockIdx.x | threadIdx.x) == 0)
        te_write_pair(p.to, state.scale);
}

/* Sums over the team of ROWS rows, in pairs. */
template <int ROWS> static __device__ __forceinline__ void sum_rows(te_team &team, float sums[ROWS])
{
    float none = 0.0F;
    if constexpr (ROWS == 1)
        team.sum(sums[0], none);
    else
#pragma unroll
        for (int i = 0; i < ROWS; i += 2) team.sum(sums[i], sums[i + 1]);
}

/* Mean and rsigma of rows of which the team holds all vectors. */
template <typename T, int ROWS, int VECTORS>
static __device__ __forceinline__ void statistics(const te_norm_params &p, te_norm_state &state,
                                                  te_vector<T, 8> x[ROWS][VECTORS], te_index row,
                                                  float mean[ROWS], float rsigma[ROWS])
{
    const int step = blockDim.x / state.team.lanes;
#pragma unroll
    for (int i = 0; i < ROWS; i++) mean[i] = rsigma[i] = 0.0F;
    if (p.given) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (row + i * step < p.input.rows) {
                if (p.mean != nullptr) mean[i] = p.mean[row + i * step];
                rsigma[i] = p.rsigma[row + i * step];
            }
        return;
    }
    if (p.centered) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) mean[i] += sum_of<T>(x[i][v]);
        sum_rows<ROWS>(state.team, mean);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            mean[i] *= p.inverse;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) x[i][v].forget();
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            rsigma[i] += squares_of<T>(x[i][v], mean[i],
                                       p.input.columns -
                                           8 * (te_index)(v * state.team.lanes + state.team.lane));
    sum_rows<ROWS>(state.team, rsigma);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        rsigma[i] = __frsqrt_rn(__fmaf_rn(rsigma[i], p.inverse, p.eps));
        if (state.team.lane == 0 && row + i * step < p.input.rows) {
            if (p.mean != nullptr) p.mean[row + i * step] = mean[i];
            if (p.rsigma != nullptr) p.rsigma[row + i * step] = rsigma[i];
        }
    }
}

/* Rows of at most lanes * VECTORS vectors; a thread holds pieces of ROWS of them. */
template <typename T, int ROWS, int VECTORS>
static __device__ __forceinline__ void norm_rows(const te_norm_params &p)
{
    __shared__ __align__(8) float scratch[TE_TEAM_SCRATCH];
    te_norm_state state(p, scratch);
    const te_index rows = p.input.rows;
    const int step = blockDim.x / p.lanes, columns = (int)p.input.columns; /* they fit the team */
    const bool applied = applies(p);
    float w[8], b[8];
    begin(p, state);
    if constexpr (VECTORS == 1) {
        te_load_weight(p.factors, state.team.lane * 8, columns, w);
        te_load_bias(p.factors, state.team.lane * 8, columns, b);
    }
    for (te_index first = (te_index)blockIdx.x * step * ROWS; first < rows;
         first += (te_index)gridDim.x * step * ROWS) {
        const te_index row = first + state.team.team;
        te_vector<T, 8> x[ROWS][VECTORS];
        float mean[ROWS], rsigma[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int column = 8 * (v * p.lanes + state.team.lane);
                x[i][v].load(te_at<T>(p.input, row + i * step, column), p.input_aligned != 0,
                             row + i * step < rows ? columns - column : 0);
            }
        statistics<T, ROWS, VECTORS>(p, state, x, row, mean, rsigma);
        if (!applied) continue;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) x[i][v].forget();
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 8 * (v * p.lanes + state.team.lane);
            if constexpr (VECTORS > 1) {
                te_load_weight(p.factors, column, columns, w);
                te_load_bias(p.factors, column, columns, b);
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (row + i * step < rows)
                    apply<T>(p, state, x[i][v], row + i * step, column, mean[i], rsigma[i], w, b);
        }
    }
    finish(p, state);
}

/* A row of any width, by the whole block, which reads it up to three times. */
template <typename T> static __device__ __forceinline__ void norm_long_rows(const te_norm_params &p)
{
    __shared__ __align__(8) float scratch[TE_TEAM_SCRATCH];
    te_norm_state state(p, scratch);
    const te_index columns = p.input.columns, step = 8 * (te_index)blockDim.x;
    const te_index width = max(columns, p.to.rowwise.data != nullptr ? p.to.rowwise.columns : 0);
    begin(p, state);
    for (te_index row = blockIdx.x; row < p.input.rows; row += gridDim.x) {
        float mean = 0.0F, rsigma = 0.0F, none = 0.0F, w[8], b[8];
        te_vector<T, 8> x;
        if (p.given) {
            if (p.mean != nullptr) mean = p.mean[row];
            rsigma = p.rsigma[row];
        } else {
            if (p.centered) {
#pragma unroll 4
                for (te_index at = 8 * threadIdx.x; at < columns; at += step) {
                    x.load(te_at<T>(p.input, row, at), p.input_aligned != 0, columns - at);
                    mean += sum_of<T>(x);
                }
                state.team.sum(mean, none);
                mean *= p.inverse;
            }
#pragma unroll 4
            for (te_index at = 8 * threadIdx.x; at < columns; at += step) {
                x.load(te_at<T>(p.input, row, at), p.input_aligned != 0, columns - at);
                rsigma += squares_of<T>(x, mean, columns - at);
            }
            state.team.sum(rsigma, none);
            rsigma = __frsqrt_rn(__fmaf_rn(rsigma, p.inverse, p.eps));
            if (threadIdx.x == 0 && p.mean != nullptr) p.mean[row] = mean;
            if (threadIdx.x == 0 && p.rsigma != nullptr) p.rsigma[row] = rsigma;
        }
        if (!applies(p)) continue;
        for (te_index at = 8 * threadIdx.x; at < width; at += step) {
            x.load(te_at<T>(p.input, row, at), p.input_aligned != 0, columns - at);
            te_load_weight(p.factors, at, columns, w);
            te_load_bias(p.factors, at, columns, b);
            apply<T>(p, state, x, row, at, mean, rsigma, w, b);
        }
    }
    finish(p, state);
}

/* The normalized input. */
template <typename T> struct te_norm_source {
    typedef te_norm_tile_params params;
    static constexpr int outputs = 1;
    static constexpr bool pads = true; /* beta lies in rows outside, too */
    static constexpr bool writes = false, adds = false;
    te_index column;
    float w[8], b[8], mean[4], rsigma[4];
    te_vector<T, 8> x[4];

    __device__ __forceinline__ te_norm_source(const params &p, te_index at) : column(at)
    {
        te_load_weight(p.factors, column, p.tile.columns, w);
        te_load_bias(p.factors, column, p.tile.columns, b);
    }

    __device__ __forceinline__ void fetch(const params &p, te_index row)
    {
        te_fetch_rows<T>(p.input, p.input_aligned != 0, row, column, x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            mean[i] = p.mean != nullptr && row + i < p.tile.rows ? p.mean[row + i] : 0.0F;
            rsigma[i] = row + i < p.tile.rows ? p.rsigma[row + i] : 0.0F;
        }
    }

    __device__ __forceinline__ void values(const params &, int i, float v[1][8]) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[0][j] = __fmaf_rn((x[i].value(j) - mean[i]) * rsigma[i], w[j], b[j]);
    }
};

#define X(I, i)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, te_##i::bytes == 4 ? 2 : 3)                  \
        te_norm_narrow_##i(const __grid_constant__ te_norm_params p)                               \
    {                                                                                              \
        norm_rows<te_##i, TE_NORM_ROWS, 1>(p);                                                     \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_NORM_THREADS, te_##i::bytes == 4 ? 1 : 2)      \
        te_norm_wide_##i(const __grid_constant__ te_norm_params p)                                 \
    {                                                                                              \
        norm_rows<te_##i, 1, TE_NORM_VECTORS>(p);                                                  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_NORM_THREADS, 1)                               \
        te_norm_long_##i(const __grid_constant__ te_norm_params p)                                 \
    {                                                                                              \
        norm_long_rows<te_##i>(p);                                                                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_TILE_THREADS, te_##i::bytes == 4 ? 4 : 5)      \
        te_norm_tile_##i(const __grid_constant__ te_norm_tile_params p)                            \
    {                                                                                              \
        te_tile_cast<te_norm_source<te_##i>, te_any_fp8>(p);                                       \
    }
TE_NORM_INSTANCES(X)
#undef X
