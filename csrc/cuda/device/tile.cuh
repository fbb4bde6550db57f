/* SPDX-License-Identifier: Apache-2.0
 *
 * tile.cuh - the transposition of a 64 x 64 tile of bytes through shared memory.
 *
 * 128 threads. A thread owns 4 rows x 8 columns: lane % 8 says which 8 columns, warp and lane / 8
 * which 4 rows. It turns its two 4 x 4 blocks of bytes in registers, so that a word holds one
 * column, and writes words; then 16-byte pieces of columns are read back. The word index is
 * swizzled: both the writes (8 column groups x 4 row groups of one warp) and the reads (two columns
 * x four 16-byte pieces of a quarter warp) touch 32 different banks.
 */
#ifndef TE_DEVICE_TILE_CUH
#define TE_DEVICE_TILE_CUH

#include "vector.cuh"

enum { TE_TILE = 64, TE_TILE_THREADS = 128, TE_TILE_WORDS = TE_TILE * TE_TILE / 4 };

/* The calling thread among those of its tile: a block may have several tiles. */
__device__ __forceinline__ int te_tile_thread()
{
    return threadIdx.x & (TE_TILE_THREADS - 1);
}

/* First row and column of the calling thread's 4 x 8 elements within a tile. */
__device__ __forceinline__ int te_tile_row()
{
    return (te_tile_thread() >> 3) * 4;
}
__device__ __forceinline__ int te_tile_column()
{
    return (threadIdx.x & 7) * 8;
}

/* Index of the word that holds rows 4 * group .. + 3 of a column. Groups 4k .. 4k + 3 are adjacent.
 */
__device__ __forceinline__ int te_tile_word(int column, int group)
{
    const int line = column ^ (column >> 3 & 1);
    return line * 16 + (((group >> 2) ^ (column >> 4 & 3)) << 2) + (group & 3);
}

/* rows[i] holds 4 bytes of row i; columns[j] receives the 4 bytes of column j. */
__device__ __forceinline__ void te_transpose_4x4(const unsigned rows[4], unsigned columns[4])
{
    const unsigned a = __byte_perm(rows[0], rows[1], 0x5140);
    const unsigned b = __byte_perm(rows[2], rows[3], 0x5140);
    const unsigned c = __byte_perm(rows[0], rows[1], 0x7362);
    const unsigned d = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(a, b, 0x5410);
    columns[1] = __byte_perm(a, b, 0x7632);
    columns[2] = __byte_perm(c, d, 0x5410);
    columns[3] = __byte_perm(c, d, 0x7632);
}

/* Loads the thread's bytes of the tile at (row, column); beyond `rows` and `columns` they are 0. */
template <typename T>
__device__ __forceinline__ void te_tile_load(const te_view &from, bool aligned, te_index row,
                                             te_index column, te_index rows, te_index columns,
                                             te_vector<T, 8> out[4])
{
    row += te_tile_row();
    column += te_tile_column();
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i].load(te_at<T>(from, row + i, column), aligned,
                    row + i < rows ? columns - column : 0);
}

/* Of 4 rows x 8 columns, row i being rows[i], the words of columns 4 * part .. + 3. */
template <typename T>
__device__ __forceinline__ void te_turn_words(const te_vector<T, 8> rows[4], int part,
                                              unsigned columns[4])
{
    const unsigned in[4] = {rows[0].word[part], rows[1].word[part], rows[2].word[part],
                            rows[3].word[part]};
    te_transpose_4x4(in, columns);
}

/* Writes the thread's bytes, row i being rows[i], into the transposed tile. */
template <typename T>
__device__ __forceinline__ void te_tile_put(unsigned *tile, const te_vector<T, 8> rows[4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        unsigned out[4];
        te_turn_words<T>(rows, half, out);
#pragma unroll
        for (int j = 0; j < 4; j++)
            tile[te_tile_word(te_tile_column() + half * 4 + j, te_tile_row() >> 2)] = out[j];
    }
}

/* Writes the transposed tile to `to`: columns of the tile are its rows, from (first, second) on,
 * those below to.rows and to.columns. */
template <typename T>
__device__ __forceinline__ void te_tile_store(const unsigned *tile, const te_view &to, bool aligned,
                                              te_index first, te_index second)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int piece = te_tile_thread() + i * TE_TILE_THREADS, column = piece >> 2;
        const int quad = piece & 3;
        const te_index row = first + column, at = second + quad * 16;
        te_vector<T, 16> bytes;
        bytes.load_aligned(tile + te_tile_word(column, quad * 4));
        if (row < to.rows) bytes.store(te_at<T>(to, row, at), aligned, to.columns - at);
    }
}

#endif
