/* SPDX-License-Identifier: Apache-2.0
 *
 * launch.h - what the host side of every kernel family needs: views, alignment, grids.
 */
#ifndef TE_CUDA_LAUNCH_H
#define TE_CUDA_LAUNCH_H

#include "core/context.h"
#include "core/tensor.h"
#include "cuda/device/types.h"
#include "cuda/driver.h"

/* The largest grid in y and z. */
#define TE_CUDA_MAX_GRID_Y 65535

static inline te_view te_cuda_view(const te_tensor *tensor)
{
    te_view view = {tensor->data, tensor->shape[0], tensor->shape[1], tensor->strides[0]};
    if (tensor->shape[0] <= 1)
        view.stride = tensor->shape[1]; /* a single row's stride may be anything */
    return view;
}

/* The last dims of a view4 are those of the tensor; it may have fewer than 4. */
static inline te_view4 te_cuda_view4(const te_tensor *tensor)
{
    te_view4 view = {tensor->data, {0, 0, 0, 0}};
    for (int32_t i = 0; tensor->data != NULL && i < tensor->ndim; i++) {
        if (tensor->shape[i] != 1) view.strides[4 - tensor->ndim + i] = tensor->strides[i];
    }
    return view;
}

/* Every line along the last dim begins at a multiple of `bytes`. */
static inline int te_cuda_aligned4(const te_view4 *view, size_t element, size_t bytes)
{
    int aligned = (uintptr_t)view->data % bytes == 0;
    for (int i = 0; i < 3; i++) aligned &= (size_t)view->strides[i] * element % bytes == 0;
    return aligned;
}

/* Every row begins at a multiple of `bytes`. */
static inline int te_cuda_aligned(const te_view *view, size_t element, size_t bytes)
{
    return (uintptr_t)view->data % bytes == 0 &&
           (view->rows <= 1 || (size_t)view->stride * element % bytes == 0);
}

/* The rows lie one after the other: the matrix may be walked as one long row. */
static inline int te_cuda_is_dense(const te_view *view)
{
    return view->stride == view->columns;
}

static inline void te_cuda_flatten(te_view *view)
{
    view->columns *= view->rows;
    view->stride = view->columns;
    view->rows = 1;
}

/* The walk of device/matrix.cuh over [rows, columns] with vectors of `elements`; *blocks is the
 * grid, at most `limit`. */
te_walk te_cuda_plan_walk(int64_t rows, int64_t columns, int elements, uint32_t limit,
                          uint32_t *blocks);

/* The largest Philox word that drops an element: u = (word >> 8) * 2^-24 < probability, without
 * converting to float. The probability is more than 0. */
static inline uint32_t te_cuda_drop_limit(float probability)
{
    const double scaled = (double)probability * 16777216.0; /* exact */
    uint64_t threshold = (uint64_t)scaled;
    if ((double)threshold < scaled) threshold++;
    return (uint32_t)((threshold << 8) - 1);
}

/* Names of the kernels of one kind, by the dtype of what they read. */
#define TE_CUDA_NAME(I, i, prefix) [TE_DTYPE_##I] = prefix #i,
#define TE_CUDA_NAMES(prefix)                                                                      \
    {                                                                                              \
        TE_NUMBERS(TE_CUDA_NAME, prefix)                                                           \
    }

/* TE_STORE_* of f32, f16 or bf16. */
static inline int te_cuda_store(te_dtype dtype)
{
    return dtype == TE_DTYPE_F32   ? TE_STORE_F32
           : dtype == TE_DTYPE_F16 ? TE_STORE_F16
                                   : TE_STORE_BF16;
}

#endif
