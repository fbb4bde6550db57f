/* SPDX-License-Identifier: Apache-2.0
 *
 * operand.h - which form of a GEMM's operands is read, and how it lies there.
 */
#ifndef TE_CORE_OPERAND_H
#define TE_CORE_OPERAND_H

#include "core/scales.h"

/* The form of an operand that a GEMM reads. Quantized: rows run along k whatever was asked. */
typedef struct te_gemm_operand {
    const te_tensor *data;
    const te_tensor *scales; /* NULL for high precision */
    const te_tensor *amax;   /* of NVFP4 */
    te_scaling_mode mode;
    int scales_to_256;
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
        .scales_to_256 = operand->scales_to_256,
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

/* The call that writes the numbers which a quantized form stands for; the operand has that form. */
static inline te_dequantize_args
te_dequantize_of(const te_operand *operand, const te_gemm_operand *form, const te_tensor *output)
{
    te_dequantize_args args = {.size = sizeof args,
                               .input = {.mode = form->mode, .scales_to_256 = form->scales_to_256},
                               .output = *output};
    if (form->data == &operand->row) {
        args.input.row = *form->data;
        args.input.row_scales = *form->scales;
        args.input.row_amax = *form->amax;
    } else {
        args.input.column = *form->data;
        args.input.column_scales = *form->scales;
        args.input.column_amax = *form->amax;
    }
    return args;
}

/* How a product of two operands is computed. */
typedef enum te_gemm_way {
    TE_GEMM_AS_IT_IS, /* by one multiplication of the data, and the scales */
    TE_GEMM_MICRO,    /* groups of one format, multiplied out to what holds them exactly */
    TE_GEMM_MIXED     /* operands that no GEMM reads together, and NVFP4 with an amax for each row:
                         multiplied out to fp32 */
} te_gemm_way;

static inline int te_scales_blocks(te_scaling_mode mode)
{
    return mode == TE_SCALING_BLOCK_1D || mode == TE_SCALING_BLOCK_2D;
}

static inline te_gemm_way te_gemm_way_of(const te_gemm_operand *a, const te_gemm_operand *b)
{
    const int both_e5m2 = a->data->dtype == TE_DTYPE_E5M2 && b->data->dtype == TE_DTYPE_E5M2;
    const int both_2d = a->mode == TE_SCALING_BLOCK_2D && b->mode == TE_SCALING_BLOCK_2D;
    const int blocks = te_scales_blocks(a->mode) && te_scales_blocks(b->mode);
    const int by_rows = a->mode == TE_SCALING_NVFP4 &&
                        (te_tensor_numel(a->amax) > 1 ||
                         (b->mode == TE_SCALING_NVFP4 && te_tensor_numel(b->amax) > 1));
    if (a->mode == b->mode && te_scales_micro(a->mode)) {
        return by_rows ? TE_GEMM_MIXED : TE_GEMM_MICRO;
    }
    if (both_e5m2 || both_2d) return TE_GEMM_MIXED;
    if (a->mode == TE_SCALING_NONE && b->mode == TE_SCALING_NONE) {
        return a->data->dtype == b->data->dtype ? TE_GEMM_AS_IT_IS : TE_GEMM_MIXED;
    }
    return a->mode == b->mode || blocks ? TE_GEMM_AS_IT_IS : TE_GEMM_MIXED;
}

/* The number of products that are summed: data may be padded further than that of the other. */
static inline int64_t te_gemm_depth(const te_gemm_operand *a, const te_gemm_operand *b)
{
    const int64_t of_a = te_gemm_extent(a, !a->transposed), of_b = te_gemm_extent(b, b->transposed);
    return of_a < of_b ? of_a : of_b;
}

#endif
