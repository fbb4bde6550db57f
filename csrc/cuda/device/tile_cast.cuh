/* SPDX-License-Identifier: Apache-2.0
 *
 * tile_cast.cuh - one pass over values that a source makes, for everything that may be requested of
 * them: row-wise FP8 bytes, transposed bytes, the values in high precision, max|x|, column sums.
 *
 * Tiles of 64 x 64 with 32 elements per thread keep a small matrix on many multiprocessors and give
 * 64-byte pieces of every output row. A block goes down `depth` tiles: the lines of the transposed
 * output are then completed by the block that began them, and column sums, the maximum and the
 * scale are worked out once. The loads of the next tile are issued before the current one is
 * stored.
 *
 * A source S is what one thread knows of its 4 rows x 8 columns:
 *   S::params                        has a te_tile_params named `tile`
 *   S::outputs                       1, or 2: values of the left and the right half of the output
 *   S::pads                          rows outside give values other than 0
 *   S::writes                        high precision and partial maxima may be requested
 *   S::adds                          column sums may be requested
 *   S(const params &, column)        what does not change from row to row
 *   fetch(const params &, row)       issues the loads of 4 rows
 *   values(const params &, i, v)     row i of what was fetched: v[outputs][8]
 * Outside of the matrix loads give 0.
 */
#ifndef TE_DEVICE_TILE_CAST_CUH
#define TE_DEVICE_TILE_CAST_CUH

#include "tile.cuh"
#include "cast.cuh"

/* The thread's 4 x 8 elements at (row, column) of a matrix, 0 beyond `rows` and `columns`. */
template <typename T>
__device__ __forceinline__ void te_fetch_rows(const te_view &from, bool aligned, te_index row,
                                              te_index column, te_vector<T, 8> rows[4])
{
    const te_index left = from.columns - column;
    if (aligned && row + 4 <= from.rows && left >= 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i].load_aligned(te_at<T>(from, row + i, column));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        rows[i].load(te_at<T>(from, row + i, column), false, row + i < from.rows ? left : 0);
}

template <typename T>
__device__ __forceinline__ void te_put_rows(const te_view &to, bool aligned, te_index row,
                                            te_index column, const te_vector<T, 8> rows[4])
{
    const te_index left = to.columns - column;
    if (aligned && row + 4 <= to.rows && left >= 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) rows[i].store_aligned(te_at<T>(to, row + i, column));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (row + i < to.rows) rows[i].store(te_at<T>(to, row + i, column), false, left);
}

/* What belongs to output `half` of a matrix that holds both side by side. */
template <int OUTPUTS>
__device__ __forceinline__ te_view te_half_columns(te_view view, int half, te_index columns,
                                                   int bytes)
{
    if (OUTPUTS == 2) {
        view.data += half * columns * bytes;
        view.columns = half == 0 ? columns : view.columns - columns;
    }
    return view;
}
template <int OUTPUTS>
__device__ __forceinline__ te_view te_half_rows(te_view view, int half, te_index columns)
{
    if (OUTPUTS == 2) {
        view.data += half * columns * view.stride;
        view.rows = columns;
    }
    return view;
}

/* Adds what the 16 row groups of the block have summed of columns `left` .. and hands them on. */
static __device__ __forceinline__ void te_finish_sums(const te_tile_params &t, te_index group,
                                                      te_index left, int half, int outputs,
                                                      float *scratch, const float sums[8])
{
    const te_index column = left + threadIdx.x;
    float *line = scratch + (te_tile_row() >> 2) * TE_TILE + te_tile_column();
    __syncthreads();
    *(float4 *)line = make_float4(sums[0], sums[1], sums[2], sums[3]);
    *(float4 *)(line + 4) = make_float4(sums[4], sums[5], sums[6], sums[7]);
    __syncthreads();
    if (threadIdx.x >= TE_TILE || column >= t.columns) return;
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < TE_TILE / 4; i++) sum += scratch[i * TE_TILE + threadIdx.x];
    if (t.sums != nullptr)
        t.sums[(group * outputs + half) * t.columns + column] = sum;
    else
        te_store_as(t.bias_dtype, t.bias_grad, half * t.columns + column, sum);
}

/* S: source; TO: te_e4m3, te_e5m2, te_any_fp8, or te_none, which casts nothing. */
template <typename S, typename TO>
static __device__ __forceinline__ void te_tile_cast(const typename S::params &p)
{
    constexpr bool casts = TO::casts;
    constexpr int outputs = S::outputs;
    const te_tile_params &t = p.tile;
    __shared__ __align__(16) unsigned tiles[2][outputs][TE_TILE_WORDS];
    __shared__ unsigned scratch[TE_TILE_THREADS / 32];
    const te_index column = (te_index)blockIdx.x * TE_TILE + te_tile_column();
    const te_index group = t.from_bottom ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    const te_index first = group * t.depth * TE_TILE;
    const bool sums_wanted = S::adds && (t.sums != nullptr || t.bias_grad != nullptr);
    te_index end = first + (te_index)t.depth * TE_TILE;
    const te_index rows = max(t.rows, t.to.column.data != nullptr ? t.to.column.columns : 0);
    float amax = 0.0F, scale = 1.0F, sums[outputs][8] = {};
    S source(p, column);

    /* The first loads come before anything waits for the flag or the scale. */
    source.fetch(p, first + te_tile_row());
    if (t.noop != nullptr && *t.noop != 0.0F) return;
    if (casts || t.to.scales[0] != nullptr) scale = te_read_scale<TE_TILE_THREADS>(t.to, scratch);
    if (t.to.scales[0] != nullptr && (blockIdx.x | blockIdx.y | threadIdx.x) == 0)
        te_write_scales(t.to, scale);

    end = min(end, rows);
    int buffer = 0;
    for (te_index top = first; top < end; top += TE_TILE, buffer ^= 1) {
        const te_index row = top + te_tile_row();
        te_vector<TO, 8> out[outputs][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float values[outputs][8];
            source.values(p, i, values);
#pragma unroll
            for (int half = 0; half < outputs; half++) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (!S::pads || row + i < t.rows) amax = fmaxf(amax, fabsf(values[half][j]));
                    if (S::adds) sums[half][j] += values[half][j];
                }
                if constexpr (casts)
                    te_cast_vector<TO>(values[half], scale, t.to.e5m2, out[half][i]);
                if (S::writes && t.output.data != nullptr && row + i < t.rows)
                    te_store_values(t.output_dtype, t.output, t.output_aligned != 0, row + i,
                                    half * t.columns + column, t.columns - column, values[half]);
            }
        }
        if constexpr (casts) {
            if (row + 4 > t.rows || column + 8 > t.columns) /* zero whatever the scale */
#pragma unroll
                for (int i = 0; i < 4 * outputs; i++)
                    te_clear_beyond<TO>(row + i % 4 < t.rows ? t.columns - column : 0,
                                        out[i / 4][i % 4]);
        }
        if (top + TE_TILE < end) source.fetch(p, row + TE_TILE);
        if constexpr (casts) {
            if (t.to.row.data != nullptr)
#pragma unroll
                for (int half = 0; half < outputs; half++)
                    te_put_rows<TO>(te_half_columns<outputs>(t.to.row, half, t.columns, 1),
                                    t.to.row_aligned != 0, row, column, out[half]);
            if (t.to.column.data != nullptr) { /* two buffers: one barrier per tile is enough */
#pragma unroll
                for (int half = 0; half < outputs; half++)
                    te_tile_put<TO>(tiles[buffer][half], out[half]);
                __syncthreads();
#pragma unroll
                for (int half = 0; half < outputs; half++)
                    te_tile_store<TO>(
                        tiles[buffer][half], te_half_rows<outputs>(t.to.column, half, t.columns),
                        t.to.column_aligned != 0, (te_index)blockIdx.x * TE_TILE, top);
            }
        }
    }
    if (sums_wanted)
#pragma unroll
        for (int half = 0; half < outputs; half++)
            te_finish_sums(t, group, (te_index)blockIdx.x * TE_TILE, half, outputs, (float *)tiles,
                           sums[half]);
    if (t.to.amax != nullptr || (S::writes && t.amax_partials != nullptr)) {
        amax = te_block_max<TE_TILE_THREADS>(amax, scratch);
        if (threadIdx.x == 0) {
            if (t.to.amax != nullptr) te_raise(t.to.amax, amax);
            if (S::writes && t.amax_partials != nullptr)
                te_raise(t.amax_partials +
                             (blockIdx.x + (te_index)gridDim.x * blockIdx.y) % TE_CAST_PARTIALS,
                         amax);
        }
    }
}

#endif
