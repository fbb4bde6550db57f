/* SPDX-License-Identifier: Apache-2.0
 *
 * matrix.cuh - how an elementwise kernel walks a matrix.
 *
 * A block of 256 threads is cut into rows of 2^lanes_log2 lanes, few for a narrow matrix and all of
 * them for a wide or dense one (a dense matrix is walked as one long row). A lane owns vectors of E
 * elements, UNROLL of them per tile, so that several loads are in flight; neighbouring lanes have
 * neighbouring vectors. Blocks stride over the tiles.
 */
#ifndef TE_DEVICE_MATRIX_CUH
#define TE_DEVICE_MATRIX_CUH

#include "cuda/device/types.h"

enum { TE_MATRIX_THREADS = 256, TE_MATRIX_UNROLL = 4 };

struct te_walk {
    te_index tile, tiles, column_tiles, lines; /* lines: matrix rows of one tile */
    int lanes_log2;

    __device__ __forceinline__ te_walk(te_index rows, te_index columns, int log2, int elements)
    {
        const te_index width = (te_index)elements * TE_MATRIX_UNROLL << log2;
        lanes_log2 = log2;
        lines = TE_MATRIX_THREADS >> log2;
        column_tiles = (columns + width - 1) / width;
        tiles = (rows + lines - 1) / lines * column_tiles;
        tile = blockIdx.x;
    }

    __device__ __forceinline__ bool more() const { return tile < tiles; }
    __device__ __forceinline__ void next() { tile += gridDim.x; }

    /* Row of this thread and the column of its first vector; the others are `step` columns apart. */
    __device__ __forceinline__ void place(int elements, te_index *row, te_index *column,
                                          te_index *step) const
    {
        te_index line, across;
        if (tiles <= 0x7fffffff) { /* a 64-bit division is slow */
            line = (unsigned)tile / (unsigned)column_tiles;
            across = (unsigned)tile % (unsigned)column_tiles;
        } else {
            line = tile / column_tiles;
            across = tile % column_tiles;
        }
        const int lane = threadIdx.x & ((1 << lanes_log2) - 1);
        *step = (te_index)elements << lanes_log2;
        *row = line * lines + (threadIdx.x >> lanes_log2);
        *column = across * TE_MATRIX_UNROLL * *step + (te_index)lane * elements;
    }
};

#endif
