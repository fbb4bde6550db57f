/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor.h - questions about te_tensor views that every layer asks. No ownership, no device.
 */
#ifndef TE_CORE_TENSOR_H
#define TE_CORE_TENSOR_H

#include "transformer_engine.h"

static inline int64_t te_round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static inline int64_t te_ceil_div(int64_t value, int64_t divisor)
{
    return (value + divisor - 1) / divisor;
}

/* A dense row-major matrix over data. */
te_tensor te_matrix(void *data, te_dtype dtype, te_device device, int64_t rows, int64_t columns);
/* A dense vector over data. */
te_tensor te_vector(void *data, te_dtype dtype, te_device device, int64_t length);

/* The dtype of the quantized forms, present or described; F32 where there are none. */
te_dtype te_operand_dtype(const te_operand *operand);

/* No more elements than an address space has: sums and products of a few sizes, and of bytes, do
 * not overflow below. */
#define TE_MOST_ELEMENTS ((int64_t)1 << 56)
/* Elements: INT64_MAX where the sizes, none of them negative, multiply to more. */
int64_t te_tensor_numel(const te_tensor *tensor);
/* The rows of a tensor, all dims before the last, as a matrix; of no dims it is as it was. The row
 * stride is TE_NO_STRIDE where they are no one distance apart. */
#define TE_NO_STRIDE (-1)
te_tensor te_tensor_rows(const te_tensor *tensor);
/* The argument has data. */
static inline int te_tensor_present(const te_tensor *tensor)
{
    return tensor->data != NULL;
}
/* Or it is described: a workspace query has no pointers yet. */
static inline int te_tensor_requested(const te_tensor *tensor)
{
    return tensor->data != NULL || tensor->ndim > 0;
}

#endif
