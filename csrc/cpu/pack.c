/* SPDX-License-Identifier: Apache-2.0
 *
 * pack.c - GEMM operands to fp32 panels.
 */
#include <string.h>

#include "cpu/pack.h"
#include "cpu/transpose.h"

enum {
    PIECE = 64,        /* depth converted before it is transposed: with 32 rows, 8 KiB */
    MAX_ACROSS = 1024, /* outer elements converted at a time */
};

te_cpu_operand te_cpu_operand_of(const te_cpu_kernels *kernels, const te_tensor *data,
                                 int outer_is_rows, int width)
{
    te_cpu_operand operand = {.kernels = kernels,
                              .data = te_cpu_matrix_of(data),
                              .depth_contiguous = outer_is_rows,
                              .width = width};
    operand.outer = outer_is_rows ? operand.data.rows : operand.data.columns;
    operand.depth = outer_is_rows ? operand.data.columns : operand.data.rows;
    return operand;
}

te_cpu_operand te_cpu_operand_slice(const te_cpu_operand *operand, int64_t k, int64_t depth)
{
    te_cpu_operand slice = *operand;
    slice.data.data = operand->depth_contiguous ? te_cpu_at(&operand->data, 0, k)
                                                : te_cpu_at(&operand->data, k, 0);
    slice.depth = depth;
    slice.begin = operand->begin + k;
    return slice;
}

/* Multiplies elements from depth k on of a row with their inverse scales. */
static void rescale(const te_cpu_operand *operand, int64_t row, int64_t k, int64_t n, float *values)
{
    const te_inverse_scales *scales = &operand->scales;
    const int64_t along = scales->layout.along;
    int64_t end;
    if (scales->values == NULL) return;
    for (int64_t at = k; at < k + n; at = end) {
        end = te_cpu_min((at / along + 1) * along, k + n);
        operand->kernels->multiply(values + (at - k), te_inverse_scale_at(scales, row, at),
                                   end - at);
    }
}

/* One panel of data [outer, depth]: rows are converted piece by piece and transposed. */
static void pack_by_rows(const te_cpu_operand *operand, int64_t first, float *output)
{
    static const float zeros[PIECE];
    float values[TE_CPU_MAX_TILE_COLUMNS][PIECE];
    const float *rows[TE_CPU_MAX_TILE_COLUMNS];
    te_dtype dtype = operand->data.dtype;
    int width = operand->width;
    for (int64_t k = 0; k < operand->depth; k += PIECE) {
        int64_t depth = te_cpu_min(PIECE, operand->depth - k);
        for (int r = 0; r < width; r++) {
            if (first + r >= operand->outer) {
                rows[r] = zeros;
                continue;
            }
            const void *source = te_cpu_at(&operand->data, first + r, k);
            rows[r] = dtype == TE_DTYPE_F32 ? source : values[r];
            if (dtype == TE_DTYPE_F32) continue;
            operand->kernels->to_f32[dtype](source, values[r], depth);
            rescale(operand, first + r, operand->begin + k, depth, values[r]);
        }
        te_cpu_transpose_floats(rows, output + k * width, width, width, depth);
    }
}

/* Panels of data [depth, outer]: every row is converted and distributed to the panels. */
static void pack_by_columns(const te_cpu_operand *operand, int64_t first, int64_t panels,
                            float *output)
{
    float values[MAX_ACROSS];
    int64_t width = operand->width, panel = operand->depth * width;
    int64_t across = te_cpu_min(panels * width, operand->outer - first);
    if (across < panels * width) {
        memset(values + across, 0, (size_t)(panels * width - across) * sizeof *values);
    }
    for (int64_t k = 0; k < operand->depth; k++) {
        const void *source = te_cpu_at(&operand->data, k, first);
        operand->kernels->to_f32[operand->data.dtype](source, values, across);
        for (int64_t p = 0; p < panels; p++) {
            memcpy(output + p * panel + k * width, values + p * width,
                   (size_t)width * sizeof *values);
        }
    }
}

void te_cpu_pack(const te_cpu_operand *operand, int64_t first, int64_t panels, float *output)
{
    int64_t width = operand->width, panel = operand->depth * width;
    int64_t group = operand->depth_contiguous ? 1 : MAX_ACROSS / width;
    for (int64_t p = 0; p < panels; p += group) {
        if (operand->depth_contiguous) {
            pack_by_rows(operand, first + p * width, output + p * panel);
        } else {
            pack_by_columns(operand, first + p * width, te_cpu_min(group, panels - p),
                            output + p * panel);
        }
    }
}
