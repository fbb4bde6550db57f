/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.cu - LayerNorm, RMSNorm and L2 norm along rows: statistics, high precision, row-wise FP8 and
 * partial maxima in one read of the input; and as a source of a kernel on tiles, for transposed
 * FP8, with the statistics of a launch before.
 *
 * A team of threads holds a row in registers, so that the variance is made of differences from the
 * mean. Of narrow rows every thread holds a piece of several, to have as many loads in flight; wide
 * rows of whole vectors of 16-bit elements come through shared memory, see norm.cuh. Rows that do
 * not fit are read in turns, most often from the cache.
 */
#include "norm.h"
#include "norm.cuh"
#include "micro_cast.cuh"
#include "scaled_cast.cuh"

/* What is the same for all rows of a thread. */
template <typename TEAM> struct te_norm_state {
    TEAM team;
    float scale, amax;
    bool measures;

    __device__ __forceinline__ te_norm_state(const te_norm_params &p, float *scratch)
        : team(p.lanes, scratch), scale(1.0F), amax(0.0F),
          measures(p.to.amax != nullptr || p.amax_partials != nullptr)
    {
    }
};

template <typename T> static __device__ __forceinline__ float sum_of(const te_vector<T, 8> &x)
{
    return ((x.value(0) + x.value(1)) + (x.value(2) + x.value(3))) +
           ((x.value(4) + x.value(5)) + (x.value(6) + x.value(7)));
}

/* Of the first `left` elements: the others hold 0, which is not the mean. WHOLE: all or none. */
template <typename T, bool WHOLE>
static __device__ __forceinline__ float squares_of(const te_vector<T, 8> &x, float mean, int left)
{
    const float center = left > 0 ? mean : 0.0F;
    float sum = 0.0F;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float distance = x.value(j) - center;
        sum = __fmaf_rn(distance, WHOLE || j < left ? distance : 0.0F, sum);
    }
    return sum;
}

template <typename T>
static __device__ __forceinline__ void normalize(const te_vector<T, 8> &x, float mean, float rsigma,
                                                 const float w[8], const float b[8], float y[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = __fmaf_rn((x.value(j) - mean) * rsigma, w[j], b[j]);
}

static __device__ __forceinline__ float largest_of(const float y[8], float amax)
{
#pragma unroll
    for (int j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(y[j]));
    return amax;
}

/* Normalizes a vector of a row and hands it on. */
template <typename T, typename TEAM>
static __device__ __forceinline__ void
apply(const te_norm_params &p, te_norm_state<TEAM> &state, const te_vector<T, 8> &x, te_index row,
      te_index column, float mean, float rsigma, const float w[8], const float b[8])
{
    const te_index left = p.input.columns - column;
    float y[8];
    normalize<T>(x, mean, rsigma, w, b, y);
    if (state.measures) state.amax = largest_of(y, state.amax);
    if (p.output.data != nullptr)
        te_store_values(p.output_dtype, p.output, p.output_aligned != 0, row, column, left, y);
    if (p.to.row.data != nullptr) {
        te_vector<te_any_fp8, 8> bytes;
        te_cast_vector<te_any_fp8>(y, state.scale, p.to.e5m2, bytes);
        if (left < 8) te_clear_beyond<te_any_fp8>(left, bytes);
        bytes.store(te_at<te_any_fp8>(p.to.row, row, column), p.to.row_aligned != 0,
                    p.to.row.columns - column);
    }
}

static __device__ __forceinline__ bool applies(const te_norm_params &p)
{
    return p.output.data != nullptr || p.to.row.data != nullptr || p.to.amax != nullptr ||
           p.amax_partials != nullptr;
}

/* Ends the launch: the maxima. */
static __device__ __forceinline__ void finish(const te_norm_params &p, float amax)
{
    __shared__ unsigned maxima[32];
    if (p.to.amax == nullptr && p.amax_partials == nullptr) return;
    amax = te_block_max<0>(amax, maxima);
    if (threadIdx.x == 0 && p.to.amax != nullptr) te_raise(p.to.amax, amax);
    if (p.amax_partials == nullptr) return;
    if (threadIdx.x == 0) p.amax_partials[blockIdx.x] = amax;
    if (blockIdx.x == 0) /* the entries that have no block */
        for (int i = gridDim.x + threadIdx.x; i < TE_CAST_PARTIALS; i += blockDim.x)
            p.amax_partials[i] = 0.0F;
}

/* Begins the launch: the scale, and the pair. */
static __device__ __forceinline__ float begin(const te_norm_params &p)
{
    __shared__ unsigned maxima[32];
    if (p.to.row.data == nullptr && p.to.scales[0] == nullptr) return 1.0F;
    const float scale = te_read_scale<0>(p.to, maxima);
    if (p.to.scales[0] != nullptr && (blockIdx.x | threadIdx.x) == 0) te_write_scales(p.to, scale);
    return scale;
}

/* Sums over the team of ROWS rows: of one, or of pairs. */
template <te_team_kind KIND>
static __device__ __forceinline__ void sum_rows(te_team<KIND, float> &team, float sums[1])
{
    team.sum(sums[0]);
}
template <te_team_kind KIND>
static __device__ __forceinline__ void sum_rows(te_team<KIND, float2> &team,
                                                float sums[TE_NORM_ROWS])
{
#pragma unroll
    for (int i = 0; i < TE_NORM_ROWS; i += 2) {
        float2 pair = make_float2(sums[i], sums[i + 1]);
        team.sum(pair);
        sums[i] = pair.x, sums[i + 1] = pair.y;
    }
}

/* Mean and rsigma of rows of which the team holds all vectors. */
template <typename T, int ROWS, int VECTORS, bool WHOLE, typename TEAM>
static __device__ __forceinline__ void
statistics(const te_norm_params &p, te_norm_state<TEAM> &state, te_vector<T, 8> x[ROWS][VECTORS],
           te_index row, int step, float mean[ROWS], float rsigma[ROWS])
{
    const int first = te_first_vector<VECTORS>(state.team.lane);
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
        sum_rows(state.team, mean);
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
            rsigma[i] +=
                squares_of<T, WHOLE>(x[i][v], mean[i], (int)p.input.columns - 8 * (first + 32 * v));
    sum_rows(state.team, rsigma);
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
template <typename T, int ROWS, int VECTORS, typename TEAM, bool HEADS = false>
static __device__ __forceinline__ void norm_rows(const te_norm_params &p)
{
    __shared__ __align__(16) float scratch[TE_TEAM_SCRATCH];
    te_norm_state<TEAM> state(p, scratch);
    const te_index rows = p.input.rows;
    const int step = blockDim.x / p.lanes, columns = (int)p.input.columns; /* they fit the team */
    const int start = 8 * te_first_vector<VECTORS>(state.team.lane);
    const bool applied = applies(p);
    float w[8], b[8];
    state.scale = begin(p);
    if constexpr (VECTORS == 1) te_load_factors(p.factors, start, columns, w, b);
    for (te_index first = (te_index)blockIdx.x * step * ROWS; first < rows;
         first += (te_index)gridDim.x * step * ROWS) {
        const te_index row = first + state.team.team;
        te_vector<T, 8> x[ROWS][VECTORS];
        float mean[ROWS], rsigma[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                const int column = start + 256 * v;
                x[i][v].load(te_row_at<T, HEADS>(p.input, p.heads, row + i * step, column),
                             p.input_aligned != 0, row + i * step < rows ? columns - column : 0);
            }
        statistics<T, ROWS, VECTORS, false>(p, state, x, row, step, mean, rsigma);
        if (!applied) continue;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = start + 256 * v;
            if constexpr (VECTORS > 1) te_load_factors(p.factors, column, columns, w, b);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (row + i * step < rows)
                    apply<T>(p, state, x[i][v], row + i * step, column, mean[i], rsigma[i], w, b);
        }
    }
    finish(p, state.amax);
}

/* Normalizes a row of whole vectors and writes it as O, with zeros up to the end of `to`; te_none:
 * measures it alone. */
template <typename T, typename O, int VECTORS, typename TEAM>
static __device__ __forceinline__ void
write_row_as(const te_norm_params &p, te_norm_state<TEAM> &state,
             const te_staged_factors<true> &factors, const te_view &to,
             const te_vector<T, 8> x[VECTORS], te_index row, float mean, float rsigma)
{
    const int start = 8 * te_first_vector<VECTORS>(state.team.lane);
    typename O::raw *line = te_at<O>(to, row, start);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        float w[8], b[8], y[8];
        te_vector<O, 8> out;
        out.clear();
        if (start + 256 * v < (int)p.input.columns) {
            factors.read(v, 0, w);
            factors.read(v, 1, b);
            normalize<T>(x[v], mean, rsigma, w, b, y);
            if (state.measures) state.amax = largest_of(y, state.amax);
            if constexpr (O::bytes > 1)
                out.encode(y);
            else if constexpr (O::casts)
                te_cast_vector<O>(y, state.scale, 0, out);
        }
        if constexpr (O::bytes > 1 || O::casts)
            if (start + 256 * v < (int)to.columns) out.store_aligned(line + 256 * v);
    }
}

template <typename T, int VECTORS, typename TEAM>
static __device__ __forceinline__ void
write_row(const te_norm_params &p, te_norm_state<TEAM> &state,
          const te_staged_factors<true> &factors, const te_vector<T, 8> x[VECTORS], te_index row,
          float mean, float rsigma)
{
    if (p.output.data != nullptr) {
        if (p.output_dtype == TE_STORE_BF16)
            write_row_as<T, te_bf16, VECTORS>(p, state, factors, p.output, x, row, mean, rsigma);
        else if (p.output_dtype == TE_STORE_F16)
            write_row_as<T, te_f16, VECTORS>(p, state, factors, p.output, x, row, mean, rsigma);
        else
            write_row_as<T, te_f32, VECTORS>(p, state, factors, p.output, x, row, mean, rsigma);
    }
    if (p.to.row.data != nullptr) {
        if (p.to.e5m2)
            write_row_as<T, te_e5m2, VECTORS>(p, state, factors, p.to.row, x, row, mean, rsigma);
        else
            write_row_as<T, te_e4m3, VECTORS>(p, state, factors, p.to.row, x, row, mean, rsigma);
    } else if (p.output.data == nullptr) {
        write_row_as<T, te_none, VECTORS>(p, state, factors, p.input, x, row, mean, rsigma);
    }
}

/* Rows of at most lanes * VECTORS whole vectors, by blocks that stay: each team strides over rows
 * of its own. Dynamic shared memory: te_row_stages, then te_staged_factors. */
template <typename T, int VECTORS>
static __device__ __forceinline__ void norm_staged_rows(const te_norm_params &p)
{
    typedef te_row_stages<T, VECTORS> row_stages;
    extern __shared__ uint4 memory[];
    __shared__ __align__(16) float scratch[TE_TEAM_SCRATCH];
    te_norm_state<te_team<TE_TEAM_WARPS, float>> state(p, scratch);
    const int vector = te_first_vector<VECTORS>(state.team.lane), start = 8 * vector;
    const int teams = blockDim.x / p.lanes, columns = (int)p.input.columns; /* they fit the team */
    const row_stages stages(memory, 1);
    uint4 *const behind = memory + stages.size(p.stages);
    const te_staged_factors<true> factors(behind, vector);
    const te_index rows = p.input.rows, step = (te_index)gridDim.x * teams;
    const bool applied = applies(p);
    te_index row = (te_index)blockIdx.x * teams + state.team.team, later = row;
    const typename T::raw *next = te_at<T>(p.input, row, start);

    for (int stage = 0; stage < p.stages; stage++) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (later < rows && start + 256 * v < columns)
                row_stages::template fetch<true>(stages.place(stage, 0), v, next + 256 * v, true,
                                                 8);
        te_copy_group();
        later += step, next += step * p.input.stride;
    }
    state.scale = begin(p);
    if (applied) te_staged_factors<true>::fill(behind, p.factors, columns, p.lanes * VECTORS);
    __syncthreads();

    for (int stage = 0; row < rows; row += step, stage = stage + 1 < p.stages ? stage + 1 : 0) {
        uint4 *const place = stages.place(stage, 0);
        te_vector<T, 8> x[1][VECTORS];
        float mean[1], rsigma[1];
        te_copy_wait(p.stages - 1);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            x[0][v].clear();
            if (start + 256 * v < columns) row_stages::read(place, v, x[0][v]);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (later < rows && start + 256 * v < columns)
                row_stages::template fetch<true>(place, v, next + 256 * v, true, 8);
        te_copy_group();
        later += step, next += step * p.input.stride;
        statistics<T, 1, VECTORS, true>(p, state, x, row, 0, mean, rsigma);
        if (applied) write_row<T, VECTORS>(p, state, factors, x[0], row, mean[0], rsigma[0]);
    }
    te_copy_wait(0);
    finish(p, state.amax);
}

/* A row of any width, by the whole block, which reads it up to three times. */
template <typename T> static __device__ __forceinline__ void norm_long_rows(const te_norm_params &p)
{
    __shared__ __align__(16) float scratch[TE_TEAM_SCRATCH];
    te_norm_state<te_team<TE_TEAM_BLOCK, float>> state(p, scratch);
    const te_index columns = p.input.columns, step = 8 * (te_index)blockDim.x;
    const te_index width = max(columns, p.to.row.data != nullptr ? p.to.row.columns : 0);
    state.scale = begin(p);
    for (te_index row = blockIdx.x; row < p.input.rows; row += gridDim.x) {
        float mean = 0.0F, rsigma = 0.0F, w[8], b[8];
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
                state.team.sum(mean);
                mean *= p.inverse;
            }
#pragma unroll 4
            for (te_index at = 8 * threadIdx.x; at < columns; at += step) {
                const te_index left = columns - at;
                x.load(te_at<T>(p.input, row, at), p.input_aligned != 0, left);
                rsigma += squares_of<T, false>(x, mean, left < 8 ? (int)left : 8);
            }
            state.team.sum(rsigma);
            rsigma = __frsqrt_rn(__fmaf_rn(rsigma, p.inverse, p.eps));
            if (threadIdx.x == 0 && p.mean != nullptr) p.mean[row] = mean;
            if (threadIdx.x == 0 && p.rsigma != nullptr) p.rsigma[row] = rsigma;
        }
        if (!applies(p)) continue;
        for (te_index at = 8 * threadIdx.x; at < width; at += step) {
            x.load(te_at<T>(p.input, row, at), p.input_aligned != 0, columns - at);
            te_load_factors(p.factors, at, columns, w, b);
            apply<T>(p, state, x, row, at, mean, rsigma, w, b);
        }
    }
    finish(p, state.amax);
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
        te_load_factors(p.factors, column, p.tile.columns, w, b);
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
        normalize<T>(x[i], mean[i], rsigma[i], w, b, v[0]);
    }
};

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_norm_narrow_##i, te_norm_params,                                                  \
              (TE_NORM_NARROW_THREADS, te_##i::bytes == 4 ? 2 : 3),                                \
              norm_rows<te_##i, TE_NORM_ROWS, 1, te_team<TE_TEAM_LANES, float2>>(p))               \
    TE_KERNEL(te_norm_heads_##i, te_norm_params,                                                   \
              (TE_NORM_NARROW_THREADS, te_##i::bytes == 4 ? 2 : 3),                                \
              norm_rows<te_##i, TE_NORM_ROWS, 1, te_team<TE_TEAM_LANES, float2>, true>(p))         \
    TE_KERNEL(te_norm_odd_##i, te_norm_params, (TE_NORM_THREADS, te_##i::bytes == 4 ? 1 : 2),      \
              norm_rows<te_##i, 1, TE_NORM_VECTORS, te_team<TE_TEAM_BLOCK, float>>(p))             \
    TE_KERNEL(te_norm_long_##i, te_norm_params, (TE_NORM_THREADS, 1), norm_long_rows<te_##i>(p))   \
    TE_KERNEL(te_norm_tile_##i, te_norm_tile_params,                                               \
              (TE_TILE_THREADS, te_##i::bytes == 4 ? 4 : 5),                                       \
              te_tile_cast<te_norm_source<te_##i>, te_any_fp8>(p))                                 \
    TE_KERNEL(te_norm_scaled_##i, te_norm_tile_params, (TE_SCALED_THREADS, 2),                     \
              te_scaled_cast<te_norm_source<te_##i>, te_any_fp8>(p))                               \
    TE_KERNEL(te_norm_mxfp8_##i, te_norm_tile_params, (TE_TILE_THREADS),                           \
              te_micro_cast<te_norm_source<te_##i>, te_mxfp8<te_any_fp8>>(p))                      \
    TE_KERNEL(te_norm_nvfp4_##i, te_norm_tile_params, (TE_TILE_THREADS),                           \
              te_micro_cast<te_norm_source<te_##i>, te_nvfp4>(p))
TE_NUMBERS(X, )
#undef X

#define X(I, i)                                                                                    \
    TE_KERNEL(te_norm_wide_##i, te_norm_params, (TE_NORM_WIDE_THREADS, 1),                         \
              norm_staged_rows<te_##i, TE_NORM_WIDE_VECTORS>(p))
TE_NORM_WIDE_INSTANCES(X)
#undef X
