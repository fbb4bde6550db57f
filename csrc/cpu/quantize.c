/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c - FP8 casts (one pass over the input, see tiles.h) and their inverse, and max|x|.
 */
#include <string.h>

#include "core/scales.h"
#include "core/scaling_math.h"
#include "core/status.h"
#include "core/fp8.h"
#include "cpu/microscale.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"

TE_CPU_SUMS_WORKSPACE(quantize, input)

/* A row of the input as it lies. */
static const void *input_row(const void *self, int64_t row, int64_t column, int64_t n,
                             float *buffer)
{
    (void)n, (void)buffer;
    return te_cpu_at(self, row, column);
}

te_status te_cpu_quantize(const te_quantize_args *args)
{
    const te_cpu_matrix input = te_cpu_matrix_of(&args->input);
    const te_cpu_request request = {&args->cast, &args->bias_grad, args->workspace,
                                    args->workspace_size};
    TE_TRY(te_cpu_check_sums(TE_OP_QUANTIZE, &args->input, &request));
    if (args->noop != NULL && *args->noop != 0.0F) return TE_OK;
    te_cpu_tiles tiles = te_cpu_tiles_begin(&request, input.rows, input.columns, input.dtype, 0);
    tiles.source = input_row;
    if (tiles.micro.row.row_amax != NULL) te_cpu_micro_measure_rows(&args->cast, &input);
    /* With nothing to cast, measure or sum there is nothing to read. */
    int reads = tiles.quantize != NULL || te_cpu_tiles_hold(&tiles);
    int32_t amax = reads ? te_cpu_all_tiles(&tiles, &input) : 0;
    te_cpu_tiles_end(&tiles, &request, amax);
    return TE_OK;
}

te_status te_cpu_amax(const te_amax_args *args)
{
    enum { ROWS = 16, COLUMNS = 2048 };
    const te_cpu_matrix input = te_cpu_matrix_of(&args->input);
    if (args->hadamard != 0) {
        memset(args->partials, 0, TE_AMAX_PARTIALS * sizeof(float));
        args->partials[0] = te_cpu_hadamard_amax(te_cpu_kernels_get(), &input, args->hadamard);
        return TE_OK;
    }
    te_cpu_quantize_row measure = te_cpu_kernels_get()->quantize[input.dtype][0][0];
    int64_t tiles_across = te_ceil_div(input.columns, COLUMNS);
    int64_t tiles = te_ceil_div(input.rows, ROWS) * tiles_across;
#pragma omp parallel for num_threads(te_cpu_threads(input.rows, input.columns))
    for (int64_t partial = 0; partial < TE_AMAX_PARTIALS; partial++) {
        int32_t amax = 0;
        for (int64_t tile = partial; tile < tiles; tile += TE_AMAX_PARTIALS) {
            int64_t row = tile / tiles_across * ROWS, column = tile % tiles_across * COLUMNS;
            int64_t width = te_cpu_min(COLUMNS, input.columns - column);
            int64_t end = te_cpu_min(row + ROWS, input.rows);
            for (int64_t r = row; r < end; r++) {
                measure(te_cpu_at(&input, r, column), NULL, width, 1.0F, &amax, NULL);
            }
        }
        args->partials[partial] = te_float_of(amax);
    }
    return TE_OK;
}

/* Codes to numbers of the output's dtype, a piece that fits on the stack at a time. The codes are
 * those of row `row` of the form from `column` on; by columns, of its column `row` from row
 * `column` on. */
static void dequantize_row(const te_cpu_kernels *kernels, const te_cpu_matrix *output,
                           const te_inverse_scales *scales, int by_rows, int64_t row,
                           int64_t column, const uint8_t *codes, int64_t n, te_dtype dtype)
{
    float values[TE_CPU_TILE_COLUMNS];
    const float limit = te_dtype_max(output->dtype);
    for (int64_t first = 0; first < n; first += TE_CPU_TILE_COLUMNS) {
        int64_t width = te_cpu_min(TE_CPU_TILE_COLUMNS, n - first);
        kernels->to_f32[dtype](codes + first, values, width);
        for (int64_t i = 0; i < width; i++) {
            int64_t at = column + first + i;
            float scale_inv = by_rows ? te_inverse_scale_at(scales, row, at)
                                      : te_inverse_scale_at(scales, at, row);
            values[i] = te_scaled_value(values[i], scale_inv, limit);
        }
        kernels->from_f32[output->dtype](values, te_cpu_at(output, row, column + first), width);
    }
}

te_status te_cpu_dequantize(const te_dequantize_args *args)
{
    const te_cpu_kernels *kernels = te_cpu_kernels_get();
    const te_operand *from = &args->input;
    int by_rows = from->row.data != NULL;
    const te_tensor *data = by_rows ? &from->row : &from->column;
    const te_cpu_matrix input = te_cpu_matrix_of(data);
    const te_cpu_matrix output = te_cpu_matrix_of(&args->output);
    const te_inverse_scales scales =
        te_inverse_scales_of(from->mode, data, by_rows ? &from->row_scales : &from->column_scales);
    if (output.rows == 0 || output.columns == 0) return TE_OK;
    if (te_scales_micro(from->mode)) {
        te_cpu_micro_dequantize(from, by_rows, 0, &args->output);
        return TE_OK;
    }
    int64_t tiles_across = by_rows ? 1 : te_ceil_div(output.columns, TE_CPU_BLOCK);
    int64_t tiles = te_ceil_div(output.rows, TE_CPU_BLOCK) * tiles_across;
#pragma omp parallel for num_threads(te_cpu_threads(output.rows, output.columns))
    for (int64_t tile = 0; tile < tiles; tile++) {
        uint8_t block[TE_CPU_BLOCK * TE_CPU_BLOCK];
        int64_t row = tile / tiles_across * TE_CPU_BLOCK;
        int64_t column = tile % tiles_across * TE_CPU_BLOCK;
        int64_t rows = te_cpu_min(TE_CPU_BLOCK, output.rows - row);
        int64_t columns = output.columns;
        if (!by_rows) {
            columns = te_cpu_min(TE_CPU_BLOCK, output.columns - column);
            te_cpu_transpose_bytes(te_cpu_at(&input, column, row), input.row_stride, block,
                                   TE_CPU_BLOCK, columns, rows);
        }
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *codes =
                by_rows ? te_cpu_at(&input, row + r, 0) : block + r * TE_CPU_BLOCK;
            dequantize_row(kernels, &output, &scales, by_rows, row + r, column, codes, columns,
                           input.dtype);
        }
    }
    return TE_OK;
}
