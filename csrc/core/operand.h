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
    const te_tensor *amax;   /* of NVFP4 */
    te_scaling_mode mode;
    int transposed; /* the operand is the transpose of data */
} te_gemm_operand;

/* The inverse scales begin here; NULL where there are none. */
static inline const float *te_inverse_scale(const te_tensor *scales)
{
    return scales == NULL ? NULL : (const float *)scales->data + TE_SCALES_INVERSE;
}

static inline te_gemm_operand te_gemm_form(const te_operand *operand, int transposed, int by_rows)
{
    if (operand->mode == TE_SCALING_NONE) {
        return (te_gemm_operand){.data = &operand->wide, .transposed = transposed};
    }
    return (te_gemm_operand){
        .data = by_rows ? &operand->row : &operand->column,
        .scales = by_rows ? &operand->row_scales : &operand->column_scales,
        .amax = by_rows ? &operand->row_amax : &operand->column_amax,
        .mode = operand->mode,
        .transposed = operand->mode == TE_SCALING_MXFP8 ? transposed : by_rows == transposed};
}

static inline te_gemm_operand te_gemm_a(const te_gemm_args *args)
{
    return te_gemm_form(&args->a, args->a_transposed != 0, args->a_transposed == 0);
}

/* Rows and columns of the operand's data in elements. */
static inline int64_t te_gemm_extent(const te_gemm_operand *form, int dim)
{
    return form->data->shape[dim] * (dim == 1 && form->mode == TE_SCALING_NVFP4 ? 2 : 1);
}

static inline te_gemm_operand te_gemm_b(const te_gemm_args *args)
{
    return te_gemm_form(&args->b, args->b_transposed != 0, args->b_transposed != 0);
}

#endif
