/* SPDX-License-Identifier: Apache-2.0
 *
 * part_stages.h - what the files of a part share: its buffers (part.c), the casting stages over
 * them (part_cast.c) and the GEMMs (part_gemm.c).
 */
#ifndef TE_LAYER_PART_STAGES_H
#define TE_LAYER_PART_STAGES_H

#include "layer/part.h"

/* X(ENUM, name): buffers that belong to a part and carry its prefix. */
#define TE_PART_BUFFERS(X)                                                                         \
    X(WEIGHT, weight)                                                                              \
    X(WEIGHT_ROW, weight_row)                                                                      \
    X(WEIGHT_COLUMN, weight_column)                                                                \
    X(WEIGHT_PAIR, weight_pair)                                                                    \
    X(BIAS, bias)                                                                                  \
    X(BIAS_CAST, bias_cast)                                                                        \
    X(INPUT_ROW, input_row)                                                                        \
    X(INPUT_COLUMN, input_column)                                                                  \
    X(INPUT_PAIR, input_pair)                                                                      \
    X(INPUT_WIDE, input_wide)                                                                      \
    X(INPUT_GATHERED, input_gathered)                                                              \
    X(GRAD_OUTPUT_ROW, grad_output_row)                                                            \
    X(GRAD_OUTPUT_COLUMN, grad_output_column)                                                      \
    X(GRAD_OUTPUT_PAIR, grad_output_pair)                                                          \
    X(GRAD_OUTPUT_WIDE, grad_output_wide)                                                          \
    X(GRAD_WEIGHT, grad_weight)                                                                    \
    X(MAIN_GRAD, main_grad)                                                                        \
    X(GRAD_BIAS, grad_bias)

typedef enum te_part_buffer {
#define X(NAME, name) TE_PART_BUFFER_##NAME,
    TE_PART_BUFFERS(X)
#undef X
        TE_PART_BUFFER_COUNT
} te_part_buffer;

/* ---- part.c: buffers that stages add as they need them ---- */

int16_t te_part_new_pair(te_part *part, te_part_buffer name, te_buffer_role role);
void te_part_new_weight_row(te_part *part, te_buffer_role role);
void te_part_new_weight_column(te_part *part, te_buffer_role role);
void te_part_new_input_row(te_part *part);
void te_part_new_input_column(te_part *part, te_buffer_role role);
/* A high-precision operand between the producer and the GEMM. */
void te_part_new_input_wide(te_part *part, te_buffer_role role);
int16_t te_part_new_gathered_input(te_part *part);
void te_part_new_grad_row(te_part *part);
void te_part_new_grad_column(te_part *part, te_buffer_role role);
void te_part_new_grad_wide(te_part *part, te_buffer_role role);
int16_t te_part_new_bias_cast(te_part *part, te_dtype dtype);

/* ---- part_cast.c ---- */

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
