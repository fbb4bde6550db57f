/* SPDX-License-Identifier: Apache-2.0
 *
 * pack.h - a GEMM operand of any dtype rearranged to fp32 panels for the inner tile.
 *
 * Along its outer dimension (rows of a, columns of b) an operand is cut into panels of `width`; a
 * panel is [depth][width] floats, so that a tile reads it from front to back. The last panel is
 * filled up with zeros.
 */
#ifndef TE_CPU_PACK_H
#define TE_CPU_PACK_H

#include "core/scales.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"

typedef struct te_cpu_operand {
    const te_cpu_kernels *kernels;
    te_cpu_matrix data;
    int64_t outer, depth;     /* elements across and along the panels */
    int depth_contiguous;     /* data is [outer, depth]; else [depth, outer] */
    int width;                /* of a panel */
    te_inverse_scales scales; /* of quantized data, [outer, depth]; values NULL: 1 */
    int64_t begin;            /* depth at which a slice begins */
} te_cpu_operand;

/* outer_is_rows: the outer dimension is the rows of data. */
te_cpu_operand te_cpu_operand_of(const te_cpu_kernels *kernels, const te_tensor *data,
                                 int outer_is_rows, int width);
/* The part [k, k + depth) along the panels. */
te_cpu_operand te_cpu_operand_slice(const te_cpu_operand *operand, int64_t k, int64_t depth);
/* Writes `panels` panels from outer index `first` on, each depth * width floats. */
void te_cpu_pack(const te_cpu_operand *operand, int64_t first, int64_t panels, float *output);

#endif
