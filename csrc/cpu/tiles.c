/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.c - the outputs of a pass over rows: what quantize shares with the operators that are fused
 * with it.
 */
#include <string.h>

#include "core/check.h"
#include "core/scaling_math.h"
#include "core/fp8.h"
#include "cpu/record.h"
#include "cpu/tiles.h"

size_t te_cpu_sums_bytes(const te_tensor *matrix, const te_tensor *sums)
{
    if (!te_tensor_requested(sums)) return 0;
    return (size_t)(te_ceil_div(matrix->shape[0], TE_CPU_TILE_ROWS) * matrix->shape[1]) *
           sizeof(float);
}

te_status te_cpu_check_sums(te_op op, const te_tensor *matrix, const te_cpu_request *request)
{
    if (!te_tensor_present(request->sums)) return TE_OK;
    return te_check_workspace(op, request->workspace, request->workspace_size,
                              te_cpu_sums_bytes(matrix, request->sums));
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

static float make_scale(const te_cast_request *cast, te_dtype dtype)
{
    if (cast->scale != NULL && (cast->partials == NULL || *cast->scale != 0.0F)) {
        return *cast->scale;
    }
    return te_current_scale(te_cpu_largest_partial(cast->partials), te_dtype_max(dtype),
                            cast->amax_epsilon, cast->power_2_scale);
}

/* What measures by itself. */
static void begin_scaled(te_cpu_tiles *tiles, const te_cast_request *cast)
{
    const te_operand *result = &cast->result;
    if (!te_tensor_requested(&result->row) && !te_tensor_requested(&result->column)) return;
    tiles->scaled = (te_cpu_scaled){
        .kernels = tiles->kernels,
        .mode = result->mode,
        .row = te_cpu_scaled_form_of(result->mode, &result->row, &result->row_scales),
        .column = te_cpu_scaled_form_of(result->mode, &result->column, &result->column_scales),
        .fp8_max = te_dtype_max(te_operand_dtype(result)),
        .epsilon = cast->amax_epsilon,
        .top = te_dtype_max(tiles->dtype),
        .power_2 = cast->power_2_scale};
    tiles->tile_rows = TE_CPU_SCALED_SIDE;
    tiles->passes = result->mode == TE_SCALING_ROW ? 2 : 1;
}

/* Where quantized data goes, and how it is scaled; a scale of all of it is written. */
static void begin_cast(te_cpu_tiles *tiles, const te_cast_request *cast)
{
    const te_operand *result = &cast->result;
    if (te_scales_micro(result->mode)) {
        if (!te_tensor_requested(&result->row) && !te_tensor_requested(&result->column)) return;
        tiles->micro = te_cpu_micro_begin(cast, tiles->rows, tiles->columns);
        return;
    }
    if (result->row.data != NULL) tiles->row = te_cpu_matrix_of(&result->row);
    if (result->column.data != NULL) tiles->column = te_cpu_matrix_of(&result->column);
    if (te_scales_own(result->mode)) {
        begin_scaled(tiles, cast);
    } else if (result->mode != TE_SCALING_NONE) {
        tiles->scale = make_scale(cast, te_operand_dtype(result));
        te_cpu_write_scales(&result->row_scales, tiles->scale);
        te_cpu_write_scales(&result->column_scales, tiles->scale);
    }
}

te_cpu_tiles te_cpu_tiles_begin(const te_cpu_request *request, int64_t rows, int64_t columns,
                                te_dtype dtype, int made)
{
    const te_cast_request *cast = request->cast;
    const te_operand *result = &cast->result;
    te_dtype codes = te_operand_dtype(result);
    te_cpu_tiles tiles = {.kernels = te_cpu_kernels_get(),
                          .rows = rows,
                          .columns = columns,
                          .tile_rows = TE_CPU_TILE_ROWS,
                          .dtype = dtype,
                          .scale = 1.0F,
                          .passes = 1};
    int with_sums = request->sums != NULL && request->sums->data != NULL;
    if (result->wide.data != NULL) tiles.wide = te_cpu_matrix_of(&result->wide);
    if (with_sums) tiles.sums = request->workspace;
    begin_cast(&tiles, cast);
    int casts = tiles.row.data != NULL || tiles.column.data != NULL;
    if (casts || with_sums || cast->amax != NULL || cast->amax_partials != NULL) {
        tiles.quantize =
            tiles.kernels->quantize[dtype][casts ? te_cpu_target(codes) : 0][with_sums];
    }
    tiles.tile_columns = tiles.scaled.mode != TE_SCALING_NONE  ? TE_CPU_SCALED_SIDE
                         : tiles.micro.mode != TE_SCALING_NONE ? TE_CPU_MICRO_COLUMNS
                         : tiles.column.data != NULL           ? TE_CPU_TILE_COLUMNS
                         : made                                ? TE_CPU_MADE_COLUMNS
                                                               : TE_CPU_READ_COLUMNS;
    return tiles;
}

te_cpu_tiles te_cpu_tiles_pass(const te_cpu_tiles *tiles, int pass)
{
    te_cpu_tiles same = *tiles;
    same.scaled.measures = pass + 1 < tiles->passes;
    return same;
}

/* ---- tiles -------------------------------------------------------------------------------- */

void te_cpu_write_columns(const te_cpu_matrix *output, int64_t row, int64_t column,
                          const te_cpu_matrix *bytes)
{
    uint8_t block[TE_CPU_BLOCK * TE_CPU_BLOCK];
    for (int64_t first = 0; first < bytes->columns; first += TE_CPU_BLOCK) {
        int64_t width = te_cpu_min(TE_CPU_BLOCK, bytes->columns - first);
        te_cpu_transpose_bytes(te_cpu_at(bytes, 0, first), bytes->row_stride, block, TE_CPU_BLOCK,
                               bytes->rows, width);
        for (int64_t c = 0; c < width; c++) {
            memcpy(te_cpu_at(output, column + first + c, row), block + c * TE_CPU_BLOCK,
                   (size_t)bytes->rows);
        }
    }
}

enum { HELD_VALUES = TE_CPU_SCALED_SIDE * TE_CPU_SCALED_SIDE };
_Static_assert((int)HELD_VALUES == (int)TE_CPU_MICRO_ROWS * (int)TE_CPU_MICRO_COLUMNS,
               "tiles of one size");
_Static_assert((int)TE_CPU_MICRO_ROWS == (int)TE_CPU_TILE_ROWS, "rows of one line of sums");

/* The same of a cast with scales of rows, tiles or groups: all values are there before one is
 * cast. */
static void held_tile(const te_cpu_tiles *tiles, const void *self, int64_t row, int64_t column)
{
    float values[HELD_VALUES];
    const int64_t pitch = tiles->tile_columns;
    const int64_t rows = te_cpu_min(tiles->tile_rows, tiles->rows - row);
    const int64_t columns = te_cpu_min(pitch, tiles->columns - column);
    const te_cpu_matrix *wide = &tiles->wide;
    const int micro = tiles->micro.mode != TE_SCALING_NONE;
    float *sums = NULL;
    if (tiles->sums != NULL && !tiles->scaled.measures) {
        sums = tiles->sums + row / tiles->tile_rows * tiles->columns + column;
        memset(sums, 0, (size_t)columns * sizeof *sums);
    }
    if (micro && (rows < tiles->tile_rows || columns < pitch)) memset(values, 0, sizeof values);
    for (int64_t r = 0; r < rows; r++) {
        float *line = values + r * pitch;
        const void *made = tiles->source(self, row + r, column, columns, line);
        if (made != line) tiles->kernels->to_f32[tiles->dtype](made, line, columns);
        if (sums != NULL) tiles->kernels->add(sums, line, columns);
        if (wide->data != NULL && !tiles->scaled.measures) {
            tiles->kernels->from_f32[wide->dtype](line, te_cpu_at(wide, row + r, column), columns);
        }
    }
    if (micro) {
        te_cpu_micro_tile(&tiles->micro, values, row, column);
    } else {
        te_cpu_scaled_tile(&tiles->scaled, (float(*)[TE_CPU_SCALED_SIDE])values, row, column, rows,
                           columns);
    }
}

int32_t te_cpu_tile(const te_cpu_tiles *tiles, const void *self, int64_t row, int64_t column)
{
    uint8_t local[TE_CPU_TILE_ROWS * TE_CPU_TILE_COLUMNS]; /* codes that no row-wise output takes */
    float buffer[TE_CPU_MADE_COLUMNS];
    const te_cpu_matrix *wide = &tiles->wide;
    te_cpu_matrix codes = {.rows = te_cpu_min(tiles->tile_rows, tiles->rows - row),
                           .columns = te_cpu_min(tiles->tile_columns, tiles->columns - column),
                           .column_stride = 1,
                           .bytes = 1};
    float *sums = NULL;
    int32_t amax = 0;
    if (te_cpu_tiles_hold(tiles)) {
        held_tile(tiles, self, row, column);
        return 0;
    }
    if (tiles->row.data != NULL) {
        codes.data = te_cpu_at(&tiles->row, row, column);
        codes.row_stride = tiles->row.row_stride;
    } else if (tiles->column.data != NULL) {
        codes.data = local;
        codes.row_stride = TE_CPU_TILE_COLUMNS;
    }
    if (tiles->sums != NULL) {
        sums = tiles->sums + row / TE_CPU_TILE_ROWS * tiles->columns + column;
        memset(sums, 0, (size_t)codes.columns * sizeof *sums);
    }
    for (int64_t r = 0; r < codes.rows; r++) {
        uint8_t *target = codes.data == NULL ? NULL : te_cpu_at(&codes, r, 0);
        void *place = wide->data == NULL ? NULL : te_cpu_at(wide, row + r, column);
        int direct = place != NULL && wide->dtype == TE_DTYPE_F32; /* made where it belongs */
        const void *values =
            tiles->source(self, row + r, column, codes.columns, direct ? place : buffer);
        if (place != NULL && !direct) {
            tiles->kernels->from_f32[wide->dtype](values, place, codes.columns);
        }
        if (tiles->quantize != NULL) {
            tiles->quantize(values, target, codes.columns, tiles->scale, &amax, sums);
        }
    }
    if (tiles->column.data != NULL) te_cpu_write_columns(&tiles->column, row, column, &codes);
    return amax;
}

static int32_t all_tiles(const te_cpu_tiles *tiles, const void *self)
{
    /* Downwards first: the columns of a tile lie far apart in the column-wise output, and their
     * pages are used again by the next tile. */
    int64_t tiles_down = te_ceil_div(tiles->rows, tiles->tile_rows);
    int64_t count = tiles_down * te_ceil_div(tiles->columns, tiles->tile_columns);
    int threads = te_cpu_threads(tiles->rows, tiles->columns);
    int32_t amax = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) reduction(max : amax)
    for (int64_t tile = 0; tile < count; tile++) {
        int32_t bits = te_cpu_tile(tiles, self, tile % tiles_down * tiles->tile_rows,
                                   tile / tiles_down * tiles->tile_columns);
        amax = bits > amax ? bits : amax;
    }
    return amax;
}

int32_t te_cpu_all_tiles(const te_cpu_tiles *tiles, const void *self)
{
    int32_t amax = 0;
    for (int pass = 0; pass < tiles->passes; pass++) {
        const te_cpu_tiles now = te_cpu_tiles_pass(tiles, pass);
        amax = all_tiles(&now, self);
    }
    return amax;
}

/* ---- end ---------------------------------------------------------------------------------- */

void te_cpu_tiles_end(const te_cpu_tiles *tiles, const te_cpu_request *request, int32_t amax)
{
    const te_cast_request *cast = request->cast;
    te_cpu_zero_columns(&tiles->row, tiles->columns);
    te_cpu_zero_columns(&tiles->column, tiles->rows);
    if (request->sums != NULL && request->sums->data != NULL) {
        te_cpu_join_sums(tiles->kernels, tiles->sums, te_ceil_div(tiles->rows, tiles->tile_rows),
                         request->sums);
    }
    te_cpu_record_amax(cast->amax, te_float_of(amax));
    if (cast->amax_partials != NULL) {
        memset(cast->amax_partials, 0, TE_AMAX_PARTIALS * sizeof(float));
        cast->amax_partials[0] = te_float_of(amax);
    }
}
