/* SPDX-License-Identifier: Apache-2.0
 *
 * scaled_tiles.h - casts with scales of rows or of tiles.
 */
#ifndef TE_CPU_SCALED_TILES_H
#define TE_CPU_SCALED_TILES_H

#include "core/scales.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"

enum { TE_CPU_SCALED_SIDE = 128 }; /* rows and columns of a tile */

/* One form of the result. */
typedef struct te_cpu_scaled_form {
    te_cpu_matrix data; /* data NULL: not wanted */
    float *scales;
    te_scale_layout layout;
} te_cpu_scaled_form;

/* One cast. */
typedef struct te_cpu_scaled {
    const te_cpu_kernels *kernels;
    te_scaling_mode mode; /* TE_SCALING_NONE: this is none */
    te_cpu_scaled_form row, column;
    float fp8_max, epsilon, top; /* top: what an infinite scale becomes */
    int power_2;
    int measures; /* the pass that measures rows */
} te_cpu_scaled;

/* A form of a request; its scales are 0 then. */
te_cpu_scaled_form te_cpu_scaled_form_of(te_scaling_mode mode, const te_tensor *data,
                                         const te_tensor *scales);
/* Casts, or measures, the tile at (row, column): values[rows][columns]. */
void te_cpu_scaled_tile(const te_cpu_scaled *cast, float (*values)[TE_CPU_SCALED_SIDE], int64_t row,
                        int64_t column, int64_t rows, int64_t columns);

#endif
