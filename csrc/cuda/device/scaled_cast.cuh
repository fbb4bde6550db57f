/* SPDX-License-Identifier: Apache-2.0
 *
 * scaled_cast.cuh - one pass over values that a source makes (tile_cast.cuh says what a source is),
 * cast with a scale per tile of 1 x 128 or 128 x 128, in both usages; or with a scale per row, of
 * which the launch before has found the maxima.
 *
 * A block has a tile of 128 x 128 values in registers: a warp 8 whole rows, a thread 4 x 8 values,
 * so that what a warp writes of either form is lines of 128 bytes. The maximum of a row is found
 * and becomes a scale within the warp; maxima of columns meet in shared memory. Rows are cast by
 * their scales, then columns by theirs; of a tile with one scale bytes are made once and turned.
 */
#ifndef TE_DEVICE_SCALED_CAST_CUH
#define TE_DEVICE_SCALED_CAST_CUH

#include "tile_cast.cuh"

enum {
    TE_SCALED_WARPS = TE_SCALED_THREADS / 32,
    TE_SCALED_WORDS = TE_SCALED_SIDE / 4 /* of a column of the tile */
};

/* What the threads of a block share. */
struct te_scaled_shared {
    unsigned tile[TE_SCALED_SIDE * TE_SCALED_WORDS]; /* bytes to turn; column sums at the end */
    float columns[TE_SCALED_SIDE];                   /* scales */
    float parts[TE_SCALED_WARPS][TE_SCALED_SIDE];    /* maxima of columns by warp */
    unsigned tops[TE_SCALED_WARPS];
};

/* First row and column of the calling thread's values within the tile. */
__device__ __forceinline__ int te_scaled_row()
{
    return (threadIdx.x >> 4) * 4;
}
__device__ __forceinline__ int te_scaled_column()
{
    return (threadIdx.x & 15) * 8;
}

/* Index of the word that holds rows 4 * group .. + 3 of a column, as te_tile_word. Writes of a warp
 * (16 column groups x 2 row groups) touch 16 banks, reads of 8 threads a whole column. */
__device__ __forceinline__ int te_scaled_word(int column, int group)
{
    return column * TE_SCALED_WORDS + (((group >> 2) ^ (column >> 3 & 7)) << 2) + (group & 3);
}

__device__ __forceinline__ float te_scale_of(const te_tile_params &t, float amax)
{
    return te_tile_scale(amax, t.to.fp8_max, t.to.epsilon, t.to.power_2, t.scaled.top);
}

/* Whether a source had rather make its values again for each use than hold them in registers. Its
 * kernels, bound by instructions, have code of their own for tiles that lie inside. */
template <typename S> struct te_repeats {
    static constexpr bool value = false;
};

/* The values of a thread: made once and held, or made again for each use. */
template <typename S, bool REPEATS> struct te_scaled_values {
    float held[S::outputs][4][8];

    __device__ __forceinline__ void make(const typename S::params &p, S &source, te_index row)
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float values[S::outputs][8];
            source.values(p, i, values);
#pragma unroll
            for (int half = 0; half < S::outputs; half++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    held[half][i][j] = !S::pads || row + i < p.tile.rows ? values[half][j] : 0.0F;
        }
    }
    __device__ __forceinline__ void again()
    {
    }
    __device__ __forceinline__ void row(int half, int i, float v[8]) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = held[half][i][j];
    }
};
template <typename S> struct te_scaled_values<S, true> {
    const typename S::params *p;
    S *source;

    __device__ __forceinline__ void make(const typename S::params &params, S &of, te_index)
    {
        p = &params, source = &of;
    }
    __device__ __forceinline__ void again()
    {
        source->forget();
    }
    __device__ __forceinline__ void row(int, int i, float v[8]) const
    {
        float values[1][8];
        source->values(*p, i, values);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = values[0][j];
    }
};

/* The maxima of the rows and columns of a thread's values. */
template <typename V>
__device__ __forceinline__ void te_scaled_maxima(const V &values, int half, float rows[4],
                                                 float columns[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++) columns[j] = 0.0F;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[8];
        values.row(half, i, v);
        rows[i] = 0.0F;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            columns[j] = fmaxf(columns[j], fabsf(v[j]));
            rows[i] = fmaxf(rows[i], fabsf(v[j]));
        }
    }
}

/* Of two maxima a thread hands one to the thread `step` lanes away and keeps the other for both:
 * the second one, where its lane has that bit. */
__device__ __forceinline__ float te_share_maxima(float first, float second, int step)
{
    const bool keeps_second = (threadIdx.x & step) != 0;
    const float given = __shfl_xor_sync(0xffffffffU, keeps_second ? first : second, step);
    return fmaxf(keeps_second ? second : first, given);
}

/* The maximum, over 16 lanes, of that of the 4 rows which is the thread's own; every fourth lane
 * has the same. */
__device__ __forceinline__ int te_scaled_own_row()
{
    return (threadIdx.x & 1) * 2 + (threadIdx.x >> 1 & 1);
}
__device__ __forceinline__ float te_scaled_row_max(const float rows[4])
{
    const float even = te_share_maxima(rows[0], rows[2], 1);
    const float odd = te_share_maxima(rows[1], rows[3], 1);
    float amax = te_share_maxima(even, odd, 2);
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, 4));
    return fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, 8));
}

/* From each thread's own row to its 4. */
__device__ __forceinline__ void te_scaled_spread(float own, float scales[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        scales[i] = __shfl_sync(0xffffffffU, own, (threadIdx.x & 16) | i >> 1 | (i & 1) << 1);
}

/* Leaves the maxima of the columns of a warp. */
__device__ __forceinline__ void te_scaled_put_parts(te_scaled_shared &s, const float columns[8])
{
    float four[4];
#pragma unroll
    for (int j = 0; j < 4; j++) four[j] = te_share_maxima(columns[j], columns[j + 4], 16);
    *(float4 *)&s.parts[threadIdx.x >> 5][te_scaled_column() + (threadIdx.x >> 2 & 4)] =
        make_float4(four[0], four[1], four[2], four[3]);
}
__device__ __forceinline__ float te_scaled_column_max(const te_scaled_shared &s)
{
    float amax = 0.0F;
#pragma unroll
    for (int i = 0; i < TE_SCALED_WARPS; i++) amax = fmaxf(amax, s.parts[i][threadIdx.x]);
    return amax;
}

/* Line `line` of a form, of a tile that begins at `along` of it: its maximum becomes its scale,
 * which one of the threads that have it writes to the form's scales; of rows it has been found
 * before. `lines` and `elements` of a line are those of the form without padding. */
__device__ __forceinline__ float te_scaled_line(const te_tile_params &t, const te_scaled_form &form,
                                                te_index line, te_index along, te_index lines,
                                                te_index elements, float amax, bool writes)
{
    const te_index block = along / TE_SCALED_SIDE;
    if (t.scaled.mode == TE_SCALED_ROW) {
        float *const place = form.scales + line;
        if (line >= lines) return 1.0F;
        const float scale = te_scale_of(t, place[form.stride]);
        if (writes && along == 0 && elements > 0) *place = __fdiv_rn(1.0F, scale);
        return scale;
    }
    const float scale = te_scale_of(t, amax);
    if (writes && block < form.count && line < form.stride)
        form.scales[block * form.stride + line] =
            line < lines && along < elements ? __fdiv_rn(1.0F, scale) : 0.0F;
    return scale;
}

/* The one scale of a form's tile of 128 x 128; the last tile of a line of tiles also clears what
 * pads the line. By one thread. */
__device__ __forceinline__ void te_scaled_block(const te_scaled_form &form, te_index line,
                                                te_index along, bool inside, bool last, float scale)
{
    const te_index row = line / TE_SCALED_SIDE, block = along / TE_SCALED_SIDE;
    if (form.scales == nullptr || row >= form.count) return;
    float *const place = form.scales + row * form.stride;
    if (block < form.stride) place[block] = inside ? __fdiv_rn(1.0F, scale) : 0.0F;
    if (last)
        for (te_index i = block + 1; i < form.stride; i++) place[i] = 0.0F;
}

/* The tile of a block: where it begins, and the rows and columns of the matrix. */
struct te_scaled_place {
    te_index top, left, rows, columns;

    /* WHOLE of what follows: the tile lies inside, and every access to the results is aligned. */
    __device__ __forceinline__ bool whole(const te_cast_target &to) const
    {
        return top + TE_SCALED_SIDE <= rows && left + TE_SCALED_SIDE <= columns &&
               (to.row.data == nullptr || to.row_aligned != 0) &&
               (to.column.data == nullptr || to.column_aligned != 0);
    }
};

/* One scale for the whole tile. */
__device__ __forceinline__ void te_scaled_square(const te_tile_params &t, te_scaled_shared &s,
                                                 const te_scaled_place &at, const float rows[4],
                                                 float scales[4])
{
    const float mine = fmaxf(fmaxf(rows[0], rows[1]), fmaxf(rows[2], rows[3]));
    const float scale = te_scale_of(t, te_block_max<TE_SCALED_THREADS>(mine, s.tops));
    const bool inside = at.top < at.rows && at.left < at.columns;
    if (threadIdx.x == 0)
        te_scaled_block(t.scaled.row, at.top, at.left, inside,
                        at.left + TE_SCALED_SIDE >= at.columns, scale);
    if (threadIdx.x == 32)
        te_scaled_block(t.scaled.column, at.left, at.top, inside,
                        at.top + TE_SCALED_SIDE >= at.rows, scale);
#pragma unroll
    for (int i = 0; i < 4; i++) scales[i] = scale;
}

/* The scales of the thread's rows; those of columns in shared memory, after the next barrier. Where
 * the launch measures, maxima are raised instead. */
template <typename V>
static __device__ __forceinline__ void
te_scaled_scales(const te_tile_params &t, te_scaled_shared &s, const V &values, int half,
                 const te_scaled_place &at, float scales[4])
{
    const bool measures = t.scaled.measures != 0;
    const bool finds = t.scaled.mode != TE_SCALED_ROW || measures;
    const te_scaled_form &row = t.scaled.row, &column = t.scaled.column;
    float rows[4], columns[8], amax = 0.0F;
    if (finds) te_scaled_maxima(values, half, rows, columns);
    if (t.scaled.mode == TE_SCALED_2D) {
        te_scaled_square(t, s, at, rows, scales);
        return;
    }
    if (finds && column.scales != nullptr) te_scaled_put_parts(s, columns);
    if (row.scales != nullptr) {
        const te_index line = at.top + te_scaled_row() + te_scaled_own_row();
        const bool first = (threadIdx.x & 12) == 0; /* of those that have the row */
        if (finds) amax = te_scaled_row_max(rows);
        if (!measures)
            te_scaled_spread(
                te_scaled_line(t, row, line, at.left, at.rows, at.columns, amax, first), scales);
        else if (first && line < at.rows)
            te_raise(row.scales + row.stride + line, amax);
    }
    if (column.scales != nullptr) {
        const te_index line = at.left + threadIdx.x;
        if (finds) __syncthreads();
        if (threadIdx.x >= TE_SCALED_SIDE) return;
        amax = finds ? te_scaled_column_max(s) : 0.0F;
        if (!measures)
            s.columns[threadIdx.x] =
                te_scaled_line(t, column, line, at.top, at.columns, at.rows, amax, true);
        else if (line < at.columns)
            te_raise(column.scales + column.stride + line, amax);
    }
}

/* The thread's bytes of its 4 rows: by the scale of each row, or BY_COLUMN of each column. */
template <typename TO, bool WHOLE, bool BY_COLUMN, typename V>
static __device__ __forceinline__ void te_scaled_bytes(const te_tile_params &t, V &values, int half,
                                                       const te_scaled_place &at,
                                                       const float *scales, te_vector<TO, 8> out[4])
{
    const te_index row = at.top + te_scaled_row(), column = at.left + te_scaled_column();
    const bool edge = !WHOLE && (row + 4 > at.rows || column + 8 > at.columns);
    values.again();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[8];
        values.row(half, i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= scales[BY_COLUMN ? j : i];
        te_cast_vector<TO>(v, 1.0F, t.to.e5m2, out[i]);
        if (edge) te_clear_beyond<TO>(row + i < at.rows ? at.columns - column : 0, out[i]);
    }
}

/* Turns the tile and writes it to the column-wise form. */
template <typename TO, bool WHOLE>
static __device__ __forceinline__ void te_scaled_turn(const te_tile_params &t, te_scaled_shared &s,
                                                      const te_scaled_place &at,
                                                      const te_vector<TO, 8> out[4])
{
#pragma unroll
    for (int part = 0; part < 2; part++) {
        unsigned words[4];
        te_turn_words<TO>(out, part, words);
#pragma unroll
        for (int j = 0; j < 4; j++)
            s.tile[te_scaled_word(te_scaled_column() + part * 4 + j, te_scaled_row() >> 2)] =
                words[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int piece = threadIdx.x + i * TE_SCALED_THREADS, line = piece >> 3, quad = piece & 7;
        const te_index row = at.left + line, column = at.top + quad * 16;
        te_vector<TO, 16> bytes;
        bytes.load_aligned(s.tile + te_scaled_word(line, quad * 4));
        if (WHOLE)
            bytes.store_aligned(te_at<TO>(t.to.column, row, column));
        else if (row < t.to.column.rows)
            bytes.store(te_at<TO>(t.to.column, row, column), t.to.column_aligned != 0,
                        t.to.column.columns - column);
    }
}

/* Casts the tile. `rows`: the scales of the thread's rows. */
template <typename TO, bool WHOLE, typename V>
static __device__ __forceinline__ void
te_scaled_write(const te_tile_params &t, te_scaled_shared &s, V &values, int half,
                const te_scaled_place &at, const float rows[4])
{
    const te_index row = at.top + te_scaled_row(), column = at.left + te_scaled_column();
    const bool square = t.scaled.mode == TE_SCALED_2D;
    te_vector<TO, 8> out[4];
    if (square || t.to.row.data != nullptr)
        te_scaled_bytes<TO, WHOLE, false>(t, values, half, at, rows, out);
    if (t.to.row.data != nullptr) {
        if (WHOLE) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[i].store_aligned(te_at<TO>(t.to.row, row + i, column));
        } else {
            te_put_rows<TO>(t.to.row, t.to.row_aligned != 0, row, column, out);
        }
    }
    if (t.to.column.data == nullptr) return;
    if (!square) {
        float columns[8];
        __syncthreads(); /* the scales are there */
        *(float4 *)columns = *(const float4 *)(s.columns + te_scaled_column());
        *(float4 *)(columns + 4) = *(const float4 *)(s.columns + te_scaled_column() + 4);
        te_scaled_bytes<TO, WHOLE, true>(t, values, half, at, columns, out);
    }
    te_scaled_turn<TO, WHOLE>(t, s, at, out);
}

/* Sums the columns of a tile, in parts of 4 rows, and hands them on. */
template <typename V>
static __device__ __forceinline__ void te_scaled_sums(const te_tile_params &t, te_scaled_shared &s,
                                                      V &values, int half, int outputs,
                                                      te_index group, te_index left)
{
    const te_index column = left + threadIdx.x;
    float *const scratch = (float *)s.tile;
    float *const line = scratch + (te_scaled_row() >> 2) * TE_SCALED_SIDE + te_scaled_column();
    float sums[8] = {};
    values.again();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[8];
        values.row(half, i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] += v[j];
    }
    __syncthreads(); /* the bytes there have been read */
    *(float4 *)line = make_float4(sums[0], sums[1], sums[2], sums[3]);
    *(float4 *)(line + 4) = make_float4(sums[4], sums[5], sums[6], sums[7]);
    __syncthreads();
    if (threadIdx.x < TE_SCALED_SIDE && column < t.columns) {
        float sum = 0.0F;
#pragma unroll 8
        for (int i = 0; i < TE_SCALED_SIDE / 4; i++)
            sum += scratch[i * TE_SCALED_SIDE + threadIdx.x];
        if (t.sums != nullptr)
            t.sums[(group * outputs + half) * t.columns + column] = sum;
        else
            te_store_as(t.bias_dtype, t.bias_grad, half * t.columns + column, sum);
    }
}

/* S: source; with two outputs a half has whole tiles. TO: te_e4m3, te_e5m2 or te_any_fp8. A block
 * has one tile, and the next one that beside it. */
template <typename S, typename TO>
static __device__ __forceinline__ void te_scaled_cast(const typename S::params &p)
{
    constexpr int outputs = S::outputs;
    const te_tile_params &t = p.tile;
    __shared__ __align__(16) te_scaled_shared shared;
    const unsigned across = (unsigned)t.scaled.across, line = blockIdx.x / across;
    const te_index group = t.from_bottom ? gridDim.x / across - 1 - line : line;
    const te_index left = (te_index)(blockIdx.x - line * across) * TE_SCALED_SIDE;
    const te_index top = group * TE_SCALED_SIDE, row = top + te_scaled_row();
    const te_index column = left + te_scaled_column();
    S source(p, column);
    te_scaled_values<S, te_repeats<S>::value> values;

    source.fetch(p, row);
    if (t.noop != nullptr && *t.noop != 0.0F) return;
    values.make(p, source, row);
#pragma unroll
    for (int half = 0; half < outputs; half++) {
        const te_index begin = half * t.columns + left;
        if (half + 1 < outputs && left >= t.columns) continue; /* padding behind the last half */
        const te_scaled_place at = {top, begin, t.rows, outputs * t.columns};
        float scales[4];
        if (half > 0) __syncthreads(); /* what the first half shared is not read any more */
        te_scaled_scales(t, shared, values, half, at, scales);
        if (t.scaled.measures) continue;
        if (te_repeats<S>::value && at.whole(t.to))
            te_scaled_write<TO, true>(t, shared, values, half, at, scales);
        else
            te_scaled_write<TO, false>(t, shared, values, half, at, scales);
        if (S::writes && t.output.data != nullptr)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float v[8];
                values.row(half, i, v);
                if (row + i < t.rows)
                    te_store_values(t.output_dtype, t.output, t.output_aligned != 0, row + i,
                                    half * t.columns + column, t.columns - column, v);
            }
        if (S::adds && (t.sums != nullptr || t.bias_grad != nullptr))
            te_scaled_sums(t, shared, values, half, outputs, group, left);
    }
}

#endif
