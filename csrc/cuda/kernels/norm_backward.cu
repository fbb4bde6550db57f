/* SPDX-License-Identifier: Apache-2.0
 *
 * norm_backward.cu - gradients of LayerNorm, RMSNorm and L2 norm.
 *
 * One read of the inputs serves the gradient of the input, which needs two sums along the row
 * first, and the column sums of gamma and beta, which a thread keeps in registers for its columns
 * over all rows that it meets: blocks stay for the whole launch. The next rows are loaded
 * to shared memory meanwhile, see norm.cuh.
 *
 * Matrices of two dtypes lie in shared memory as they are, in places for fp32, and are decoded
 * where they are read.
 *
 * Rows too wide for this are read twice, and their column sums are made by a kernel on tiles.
 *
 * Dynamic shared memory: te_row_stages, then where VECTORS > 1 te_staged_factors. At the end
 * [VECTORS * 8][threads + 4] floats of column sums take their place.
 */
#include "norm_backward.h"
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

/* Adds what the gradient of another reader of the input is, to values as rounded. */
template <typename T>
static __device__ __forceinline__ void join_as(const float residual[8], float y[8])
{
    te_vector<T, 8> rounded;
    rounded.encode(y);
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = __fadd_rn(rounded.value(j), residual[j]);
}

/* The same, of the dtype of the output, wherever it lies. */
static __device__ __forceinline__ void join(const te_norm_backward_params &p, te_index row,
                                            te_index column, te_index count, float y[8])
{
    float residual[8];
    if (p.residual.data == nullptr) return;
    te_load_values(p.output_dtype, p.residual.data, p.residual_aligned != 0,
                   row * p.residual.stride + column, count, residual);
    if (p.output_dtype == TE_STORE_BF16)
        join_as<te_bf16>(residual, y);
    else if (p.output_dtype == TE_STORE_F16)
        join_as<te_f16>(residual, y);
    else
        join_as<te_f32>(residual, y);
}

/* Adds the column sums of the block's teams and leaves them in `to`. */
template <int VECTORS>
static __device__ __forceinline__ void write_sums(const float sums[VECTORS][8], int lanes,
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
        const int vector = column >> 3, group = vector >> 5; /* of te_first_vector */
        const int lane = group / VECTORS * 32 + (vector & 31), v = group % VECTORS;
        const float *line = scratch + (v * 8 + (column & 7)) * pitch + lane;
        float sum = line[0];
        for (int team = 1; team < teams; team++) sum += line[team * lanes];
        to[column] = sum;
    }
}

/* 8 elements of 2 bytes. */
template <typename T>
static __device__ __forceinline__ void decode_half(const uint4 &piece, te_vector<te_f32, 8> &out)
{
    te_vector<T, 8> half;
    float values[8];
    half.word[0] = piece.x, half.word[1] = piece.y, half.word[2] = piece.z, half.word[3] = piece.w;
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] = half.value(j);
    out.encode(values);
}

/* What a thread has on its way through shared memory. The matrices are the input, the gradient, and
 * with ADDS maybe what is added to it. WHOLE: rows of nothing but aligned vectors, and with ADDS
 * something is added. MIXED: T is f32, and the matrices have dtypes of their own, of which those of
 * 2 bytes take the first of a vector's two pieces. */
template <typename T, int VECTORS, bool WHOLE, bool ADDS, bool HEADS, bool MIXED>
struct te_backward_stages {
    typedef te_row_stages<T, VECTORS> row_stages;
    const te_norm_gradients &of;
    row_stages stages;
    int start;
    bool adds;

    __device__ __forceinline__ te_backward_stages(const te_norm_gradients &of_, uint4 *memory,
                                                  int first_vector)
        : of(of_), stages(memory, ADDS && (WHOLE || of_.add.data != nullptr) ? 3 : 2),
          start(8 * first_vector), adds(ADDS && (WHOLE || of_.add.data != nullptr))
    {
    }

    __device__ __forceinline__ bool has(int v) const
    {
        return start + 256 * v < (int)of.input.columns;
    }

    __device__ __forceinline__ void fetch_one(const typename T::raw *line, uint4 *place) const
    {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            if (has(v))
                row_stages::template fetch<WHOLE>(place, v, line + 256 * v, of.aligned != 0,
                                                  (int)of.input.columns - start - 256 * v);
    }

    __device__ __forceinline__ void fetch_half(const te_bf16::raw *line, uint4 *place) const
    {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const int left = (int)of.input.columns - start - 256 * v;
            uint4 *to = place + v * row_stages::pieces * 32;
            if (left <= 0) continue;
            if (of.aligned != 0 && left >= 8) {
                te_copy_async(to, line + 256 * v);
            } else {
                te_vector<te_bf16, 8> bits; /* or of f16 */
                bits.load(line + 256 * v, false, left);
                *to = make_uint4(bits.word[0], bits.word[1], bits.word[2], bits.word[3]);
            }
        }
    }

    __device__ __forceinline__ void fetch_mixed(const te_view &view, int dtype, te_index row,
                                                uint4 *place) const
    {
        if (dtype == TE_STORE_F32)
            fetch_one(te_at<T>(view, row, start), place);
        else
            fetch_half(te_at<te_bf16>(view, row, start), place);
    }

    /* Vector v of a matrix that has arrived. */
    __device__ __forceinline__ void read(int stage, int matrix, int v, te_vector<T, 8> &out) const
    {
        const uint4 *place = stages.place(stage, matrix);
        if constexpr (MIXED) {
            const int dtype = matrix == 0 ? of.input_dtype : of.grad_dtype;
            const uint4 *from = place + v * row_stages::pieces * 32;
            if (dtype == TE_STORE_BF16) return decode_half<te_bf16>(*from, out);
            if (dtype == TE_STORE_F16) return decode_half<te_f16>(*from, out);
        }
        row_stages::read(place, v, out);
    }

    /* Begins to load a row. */
    __device__ __forceinline__ void fetch(int stage, te_index row) const
    {
        if constexpr (MIXED) {
            fetch_mixed(of.input, of.input_dtype, row, stages.place(stage, 0));
            fetch_mixed(of.grad, of.grad_dtype, row, stages.place(stage, 1));
            if (adds) fetch_mixed(of.add, of.grad_dtype, row, stages.place(stage, 2));
            return;
        }
        fetch_one(te_row_at<T, HEADS>(of.input, of.heads, row, start), stages.place(stage, 0));
        fetch_one(te_at<T>(of.grad, row, start), stages.place(stage, 1));
        if (adds) fetch_one(te_at<T>(of.add, row, start), stages.place(stage, 2));
    }

    /* Begins to load the first rows, `step` apart; vectors beyond their end stay 0. */
    __device__ __forceinline__ void fetch_first(int count, te_index row, te_index step) const
    {
        te_vector<T, 8> zero;
        zero.clear();
        for (int stage = 0; stage < count; stage++, row += step) {
            for (int matrix = 0; matrix < stages.matrices; matrix++)
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    if (!has(v)) row_stages::write(stages.place(stage, matrix), v, zero);
            if (row < of.input.rows) fetch(stage, row);
            te_copy_group();
        }
    }

    /* What take() makes of vector v of a row that has arrived, and of no row zeros. */
    __device__ __forceinline__ void take_vector(int stage, int v, bool is_row, float mean,
                                                float rsigma, float dz[8], float normal[8]) const
    {
        te_vector<T, 8> x, grad, add;
        if (is_row) {
            read(stage, 0, v, x);
            read(stage, 1, v, grad);
            if (adds) read(stage, 2, v, add);
        } else {
            x.clear(), grad.clear(), add.clear();
        }
        take<T>(grad, add, x, adds, mean, has(v) ? rsigma : 0.0F, dz, normal);
    }
};

/* Rows of at most lanes * VECTORS vectors. WHOLE: see above; the gradient of the input then has the
 * dtype of the others, and 16 bytes of it can be written at once, and with JOINS as many of a
 * residual's gradient be read. */
template <typename T, int VECTORS, bool WHOLE, bool ADDS, bool JOINS, te_team_kind KIND,
          bool HEADS = false, bool MIXED = false>
static __device__ __forceinline__ void norm_backward(const te_norm_backward_params &p)
{
    extern __shared__ uint4 memory[];
    __shared__ __align__(16) float scratch[TE_TEAM_SCRATCH];
    const te_norm_gradients &of = p.of;
    const te_index rows = of.input.rows;
    te_team<KIND, float2> team(p.lanes, scratch);
    const int columns = (int)of.input.columns; /* they fit the team */
    const int vector = te_first_vector<VECTORS>(team.lane), start = 8 * vector;
    const te_backward_stages<T, VECTORS, WHOLE, ADDS, HEADS, MIXED> staged(of, memory, vector);
    uint4 *const behind = memory + staged.stages.size(p.stages);
    const te_staged_factors<false> factors(behind, vector);
    const int teams = blockDim.x / p.lanes;
    const te_index step = (te_index)gridDim.x * teams;
    te_index base = (te_index)blockIdx.x * teams;
    float w[8], none[8], gamma_sums[VECTORS][8] = {}, beta_sums[VECTORS][8] = {};
    float next_mean = 0.0F, next_rsigma = 0.0F;

    staged.fetch_first(p.stages, base + team.team, step);
    if (base + team.team < rows) {
        if (of.mean != nullptr) next_mean = of.mean[base + team.team];
        next_rsigma = of.rsigma[base + team.team];
    }
    if constexpr (VECTORS == 1)
        te_load_factors(of.factors, start, columns, w, none);
    else
        te_staged_factors<false>::fill(behind, of.factors, columns, p.lanes * VECTORS);
    __syncthreads();

    /* As often for every team of a warp: its lanes stay together, and add zeros in the end. */
    for (int stage = 0; KIND == TE_TEAM_LANES ? base < rows : base + team.team < rows;
         base += step, stage = stage + 1 < p.stages ? stage + 1 : 0) {
        const te_index row = base + team.team;
        const bool is_row = KIND != TE_TEAM_LANES || row < rows;
        const float mean = next_mean, rsigma = next_rsigma;
        float dz[8], normal[8];
        float2 sums = make_float2(0.0F, 0.0F); /* of dz, and of it times the normalized row */
        te_vector<T, 8> joined[JOINS ? VECTORS : 1];
        if constexpr (JOINS) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (staged.has(v))
                    joined[v].load_aligned(te_at<T>(p.residual, row, start + 256 * v));
        }
        if (row + step < rows) {
            if (of.mean != nullptr) next_mean = of.mean[row + step];
            next_rsigma = of.rsigma[row + step];
        }
        te_copy_wait(p.stages - 1);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            staged.take_vector(stage, v, is_row, mean, rsigma, dz, normal);
            if constexpr (VECTORS > 1) factors.read(v, 0, w);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float weighted = dz[j] * w[j];
                sums.x += weighted;
                sums.y = __fmaf_rn(weighted, normal[j], sums.y);
            }
        }
        team.sum(sums);
        const float plain = p.centered ? sums.x * p.inverse : 0.0F, scaled = sums.y * p.inverse;
        const bool writes = p.output.data != nullptr && is_row;
        typename T::raw *line = te_at<T>(p.output, row, start); /* where it has this dtype */
        te_view to = p.output;
        if (HEADS && writes)
            to.data +=
                te_head_offset(p.output_heads, row) * (p.output_dtype == TE_STORE_F32 ? 4 : 2);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            staged.take_vector(stage, v, is_row, mean, rsigma, dz, normal);
            if constexpr (VECTORS > 1) factors.read(v, 0, w);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                gamma_sums[v][j] = __fmaf_rn(dz[j], normal[j], gamma_sums[v][j]);
                beta_sums[v][j] += dz[j];
            }
            if (!writes || !staged.has(v)) continue;
            float y[8];
            combine(dz, normal, w, rsigma, plain, scaled, y);
            if constexpr (JOINS) {
                float residual[8];
#pragma unroll
                for (int j = 0; j < 8; j++) residual[j] = joined[v].value(j);
                join_as<T>(residual, y);
            } else if constexpr (!WHOLE) {
                join(p, row, start + 256 * v, columns - start - 256 * v, y);
            }
            if constexpr (WHOLE)
                te_round_store<T>(y, line + 256 * v);
            else
                te_store_values(p.output_dtype, to, p.output_aligned != 0, HEADS ? 0 : row,
                                start + 256 * v, columns - start - 256 * v, y);
        }
        if (row + p.stages * step < rows) staged.fetch(stage, row + p.stages * step);
        te_copy_group();
    }
    te_copy_wait(0);
    if (p.sums == nullptr) return;
    float *to = p.sums + (te_index)blockIdx.x * p.lines * columns;
    write_sums<VECTORS>(gamma_sums, p.lanes, columns, (float *)memory, to);
    if (p.lines > 1)
        write_sums<VECTORS>(beta_sums, p.lanes, columns, (float *)memory, to + columns);
}

/* The gradient of the input for rows of any width: a block per row. */
template <typename T>
static __device__ __forceinline__ void norm_backward_long(const te_norm_backward_params &p)
{
    __shared__ __align__(16) float scratch[TE_TEAM_SCRATCH];
    const te_norm_gradients &of = p.of;
    const te_index columns = of.input.columns, step = 8 * (te_index)blockDim.x;
    const bool adds = of.add.data != nullptr, aligned = of.aligned != 0;
    te_team<TE_TEAM_BLOCK, float2> team(blockDim.x, scratch);
    for (te_index row = blockIdx.x; row < of.input.rows; row += gridDim.x) {
        const float mean = of.mean != nullptr ? of.mean[row] : 0.0F, rsigma = of.rsigma[row];
        float plain = 0.0F, scaled = 0.0F, dz[8], normal[8], w[8], none[8], y[8];
        for (int pass = 0; pass < 2; pass++) {
            for (te_index at = 8 * threadIdx.x; at < columns; at += step) {
                te_vector<T, 8> x, grad, add;
                x.load(te_at<T>(of.input, row, at), aligned, columns - at);
                grad.load(te_at<T>(of.grad, row, at), aligned, columns - at);
                add.load(te_at<T>(of.add, row, at), aligned, adds ? columns - at : 0);
                take<T>(grad, add, x, adds, mean, rsigma, dz, normal);
                te_load_factors(of.factors, at, columns, w, none);
                if (pass == 0) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const float weighted = dz[j] * w[j];
                        plain += weighted;
                        scaled = __fmaf_rn(weighted, normal[j], scaled);
                    }
                } else {
                    combine(dz, normal, w, rsigma, plain, scaled, y);
                    join(p, row, at, columns - at, y);
                    te_store_values(p.output_dtype, p.output, p.output_aligned != 0, row, at,
                                    columns - at, y);
                }
            }
            if (pass == 1) break;
            float2 sums = make_float2(plain, scaled);
            team.sum(sums);
            plain = p.centered ? sums.x * p.inverse : 0.0F;
            scaled = sums.y * p.inverse;
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

#define WIDE(i, whole, adds, joins)                                                                \
    (norm_backward<te_##i, TE_NORM_BACKWARD_BYTES / (8 * te_##i::bytes), whole, adds, joins,       \
                   TE_TEAM_WARPS>(p))
#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_norm_backward_narrow_##i, te_norm_backward_params, (TE_NORM_NARROW_THREADS, 3),   \
              norm_backward<te_##i, 1, false, true, false, TE_TEAM_LANES>(p))                      \
    TE_KERNEL(te_norm_backward_heads_##i, te_norm_backward_params, (TE_NORM_NARROW_THREADS, 3),    \
              norm_backward<te_##i, 1, false, true, false, TE_TEAM_LANES, true>(p))                \
    TE_KERNEL(te_norm_backward_wide_##i, te_norm_backward_params, (TE_NORM_BACKWARD_THREADS, 1),   \
              WIDE(i, true, false, false))                                                         \
    TE_KERNEL(te_norm_backward_adding_##i, te_norm_backward_params, (TE_NORM_BACKWARD_THREADS, 1), \
              WIDE(i, true, true, false))                                                          \
    TE_KERNEL(te_norm_backward_joining_##i, te_norm_backward_params,                               \
              (TE_NORM_BACKWARD_THREADS, 1), WIDE(i, true, false, true))                           \
    TE_KERNEL(te_norm_backward_odd_##i, te_norm_backward_params, (TE_NORM_BACKWARD_THREADS, 1),    \
              WIDE(i, false, true, false))                                                         \
    TE_KERNEL(te_norm_backward_long_##i, te_norm_backward_params, (TE_NORM_BACKWARD_THREADS, 1),   \
              norm_backward_long<te_##i>(p))                                                       \
    TE_KERNEL(te_norm_sums_##i, te_norm_sums_params, (TE_TILE_THREADS, 3),                         \
              te_tile_cast<te_norm_sums_source<te_##i>, te_none>(p))
TE_NUMBERS(X, )
#undef X

TE_KERNEL(te_norm_backward_narrow_mixed, te_norm_backward_params, (TE_NORM_NARROW_THREADS, 3),
          norm_backward<te_f32, 1, false, true, false, TE_TEAM_LANES, false, true>(p))
TE_KERNEL(te_norm_backward_wide_mixed, te_norm_backward_params, (TE_NORM_BACKWARD_THREADS, 1),
          norm_backward<te_f32, TE_NORM_BACKWARD_BYTES / (8 * te_f32::bytes), false, true, false,
                        TE_TEAM_WARPS, false, true>(p))
