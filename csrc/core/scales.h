/* SPDX-License-Identifier: Apache-2.0
 *
 * scales.h - where the scale of an element of quantized data lies, by scaling mode.
 */
#ifndef TE_CORE_SCALES_H
#define TE_CORE_SCALES_H

#include "core/microscale.h"
#include "core/tensor.h"

/* The scales of a quantized form [rows, columns]: their tensor, dense, and the element of it that
 * belongs to an element of the form. */
typedef struct te_scale_layout {
    int32_t ndim;
    int64_t shape[2];
    int64_t across, along; /* rows, and elements of a row, that share a scale */
    int64_t across_step, along_step;
} te_scale_layout;

/* Zeroes for TE_SCALING_NONE, which has no scales. */
te_scale_layout te_scale_layout_of(te_scaling_mode mode, int64_t rows, int64_t columns);
/* Those of the column-wise form of a matrix [rows, columns]. */
te_scale_layout te_column_scale_layout_of(te_scaling_mode mode, int64_t rows, int64_t columns);

/* Whether a cast finds the scales of its rows or tiles by itself. */
static inline int te_scales_own(te_scaling_mode mode)
{
    return mode > TE_SCALING_TENSOR && mode != TE_SCALING_NVFP4;
}

/* Groups that no GEMM here reads (core/microscale.h). */
static inline int te_scales_micro(te_scaling_mode mode)
{
    return mode == TE_SCALING_MXFP8 || mode == TE_SCALING_NVFP4;
}

/* Bytes of a row of data of so many elements, at least. */
static inline int64_t te_row_bytes(te_scaling_mode mode, int64_t elements)
{
    return mode == TE_SCALING_NVFP4 ? te_round_up(elements, TE_NVFP4_GROUP) / 2 : elements;
}

/* The numbers that data is multiplied with. */
typedef struct te_inverse_scales {
    const float *values; /* NULL: 1 */
    te_scale_layout layout;
} te_inverse_scales;

static inline te_inverse_scales te_inverse_scales_of(te_scaling_mode mode, const te_tensor *data,
                                                     const te_tensor *scales)
{
    te_inverse_scales found = {scales->data,
                               te_scale_layout_of(mode, data->shape[0], data->shape[1])};
    return found;
}

static inline float te_inverse_scale_at(const te_inverse_scales *scales, int64_t row,
                                        int64_t column)
{
    const te_scale_layout *at = &scales->layout;
    return scales->values[row / at->across * at->across_step + column / at->along * at->along_step];
}

#endif
