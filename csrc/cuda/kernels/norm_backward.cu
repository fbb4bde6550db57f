/* SPDX-License-Identifier: Apache-2.0
 *
 * norm_backward.cu - gradients of LayerNorm, RMSNorm and L2 norm.
 *
 * One read of the inputs serves the gradient of the input, which needs two sums along the row
 * first, and the column sums of gamma and beta, which a thread keeps in registers for its columns
 * over all rows that it meets: blocks stay for the whole launch. The rows to come are on their way
 * to shared memory meanwhile. A thread reads there what itself has fetched, so only the sums of a
 * row need a barrier, of the threads that share it.
 *
 * Rows too wide for this are read twice, and their column sums are made by a kernel on tiles.
 *
 * Dynamic shared memory, in pieces of 16 bytes: [stages][matrices][VECTORS][halves][threads] rows
 * (f32 takes two pieces per vector), then where VECTORS > 1 [VECTORS][2][lanes] factors as floats.
 * At the end [VECTORS * 8][threads + 4] floats of column sums take their place.
 */
#include "norm_backward.h"
#include "async.cuh"
#include "norm.cuh"
#include "tile_cast.cuh"

/* dz, and from it and the input what the gradients are made of. */
template <typename T>
static __device__ __forceinline__ void take(const te_vector<T, 8> &grad, const te_vector<T, 8> &add,
                                            const te_vector<T, 8> &x, bool adds, float mean,
                                            float rsigma, float dz[8], float normal[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        dz[j] = grad.value(j);
        if (adds) dz[j] += add.value(j);
        normal[j] = (x.value(j) - mean) * rsigma;
    }
}

/* The gradient of the input from the row's sums. */
static __device__ __forceinline__ void combine(const float dz[8], const float normal[8],
                                               const float w[8], float rsigma, float plain,
                                               float scaled, float y[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        y[j] = rsigma * (__fmaf_rn(dz[j], w[j], -plain) - normal[j] * scaled);
}

/* The rows of a thread in shared memory. */
template <typename T, int VECTORS> struct te_row_stages {
    static constexpr int pieces = T::bytes / 2; /* of a vector */
    uint4 *first;                               /* the thread's first piece */
    int matrices;

    __device__ __forceinline__ uint4 *place(int stage, int matrix, int v) const
    {
        return first + (((stage * matrices + matrix) * VECTORS + v) * pieces) * (int)blockDim.x;
    }

    __device__ __forceinline__ void fetch_one(const te_view &from, bool aligned, te_index row,
                                              int column, uint4 *to) const
    {
        const typename T::raw *source = te_at<T>(from, row, column);
        const int left = (int)from.columns - column;
        if (aligned && left >= 8) {
#pragma unroll
            for (int i = 0; i < pieces; i++)
                te_copy_async(to + i * blockDim.x, (const unsigned char *)source + 16 * i);
            return;
        }
        te_vector<T, 8> in;
        in.load(source, false, left);
#pragma unroll
        for (int i = 0; i < pieces; i++)
            to[i * blockDim.x] = make_uint4(in.word[4 * i], in.word[4 * i + 1], in.word[4 * i + 2],
                                            in.word[4 * i + 3]);
    }

    /* Vector v of a row begins its way. */
    __device__ __forceinline__ void fetch(const te_norm_gradients &of, te_index row, int column,
                                          int stage, int v) const
    {
        fetch_one(of.input, of.aligned != 0, row, column, place(stage, 0, v));
        fetch_one(of.grad, of.aligned != 0, row, column, place(stage, 1, v));
        if (matrices > 2) fetch_one(of.add, of.aligned != 0, row, column, place(stage, 2, v));
    }

    __device__ __forceinline__ void read_one(const uint4 *from, te_vector<T, 8> &out) const
    {
#pragma unroll
        for (int i = 0; i < pieces; i++) {
            const uint4 piece = from[i * blockDim.x];
            out.word[4 * i] = piece.x, out.word[4 * i + 1] = piece.y;
            out.word[4 * i + 2] = piece.z, out.word[4 * i + 3] = piece.w;
        }
    }

    __device__ __forceinline__ void read(int stage, int v, float mean, float rsigma, float dz[8],
                                         float normal[8]) const
    {
        te_vector<T, 8> in;
        read_one(place(stage, 1, v), in);
#pragma unroll
        for (int j = 0; j < 8; j++) dz[j] = in.value(j);
        if (matrices > 2) {
            read_one(place(stage, 2, v), in);
#pragma unroll
            for (int j = 0; j < 8; j++) dz[j] += in.value(j);
        }
        read_one(place(stage, 0, v), in);
#pragma unroll
        for (int j = 0; j < 8; j++) normal[j] = (in.value(j) - mean) * rsigma;
    }
};

/* Adds the column sums of the block's teams and leaves them in `to`. */
template <int VECTORS>
static __device__ __forceinline__ void hand_on(const float sums[VECTORS][8], int lanes,
                                               te_index columns, float *scratch, float *to)
{
    const int pitch = blockDim.x + 4; /* 8 neighbouring columns lie in different banks */
    const int teams = blockDim.x / lanes;
    __syncthreads();
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int j = 0; j < 8; j++) scratch[(v * 8 + j) * pitch + threadIdx.x] = sums[v][j];
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        const int vector = column >> 3, v = vector / lanes, lane = vector - v * lanes;
        const float *line = scratch + (v * 8 + (column & 7)) * pitch + lane;
        float sum = line[0];
        for (int team = 1; team < teams; team++) sum += line[team * lanes];
        to[column] = sum;
    }
}

/* Rows of at most lanes * VECTORS vectors. */
template <typename T, int VECTORS>
static __device__ __forceinline__ void norm_backward(const te_norm_backward_params &p)
{
    extern __shared__ uint4 memory[];
    __shared__ __align__(8) float scratch[TE_TEAM_SCRATCH];
    const te_norm_gradients &of = p.of;
    const te_index rows = of.input.rows;
    const int columns = (int)of.input.columns; /* they fit the team */
    te_team team(p.lanes, scratch);
    const te_row_stages<T, VECTORS> stages = {memory + threadIdx.x, of.add.data != nullptr ? 3 : 2};
    float4 *factors = (float4 *)(memory + p.stages * stages.matrices * VECTORS * stages.pieces *
                                              (int)blockDim.x) +
                      team.lane;
    const int teams = blockDim.x / p.lanes;
    const te_index step = (te_index)gridDim.x * teams;
    te_index base = (te_index)blockIdx.x * teams;
    float w[8], gamma_sums[VECTORS][8] = {}, beta_sums[VECTORS][8] = {};
    float next_mean = 0.0F, next_rsigma = 0.0F;

    for (int stage = 0; stage < p.stages; stage++) {
        const te_index row = base + team.team + stage * step;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 8 * (v * p.lanes + team.lane);
            if (row < rows && column < columns) stages.fetch(of, row, column, stage, v);
        }
        te_copy_group();
    }
    if (base + team.team < rows) {
        if (of.mean != nullptr) next_mean = of.mean[base + team.team];
        next_rsigma = of.rsigma[base + team.team];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        te_load_weight(of.factors, 8 * (v * p.lanes + team.lane), columns, w);
        if (VECTORS == 1) break;
        if (team.team == 0) {
            factors[(v * 2) * p.lanes] = make_float4(w[0], w[1], w[2], w[3]);
            factors[(v * 2 + 1) * p.lanes] = make_float4(w[4], w[5], w[6], w[7]);
        }
    }
    __syncthreads();

    int stage = 0;
    for (; base < rows; base += step) { /* as often for every team: lanes of a warp stay together */
        const te_index row = base + team.team, later = row + p.stages * step;
        const float mean = next_mean, rsigma = next_rsigma;
        float plain = 0.0F, scaled = 0.0F, dz[8], normal[8];
        if (row + step < rows) {
            if (of.mean != nullptr) next_mean = of.mean[row + step];
            next_rsigma = of.rsigma[row + step];
        }
        te_copy_wait(p.stages - 1);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (row >= rows || 8 * (v * p.lanes + team.lane) >= columns) continue;
            stages.read(stage, v, mean, rsigma, dz, normal);
            if constexpr (VECTORS > 1) {
                *(float4 *)w = factors[(v * 2) * p.lanes];
                *(float4 *)(w + 4) = factors[(v * 2 + 1) * p.lanes];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float weighted = dz[j] * w[j];
                plain += weighted;
                scaled = __fmaf_rn(weighted, normal[j], scaled);
            }
        }
        team.sum(plain, scaled);
        plain = p.centered ? plain * p.inverse : 0.0F;
        scaled *= p.inverse;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int column = 8 * (v * p.lanes + team.lane);
            if (row >= rows || column >= columns) continue;
            stages.read(stage, v, mean, rsigma, dz, normal);
            if (later < rows) stages.fetch(of, later, column, stage, v);
            if constexpr (VECTORS > 1) {
                *(float4 *)w = factors[(v * 2) * p.lanes];
                *(float4 *)(w + 4) = factors[(v * 2 + 1) * p.lanes];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                gamma_sums[v][j] = __fmaf_rn(dz[j], normal[j], gamma_sums[v][j]);
                beta_sums[v][j] += dz[j];
            }
            if (p.output.data != nullptr) {
                float y[8];
                combine(dz, normal, w, rsigma, plain, scaled, y);
                te_store_values(p.output_dtype, p.output, p.output_aligned != 0, row, column,
                                columns - column, y);
            }
        }
        te_copy_group();
        stage = stage + 1 < p.stages ? stage + 1 : 0;
    }
    te_copy_wait(0);
    if (p.sums == nullptr) return;
    float *to = p.sums + (te_index)blockIdx.x * p.lines * columns;
    hand_on<VECTORS>(gamma_sums, p.lanes, columns, (float *)memory, to);
    if (p.lines > 1) hand_on<VECTORS>(beta_sums, p.lanes, columns, (float *)memory, to + columns);
}

/* The gradient of the input for rows of any width: a block per row. */
template <typename T>
static __device__ __forceinline__ void norm_backward_long(const te_norm_backward_params &p)
{
    __shared__ __align__(8) float scratch[TE_TEAM_SCRATCH];
    const te_norm_gradients &of = p.of;
    const te_index columns = of.input.columns, step = 8 * (te_index)blockDim.x;
    const bool adds = of.add.data != nullptr, aligned = of.aligned != 0;
    te_team team(blockDim.x, scratch);
    for (te_index row = blockIdx.x; row < of.input.rows; row += gridDim.x) {
        const float mean = of.mean != nullptr ? of.mean[row] : 0.0F, rsigma = of.rsigma[row];
        float plain = 0.0F, scaled = 0.0F, dz[8], normal[8], w[8], y[8];
        for (int pass = 0; pass < 2; pass++) {
            for (te_index at = 8 * threadIdx.x; at < columns; at += step) {
                te_vector<T, 8> x, grad, add;
                x.load(te_at<T>(of.input, row, at), aligned, columns - at);
                grad.load(te_at<T>(of.grad, row, at), aligned, columns - at);
                add.load(te_at<T>(of.add, row, at), aligned, adds ? columns - at : 0);
                take<T>(grad, add, x, adds, mean, rsigma, dz, normal);
                te_load_weight(of.factors, at, columns, w);
                if (pass == 0) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float weighted = dz[j] * w[j];
                        plain += weighted;
                        scaled = __fmaf_rn(weighted, normal[j], scaled);
                    }
                } else {
                    combine(dz, normal, w, rsigma, plain, scaled, y);
                    te_store_values(p.output_dtype, p.output, p.output_aligned != 0, row, at,
                                    columns - at, y);
                }
            }
            if (pass == 1) break;
            team.sum(plain, scaled);
            plain = p.centered ? plain * p.inverse : 0.0F;
            scaled *= p.inverse;
        }
    }
}

/* dz times the normalized input, and dz. */
template <typename T> struct te_norm_sums_source {
    typedef te_norm_sums_params params;
    static constexpr int outputs = 2;
    static constexpr bool pads = false, writes = false, adds = true;
    te_index column;
    float mean[4], rsigma[4];
    te_vector<T, 8> x[4], grad[4], add[4];

    __device__ __forceinline__ te_norm_sums_source(const params &, te_index at) : column(at)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) add[i].clear();
    }

    __device__ __forceinline__ void fetch(const params &p, te_index row)
    {
        te_fetch_rows<T>(p.of.input, p.of.aligned != 0, row, column, x);
        te_fetch_rows<T>(p.of.grad, p.of.aligned != 0, row, column, grad);
        if (p.of.add.data != nullptr)
            te_fetch_rows<T>(p.of.add, p.of.aligned != 0, row, column, add);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool inside = row + i < p.tile.rows;
            mean[i] = p.of.mean != nullptr && inside ? p.of.mean[row + i] : 0.0F;
            rsigma[i] = inside ? p.of.rsigma[row + i] : 0.0F;
        }
    }

    __device__ __forceinline__ void values(const params &, int i, float v[2][8]) const
    {
        take<T>(grad[i], add[i], x[i], true, mean[i], rsigma[i], v[1], v[0]);
#pragma unroll
        for (int j = 0; j < 8; j++) v[0][j] *= v[1][j];
    }
};

#define X(I, i)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TE_NORM_NARROW_THREADS, 3)                        \
        te_norm_backward_narrow_##i(const __grid_constant__ te_norm_backward_params p)             \
    {                                                                                              \
        norm_backward<te_##i, 1>(p);                                                               \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_NORM_BACKWARD_THREADS, 1)                      \
        te_norm_backward_wide_##i(const __grid_constant__ te_norm_backward_params p)               \
    {                                                                                              \
        norm_backward<te_##i, TE_NORM_VECTORS>(p);                                                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_NORM_BACKWARD_THREADS, 1)                      \
        te_norm_backward_long_##i(const __grid_constant__ te_norm_backward_params p)               \
    {                                                                                              \
        norm_backward_long<te_##i>(p);                                                             \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_TILE_THREADS, 3)                               \
        te_norm_sums_##i(const __grid_constant__ te_norm_sums_params p)                            \
    {                                                                                              \
        te_tile_cast<te_norm_sums_source<te_##i>, te_none>(p);                                     \
    }
TE_NORM_INSTANCES(X)
#undef X
