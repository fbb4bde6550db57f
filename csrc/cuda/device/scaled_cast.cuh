/* SPDX-License-Identifier: Apache-2.0
 *
 * scaled_cast.cuh - one pass over values that a source makes (tile_cast.cuh says what a source is),
 * cast with a scale per tile of 1 x 128 or 128 x 128, in both usages; or with a scale per row, of
 * which the launch before has found the maxima.
 *
 * A block has a tile of 128 x 128 values in registers: four quadrants of 64 x 64, each of 128
 * threads with 4 x 8 values. Maxima of rows and columns meet in shared memory, where each becomes a
 * scale once; rows are cast by theirs, columns by theirs, and turned quadrant by quadrant.
 */
#ifndef TE_DEVICE_SCALED_CAST_CUH
#define TE_DEVICE_SCALED_CAST_CUH

#include "tile_cast.cuh"

enum { TE_SCALED_WARPS = TE_SCALED_THREADS / 32 };

/* What the threads of a block share. */
struct te_scaled_shared {
    unsigned tiles[4][TE_TILE_WORDS];                    /* bytes to turn; column sums at the end */
    float rows[TE_SCALED_SIDE], columns[TE_SCALED_SIDE]; /* scales */
    float row_parts[2][TE_SCALED_SIDE];                  /* maxima by half of the columns */
    float column_parts[TE_SCALED_WARPS / 2][TE_SCALED_SIDE];
    unsigned words[TE_SCALED_WARPS];
};

/* First row and column of the calling thread's values within the tile. */
__device__ __forceinline__ int te_scaled_row()
{
    return (threadIdx.x >> 8) * TE_TILE + te_tile_row();
}
__device__ __forceinline__ int te_scaled_column()
{
    return (threadIdx.x >> 7 & 1) * TE_TILE + te_tile_column();
}

__device__ __forceinline__ float te_scale_of(const te_tile_params &t, float amax)
{
    return te_tile_scale(amax, t.to.fp8_max, t.to.epsilon, t.to.power_2, t.scaled.top);
}

/* Whether a source had rather make its values again for each use than hold them in registers. */
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

/* The maxima of the rows and columns of a tile, in parts; ends in a barrier. */
template <typename V>
__device__ __forceinline__ void te_scaled_maxima(te_scaled_shared &s, const V &values, int half)
{
    const int warp = (threadIdx.x >> 8) * (TE_SCALED_WARPS / 4) + (threadIdx.x >> 5 & 3);
    float tops[8] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float amax = 0.0F, v[8];
        values.row(half, i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            tops[j] = fmaxf(tops[j], fabsf(v[j]));
            amax = fmaxf(amax, fabsf(v[j]));
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, step));
        if ((threadIdx.x & 7) == 0) s.row_parts[threadIdx.x >> 7 & 1][te_scaled_row() + i] = amax;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float amax = fmaxf(tops[j], __shfl_xor_sync(0xffffffffU, tops[j], 8));
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffU, amax, 16));
        if ((threadIdx.x & 24) == 0) s.column_parts[warp][te_scaled_column() + j] = amax;
    }
    __syncthreads();
}

/* Line `at` of a form's tile that begins at (line, along): its maximum becomes its scale, which
 * goes to its scales; of rows it has been found before. `lines` and `elements` of a line are those
 * of the form without padding. */
__device__ __forceinline__ float te_scaled_line(const te_tile_params &t, const te_scaled_form &form,
                                                te_index line, te_index along, te_index lines,
                                                te_index elements, float amax)
{
    const te_index block = along / TE_SCALED_SIDE;
    if (form.scales == nullptr) return 1.0F;
    if (t.scaled.mode == TE_SCALED_ROW) {
        float *const place = form.scales + line;
        if (line >= lines) return 1.0F;
        const float scale = te_scale_of(t, place[form.stride]);
        if (along == 0 && elements > 0) *place = __fdiv_rn(1.0F, scale);
        return scale;
    }
    const float scale = te_scale_of(t, amax);
    if (block < form.count && line < form.stride)
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

/* Makes the scales of the tile from the maxima in parts; ends in a barrier. */
static __device__ __forceinline__ void te_scaled_scales(const te_tile_params &t,
                                                        te_scaled_shared &s, te_index top,
                                                        te_index left, te_index rows,
                                                        te_index columns)
{
    const int at = threadIdx.x & (TE_SCALED_SIDE - 1);
    const bool of_columns = threadIdx.x >> 7 == 1;
    float amax = 0.0F;
    if (threadIdx.x < TE_SCALED_SIDE) {
        amax = fmaxf(s.row_parts[0][at], s.row_parts[1][at]);
    } else if (of_columns) {
#pragma unroll
        for (int i = 0; i < TE_SCALED_WARPS / 2; i++) amax = fmaxf(amax, s.column_parts[i][at]);
    }
    if (t.scaled.measures) {
        const te_scaled_form &form = of_columns ? t.scaled.column : t.scaled.row;
        const te_index line = (of_columns ? left : top) + at;
        if (threadIdx.x < 2 * TE_SCALED_SIDE && form.scales != nullptr &&
            line < (of_columns ? columns : rows))
            te_raise(form.scales + form.stride + line, amax);
        __syncthreads();
        return;
    }
    if (t.scaled.mode == TE_SCALED_2D) {
        const float whole = te_block_max<TE_SCALED_THREADS>(amax, s.words);
        const float scale = te_scale_of(t, whole);
        const bool inside = top < rows && left < columns;
        if (threadIdx.x == 0)
            te_scaled_block(t.scaled.row, top, left, inside, left + TE_SCALED_SIDE >= columns,
                            scale);
        if (threadIdx.x == 32)
            te_scaled_block(t.scaled.column, left, top, inside, top + TE_SCALED_SIDE >= rows,
                            scale);
        if (threadIdx.x < TE_SCALED_SIDE)
            s.rows[at] = scale;
        else if (of_columns)
            s.columns[at] = scale;
    } else if (threadIdx.x < TE_SCALED_SIDE) {
        s.rows[at] = te_scaled_line(t, t.scaled.row, top + at, left, rows, columns, amax);
    } else if (of_columns) {
        s.columns[at] = te_scaled_line(t, t.scaled.column, left + at, top, columns, rows, amax);
    }
    __syncthreads();
}

/* Casts the tile at (top, left) of a matrix: `rows` and `columns` are those of the matrix. */
template <typename TO, typename V>
static __device__ __forceinline__ void
te_scaled_write(const te_tile_params &t, te_scaled_shared &s, V &values, int half, te_index top,
                te_index left, te_index rows, te_index columns)
{
    const te_index row = top + te_scaled_row(), column = left + te_scaled_column();
    const bool edge = row + 4 > rows || column + 8 > columns;
    te_vector<TO, 8> out[4];
    if (t.to.row.data != nullptr) {
        values.again();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v[8];
            values.row(half, i, v);
            te_cast_vector<TO>(v, s.rows[te_scaled_row() + i], t.to.e5m2, out[i]);
            if (edge) te_clear_beyond<TO>(row + i < rows ? columns - column : 0, out[i]);
        }
        te_put_rows<TO>(t.to.row, t.to.row_aligned != 0, row, column, out);
    }
    if (t.to.column.data == nullptr) return;
    float scales[8];
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        const float4 four = *(const float4 *)(s.columns + te_scaled_column() + j);
        scales[j] = four.x, scales[j + 1] = four.y, scales[j + 2] = four.z, scales[j + 3] = four.w;
    }
    values.again();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[8];
        values.row(half, i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= scales[j];
        te_cast_vector<TO>(v, 1.0F, t.to.e5m2, out[i]);
        if (edge) te_clear_beyond<TO>(row + i < rows ? columns - column : 0, out[i]);
    }
    unsigned *const tile = s.tiles[threadIdx.x >> 7];
    te_tile_put<TO>(tile, out);
    __syncthreads();
    te_tile_store<TO>(tile, t.to.column, t.to.column_aligned != 0,
                      left + (threadIdx.x >> 7 & 1) * TE_TILE, top + (threadIdx.x >> 8) * TE_TILE);
}

/* Sums the columns of a tile, in parts of 4 rows, and hands them on. */
template <typename V>
static __device__ __forceinline__ void te_scaled_sums(const te_tile_params &t, te_scaled_shared &s,
                                                      V &values, int half, int outputs,
                                                      te_index group, te_index left)
{
    const te_index column = left + threadIdx.x;
    float *const scratch = (float *)s.tiles;
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
    __syncthreads(); /* of two halves, the second one turns bytes there */
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
    const te_index column = left + te_scaled_column(), columns = outputs * t.columns;
    const bool casts = t.scaled.measures == 0;
    S source(p, column);
    te_scaled_values<S, te_repeats<S>::value> values;

    source.fetch(p, row);
    if (t.noop != nullptr && *t.noop != 0.0F) return;
    values.make(p, source, row);
#pragma unroll
    for (int half = 0; half < outputs; half++) {
        const te_index begin = half * t.columns + left;
        if (half + 1 < outputs && left >= t.columns) continue; /* padding behind the last half */
        if (t.scaled.mode != TE_SCALED_ROW || !casts) te_scaled_maxima(shared, values, half);
        te_scaled_scales(t, shared, top, begin, t.rows, columns);
        if (!casts) continue;
        te_scaled_write<TO>(t, shared, values, half, top, begin, t.rows, columns);
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
        else if (outputs > 1)
            __syncthreads(); /* scales and bytes of the first half are not read any more */
    }
}

#endif
