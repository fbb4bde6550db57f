/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.h - parameters of the norms and of their gradients. Device pointers are borrowed for the
 * launch. Read by gcc, nvcc and NVRTC.
 *
 * LayerNorm, RMSNorm and L2 norm differ in two numbers: whether there is a mean (`centered`), and
 * `inverse`, 1 / columns or 1, which multiplies sums over a row.
 */
#ifndef TE_CUDA_KERNELS_NORM_H
#define TE_CUDA_KERNELS_NORM_H

#include "cuda/device/types.h"

/* X(DTYPE, dtype) of the kernel for wide rows; the others are there for all TE_NUMBERS. */
#define TE_NORM_WIDE_INSTANCES(X)                                                                  \
    X(F16, f16)                                                                                    \
    X(BF16, bf16)

enum {
    TE_NORM_ROWS = 4, /* narrow rows that a thread holds a vector of 8 elements of */
    TE_NORM_NARROW_THREADS = 256,
    TE_NORM_WIDE_VECTORS = 4, /* of a wide row of 16-bit elements, that a thread holds */
    TE_NORM_WIDE_THREADS = 768,
    TE_NORM_WIDE_STAGES = 2, /* such rows that a team loads ahead, at most */
    TE_NORM_VECTORS = 4,     /* of any other row, that a thread holds */
    TE_NORM_THREADS = 512    /* at most: rows beyond 512 * 4 * 8 columns are read in turns */
};

/* Rows of up to three dims, as heads of a projection are: row r lies at (r / inner / middle,
 * r / inner % middle, r % inner). */
typedef struct te_norm_heads {
    te_index inner, middle;
    te_index strides[3]; /* of the outer, the middle and the inner dim, in elements */
} te_norm_heads;

/* gamma and beta; both of one dtype. */
typedef struct te_norm_factors {
    const void *gamma; /* [columns]; NULL: 1 */
    const void *beta;  /* [columns]; NULL: 0 */
    int dtype;         /* TE_STORE_* */
    int aligned;       /* both begin at 16 bytes */
    int zero_centered; /* the factor is 1 + gamma */
} te_norm_factors;

/* Statistics, and what follows from them along rows. Teams of `lanes` threads share rows: a power
 * of two up to 32, or whole warps. Blocks stride over the rows. The kernel for wide rows takes
 * nothing but whole vectors: multiples of 8 columns, of FP8 rows too, all of them aligned; it has
 * dynamic shared memory for `stages` rows of each team and for the factors. */
typedef struct te_norm_params {
    te_view input; /* [rows, columns]; te_norm_heads_<dtype>: rows lie as `heads` says */
    te_norm_heads heads;
    te_view output;    /* [rows, columns]; data NULL: not requested */
    te_cast_target to; /* column is not read */
    te_norm_factors factors;
    float *mean, *rsigma; /* [rows]; written, or read if `given`; NULL: not requested, mean 0 */
    float *amax_partials; /* TE_CAST_PARTIALS floats, for at most as many blocks; or NULL */
    float eps, inverse;
    int given, centered;
    int lanes, stages;
    int input_aligned, output_aligned; /* every row begins at 16 bytes */
    int output_dtype;                  /* TE_STORE_* */
} te_norm_params;

/* A kernel on tiles, see te_tile_params: the cast of what is normalized with given statistics. */
typedef struct te_norm_tile_params {
    te_tile_params tile;
    te_view input; /* [rows, columns] */
    te_norm_factors factors;
    const float *mean, *rsigma; /* [rows]; mean NULL: 0 */
    int input_aligned;
} te_norm_tile_params;

#endif
