/* SPDX-License-Identifier: Apache-2.0
 *
 * elementwise.c - fill, cast and transpose.
 */
#include <string.h>

#include "core/status.h"
#include "core/fp8.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"

enum {
    PIECE = 512
}; /* elements converted at a time, so that the fp32 between stays in the cache */

/* Writes n equal elements. */
static void fill_row(unsigned char *target, const unsigned char *element, size_t size, int64_t n)
{
    if (size == 1) {
        memset(target, element[0], (size_t)n);
        return;
    }
    size_t total = (size_t)n * size, done = size < total ? size : total;
    memcpy(target, element, done);
    while (done < total) { /* doubling what is there */
        size_t more = done < total - done ? done : total - done;
        memcpy(target + done, target, more);
        done += more;
    }
}

te_status te_cpu_fill(const te_fill_args *args)
{
    const te_cpu_matrix output = te_cpu_matrix_of(&args->output);
    unsigned char element[8] = {0};
    size_t size = te_encode(output.dtype, args->value, element);
    if (output.columns == 0) return TE_OK;
#pragma omp parallel for num_threads(te_cpu_threads(output.rows, output.columns))
    for (int64_t r = 0; r < output.rows; r++) {
        fill_row(te_cpu_at(&output, r, 0), element, size, output.columns);
    }
    return TE_OK;
}

/* n elements of one row; both rows are contiguous. */
static void convert_row(const te_cpu_kernels *kernels, const unsigned char *x, te_dtype from,
                        unsigned char *y, te_dtype to, int64_t n)
{
    float values[PIECE];
    size_t x_bytes = te_dtype_bytes(from), y_bytes = te_dtype_bytes(to);
    if (from == to) {
        memcpy(y, x, (size_t)n * x_bytes);
    } else if (from == TE_DTYPE_F32) {
        kernels->from_f32[to]((const float *)(const void *)x, y, n);
    } else if (to == TE_DTYPE_F32) {
        kernels->to_f32[from](x, (float *)(void *)y, n);
    } else {
        for (int64_t first = 0; first < n; first += PIECE) {
            int64_t width = te_cpu_min(PIECE, n - first);
            kernels->to_f32[from](x + (size_t)first * x_bytes, values, width);
            kernels->from_f32[to](values, y + (size_t)first * y_bytes, width);
        }
    }
}

te_status te_cpu_cast(const te_cast_args *args)
{
    const te_cpu_kernels *kernels = te_cpu_kernels_get();
    const te_cpu_matrix input = te_cpu_matrix_of(&args->input);
    const te_cpu_matrix output = te_cpu_matrix_of(&args->output);
    int64_t rows = te_cpu_min(input.rows, output.rows);
    int64_t columns = te_cpu_min(input.columns, output.columns);
    /* With a column stride, elements are converted one by one. */
    int64_t step = input.column_stride == 1 && output.column_stride == 1 ? columns : 1;
    int64_t zero_step = output.column_stride == 1 ? output.columns : 1;
#pragma omp parallel for num_threads(te_cpu_threads(output.rows, output.columns))
    for (int64_t r = 0; r < output.rows; r++) {
        int64_t converted = r < rows ? columns : 0;
        for (int64_t c = 0; c < converted; c += step) {
            convert_row(kernels, te_cpu_at(&input, r, c), input.dtype, te_cpu_at(&output, r, c),
                        output.dtype, step);
        }
        for (int64_t c = converted; c < output.columns; c += zero_step) {
            size_t n = (size_t)te_cpu_min(zero_step, output.columns - c);
            memset(te_cpu_at(&output, r, c), 0, n * output.bytes);
        }
    }
    return TE_OK;
}

te_status te_cpu_transpose(const te_transpose_args *args)
{
    const te_cpu_matrix input = te_cpu_matrix_of(&args->input);
    const te_cpu_matrix output = te_cpu_matrix_of(&args->output);
    int64_t tiles_down = te_ceil_div(input.rows, TE_CPU_BLOCK);
    int64_t tiles = te_ceil_div(input.columns, TE_CPU_BLOCK) * tiles_down;
#pragma omp parallel for num_threads(te_cpu_threads(output.rows, output.columns))
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t column = tile / tiles_down * TE_CPU_BLOCK, row = tile % tiles_down * TE_CPU_BLOCK;
        te_cpu_matrix block = input;
        block.data = te_cpu_at(&input, row, column);
        block.rows = te_cpu_min(TE_CPU_BLOCK, input.rows - row);
        block.columns = te_cpu_min(TE_CPU_BLOCK, input.columns - column);
        te_cpu_write_columns(&output, row, column, &block);
    }
    te_cpu_zero_columns(&output, input.rows);
    return TE_OK;
}
