/* SPDX-License-Identifier: Apache-2.0
 *
 * part_stages.h - the casting stages of a part (part.c) for its GEMMs (part_gemm.c). Internal to
 * the two.
 */
#ifndef TE_LAYER_PART_STAGES_H
#define TE_LAYER_PART_STAGES_H

#include "layer/part.h"

/* Where a cast goes; TE_NO_BUFFER: not wanted. */
typedef struct te_part_usages {
    int16_t row, column, pair;
} te_part_usages;

te_stage *te_part_stage(te_part *part, te_linear_stage stage, te_op op);

/* Casts with the recipe's scales; they fill the part's row, column and pair. */
void te_part_quantize_input(te_part *part);
void te_part_quantize_weight(te_part *part);
void te_part_quantize_grad(te_part *part, int16_t grad_bias);
/* Casts with the scales that the forward saved. */
void te_part_requantize_input(te_part *part, int row, int column);
void te_part_requantize_weight(te_part *part, int row, int column);
/* The bias gradient where nothing is cast. */
void te_part_bias_grad(te_part *part, int16_t grad_bias);

/* The operand in high precision: as it is, or after the producer has written it. */
int16_t te_part_wide_input(te_part *part);
int16_t te_part_wide_grad(te_part *part, int16_t grad_bias);

/* The bias in the dtype that the GEMM asks for; TE_NO_BUFFER without one. */
int16_t te_part_cast_bias(te_part *part);
/* Row-wise input of the GEMM: the local one, or what the caller gathers from every rank. */
int16_t te_part_gather(te_part *part);

#endif
