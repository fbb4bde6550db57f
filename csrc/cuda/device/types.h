/* SPDX-License-Identifier: Apache-2.0
 *
 * types.h - what the parameter structs of the kernels are made of. Read by gcc, nvcc and NVRTC, so
 * it includes nothing: NVRTC has no <stdint.h>.
 */
#ifndef TE_CUDA_TYPES_H
#define TE_CUDA_TYPES_H

typedef long long te_index; /* 64 bits: rows, columns, strides and offsets, in elements */

/* A matrix with unit column stride. */
typedef struct te_view {
    unsigned char *data;
    te_index rows, columns, stride;
} te_view;

/* How a matrix is dealt out to blocks, see matrix.cuh. Worked out on the host: 64-bit divisions
 * cost a thread as much as its share of a copy. */
typedef struct te_walk {
    te_index tiles, column_tiles; /* tiles: of the matrix; column_tiles: next to each other */
    int lanes_log2;               /* lanes of one row of a tile */
} te_walk;

/* How a high-precision vector is written when its dtype is known at run time only. */
enum { TE_STORE_F32 = 0, TE_STORE_F16 = 1, TE_STORE_BF16 = 2 };

#endif
