/* SPDX-License-Identifier: Apache-2.0
 *
 * micro_cast.cuh - casts to MXFP8 and NVFP4 of values that a source makes (tile_cast.cuh says what
 * a source is), row-wise and column-wise, with the values in high precision and column sums
 * (arithmetic: core/microscale.h).
 *
 * Tiles of 64 x 64, a block each, of which a thread has 4 rows x 8 columns as in tile_cast.cuh: a
 * group of 32 (16) values of a row is in 4 (2) neighbouring lanes, 16 values of a column are in 4
 * lanes of one warp. So maxima and the Hadamard transform take shuffles alone; only the 32 rows of
 * an MXFP8 column meet through shared memory. Beyond the matrix values are 0, which makes the
 * padding of data; that of scales is 0 even where a square reaches into it.
 */
#ifndef TE_DEVICE_MICRO_CAST_CUH
#define TE_DEVICE_MICRO_CAST_CUH

#include "tile_cast.cuh"
#include "core/microscale.h"

typedef te_vector<te_none, 4> te_four_bytes;
typedef te_vector<te_none, 16> te_sixteen_bytes;

/* Where a tile lies, and the size of the matrix. */
struct te_micro_tile {
    te_index top, left, rows, columns;

    /* First row and column of the calling thread's values. */
    __device__ __forceinline__ te_index row() const
    {
        return top + te_tile_row();
    }
    __device__ __forceinline__ te_index column() const
    {
        return left + te_tile_column();
    }
};

__device__ __forceinline__ unsigned te_lanes_max(unsigned value, int lane)
{
    return max(value, __shfl_xor_sync(0xffffffffU, value, lane));
}

__device__ __forceinline__ float te_lanes_sum(float value, int lane)
{
    return value + __shfl_xor_sync(0xffffffffU, value, lane);
}

__device__ __forceinline__ void te_store_scale(const te_view &to, te_index row, te_index column,
                                               unsigned scale)
{
    if (row < to.rows && column < to.columns)
        to.data[row * to.stride + column] = (unsigned char)scale;
}

/* ---- MXFP8 ---- */

/* Bits of a magnitude; NaN is none. */
__device__ __forceinline__ unsigned te_magnitude(float value)
{
    return __float_as_uint(fmaxf(fabsf(value), 0.0F));
}

/* TO: te_e4m3, te_e5m2 or te_any_fp8. */
template <typename TO> struct te_mxfp8 {
    struct memory {
        unsigned tops[4][TE_TILE];
    };
    memory &shared;

    __device__ __forceinline__ te_mxfp8(const te_micro_params &, memory &block) : shared(block)
    {
    }

    /* The largest magnitudes of groups of columns: 16 rows are in a warp, 32 in two. */
    __device__ __forceinline__ void join(unsigned tops[8]) const
    {
        const int warp = threadIdx.x >> 5;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            tops[j] = te_lanes_max(te_lanes_max(tops[j], 8), 16);
            if ((threadIdx.x & 31) < 8) shared.tops[warp][te_tile_column() + j] = tops[j];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; j++)
            tops[j] = max(tops[j], shared.tops[warp ^ 1][te_tile_column() + j]);
    }

    /* Casts a tile; `values` are changed. */
    __device__ __forceinline__ void cast(const te_tile_params &t, const te_micro_tile &tile,
                                         float values[4][8]) const
    {
        const te_micro_params &p = t.micro;
        const te_index row = tile.row(), column = tile.column();
        unsigned row_tops[4] = {}, column_tops[8] = {};
        te_vector<TO, 8> out[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned bits = te_magnitude(values[i][j]);
                row_tops[i] = max(row_tops[i], bits);
                column_tops[j] = max(column_tops[j], bits);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) row_tops[i] = te_lanes_max(te_lanes_max(row_tops[i], 1), 2);
        if (p.column.data.data != nullptr || p.square) join(column_tops);
        if (p.square) {
            unsigned square = 0U;
#pragma unroll
            for (int j = 0; j < 8; j++) square = max(square, column_tops[j]);
            square = te_lanes_max(te_lanes_max(square, 1), 2);
#pragma unroll
            for (int i = 0; i < 4; i++) row_tops[i] = square;
#pragma unroll
            for (int j = 0; j < 8; j++) column_tops[j] = square;
        }
        if (p.row.data.data != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned e = te_e8m0_of(__uint_as_float(row_tops[i]), p.fp8_max, p.margin);
                te_cast_vector<TO>(values[i], te_e8m0_multiplier(e), t.to.e5m2, out[i]);
                if ((threadIdx.x & 3) == 0)
                    te_store_scale(p.row.scales, row + i, column / TE_MXFP8_GROUP,
                                   row + i < tile.rows ? e : 0U);
            }
            te_put_rows<TO>(p.row.data, p.row.aligned != 0, row, column, out);
        }
        if (p.column.data.data != nullptr) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned e = te_e8m0_of(__uint_as_float(column_tops[j]), p.fp8_max, p.margin);
                const float multiplier = te_e8m0_multiplier(e);
#pragma unroll
                for (int i = 0; i < 4; i++) values[i][j] *= multiplier;
                if (te_tile_row() % TE_MXFP8_GROUP == 0)
                    te_store_scale(p.column.scales, row / TE_MXFP8_GROUP, column + j,
                                   column + j < tile.columns ? e : 0U);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) te_cast_vector<TO>(values[i], 1.0F, t.to.e5m2, out[i]);
            te_put_rows<TO>(p.column.data, p.column.aligned != 0, row, column, out);
        }
    }
};

/* ---- NVFP4 ---- */

/* The thread's part of the transform of groups of 16 rows, which 4 lanes share: the steps 1 and 2
 * are within it, 4 and 8 between lanes. */
static __device__ __forceinline__ void te_hadamard(float values[4][8], unsigned signs)
{
    const int lane = threadIdx.x & 31, first = lane >> 3 << 2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = te_hadamard_enter(values[i][j], first + i, signs);
        const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
        v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
        for (int step = 8; step <= 16; step *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float other = __shfl_xor_sync(0xffffffffU, v[i], step);
                v[i] = (lane & step) == 0 ? v[i] + other : other - v[i];
            }
#pragma unroll
        for (int i = 0; i < 4; i++) values[i][j] = te_hadamard_leave(v[i]);
    }
}

/* The largest magnitude of a tensor; all threads of the block. */
static __device__ __forceinline__ float te_largest_of(const float *partials, unsigned *scratch)
{
    float amax = 0.0F;
    for (int i = threadIdx.x; i < TE_CAST_PARTIALS; i += TE_TILE_THREADS)
        amax = fmaxf(amax, partials[i]);
    amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
    __syncthreads();
    return te_nvfp4_amax(amax);
}

/* The scale of a group as E4M3, and what its values are multiplied by, so that its largest
 * magnitude becomes `code`. */
static __device__ __forceinline__ unsigned te_group_scale(unsigned top, float encode,
                                                          te_nvfp4_code code, float *multiplier)
{
    const unsigned scale =
        te_fp8_pair<te_e4m3>(te_nvfp4_group_scale(top, encode, code), 0.0F) & 0xffU;
    *multiplier = te_nvfp4_multiplier(encode, te_decode<te_e4m3>((unsigned char)scale));
    return scale;
}

/* A lane's part of a line of 16, as an argument. */
template <int COUNT> struct te_part {
    float v[COUNT];
};

/* What a line loses with the scale that makes the largest magnitude of its group `code`: of
 * neighbours in 16 / COUNT lanes that are `apart`, added one after the other. All lanes of the warp
 * take part, and those of a line have its sum. Called, as are random numbers below: inlined
 * everywhere these few would be most of the code of a kernel. */
template <int COUNT>
static __device__ __noinline__ float te_loss_of(te_part<COUNT> errors, int apart, int squared,
                                                float amax, float range, unsigned top,
                                                te_nvfp4_code code)
{
    const float encode = te_nvfp4_encode(amax, range);
    const int lane = threadIdx.x & 31, first = lane & ~((16 / COUNT - 1) * apart);
    te_nvfp4_way way = {0.0F, 0.0F, amax, range};
    float sum = 0.0F;
    way.group_scale =
        te_decode<te_e4m3>((unsigned char)te_group_scale(top, encode, code, &way.multiplier));
#pragma unroll
    for (int i = 0; i < COUNT; i++) errors.v[i] = te_nvfp4_error(errors.v[i], way, squared);
#pragma unroll
    for (int part = 0; part < 16 / COUNT; part++) {
        float total = sum;
#pragma unroll
        for (int i = 0; i < COUNT; i++) total += errors.v[i];
        sum = __shfl_sync(0xffffffffU, total, first + part * apart);
    }
    return sum;
}

/* What a row of the thread's loses, whose other half is in the lane beside; and a column. */
static __device__ __forceinline__ float te_row_loss(const te_micro_params &p, const float values[8],
                                                    float amax, unsigned top, te_nvfp4_code code)
{
    te_part<8> part;
#pragma unroll
    for (int j = 0; j < 8; j++) part.v[j] = values[j];
    return te_loss_of(part, 1, p.squared, amax, p.range, top, code);
}
static __device__ __forceinline__ float te_column_loss(const te_micro_params &p,
                                                       const float values[4][8], int j, float amax,
                                                       unsigned top, te_nvfp4_code code)
{
    te_part<4> part;
#pragma unroll
    for (int i = 0; i < 4; i++) part.v[i] = values[i][j];
    return te_loss_of(part, 8, p.squared, amax, p.range, top, code);
}

/* What the largest magnitude of a group becomes: of row i of the thread's, of column j, of its
 * square. All lanes of the warp take part. */
static __device__ __forceinline__ te_nvfp4_code te_row_code(const te_micro_params &p,
                                                            const float values[8], float amax,
                                                            unsigned top)
{
    if (!p.four_over_six) return TE_NVFP4_SIX;
    const float four = te_row_loss(p, values, amax, top, TE_NVFP4_FOUR);
    const float six = te_row_loss(p, values, amax, top, TE_NVFP4_SIX_OF_TWO);
    return four < six ? TE_NVFP4_FOUR : TE_NVFP4_SIX_OF_TWO;
}

static __device__ __forceinline__ te_nvfp4_code te_column_code(const te_micro_params &p,
                                                               const float values[4][8], int j,
                                                               float amax, unsigned top)
{
    if (!p.four_over_six) return TE_NVFP4_SIX;
    const float four = te_column_loss(p, values, j, amax, top, TE_NVFP4_FOUR);
    const float six = te_column_loss(p, values, j, amax, top, TE_NVFP4_SIX_OF_TWO);
    return four < six ? TE_NVFP4_FOUR : TE_NVFP4_SIX_OF_TWO;
}

/* Row 4 q + i of a square is row i of lanes 8 q and on. */
static __device__ __forceinline__ te_nvfp4_code te_square_code(const te_micro_params &p,
                                                               const float values[4][8], float amax,
                                                               unsigned top)
{
    float loss[2];
    if (!p.four_over_six) return TE_NVFP4_SIX;
#pragma unroll
    for (int way = 0; way < 2; way++) {
        float rows[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rows[i] = te_row_loss(p, values[i], amax, top,
                                  way == 0 ? TE_NVFP4_FOUR : TE_NVFP4_SIX_OF_TWO);
            rows[i] = te_lanes_sum(te_lanes_sum(rows[i], 16), 8);
        }
        loss[way] = (rows[0] + rows[2]) + (rows[1] + rows[3]);
    }
    return loss[0] < loss[1] ? TE_NVFP4_FOUR : TE_NVFP4_SIX_OF_TWO;
}

/* Four codes of neighbours that begin at element `index`, a multiple of 4, in the low 16 bits. */
static __device__ __noinline__ unsigned
te_random_codes(const te_index *rng, unsigned long long index, float a, float b, float c, float d)
{
    const te_philox_words words =
        te_philox((unsigned long long)rng[0], (unsigned long long)rng[1] + index / 4);
    return te_e2m1_stochastic(a, te_philox_uniform(words.word[0])) |
           te_e2m1_stochastic(b, te_philox_uniform(words.word[1])) << 4 |
           te_e2m1_stochastic(c, te_philox_uniform(words.word[2])) << 8 |
           te_e2m1_stochastic(d, te_philox_uniform(words.word[3])) << 12;
}
static __device__ __forceinline__ unsigned te_four_codes(const te_micro_params &p,
                                                         unsigned long long index, float a, float b,
                                                         float c, float d)
{
    if (p.rng != nullptr) return te_random_codes(p.rng, index, a, b, c, d);
    return te_e2m1_nearest(a) | te_e2m1_nearest(b) << 4 | te_e2m1_nearest(c) << 8 |
           te_e2m1_nearest(d) << 12;
}

__device__ __forceinline__ te_index te_whole_groups(te_index count)
{
    return (count + TE_NVFP4_GROUP - 1) / TE_NVFP4_GROUP * TE_NVFP4_GROUP;
}

/* Of neighbouring rows: [4][8]; tops[i] of the group of row i. */
static __device__ __forceinline__ void te_nvfp4_rows(const te_micro_params &p,
                                                     const te_micro_tile &tile, float all,
                                                     const float values[4][8],
                                                     const unsigned tops[4])
{
    const te_index row = tile.row(), column = tile.column();
    const te_index wide = te_whole_groups(tile.columns);
    const te_nvfp4_code square = p.square ? te_square_code(p, values, all, tops[0]) : TE_NVFP4_SIX;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *v = values[i];
        const unsigned long long index = (unsigned long long)((row + i) * wide + column);
        float m;
        te_four_bytes codes;
        const float amax = p.row.amax_per_row && row + i < tile.rows ? p.row.amax[row + i] : all;
        const te_nvfp4_code code = p.square ? square : te_row_code(p, v, amax, tops[i]);
        const unsigned scale = te_group_scale(tops[i], te_nvfp4_encode(amax, p.range), code, &m);
        if (row + i >= p.row.scales.rows) continue;
        codes.word[0] = te_four_codes(p, index, v[0] * m, v[1] * m, v[2] * m, v[3] * m) |
                        te_four_codes(p, index + 4, v[4] * m, v[5] * m, v[6] * m, v[7] * m) << 16;
        if ((threadIdx.x & 1) == 0)
            te_store_scale(p.row.scales, row + i, column / TE_NVFP4_GROUP,
                           row + i < tile.rows ? scale : 0U);
        if (row + i < p.row.data.rows)
            codes.store(te_at<te_none>(p.row.data, row + i, column / 2), p.row.aligned != 0,
                        p.row.data.columns - column / 2);
    }
}

/* Of neighbouring columns; lines of the tile in shared memory are the transposed rows. */
static __device__ __forceinline__ void te_nvfp4_columns(const te_micro_params &p,
                                                        const te_micro_tile &tile, float amax,
                                                        const float values[4][8],
                                                        const unsigned tops[8],
                                                        unsigned short lines[TE_TILE][24])
{
    const te_index row = tile.row(), column = tile.column();
    const te_index high = te_whole_groups(tile.rows);
    const te_index below = tile.rows * te_whole_groups(tile.columns); /* the row-wise elements */
    const float encode = te_nvfp4_encode(amax, p.range);
    const te_nvfp4_code square = p.square ? te_square_code(p, values, amax, tops[0]) : TE_NVFP4_SIX;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const unsigned long long index = (unsigned long long)(below + (column + j) * high + row);
        float m;
        const te_nvfp4_code code = p.square ? square : te_column_code(p, values, j, amax, tops[j]);
        const unsigned scale = te_group_scale(tops[j], encode, code, &m);
        lines[te_tile_column() + j][te_tile_row() >> 2] = (unsigned short)te_four_codes(
            p, index, values[0][j] * m, values[1][j] * m, values[2][j] * m, values[3][j] * m);
        if (te_tile_row() % TE_NVFP4_GROUP == 0)
            te_store_scale(p.column.scales, column + j, row / TE_NVFP4_GROUP,
                           column + j < tile.columns ? scale : 0U);
    }
    __syncthreads();
    const int line = threadIdx.x >> 1, half = threadIdx.x & 1;
    const te_index to = tile.left + line;
    const te_index at = tile.top / 2 + half * 16;
    te_sixteen_bytes codes;
    codes.load_aligned(&lines[line][half * 8]);
    if (to < p.column.data.rows)
        codes.store(te_at<te_none>(p.column.data, to, at), p.column.aligned != 0,
                    p.column.data.columns - at);
}

/* The bits of a magnitude; those of NaN are the largest. */
static __device__ __forceinline__ unsigned te_magnitude_or_nan(float value)
{
    return __float_as_uint(value) & 0x7fffffffU;
}

struct te_nvfp4 {
    struct memory {
        unsigned short lines[TE_TILE][24];
        unsigned scratch[TE_TILE_THREADS / 32];
    };
    memory &shared;
    float row_amax, column_amax;

    /* The amax is written also where there is no data. */
    __device__ __forceinline__ te_nvfp4(const te_micro_params &p, memory &block)
        : shared(block), row_amax(0.0F), column_amax(0.0F)
    {
        if (p.row.amax != nullptr && !p.row.amax_per_row) row_amax = measured(p.row);
        if (p.column.amax != nullptr) column_amax = measured(p.column);
    }

    __device__ __forceinline__ float measured(const te_micro_form &form) const
    {
        const float largest = te_largest_of(form.partials, shared.scratch);
        if ((blockIdx.x | threadIdx.x) == 0) *form.amax = largest;
        return largest;
    }

    /* Casts a tile; `values` are changed. */
    __device__ __forceinline__ void cast(const te_tile_params &t, const te_micro_tile &tile,
                                         float values[4][8]) const
    {
        const te_micro_params &p = t.micro;
        unsigned tops[4] = {}, column_tops[8] = {}, square = 0U;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) tops[i] = max(tops[i], te_magnitude_or_nan(values[i][j]));
            tops[i] = te_lanes_max(tops[i], 1);
            square = max(square, tops[i]);
        }
        square = te_lanes_max(te_lanes_max(square, 8), 16);
        if (p.square)
#pragma unroll
            for (int i = 0; i < 4; i++) tops[i] = square;
        if (p.row.data.data != nullptr) te_nvfp4_rows(p, tile, row_amax, values, tops);
        if (p.column.data.data == nullptr) return;
        if (p.hadamard) te_hadamard(values, p.signs);
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                column_tops[j] = max(column_tops[j], te_magnitude_or_nan(values[i][j]));
            column_tops[j] = p.square ? square : te_lanes_max(te_lanes_max(column_tops[j], 8), 16);
        }
        te_nvfp4_columns(p, tile, column_amax, values, column_tops, shared.lines);
    }
};

/* ---- a block's tile ---- */

/* The values of a thread, 0 beyond the matrix whatever the source makes there. */
template <typename S>
__device__ __forceinline__ void te_micro_values(const typename S::params &p, const S &source,
                                                const te_micro_tile &tile,
                                                float values[S::outputs][4][8])
{
    const te_index left = p.tile.columns - tile.column(), below = p.tile.rows - tile.row();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float made[S::outputs][8];
        source.values(p, i, made);
#pragma unroll
        for (int half = 0; half < S::outputs; half++)
#pragma unroll
            for (int j = 0; j < 8; j++) values[half][i][j] = made[half][j];
    }
    if (left >= 8 && below >= 4) return;
#pragma unroll
    for (int i = 0; i < 4 * S::outputs; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (i % 4 >= below || j >= left) values[i / 4][i % 4][j] = 0.0F;
}

/* Sums the columns of a tile and hands them on. */
static __device__ __forceinline__ void te_micro_sums(const te_tile_params &t, te_index group,
                                                     te_index left, int half, int outputs,
                                                     float *scratch, const float values[4][8])
{
    float sums[8] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] += values[i][j];
    te_finish_sums(t, group, left, half, outputs, scratch, sums);
}

/* S: source; with two outputs a half has whole tiles. FORMAT: te_mxfp8 or te_nvfp4. */
template <typename S, typename FORMAT>
static __device__ __forceinline__ void te_micro_cast(const typename S::params &p)
{
    constexpr int outputs = S::outputs;
    const te_tile_params &t = p.tile;
    __shared__ __align__(16) typename FORMAT::memory shared;
    __shared__ __align__(16) float scratch[S::adds ? TE_TILE / 4 * TE_TILE : 4];
    const unsigned across = (unsigned)t.micro.across, line = blockIdx.x / across;
    const te_index group = t.from_bottom ? gridDim.x / across - 1 - line : line;
    te_micro_tile tile = {group * TE_TILE, (te_index)(blockIdx.x - line * across) * TE_TILE, t.rows,
                          outputs * t.columns};
    const te_index left = tile.left, row = tile.row(), column = tile.column();
    float values[outputs][4][8];
    S source(p, column);

    source.fetch(p, row);
    if (t.noop != nullptr && *t.noop != 0.0F) return;
    const FORMAT format(t.micro, shared);
    te_micro_values<S>(p, source, tile, values);
#pragma unroll
    for (int half = 0; half < outputs; half++) {
        if (half + 1 < outputs && left >= t.columns) continue; /* padding behind the last half */
        if (S::writes && t.output.data != nullptr)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (row + i < t.rows)
                    te_store_values(t.output_dtype, t.output, t.output_aligned != 0, row + i,
                                    half * t.columns + column, t.columns - column, values[half][i]);
        if (S::adds && (t.sums != nullptr || t.bias_grad != nullptr))
            te_micro_sums(t, group, left, half, outputs, scratch, values[half]);
        tile.left = half * t.columns + left;
        format.cast(t, tile, values[half]);
        if (half + 1 < outputs) __syncthreads(); /* what is shared has been read */
    }
}

#endif
