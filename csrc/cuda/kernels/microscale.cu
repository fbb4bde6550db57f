/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.cu - casts to MXFP8 and NVFP4, row-wise and column-wise in one read of the input, and
 * their inverse (arithmetic: core/microscale.h).
 *
 * Tiles of 64 x 64, of which a thread has 4 rows x 8 columns as in tile_cast.cuh: a group of 32
 * (16) values of a row is in 4 (2) neighbouring lanes, 16 values of a column are in 4 lanes of one
 * warp. So maxima and the Hadamard transform take shuffles alone; only the 32 rows of an MXFP8
 * column meet through shared memory. Beyond the matrix values are 0, which makes the padding of
 * data; that of scales is 0 even where a square reaches into it.
 */
#include "microscale.h"
#include "tile_cast.cuh"
#include "core/microscale.h"

typedef te_vector<te_none, 4> te_four_bytes;
typedef te_vector<te_none, 16> te_sixteen_bytes;

static __device__ __forceinline__ unsigned lanes_max(unsigned value, int lane)
{
    return max(value, __shfl_xor_sync(0xffffffffU, value, lane));
}

static __device__ __forceinline__ void store_scale(const te_view &to, te_index row, te_index column,
                                                   unsigned scale)
{
    if (row < to.rows && column < to.columns)
        to.data[row * to.stride + column] = (unsigned char)scale;
}

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

/* ---- MXFP8 ---- */

/* Bits of a magnitude; NaN is none. */
static __device__ __forceinline__ unsigned magnitude(float value)
{
    return __float_as_uint(fmaxf(fabsf(value), 0.0F));
}

template <typename T, typename TO>
static __device__ __forceinline__ void mxfp8(const te_micro_params &p)
{
    __shared__ unsigned tops[4][TE_TILE];
    const te_index column = (te_index)blockIdx.x * TE_TILE + te_tile_column();
    const int warp = threadIdx.x >> 5;
    const bool by_columns = p.column.data.data != nullptr || p.square;
    if (p.noop != nullptr && *p.noop != 0.0F) return;
    for (te_index top = (te_index)blockIdx.y * TE_TILE; top < p.height;
         top += (te_index)gridDim.y * TE_TILE) {
        const te_index row = top + te_tile_row();
        float values[4][8];
        unsigned row_tops[4] = {}, column_tops[8] = {};
        te_vector<TO, 8> out[4];
        fetch_values<T>(p.input, p.input_aligned != 0, row, column, values);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned bits = magnitude(values[i][j]);
                row_tops[i] = max(row_tops[i], bits);
                column_tops[j] = max(column_tops[j], bits);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) row_tops[i] = lanes_max(lanes_max(row_tops[i], 1), 2);
        if (by_columns) { /* 16 rows are in a warp, 32 in two */
            __syncthreads();
#pragma unroll
            for (int j = 0; j < 8; j++) {
                column_tops[j] = lanes_max(lanes_max(column_tops[j], 8), 16);
                if ((threadIdx.x & 31) < 8) tops[warp][te_tile_column() + j] = column_tops[j];
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < 8; j++)
                column_tops[j] = max(column_tops[j], tops[warp ^ 1][te_tile_column() + j]);
        }
        if (p.square) {
            unsigned square = 0U;
#pragma unroll
            for (int j = 0; j < 8; j++) square = max(square, column_tops[j]);
            square = lanes_max(lanes_max(square, 1), 2);
#pragma unroll
            for (int i = 0; i < 4; i++) row_tops[i] = square;
#pragma unroll
            for (int j = 0; j < 8; j++) column_tops[j] = square;
        }
        if (p.row.data.data != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const unsigned e = te_e8m0_of(__uint_as_float(row_tops[i]), p.fp8_max, p.margin);
                te_cast_vector<TO>(values[i], te_e8m0_multiplier(e), 0, out[i]);
                if ((threadIdx.x & 3) == 0)
                    store_scale(p.row.scales, row + i, column / TE_MXFP8_GROUP,
                                row + i < p.input.rows ? e : 0U);
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
                    store_scale(p.column.scales, row / TE_MXFP8_GROUP, column + j,
                                column + j < p.input.columns ? e : 0U);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) te_cast_vector<TO>(values[i], 1.0F, 0, out[i]);
            te_put_rows<TO>(p.column.data, p.column.aligned != 0, row, column, out);
        }
    }
}

#define X(I, i, O, o)                                                                              \
    TE_KERNEL(te_mxfp8_##i##_##o, te_micro_params, (TE_TILE_THREADS), mxfp8<te_##i, te_##o>(p))
TE_MXFP8_INSTANCES(X)
#undef X

/* ---- NVFP4 ---- */

/* The thread's part of the transform of groups of 16 rows, which 4 lanes share: the steps 1 and 2
 * are within it, 4 and 8 between lanes. */
static __device__ __forceinline__ void hadamard(float values[4][8])
{
    const int lane = threadIdx.x & 31, first = lane >> 3 << 2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = te_hadamard_enter(values[i][j], first + i);
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
static __device__ __forceinline__ float largest_of(const float *partials, float range,
                                                   unsigned *scratch)
{
    float amax = 0.0F;
    for (int i = threadIdx.x; i < TE_CAST_PARTIALS; i += TE_TILE_THREADS)
        amax = fmaxf(amax, partials[i]);
    amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
    __syncthreads();
    return te_nvfp4_amax(te_product(amax, range));
}

/* The scale of a group as E4M3, and what its values are multiplied by, so that its largest
 * magnitude becomes `code`. */
static __device__ __forceinline__ unsigned group_scale(unsigned top, float encode, float code,
                                                       float *multiplier)
{
    const unsigned scale =
        te_fp8_pair<te_e4m3>(te_nvfp4_group_scale(top, encode, code), 0.0F) & 0xffU;
    *multiplier = te_nvfp4_multiplier(encode, te_decode<te_e4m3>((unsigned char)scale));
    return scale;
}

static __device__ __forceinline__ float lanes_sum(float value, int lane)
{
    return value + __shfl_xor_sync(0xffffffffU, value, lane);
}

/* What neighbours that begin with `values` and lie STEP floats apart lose with the scale that makes
 * the largest magnitude of their group `code`: COUNT leaves of the tree of core/microscale.h. */
template <int COUNT, int STEP>
static __device__ __forceinline__ float loss_of(const te_micro_params &p, const float *values,
                                                float encode, unsigned top, float code)
{
    float multiplier, errors[COUNT];
    const unsigned bits = group_scale(top, encode, code, &multiplier);
    const float scale = te_decode<te_e4m3>((unsigned char)bits);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        errors[i] = te_nvfp4_error(values[i * STEP], encode, multiplier, scale, p.squared);
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i += 2 * step) errors[i] += errors[i + step];
    return errors[0];
}

/* What a row of a group loses, whose two halves are in neighbouring lanes. */
static __device__ __forceinline__ float row_loss(const te_micro_params &p, const float values[8],
                                                 float encode, unsigned top, float code)
{
    return lanes_sum(loss_of<8, 1>(p, values, encode, top, code), 1);
}

/* What the largest magnitude of a group becomes: of row i of the thread's, of column j, of its
 * square. All lanes of the warp take part. */
static __device__ __forceinline__ float row_code(const te_micro_params &p, const float values[8],
                                                 float encode, unsigned top)
{
    if (!p.four_over_six) return 6.0F;
    const float four = row_loss(p, values, encode, top, 4.0F);
    return four < row_loss(p, values, encode, top, 6.0F) ? 4.0F : 6.0F;
}

static __device__ __forceinline__ float
column_code(const te_micro_params &p, const float values[4][8], int j, float encode, unsigned top)
{
    if (!p.four_over_six) return 6.0F;
    const float *v = &values[0][j];
    const float four = lanes_sum(lanes_sum(loss_of<4, 8>(p, v, encode, top, 4.0F), 8), 16);
    const float six = lanes_sum(lanes_sum(loss_of<4, 8>(p, v, encode, top, 6.0F), 8), 16);
    return four < six ? 4.0F : 6.0F;
}

static __device__ __forceinline__ float
square_code(const te_micro_params &p, const float values[4][8], float encode, unsigned top)
{
    float loss[2];
    if (!p.four_over_six) return 6.0F;
#pragma unroll
    for (int way = 0; way < 2; way++) {
        float rows[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            rows[i] = row_loss(p, values[i], encode, top, way == 0 ? 4.0F : 6.0F);
        loss[way] = lanes_sum(lanes_sum((rows[0] + rows[1]) + (rows[2] + rows[3]), 8), 16);
    }
    return loss[0] < loss[1] ? 4.0F : 6.0F;
}

/* Four codes of neighbours that begin at element `index`, a multiple of 4, in the low 16 bits. */
static __device__ __forceinline__ unsigned
four_codes(const te_micro_params &p, unsigned long long index, float a, float b, float c, float d)
{
    if (p.rng == nullptr)
        return te_e2m1_nearest(a) | te_e2m1_nearest(b) << 4 | te_e2m1_nearest(c) << 8 |
               te_e2m1_nearest(d) << 12;
    const te_philox_words words =
        te_philox((unsigned long long)p.rng[0], (unsigned long long)p.rng[1] + index / 4);
    return te_e2m1_stochastic(a, te_philox_uniform(words.word[0])) |
           te_e2m1_stochastic(b, te_philox_uniform(words.word[1])) << 4 |
           te_e2m1_stochastic(c, te_philox_uniform(words.word[2])) << 8 |
           te_e2m1_stochastic(d, te_philox_uniform(words.word[3])) << 12;
}

/* Of neighbouring rows: [4][8]; tops[i] of the group of row i. */
static __device__ __forceinline__ void nvfp4_rows(const te_micro_params &p, te_index row,
                                                  te_index column, te_index wide, float all,
                                                  const float values[4][8], const unsigned tops[4])
{
    const float square = p.square ? square_code(p, values, all, tops[0]) : 6.0F;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *v = values[i];
        const unsigned long long index = (unsigned long long)((row + i) * wide + column);
        float m;
        te_four_bytes codes;
        const float encode = p.row.amax_per_row && row + i < p.input.rows
                                 ? te_nvfp4_encode(p.row.amax[row + i])
                                 : all;
        const float code = p.square ? square : row_code(p, v, encode, tops[i]);
        const unsigned scale = group_scale(tops[i], encode, code, &m);
        if (row + i >= p.row.scales.rows) continue;
        codes.word[0] = four_codes(p, index, v[0] * m, v[1] * m, v[2] * m, v[3] * m) |
                        four_codes(p, index + 4, v[4] * m, v[5] * m, v[6] * m, v[7] * m) << 16;
        if ((threadIdx.x & 1) == 0)
            store_scale(p.row.scales, row + i, column / TE_NVFP4_GROUP,
                        row + i < p.input.rows ? scale : 0U);
        if (row + i < p.row.data.rows)
            codes.store(te_at<te_none>(p.row.data, row + i, column / 2), p.row.aligned != 0,
                        p.row.data.columns - column / 2);
    }
}

/* Of neighbouring columns; lines of the tile in shared memory are the transposed rows. */
static __device__ __forceinline__ void nvfp4_columns(const te_micro_params &p, te_index row,
                                                     te_index column, te_index below, te_index high,
                                                     float encode, const float values[4][8],
                                                     const unsigned tops[8],
                                                     unsigned short lines[TE_TILE][24])
{
    const float square = p.square ? square_code(p, values, encode, tops[0]) : 6.0F;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const unsigned long long index = (unsigned long long)(below + (column + j) * high + row);
        float m;
        const float code = p.square ? square : column_code(p, values, j, encode, tops[j]);
        const unsigned scale = group_scale(tops[j], encode, code, &m);
        lines[te_tile_column() + j][te_tile_row() >> 2] = (unsigned short)four_codes(
            p, index, values[0][j] * m, values[1][j] * m, values[2][j] * m, values[3][j] * m);
        if (te_tile_row() % TE_NVFP4_GROUP == 0)
            store_scale(p.column.scales, column + j, row / TE_NVFP4_GROUP,
                        column + j < p.input.columns ? scale : 0U);
    }
    __syncthreads();
    const int line = threadIdx.x >> 1, half = threadIdx.x & 1;
    const te_index to = (te_index)blockIdx.x * TE_TILE + line;
    const te_index at = (row - te_tile_row()) / 2 + half * 16;
    te_sixteen_bytes codes;
    codes.load_aligned(&lines[line][half * 8]);
    if (to < p.column.data.rows)
        codes.store(te_at<te_none>(p.column.data, to, at), p.column.aligned != 0,
                    p.column.data.columns - at);
    __syncthreads();
}

/* The bits of a magnitude; those of NaN are the largest. */
static __device__ __forceinline__ unsigned magnitude_or_nan(float value)
{
    return __float_as_uint(value) & 0x7fffffffU;
}

template <typename T> static __device__ __forceinline__ void nvfp4(const te_micro_params &p)
{
    __shared__ __align__(16) unsigned short lines[TE_TILE][24];
    __shared__ unsigned scratch[TE_TILE_THREADS / 32];
    const te_index column = (te_index)blockIdx.x * TE_TILE + te_tile_column();
    const te_index wide = (p.input.columns + TE_NVFP4_GROUP - 1) / TE_NVFP4_GROUP * TE_NVFP4_GROUP;
    const te_index high = (p.input.rows + TE_NVFP4_GROUP - 1) / TE_NVFP4_GROUP * TE_NVFP4_GROUP;
    const bool by_rows = p.row.data.data != nullptr, by_columns = p.column.data.data != nullptr;
    float row_encode = 1.0F, column_encode = 1.0F;
    if (p.noop != nullptr && *p.noop != 0.0F) return;
    if (p.row.amax != nullptr && !p.row.amax_per_row) { /* also where there is no data */
        const float largest = largest_of(p.row.partials, p.range, scratch);
        row_encode = te_nvfp4_encode(largest);
        if ((blockIdx.x | blockIdx.y | threadIdx.x) == 0) *p.row.amax = largest;
    }
    if (p.column.amax != nullptr) {
        const float largest = largest_of(p.column.partials, p.range, scratch);
        column_encode = te_nvfp4_encode(largest);
        if ((blockIdx.x | blockIdx.y | threadIdx.x) == 0) *p.column.amax = largest;
    }
    for (te_index top = (te_index)blockIdx.y * TE_TILE; top < p.height;
         top += (te_index)gridDim.y * TE_TILE) {
        const te_index row = top + te_tile_row();
        float values[4][8];
        unsigned tops[4] = {}, column_tops[8] = {}, square = 0U;
        fetch_values<T>(p.input, p.input_aligned != 0, row, column, values);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) tops[i] = max(tops[i], magnitude_or_nan(values[i][j]));
            tops[i] = lanes_max(tops[i], 1);
            square = max(square, tops[i]);
        }
        square = lanes_max(lanes_max(square, 8), 16);
        if (p.square)
#pragma unroll
            for (int i = 0; i < 4; i++) tops[i] = square;
        if (by_rows) nvfp4_rows(p, row, column, wide, row_encode, values, tops);
        if (!by_columns) continue;
        if (p.hadamard) hadamard(values);
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                column_tops[j] = max(column_tops[j], magnitude_or_nan(values[i][j]));
            column_tops[j] = p.square ? square : lanes_max(lanes_max(column_tops[j], 8), 16);
        }
        nvfp4_columns(p, row, column, p.input.rows * wide, high, column_encode, values, column_tops,
                      lines);
    }
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
        if (threadIdx.x == 0) p.amax[row] = te_nvfp4_amax(te_product(amax, p.range));
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
        hadamard(values);
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
    TE_KERNEL(te_nvfp4_##i, te_micro_params, (TE_TILE_THREADS), nvfp4<te_##i>(p))                  \
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
static __device__ __forceinline__ float nvfp4_factor(const te_micro_form &form, te_index row,
                                                     te_index rows)
{
    const te_index at = form.amax_per_row ? min(row, rows - 1) : 0;
    return form.amax != nullptr ? te_nvfp4_decode(form.amax[at]) : 1.0F;
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
            const float factor = nvfp4_factor(p.form, row + i, p.output.rows);
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
    const float factor = nvfp4_factor(p.form, 0, 1);
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
          p.out[0] = te_nvfp4_decode(*p.a) * te_nvfp4_decode(*p.b);
          p.out[1] = p.beta)
