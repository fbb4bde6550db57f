/* SPDX-License-Identifier: Apache-2.0
 *
 * matrix.h - a tensor as the operators' loops see it, and how many threads a loop is worth.
 */
#ifndef TE_CPU_MATRIX_H
#define TE_CPU_MATRIX_H

#if defined(_OPENMP)
#include <omp.h>
#endif
#include <stdint.h>
#include <string.h>

#include "core/fork.h"
#include "core/interrupt.h"
#include "core/tensor.h"
#include "transformer_engine.h"

/* [rows, columns]; a vector is one row. Strides in elements. */
typedef struct te_cpu_matrix {
    unsigned char *data;
    int64_t rows, columns, row_stride, column_stride;
    size_t bytes; /* of an element */
    te_dtype dtype;
} te_cpu_matrix;

static inline te_cpu_matrix te_cpu_matrix_of(const te_tensor *tensor)
{
    te_cpu_matrix matrix = {.data = tensor->data,
                            .rows = 1,
                            .columns = 1,
                            .column_stride = 1,
                            .bytes = te_dtype_bytes(tensor->dtype),
                            .dtype = tensor->dtype};
    if (tensor->ndim >= 1) {
        matrix.columns = tensor->shape[tensor->ndim - 1];
        matrix.column_stride = tensor->strides[tensor->ndim - 1];
    }
    if (tensor->ndim >= 2) {
        matrix.rows = tensor->shape[tensor->ndim - 2];
        matrix.row_stride = tensor->strides[tensor->ndim - 2];
    }
    if (matrix.columns <= 1) matrix.column_stride = 1; /* any stride is legal there */
    return matrix;
}

static inline unsigned char *te_cpu_at(const te_cpu_matrix *matrix, int64_t row, int64_t column)
{
    int64_t offset = row * matrix->row_stride + column * matrix->column_stride;
    return matrix->data + offset * (int64_t)matrix->bytes;
}

/* Zeroes the columns of a matrix of bytes from `first` on. */
static inline void te_cpu_zero_columns(const te_cpu_matrix *matrix, int64_t first)
{
    if (matrix->data == NULL || matrix->columns <= first) return;
    for (int64_t r = 0; r < matrix->rows; r++) {
        memset(te_cpu_at(matrix, r, first), 0, (size_t)(matrix->columns - first));
    }
}

/* A tensor of up to four dims, whose last one is the last; a dim that is not there, or of 1 and
 * stands for all, has stride 0. */
typedef struct te_cpu_tensor4 {
    unsigned char *data; /* NULL: absent */
    int64_t strides[4];
    const int32_t *offsets; /* of packed sequences: the index in dim 1 with which each begins; else
                               NULL */
    int64_t bytes;          /* of an element */
    te_dtype dtype;
} te_cpu_tensor4;

static inline te_cpu_tensor4 te_cpu_tensor4_of(const te_tensor *tensor)
{
    te_cpu_tensor4 x = {.data = tensor->data,
                        .bytes = (int64_t)te_dtype_bytes(tensor->dtype),
                        .dtype = tensor->dtype};
    for (int dim = 0; x.data != NULL && dim < tensor->ndim; dim++) {
        x.strides[4 - tensor->ndim + dim] = tensor->shape[dim] == 1 ? 0 : tensor->strides[dim];
    }
    return x;
}

/* The first element at indices of the first three dims. */
static inline unsigned char *te_cpu_at4(const te_cpu_tensor4 *x, int64_t a, int64_t b, int64_t c)
{
    return x->data + (a * x->strides[0] + b * x->strides[1] + c * x->strides[2]) * x->bytes;
}

static inline int64_t te_cpu_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Threads that OpenMP would use here. One in a forked child: GNU's runtime would wait there for the
 * threads of a team that only the parent has. */
static inline int te_cpu_max_threads(void)
{
#if defined(_OPENMP)
    return omp_in_parallel() || te_fork_generation() > 0 ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

/* Number of this thread in its team. */
static inline int te_cpu_thread(void)
{
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Whether a call has been stopped; the thread that made it finds out for the others. */
static inline int te_cpu_stopped(te_interruptible *call)
{
    return te_cpu_thread() == 0 ? te_interruptible_ask(call) : te_interruptible_stopped(call);
}

/* Threads for a loop over so many rows of elements: starting a team costs microseconds. */
static inline int te_cpu_threads(int64_t rows, int64_t columns)
{
    return rows * columns < 32768 ? 1 : te_cpu_max_threads();
}

#endif
