/* SPDX-License-Identifier: Apache-2.0
 *
 * operand.h - which form of a GEMM's operands is read, and how it lies there.
 */
#ifndef TE_CORE_OPERAND_H
#define TE_CORE_OPERAND_H

#include "core/tensor.h"

/* The form of an operand that a GEMM reads. Quantized: rows run along k whatever was asked. */
typedef struct te_gemm_operand {
    const te_tensor *data;
    const te_tensor *scales; /* NULL for high precision */
    int transposed;          /* the operand is the transpose of data */
} te_gemm_operand;

/* The number that data is multiplied with; NULL where there are no scales. */
static inline const float *te_inverse_scale(const te_tensor *scales)
{
    return scales == NULL ? NULL : (const float *)scales->data + TE_SCALES_INVERSE;
}

static inline te_gemm_operand te_gemm_form(const te_operand *operand, int transposed, int by_rows)
{
    if (operand->mode == TE_SCALING_NONE) {
        return (te_gemm_operand){.data = &operand->wide, .transposed = transposed};
    }
    return (te_gemm_operand){.data = by_rows ? &operand->row : &operand->column,
                             .scales = by_rows ? &operand->row_scales : &operand->column_scales,
                             .transposed = by_rows == transposed};
}

static inline te_gemm_operand te_gemm_a(const te_gemm_args *args)
{
    return te_gemm_form(&args->a, args->a_transposed != 0, args->a_transposed == 0);
}

static inline te_gemm_operand te_gemm_b(const te_gemm_args *args)
{
    return te_gemm_form(&args->b, args->b_transposed != 0, args->b_transposed != 0);
}

#endif
