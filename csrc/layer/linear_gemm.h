/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_gemm.h - the GEMMs of a linear node.
 */
#ifndef TE_LAYER_LINEAR_GEMM_H
#define TE_LAYER_LINEAR_GEMM_H

#include "layer/linear_cast.h"

/* What a GEMM of rows reads and writes; forms and weights that it finds by itself are
 * TE_NO_BUFFER. */
typedef struct te_linear_product {
    te_linear_gemm gemm;
    int32_t a, a_scales, b, d, bias;
    int32_t aux; /* with GELU in the epilogue its input, where that is kept */
    int gelu;
} te_linear_product;

/* The stage of a GEMM; an operand that is TE_NO_BUFFER it finds by itself. */
te_stage *te_linear_add_gemm(te_build *build, int32_t node, te_linear_gemm gemm, int32_t a,
                             int32_t b);
void te_linear_add_product(te_build *build, int32_t node, const te_linear_product *product);

/* The collective beside which a GEMM runs in pieces, TE_NOBODY: none. It reads rows of `a` by
 * themselves, of gathered ones the forms that were gathered. They have one scale, or those of tiles
 * of 1 x 128, which are copied for each piece. */
int32_t te_linear_collective_beside(const te_build *build, int32_t node, te_linear_gemm gemm);
/* Whether that collective gathers beside this GEMM. */
int te_linear_is_beside_gather(const te_build *build, int32_t collective, te_linear_gemm gemm);
/* A product beside a collective; `wide` is what this rank has of rows that that gathers in high
 * precision. */
void te_linear_multiply_pieces(te_build *build, int32_t node, te_linear_product *product,
                               int32_t collective, int32_t wide);

#endif
