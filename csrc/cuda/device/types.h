/* SPDX-License-Identifier: Apache-2.0
 *
 * types.h - what the parameter structs of the kernels are made of. Read by gcc, nvcc and NVRTC, so
 * it includes nothing: NVRTC has no <stdint.h>.
 */
#ifndef TE_CUDA_TYPES_H
#define TE_CUDA_TYPES_H

typedef long long te_index; /* 64 bits: rows, columns, strides and offsets, in elements */

/* X(DTYPE, dtype, ...): the dtypes of numbers that kernels read. */
#define TE_NUMBERS(X, ...)                                                                         \
    X(F32, f32, __VA_ARGS__)                                                                       \
    X(F16, f16, __VA_ARGS__)                                                                       \
    X(BF16, bf16, __VA_ARGS__)

/* A kernel: its parameter struct is `p`, its bounds (threads[, blocks per multiprocessor]). */
#define TE_KERNEL(name, params, bounds, ...)                                                       \
    extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ params p)     \
    {                                                                                              \
        __VA_ARGS__;                                                                               \
    }

/* A matrix with unit column stride. */
typedef struct te_view {
    unsigned char *data;
    te_index rows, columns, stride;
} te_view;

/* A tensor of up to four dims. Dims of one element have stride 0, so that a broadcast needs no
 * care. */
typedef struct te_view4 {
    unsigned char *data; /* NULL: absent */
    te_index strides[4];
} te_view4;

/* How a matrix is distributed to blocks, see matrix.cuh. Worked out on the host: 64-bit divisions
 * cost a thread as much as its share of a copy. */
typedef struct te_walk {
    te_index tiles, column_tiles; /* tiles: of the matrix; column_tiles: next to each other */
    int lanes_log2;               /* lanes of one row of a tile */
} te_walk;

/* How a high-precision vector is read or written when its dtype is known at run time only. */
enum { TE_STORE_F32 = 0, TE_STORE_F16 = 1, TE_STORE_BF16 = 2 };

enum {
    TE_CAST_PARTIALS = 1024
}; /* floats of partial maxima; TE_AMAX_PARTIALS of the public header */

/* Where FP8 goes, and with which scale: see cast.cuh. */
typedef struct te_cast_target {
    te_view row;           /* [rows, >= columns] bytes; data NULL: not requested */
    te_view column;        /* [columns, >= rows] bytes; data NULL: not requested */
    const float *scale;    /* 1 float; NULL or 0: from partials; both NULL: 1 */
    const float *partials; /* TE_CAST_PARTIALS floats, 16-byte aligned if partials_aligned */
    float *scales[2];      /* 2 floats each; the first NULL: not requested; the second: no others */
    float *amax;           /* 1 float or NULL */
    float fp8_max, epsilon; /* for partials */
    int power_2;
    int e5m2; /* the bytes are E5M2, else E4M3, where no template parameter says so */
    int row_aligned, column_aligned; /* every row begins at 8 (column: 16) bytes */
    int partials_aligned;
} te_cast_target;

/* Casts with scales of rows or of tiles of 128 elements, see scaled_cast.cuh. */
enum { TE_SCALED_NONE, TE_SCALED_ROW, TE_SCALED_1D, TE_SCALED_2D };
enum { TE_SCALED_SIDE = 128, TE_SCALED_THREADS = 512 };

/* The scales [count, stride] of one form. */
typedef struct te_scaled_form {
    float *scales; /* NULL: the form is not requested */
    te_index count, stride;
} te_scaled_form;

typedef struct te_scaled_params {
    te_scaled_form row, column;
    int across;   /* tiles beside each other */
    float top;    /* what an infinite scale becomes */
    int mode;     /* TE_SCALED_* */
    int measures; /* raises the maxima of rows, and casts nothing */
} te_scaled_params;

/* One form of data in small groups. */
typedef struct te_micro_form {
    te_view data;          /* bytes; data NULL: not requested */
    te_view scales;        /* bytes, padding included */
    const float *partials; /* NVFP4: TE_CAST_PARTIALS floats; NULL: the amax is there */
    float *amax;           /* NVFP4: 1 float; written by a cast, read by its inverse (NULL: 1) */
    int amax_per_row;      /* it has as many floats as data has rows */
    int aligned;           /* every access of a thread to the data is aligned */
} te_micro_form;

/* Casts to MXFP8 and NVFP4, see micro_cast.cuh. */
typedef struct te_micro_params {
    te_micro_form row, column;
    const te_index *rng; /* {seed, offset}: rounds stochastically; NULL: to nearest */
    float fp8_max;
    int across;        /* tiles beside each other */
    int square;        /* scales of 32 x 32 or 16 x 16 values */
    int hadamard;      /* the column-wise values are transformed, */
    unsigned signs;    /* negated first where bits are set */
    int margin;        /* MXFP8 */
    int four_over_six; /* NVFP4: groups whose largest magnitude becomes 4 where that loses less, */
    int squared;       /* by the squares of errors */
    float range;       /* NVFP4: te_nvfp4_range */
} te_micro_params;

/* What a kernel on 64 x 64 tiles does besides its source, see tile_cast.cuh. Grid: (column tiles,
 * row groups); 128 threads. Block (x, y) does the `depth` tiles below each other that begin at row
 * tile y * depth, or y counted from the bottom. With `scaled` tiles are 128 x 128, each of one
 * block of 512 threads, in a grid of one dim; with `micro` each tile has a block of such a grid. A
 * source with two outputs fills columns [0, columns) and [columns, 2 columns) of
 * everything below. */
typedef struct te_tile_params {
    te_index rows, columns; /* of the values of one output */
    te_cast_target to;
    te_scaled_params scaled;
    te_micro_params micro;
    te_view output;       /* the values in high precision; data NULL: not requested */
    const float *noop;    /* 1 float or NULL */
    float *sums;          /* [row groups, outputs * columns] column sums of each group, or NULL */
    void *bias_grad;      /* [outputs * columns]; with one row group, where sums is NULL; or NULL */
    float *amax_partials; /* TE_CAST_PARTIALS floats that begin with 0, raised; or NULL */
    int depth;
    int from_bottom;              /* begin with the rows that the launch before has read last */
    int bias_dtype, output_dtype; /* TE_STORE_* */
    int output_aligned;           /* every row begins at 16 bytes */
} te_tile_params;

#endif
