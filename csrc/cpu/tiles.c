/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.c - rows on their way out: what quantize shares with the operators that are fused with it.
 */
#include <string.h>

#include "core/scaling_math.h"
#include "core/status.h"
#include "core/fp8.h"
#include "cpu/record.h"
#include "cpu/tiles.h"

static int64_t row_tiles(int64_t rows)
{
    return te_ceil_div(rows, TE_CPU_TILE_ROWS);
}

int te_cpu_is_requested(const te_tensor *tensor)
{
    return tensor->data != NULL || tensor->ndim > 0;
}

size_t te_cpu_sums_bytes(int64_t rows, int64_t columns)
{
    return (size_t)(row_tiles(rows) * columns) * sizeof(float);
}

te_status te_cpu_check_workspace(const char *name, const void *workspace, size_t size,
                                 size_t needed)
{
    if (needed == 0 || (size >= needed && workspace != NULL)) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "%s: workspace of %zu bytes, needs %zu", name,
                   workspace == NULL ? 0 : size, needed);
}

void te_cpu_join_sums(const te_cpu_kernels *kernels, const float *sums, int64_t count,
                      const te_tensor *target)
{
    float totals[TE_CPU_TILE_COLUMNS];
    te_cpu_matrix output = te_cpu_matrix_of(target);
    for (int64_t first = 0; first < output.columns; first += TE_CPU_TILE_COLUMNS) {
        int64_t width = te_cpu_min(TE_CPU_TILE_COLUMNS, output.columns - first);
        memset(totals, 0, sizeof totals);
        for (int64_t i = 0; i < count; i++) {
            kernels->add(totals, sums + i * output.columns + first, width);
        }
        kernels->from_f32[output.dtype](totals, te_cpu_at(&output, 0, first), width);
    }
}

const float *te_cpu_numbers(const te_cpu_kernels *kernels, const te_cpu_matrix *matrix, int64_t row,
                            int64_t column, int64_t n, float *buffer)
{
    const void *place = te_cpu_at(matrix, row, column);
    if (matrix->dtype == TE_DTYPE_F32) return place;
    kernels->to_f32[matrix->dtype](place, buffer, n);
    return buffer;
}

/* ---- begin -------------------------------------------------------------------------------- */

static te_dtype fp8_dtype(const te_quantized *quantized)
{
    if (quantized->mode == TE_SCALING_NONE) return TE_DTYPE_F32;
    if (quantized->rowwise.data != NULL) return quantized->rowwise.dtype;
    if (quantized->columnwise.data != NULL) return quantized->columnwise.dtype;
    return te_dtype_is_fp8(quantized->rowwise.dtype) ? quantized->rowwise.dtype
                                                     : quantized->columnwise.dtype;
}

static float current_scale(const te_cpu_request *request, te_dtype dtype)
{
    float amax = 0.0F;
    if (request->partials == NULL) return 1.0F;
    for (int i = 0; i < TE_AMAX_PARTIALS; i++) {
        amax = te_max_ignoring_nan(amax, request->partials[i]);
    }
    return te_current_scale(amax, te_dtype_max(dtype), request->amax_epsilon,
                            request->power_2_scale);
}

te_cpu_tiles te_cpu_tiles_begin(const te_cpu_request *request, int64_t rows, int64_t columns,
                                te_dtype dtype, int made)
{
    const te_quantized *quantized = request->quantized;
    te_dtype codes = fp8_dtype(quantized);
    te_cpu_tiles tiles = {.kernels = te_cpu_kernels_get(),
                          .rows = rows,
                          .columns = columns,
                          .tile_rows = TE_CPU_TILE_ROWS,
                          .scale = 1.0F};
    int with_sums = request->sums != NULL && request->sums->data != NULL;
    if (request->output != NULL && request->output->data != NULL) {
        tiles.output = te_cpu_matrix_of(request->output);
    }
    if (with_sums) tiles.sums = request->workspace;
    if (quantized->mode != TE_SCALING_NONE) {
        tiles.scale = quantized->scale != NULL ? *quantized->scale : current_scale(request, codes);
        if (quantized->rowwise.data != NULL) tiles.rowwise = te_cpu_matrix_of(&quantized->rowwise);
        if (quantized->columnwise.data != NULL) {
            tiles.columnwise = te_cpu_matrix_of(&quantized->columnwise);
        }
        if (quantized->scale_pair != NULL) {
            quantized->scale_pair[TE_PAIR_INVERSE] = 1.0F / tiles.scale;
            quantized->scale_pair[TE_PAIR_SCALE] = tiles.scale;
        }
    }
    int casts = tiles.rowwise.data != NULL || tiles.columnwise.data != NULL;
    if (casts || with_sums || quantized->amax != NULL || request->amax_partials != NULL) {
        tiles.quantize =
            tiles.kernels->quantize[dtype][casts ? te_cpu_target(codes) : 0][with_sums];
    }
    tiles.tile_columns = tiles.columnwise.data != NULL ? TE_CPU_TILE_COLUMNS
                         : made                        ? TE_CPU_MADE_COLUMNS
                                                       : TE_CPU_READ_COLUMNS;
    return tiles;
}

/* ---- tiles -------------------------------------------------------------------------------- */

/* The column-wise output of the tile at (row, column), from its codes [rows, columns]. */
static void write_columnwise(const te_cpu_matrix *output, int64_t row, int64_t column,
                             const te_cpu_matrix *codes)
{
    uint8_t block[TE_CPU_BLOCK * TE_CPU_BLOCK];
    for (int64_t first = 0; first < codes->columns; first += TE_CPU_BLOCK) {
        int64_t width = te_cpu_min(TE_CPU_BLOCK, codes->columns - first);
        te_cpu_transpose_bytes(te_cpu_at(codes, 0, first), codes->row_stride, block, TE_CPU_BLOCK,
                               codes->rows, width);
        for (int64_t c = 0; c < width; c++) {
            memcpy(te_cpu_at(output, column + first + c, row), block + c * TE_CPU_BLOCK,
                   (size_t)codes->rows);
        }
    }
}

int32_t te_cpu_tile(const te_cpu_tiles *tiles, const void *self, int64_t row, int64_t column)
{
    uint8_t local[TE_CPU_TILE_ROWS * TE_CPU_TILE_COLUMNS]; /* codes that no row-wise output takes */
    float buffer[TE_CPU_MADE_COLUMNS];
    const te_cpu_matrix *output = &tiles->output;
    te_cpu_matrix codes = {.rows = te_cpu_min(tiles->tile_rows, tiles->rows - row),
                           .columns = te_cpu_min(tiles->tile_columns, tiles->columns - column),
                           .column_stride = 1,
                           .bytes = 1};
    float *sums = NULL;
    int32_t amax = 0;
    if (tiles->rowwise.data != NULL) {
        codes.data = te_cpu_at(&tiles->rowwise, row, column);
        codes.row_stride = tiles->rowwise.row_stride;
    } else if (tiles->columnwise.data != NULL) {
        codes.data = local;
        codes.row_stride = TE_CPU_TILE_COLUMNS;
    }
    if (tiles->sums != NULL) {
        sums = tiles->sums + row / TE_CPU_TILE_ROWS * tiles->columns + column;
        memset(sums, 0, (size_t)codes.columns * sizeof *sums);
    }
    for (int64_t r = 0; r < codes.rows; r++) {
        uint8_t *target = codes.data == NULL ? NULL : te_cpu_at(&codes, r, 0);
        void *place = output->data == NULL ? NULL : te_cpu_at(output, row + r, column);
        int direct = place != NULL && output->dtype == TE_DTYPE_F32; /* made where it belongs */
        const void *values =
            tiles->source(self, row + r, column, codes.columns, direct ? place : buffer);
        if (place != NULL && !direct) {
            tiles->kernels->from_f32[output->dtype](values, place, codes.columns);
        }
        if (tiles->quantize != NULL) {
            tiles->quantize(values, target, codes.columns, tiles->scale, &amax, sums);
        }
    }
    if (tiles->columnwise.data != NULL) write_columnwise(&tiles->columnwise, row, column, &codes);
    return amax;
}

int32_t te_cpu_all_tiles(const te_cpu_tiles *tiles, const void *self)
{
    /* Downwards first: the columns of a tile lie far apart in the column-wise output, and their
     * pages are used again by the next tile. */
    int64_t tiles_down = row_tiles(tiles->rows);
    int64_t count = tiles_down * te_ceil_div(tiles->columns, tiles->tile_columns);
    int threads = te_cpu_threads(tiles->rows * tiles->columns);
    int32_t amax = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) reduction(max : amax)
    for (int64_t tile = 0; tile < count; tile++) {
        int32_t bits = te_cpu_tile(tiles, self, tile % tiles_down * TE_CPU_TILE_ROWS,
                                   tile / tiles_down * tiles->tile_columns);
        amax = bits > amax ? bits : amax;
    }
    return amax;
}

/* ---- end ---------------------------------------------------------------------------------- */

/* Zeroes the columns from `first` on. */
static void zero_columns(const te_cpu_matrix *output, int64_t first)
{
    if (output->data == NULL || output->columns <= first) return;
    for (int64_t r = 0; r < output->rows; r++) {
        memset(te_cpu_at(output, r, first), 0, (size_t)(output->columns - first));
    }
}

void te_cpu_tiles_end(const te_cpu_tiles *tiles, const te_cpu_request *request, int32_t amax)
{
    float *recorded = request->quantized->amax;
    zero_columns(&tiles->rowwise, tiles->columns);
    zero_columns(&tiles->columnwise, tiles->rows);
    if (request->sums != NULL && request->sums->data != NULL) {
        te_cpu_join_sums(tiles->kernels, tiles->sums, row_tiles(tiles->rows), request->sums);
    }
    if (recorded != NULL) te_cpu_record_amax(recorded, te_float_of(amax));
    if (request->amax_partials != NULL) {
        memset(request->amax_partials, 0, TE_AMAX_PARTIALS * sizeof(float));
        request->amax_partials[0] = te_float_of(amax);
    }
}
