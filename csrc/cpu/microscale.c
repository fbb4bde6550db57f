/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.c - MXFP8 and NVFP4 on the CPU: tile by tile, row-wise and column-wise while the
 * numbers are in the cache, whoever made them (tiles.h).
 */
#include "cpu/microscale.h"

#include <string.h>

#include "core/fp8.h"
#include "core/microscale.h"
#include "cpu/record.h"

enum { ROWS = TE_CPU_MICRO_ROWS, COLUMNS = TE_CPU_MICRO_COLUMNS };

/* ---- begin -------------------------------------------------------------------------------- */

/* `partials` NULL: the amax of each row is there. */
static te_cpu_micro_form form_of(te_scaling_mode mode, const te_tensor *data,
                                 const te_tensor *scales, const te_tensor *amax,
                                 const float *partials)
{
    te_cpu_micro_form form = {.amax = 0.0F};
    if (!te_tensor_requested(data)) return form;
    form.data = te_cpu_matrix_of(data);
    form.scales = te_cpu_matrix_of(scales);
    te_cpu_zero_columns(&form.scales, 0);
    te_cpu_zero_columns(&form.data, 0);
    if (mode != TE_SCALING_NVFP4) return form;
    if (partials == NULL) {
        form.row_amax = amax->data;
        return form;
    }
    form.amax = te_nvfp4_amax(te_cpu_largest_partial(partials));
    *(float *)amax->data = form.amax;
    return form;
}

te_cpu_micro te_cpu_micro_begin(const te_cast_request *cast, int64_t rows, int64_t columns)
{
    const te_operand *to = &cast->result;
    te_cpu_micro micro = {.kernels = te_cpu_kernels_get(),
                          .mode = to->mode,
                          .rows = rows,
                          .columns = columns,
                          .square = cast->square,
                          .hadamard = cast->hadamard,
                          .margin = cast->margin,
                          .four_over_six = cast->four_over_six,
                          .range = te_nvfp4_range(to->scales_to_256),
                          .rng = cast->rng};
    const float *first = cast->row_scaled ? NULL : cast->partials;
    const float *second = cast->column_partials != NULL ? cast->column_partials : cast->partials;
    micro.dtype = te_operand_dtype(to);
    micro.row = form_of(to->mode, &to->row, &to->row_scales, &to->row_amax, first);
    micro.column = form_of(to->mode, &to->column, &to->column_scales, &to->column_amax, second);
    return micro;
}

/* ---- MXFP8 -------------------------------------------------------------------------------- */

static int32_t top_of(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* The scales of a tile that squares share, in place of the largest magnitudes of its columns. */
static void share(int32_t *tops, int64_t columns, int64_t group)
{
    for (int64_t c = 0; c < columns; c += group) {
        int32_t top = 0;
        int64_t end = te_cpu_min(c + group, columns);
        for (int64_t i = c; i < end; i++) top = top_of(top, tops[i]);
        for (int64_t i = c; i < end; i++) tops[i] = top;
    }
}

/* The largest magnitude of each column of `rows` lines. */
static void column_tops(const float *values, int64_t rows, int64_t columns, int32_t *tops)
{
    memset(tops, 0, (size_t)columns * sizeof *tops);
    for (int64_t r = 0; r < rows; r++) {
        const float *line = values + r * COLUMNS;
        for (int64_t c = 0; c < columns; c++) tops[c] = top_of(te_magnitude_bits(line[c]), tops[c]);
    }
}

/* 32 rows of a tile at (row, column) of the matrix. */
static void mxfp8_band(const te_cpu_micro *micro, const float *values, int64_t row, int64_t column,
                       int64_t rows, int64_t columns)
{
    enum { GROUP = TE_MXFP8_GROUP };
    te_cpu_quantize_row cast =
        micro->kernels->quantize[TE_DTYPE_F32][te_cpu_target(micro->dtype)][0];
    float largest = te_dtype_max(micro->dtype), multiplier[COLUMNS], scaled[COLUMNS];
    int32_t tops[COLUMNS], ignored = 0;
    int by_columns = micro->column.data.data != NULL;
    if (by_columns || micro->square) column_tops(values, rows, columns, tops);
    if (micro->square) share(tops, columns, GROUP);
    if (by_columns) {
        uint8_t *scales = te_cpu_at(&micro->column.scales, row / GROUP, column);
        for (int64_t c = 0; c < columns; c++) {
            scales[c] = (uint8_t)te_e8m0_of(te_float_of(tops[c]), largest, micro->margin);
            multiplier[c] = te_e8m0_multiplier(scales[c]);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *line = values + r * COLUMNS;
        if (by_columns) {
            for (int64_t c = 0; c < columns; c++) scaled[c] = line[c] * multiplier[c];
            cast(scaled, te_cpu_at(&micro->column.data, row + r, column), columns, 1.0F, &ignored,
                 NULL);
        }
        if (micro->row.data.data == NULL) continue;
        uint8_t *codes = te_cpu_at(&micro->row.data, row + r, column);
        uint8_t *scales = te_cpu_at(&micro->row.scales, row + r, column / GROUP);
        for (int64_t c = 0; c < columns; c += GROUP) {
            int64_t n = te_cpu_min(GROUP, columns - c);
            int32_t top = 0;
            if (micro->square) {
                top = tops[c];
            } else {
                for (int64_t i = c; i < c + n; i++) top = top_of(te_magnitude_bits(line[i]), top);
            }
            scales[c / GROUP] = (uint8_t)te_e8m0_of(te_float_of(top), largest, micro->margin);
            cast(line + c, codes + c, n, te_e8m0_multiplier(scales[c / GROUP]), &ignored, NULL);
        }
    }
}

/* ---- NVFP4 -------------------------------------------------------------------------------- */

enum { GROUP = TE_NVFP4_GROUP };

/* The largest bits of the magnitudes, those of NaN included. */
static uint32_t group_top(const float *values, uint32_t top)
{
    for (int i = 0; i < GROUP; i++) {
        uint32_t bits = (uint32_t)te_bits_of(values[i]) & 0x7fffffffU;
        top = bits > top ? bits : top;
    }
    return top;
}

static void hadamard(float *values, unsigned signs)
{
    for (int i = 0; i < GROUP; i++) values[i] = te_hadamard_enter(values[i], i, signs);
    for (int step = 1; step < GROUP; step *= 2) {
        for (int i = 0; i < GROUP; i++) {
            float a = values[i], b;
            if ((i & step) != 0) continue;
            b = values[i + step];
            values[i] = a + b;
            values[i + step] = a - b;
        }
    }
    for (int i = 0; i < GROUP; i++) values[i] = te_hadamard_leave(values[i]);
}

/* The sum of the leaves of a binary tree: i and i + 8, i and i + 4, ... */
static float tree_sum(float leaves[GROUP])
{
    for (int step = GROUP / 2; step > 0; step /= 2) {
        for (int i = 0; i < step; i++) leaves[i] += leaves[i + step];
    }
    return leaves[0];
}

/* What a line of 16 loses with the scale that makes the group's largest magnitude `code`. */
static float loss_of(const te_cpu_micro *micro, float amax, const float *values, uint32_t top,
                     te_nvfp4_code code)
{
    const float encode = te_nvfp4_encode(amax, micro->range);
    te_nvfp4_way way = {.group_scale =
                            te_e4m3_to_f32(te_f32_to_e4m3(te_nvfp4_group_scale(top, encode, code))),
                        .amax = amax,
                        .range = micro->range};
    float sum = 0.0F;
    way.multiplier = te_nvfp4_multiplier(encode, way.group_scale);
    for (int i = 0; i < GROUP; i++) {
        sum += te_nvfp4_error(values[i], way, micro->four_over_six == TE_FOUR_OVER_SIX_MSE);
    }
    return sum;
}

/* What the largest magnitude of a group becomes: a line, or the 16 lines of a square. */
static te_nvfp4_code code_of(const te_cpu_micro *micro, float amax, const float *values,
                             uint32_t top, int square)
{
    float loss[2][GROUP] = {{0}};
    if (micro->four_over_six == TE_FOUR_OVER_SIX_NONE) return TE_NVFP4_SIX;
    for (int r = 0; r < (square ? GROUP : 1); r++) {
        loss[0][r] = loss_of(micro, amax, values + r * COLUMNS, top, TE_NVFP4_FOUR);
        loss[1][r] = loss_of(micro, amax, values + r * COLUMNS, top, TE_NVFP4_SIX_OF_TWO);
    }
    return tree_sum(loss[0]) < tree_sum(loss[1]) ? TE_NVFP4_FOUR : TE_NVFP4_SIX_OF_TWO;
}

/* Codes and scale of a group whose largest magnitude is `top` and becomes `largest`; `index` counts
 * its first element for the random numbers. */
static void nvfp4_group(const te_cpu_micro *micro, float encode, const float *values, uint32_t top,
                        te_nvfp4_code largest, uint64_t index, uint8_t *codes, uint8_t *scale)
{
    unsigned code[GROUP];
    *scale = te_f32_to_e4m3(te_nvfp4_group_scale(top, encode, largest));
    float multiplier = te_nvfp4_multiplier(encode, te_e4m3_to_f32(*scale));
    for (int i = 0; i < GROUP; i += 4) {
        te_philox_words words = {{0}};
        if (micro->rng != NULL) {
            words = te_philox((uint64_t)micro->rng[0],
                              (uint64_t)micro->rng[1] + (index + (uint64_t)i) / 4);
        }
        for (int j = i; j < i + 4; j++) {
            float value = values[j] * multiplier;
            code[j] = micro->rng == NULL
                          ? te_e2m1_nearest(value)
                          : te_e2m1_stochastic(value, te_philox_uniform(words.word[j - i]));
        }
    }
    for (int i = 0; i < GROUP; i += 2) codes[i / 2] = (uint8_t)(code[i] | code[i + 1] << 4);
}

/* What the lines of a square share. */
typedef struct nvfp4_square {
    uint32_t top;
    te_nvfp4_code code; /* what that becomes, in the form at work */
} nvfp4_square;

/* A line of 16 values of one form, whose data and scales begin at (line, along); `square` is NULL
 * where it has a scale of its own. `index`: of its first element, for the random numbers. */
static void nvfp4_line(const te_cpu_micro *micro, const te_cpu_micro_form *form,
                       const float *values, const nvfp4_square *square, int64_t line, int64_t along,
                       uint64_t index)
{
    float amax = form->row_amax != NULL ? form->row_amax[line] : form->amax;
    uint32_t top = square != NULL ? square->top : group_top(values, 0);
    te_nvfp4_code code = square != NULL ? square->code : code_of(micro, amax, values, top, 0);
    nvfp4_group(micro, te_nvfp4_encode(amax, micro->range), values, top, code, index,
                te_cpu_at(&form->data, line, along / 2),
                te_cpu_at(&form->scales, line, along / GROUP));
}

/* 16 rows of a tile. Lines and columns of zeros fill the last group of either direction up. */
static void nvfp4_band(const te_cpu_micro *micro, const float *values, int64_t row, int64_t column,
                       int64_t rows, int64_t columns)
{
    const int64_t wide = te_round_up(micro->columns, GROUP), high = te_round_up(micro->rows, GROUP);
    const uint64_t below = (uint64_t)(micro->rows * wide); /* column-wise elements come after */
    for (int64_t c = 0; c < columns; c += GROUP) {
        nvfp4_square found = {0}, *square = micro->square ? &found : NULL;
        for (int64_t r = 0; r < rows && square != NULL; r++) {
            found.top = group_top(values + r * COLUMNS + c, found.top);
        }
        if (square != NULL && micro->row.data.data != NULL) {
            found.code = code_of(micro, micro->row.amax, values + c, found.top, 1);
        }
        for (int64_t r = 0; r < rows && micro->row.data.data != NULL; r++) {
            nvfp4_line(micro, &micro->row, values + r * COLUMNS + c, square, row + r, column + c,
                       (uint64_t)((row + r) * wide + column + c));
        }
        if (square != NULL && micro->column.data.data != NULL) {
            found.code = code_of(micro, micro->column.amax, values + c, found.top, 1);
        }
        int64_t end = te_cpu_min(c + GROUP, micro->columns - column);
        for (int64_t i = c; i < end && micro->column.data.data != NULL; i++) {
            float group[GROUP];
            for (int r = 0; r < GROUP; r++) group[r] = values[r * COLUMNS + i];
            if (micro->hadamard) hadamard(group, te_hadamard_signs(micro->hadamard));
            nvfp4_line(micro, &micro->column, group, square, column + i, row,
                       below + (uint64_t)((column + i) * high + row));
        }
    }
}

void te_cpu_micro_tile(const te_cpu_micro *micro, const float *values, int64_t row, int64_t column)
{
    int64_t rows = te_cpu_min(ROWS, micro->rows - row);
    int64_t columns = te_cpu_min(COLUMNS, micro->columns - column);
    int64_t band = micro->mode == TE_SCALING_MXFP8 ? TE_MXFP8_GROUP : TE_NVFP4_GROUP;
    for (int64_t r = 0; r < rows; r += band) {
        int64_t n = te_cpu_min(band, rows - r);
        if (micro->mode == TE_SCALING_MXFP8) {
            mxfp8_band(micro, values + r * COLUMNS, row + r, column, n, columns);
        } else {
            nvfp4_band(micro, values + r * COLUMNS, row + r, column, n, columns);
        }
    }
}

void te_cpu_micro_measure_rows(const te_cast_request *cast, const te_cpu_matrix *input)
{
    const te_cpu_kernels *kernels = te_cpu_kernels_get();
    float *amax = cast->result.row_amax.data;
#pragma omp parallel for num_threads(te_cpu_threads(input->rows, input->columns))
    for (int64_t row = 0; row < input->rows; row++) {
        float values[COLUMNS];
        int32_t top = 0;
        for (int64_t c = 0; c < input->columns; c += COLUMNS) {
            int64_t n = te_cpu_min(COLUMNS, input->columns - c);
            kernels->to_f32[input->dtype](te_cpu_at(input, row, c), values, n);
            for (int64_t i = 0; i < n; i++) top = top_of(te_magnitude_bits(values[i]), top);
        }
        amax[row] = te_nvfp4_amax(te_float_of(top));
    }
}

float te_cpu_hadamard_amax(const te_cpu_kernels *kernels, const te_cpu_matrix *input, int way)
{
    int64_t bands = te_ceil_div(input->rows, GROUP);
    int threads = te_cpu_threads(input->rows, input->columns);
    int32_t amax = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) reduction(max : amax)
    for (int64_t band = 0; band < bands; band++) {
        float lines[GROUP][COLUMNS], group[GROUP];
        for (int64_t c = 0; c < input->columns; c += COLUMNS) {
            int64_t n = te_cpu_min(COLUMNS, input->columns - c);
            memset(lines, 0, sizeof lines);
            for (int64_t r = 0; r < te_cpu_min(GROUP, input->rows - band * GROUP); r++) {
                kernels->to_f32[input->dtype](te_cpu_at(input, band * GROUP + r, c), lines[r], n);
            }
            for (int64_t i = 0; i < n; i++) {
                for (int r = 0; r < GROUP; r++) group[r] = lines[r][i];
                hadamard(group, te_hadamard_signs(way));
                for (int r = 0; r < GROUP; r++) amax = top_of(te_magnitude_bits(group[r]), amax);
            }
        }
    }
    return te_float_of(amax);
}

/* ---- dequantize --------------------------------------------------------------------------- */

/* Where one form lies. */
typedef struct micro_data {
    const te_cpu_kernels *kernels;
    te_cpu_matrix data, scales, output;
    te_dtype dtype;
    const float *amax; /* NVFP4: of the tensor, or of each row; NULL: without its factor */
    float range, limit;
    int by_rows, fp4, amax_per_row;
} micro_data;

/* One row of the output, columns [column, column + n) of it. */
static void mxfp8_values(const micro_data *from, int64_t row, int64_t column, int64_t n,
                         float *values)
{
    enum { GROUP32 = TE_MXFP8_GROUP };
    from->kernels->to_f32[from->dtype](te_cpu_at(&from->data, row, column), values, n);
    for (int64_t i = 0; i < n; i++) {
        unsigned e = from->by_rows ? *te_cpu_at(&from->scales, row, (column + i) / GROUP32)
                                   : *te_cpu_at(&from->scales, row / GROUP32, column + i);
        values[i] = te_saturate(values[i] * te_e8m0_value(e), from->limit);
    }
}

static void nvfp4_values(const micro_data *from, int64_t row, int64_t column, int64_t n,
                         float *values)
{
    float factor = from->amax == NULL
                       ? 1.0F
                       : te_nvfp4_decode(from->amax[from->amax_per_row ? row : 0], from->range);
    for (int64_t i = 0; i < n; i++) {
        int64_t major = from->by_rows ? row : column + i, minor = from->by_rows ? column + i : row;
        unsigned pair = *te_cpu_at(&from->data, major, minor / 2);
        float scale = te_e4m3_to_f32(*te_cpu_at(&from->scales, major, minor / GROUP));
        float value = te_e2m1_value(minor % 2 == 0 ? pair & 15U : pair >> 4) * scale;
        values[i] = te_saturate(value * factor, from->limit);
    }
}

void te_cpu_micro_dequantize(const te_operand *input, int by_rows, int raw, const te_tensor *output)
{
    const te_tensor *data = by_rows ? &input->row : &input->column;
    const te_tensor *amax = by_rows ? &input->row_amax : &input->column_amax;
    micro_data from = {.kernels = te_cpu_kernels_get(),
                       .data = te_cpu_matrix_of(data),
                       .scales =
                           te_cpu_matrix_of(by_rows ? &input->row_scales : &input->column_scales),
                       .output = te_cpu_matrix_of(output),
                       .dtype = data->dtype,
                       .range = te_nvfp4_range(input->scales_to_256),
                       .limit = te_dtype_max(output->dtype),
                       .by_rows = by_rows,
                       .fp4 = input->mode == TE_SCALING_NVFP4,
                       .amax_per_row = te_tensor_numel(amax) > 1};
    if (from.fp4 && !raw) from.amax = amax->data;
#pragma omp parallel for num_threads(te_cpu_threads(from.output.rows, from.output.columns))
    for (int64_t row = 0; row < from.output.rows; row++) {
        float values[COLUMNS];
        for (int64_t c = 0; c < from.output.columns; c += COLUMNS) {
            int64_t n = te_cpu_min(COLUMNS, from.output.columns - c);
            (from.fp4 ? nvfp4_values : mxfp8_values)(&from, row, c, n, values);
            from.kernels->from_f32[output->dtype](values, te_cpu_at(&from.output, row, c), n);
        }
    }
}
