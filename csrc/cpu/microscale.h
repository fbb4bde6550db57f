/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.h - casts to MXFP8 and NVFP4 (core/microscale.h) of tiles of fp32 numbers, and their
 * inverse.
 */
#ifndef TE_CPU_MICROSCALE_H
#define TE_CPU_MICROSCALE_H

#include "core/scales.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"

enum { TE_CPU_MICRO_ROWS = 64, TE_CPU_MICRO_COLUMNS = 256 }; /* of a tile: whole groups */

/* One form of the result. */
typedef struct te_cpu_micro_form {
    te_cpu_matrix data, scales; /* data NULL: not wanted */
    float amax;                 /* NVFP4: of the whole tensor, */
    const float *row_amax;      /* or NULL, of each row */
} te_cpu_micro_form;

/* One cast of a matrix. */
typedef struct te_cpu_micro {
    const te_cpu_kernels *kernels;
    te_scaling_mode mode; /* TE_SCALING_NONE: this is none */
    te_dtype dtype;       /* MXFP8: of the data */
    te_cpu_micro_form row, column;
    int64_t rows, columns;
    int square, hadamard, margin, four_over_six;
    float range;        /* NVFP4: te_nvfp4_range */
    const int64_t *rng; /* NULL: to nearest */
} te_cpu_micro;

/* Writes the amax of each row, where a request has that (row_scaled): before the first tile. */
void te_cpu_micro_measure_rows(const te_cast_request *cast, const te_cpu_matrix *input);
/* A cast of [rows, columns]; its results are 0 then, the amax of the tensor is written. */
te_cpu_micro te_cpu_micro_begin(const te_cast_request *cast, int64_t rows, int64_t columns);
/* Casts the tile at (row, column): values[TE_CPU_MICRO_ROWS][TE_CPU_MICRO_COLUMNS], 0 beyond the
 * matrix. */
void te_cpu_micro_tile(const te_cpu_micro *micro, const float *values, int64_t row, int64_t column);

/* The largest magnitude of the transposed and transformed matrix (`way`: te_hadamard), NaN
 * ignored. */
float te_cpu_hadamard_amax(const te_cpu_kernels *kernels, const te_cpu_matrix *input, int way);

/* Data to numbers; a GEMM's operand is `raw`, without the factor of an NVFP4 tensor. From the
 * row-wise data, or from the column-wise data. */
void te_cpu_micro_dequantize(const te_operand *input, int by_rows, int raw,
                             const te_tensor *output);

#endif
