/* SPDX-License-Identifier: Apache-2.0
 *
 * scaled_tiles.c - casts whose scales are made of what they cast: of rows, or of tiles of 128
 * elements along a row. A tile of 128 x 128 values is made in fp32, measured, and cast line by line
 * to its rows and, turned, to its columns; scales of rows take a pass over all tiles before.
 */
#include <string.h>

#include "core/fp8.h"
#include "core/scaling_math.h"
#include "core/tensor.h"
#include "cpu/record.h"
#include "cpu/scaled_tiles.h"

enum { SIDE = TE_CPU_SCALED_SIDE };

te_cpu_scaled_form te_cpu_scaled_form_of(te_scaling_mode mode, const te_tensor *data,
                                         const te_tensor *scales)
{
    te_cpu_scaled_form form = {.data = te_cpu_matrix_of(data), .scales = scales->data};
    if (te_tensor_requested(data) && te_tensor_present(scales)) { /* also those of no elements */
        memset(form.scales, 0, (size_t)te_tensor_numel(scales) * sizeof(float));
    }
    if (form.data.data != NULL) {
        form.layout = te_scale_layout_of(mode, data->shape[0], data->shape[1]);
    }
    return form;
}

/* The largest magnitude of n numbers. */
static float largest(const te_cpu_kernels *kernels, const float *values, int64_t n)
{
    int32_t amax = 0;
    kernels->quantize[TE_DTYPE_F32][0][0](values, NULL, n, 1.0F, &amax, NULL);
    return te_float_of(amax);
}

/* The lines of a tile in a form, from line `first` on, of which they are columns [at, at + n). */
typedef struct lines {
    float (*values)[SIDE];
    int64_t first, at, count, n;
} lines;

static float *amax_of_row(const te_cpu_scaled_form *form, int64_t row)
{
    return form->scales + TE_ROW_SCALES_AMAX * form->layout.shape[1] + row;
}

static void measure_lines(const te_cpu_scaled *cast, const te_cpu_scaled_form *form,
                          const lines *of)
{
    for (int64_t i = 0; i < of->count; i++) {
        te_cpu_record_amax(amax_of_row(form, of->first + i),
                           largest(cast->kernels, of->values[i], of->n));
    }
}

static void cast_lines(const te_cpu_scaled *cast, const te_cpu_scaled_form *form, const lines *of,
                       float tile_amax)
{
    const te_scale_layout *layout = &form->layout;
    const te_cpu_quantize_row quantize =
        cast->kernels->quantize[TE_DTYPE_F32][te_cpu_target(form->data.dtype)][0];
    for (int64_t i = 0; i < of->count; i++) {
        int64_t line = of->first + i;
        float *place = form->scales + line / layout->across * layout->across_step +
                       of->at / layout->along * layout->along_step;
        float amax = tile_amax, scale;
        int32_t seen = 0;
        if (cast->mode == TE_SCALING_ROW) {
            amax = *amax_of_row(form, line);
        } else if (layout->across == 1) {
            amax = largest(cast->kernels, of->values[i], of->n);
        }
        scale = te_tile_scale(amax, cast->fp8_max, cast->epsilon, cast->power_2, cast->top);
        if (cast->mode != TE_SCALING_ROW || of->at == 0) *place = 1.0F / scale;
        quantize(of->values[i], te_cpu_at(&form->data, line, of->at), of->n, scale, &seen, NULL);
    }
}

void te_cpu_scaled_tile(const te_cpu_scaled *cast, float (*values)[SIDE], int64_t row,
                        int64_t column, int64_t rows, int64_t columns)
{
    float turned[SIDE][SIDE], amax = 0.0F;
    const lines by_row = {values, row, column, rows, columns};
    const lines by_column = {turned, column, row, columns, rows};
    if (cast->mode == TE_SCALING_BLOCK_2D) {
        for (int64_t r = 0; r < rows; r++) {
            amax = te_max_ignoring_nan(amax, largest(cast->kernels, values[r], columns));
        }
    }
    if (cast->column.data.data != NULL) {
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < columns; c++) turned[c][r] = values[r][c];
        }
    }
    if (cast->measures) {
        if (cast->row.data.data != NULL) measure_lines(cast, &cast->row, &by_row);
        if (cast->column.data.data != NULL) measure_lines(cast, &cast->column, &by_column);
        return;
    }
    if (cast->row.data.data != NULL) cast_lines(cast, &cast->row, &by_row, amax);
    if (cast->column.data.data != NULL) cast_lines(cast, &cast->column, &by_column, amax);
}
