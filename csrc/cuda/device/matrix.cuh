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

/* A thread's place in the tile it is at. */
struct te_place {
    te_index row, column, step; /* of its first vector; the next ones are `step` columns apart */

    __device__ __forceinline__ te_place(const te_walk &walk, te_index tile, int elements)
    {
        te_index line = 0, across = tile;
        if (walk.tiles != walk.column_tiles) {
            if (walk.tiles <= 0x7fffffff) { /* a 64-bit division is slow */
                line = (unsigned)tile / (unsigned)walk.column_tiles;
                across = (unsigned)tile % (unsigned)walk.column_tiles;
            } else {
                line = tile / walk.column_tiles;
                across = tile % walk.column_tiles;
            }
        }
        const int lane = threadIdx.x & ((1 << walk.lanes_log2) - 1);
        step = (te_index)elements << walk.lanes_log2;
        row = line * (TE_MATRIX_THREADS >> walk.lanes_log2) + (threadIdx.x >> walk.lanes_log2);
        column = across * TE_MATRIX_UNROLL * step + (te_index)lane * elements;
    }
};

#endif
