/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.h - what the norms and their gradients share on the host.
 */
#ifndef TE_CUDA_NORM_H
#define TE_CUDA_NORM_H

#include "core/status.h"
#include "cuda/kernels/norm.h"
#include "cuda/launch.h"

/* Blocks that stay on the device for many rows: as many as an H200 has multiprocessors, whatever
 * the device, so that sums are made in the same order wherever shared memory holds as many rows. */
#define TE_CUDA_NORM_BLOCKS 132

/* Blocks that do not stay, at most. */
#define TE_CUDA_NORM_MANY_BLOCKS (1 << 20)

/* Rows for blocks that stay, see device/norm.cuh. */
typedef struct te_cuda_row_request {
    int64_t rows;
    int64_t vectors; /* of 8 elements, of a row */
    int64_t each;    /* of them, that a thread holds */
    int64_t threads; /* of a block, at most */
    int64_t stages;  /* rows that a team loads ahead, at most */
    size_t piece;    /* bytes of a vector, of all matrices that are read */
    size_t factors;  /* bytes of a vector's factors */
    int64_t limit;   /* bytes of shared memory of a block */
} te_cuda_row_request;

typedef struct te_cuda_row_teams {
    int64_t lanes, threads, blocks;
    int64_t stages, shared; /* shared: bytes of dynamic shared memory */
} te_cuda_row_teams;

/* False where a row does not fit a block. */
int te_cuda_plan_row_teams(const te_cuda_row_request *request, te_cuda_row_teams *plan);

/* Whether rows are those of no matrix: heads. Absent tensors are not. */
static inline int te_cuda_norm_is_heads(const te_tensor *tensor)
{
    return tensor->ndim > 2 && te_tensor_rows(tensor).strides[0] == TE_NO_STRIDE;
}

/* The backend has kernels for such rows of a few columns. */
static inline te_status te_cuda_norm_check_heads(te_op op, const te_tensor *tensor)
{
    int64_t columns;
    if (!te_cuda_norm_is_heads(tensor)) return TE_OK;
    columns = tensor->shape[tensor->ndim - 1];
    if (columns <= TE_NORM_HEAD_COLUMNS) return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED,
                   "%s: heads of %lld columns, expected at most %d, or rows of a matrix",
                   te_op_name(op), (long long)columns, TE_NORM_HEAD_COLUMNS);
}

/* The rows of a tensor of up to four dims, one by one. */
static inline te_norm_heads te_cuda_norm_heads(const te_tensor *tensor)
{
    const te_view4 view = te_cuda_view4(tensor);
    te_norm_heads heads = {1, 1, {view.strides[0], view.strides[1], view.strides[2]}};
    if (tensor->ndim > 1) heads.inner = tensor->shape[tensor->ndim - 2];
    if (tensor->ndim > 2) heads.middle = tensor->shape[tensor->ndim - 3];
    return heads;
}

/* Every row begins at a multiple of `bytes`. */
static inline int te_cuda_norm_aligned(const te_tensor *tensor, size_t bytes)
{
    const te_view4 view = te_cuda_view4(tensor);
    return te_cuda_aligned4(&view, te_dtype_bytes(tensor->dtype), bytes);
}

/* Tensors may be absent; beta NULL: none. */
static inline te_norm_factors te_cuda_norm_factors(const te_tensor *gamma, const te_tensor *beta,
                                                   uint32_t flags)
{
    const void *second = beta != NULL ? beta->data : NULL;
    const te_tensor *given = te_tensor_present(gamma) || beta == NULL ? gamma : beta;
    return (te_norm_factors){
        .gamma = gamma->data,
        .beta = second,
        .dtype = te_cuda_store(given->dtype),
        .aligned = (uintptr_t)gamma->data % 16 == 0 && (uintptr_t)second % 16 == 0,
        .zero_centered = te_tensor_present(gamma) && (flags & TE_NORM_ZERO_CENTERED) != 0};
}

/* What multiplies sums over a row. */
static inline float te_cuda_norm_inverse(te_norm_kind kind, int64_t columns)
{
    return kind == TE_NORM_L2 ? 1.0F : 1.0F / (float)columns;
}

#endif
