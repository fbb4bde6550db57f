/* SPDX-License-Identifier: Apache-2.0 */
#include "core/scales.h"

te_scale_layout te_scale_layout_of(te_scaling_mode mode, int64_t rows, int64_t columns)
{
    static const struct {
        int64_t along, across;
    } tiles[] = {
#define X(NAME, name, along, across) {along, across},
        TE_SCALING_MODES(X)
#undef X
    };
    te_scale_layout layout = {.across = tiles[mode].across, .along = tiles[mode].along};
    if (layout.across == 0) layout.across = rows > 0 ? rows : 1;
    if (layout.along == 0) layout.along = columns > 0 ? columns : 1;
    switch (mode) {
    case TE_SCALING_TENSOR:
        layout.ndim = 1;
        layout.shape[0] = TE_TENSOR_SCALES;
        return layout;
    case TE_SCALING_ROW:
        layout.ndim = 2;
        layout.shape[0] = TE_ROW_SCALES;
        layout.shape[1] = rows;
        layout.across_step = 1;
        return layout;
    case TE_SCALING_BLOCK_1D: /* neighbouring rows have neighbouring scales */
        layout.ndim = 2;
        layout.shape[0] = te_ceil_div(columns, layout.along);
        layout.shape[1] = te_round_up(rows, 4);
        layout.across_step = 1;
        layout.along_step = layout.shape[1];
        return layout;
    case TE_SCALING_BLOCK_2D:
    case TE_SCALING_MXFP8:
    case TE_SCALING_NVFP4:
        layout.ndim = 2;
        layout.shape[0] = te_ceil_div(rows, layout.across);
        if (te_scales_micro(mode)) layout.shape[0] = te_round_up(rows, TE_SCALES_ROWS);
        layout.shape[1] = te_round_up(te_ceil_div(columns, layout.along), TE_SCALES_COLUMNS);
        layout.across_step = layout.shape[1];
        layout.along_step = 1;
        return layout;
    default:
        return layout;
    }
}

te_scale_layout te_column_scale_layout_of(te_scaling_mode mode, int64_t rows, int64_t columns)
{
    te_scale_layout layout = te_scale_layout_of(mode, columns, rows), turned = layout;
    if (mode != TE_SCALING_MXFP8) return layout;
    for (int i = 0; i < 2; i++) turned.shape[i] = layout.shape[1 - i];
    turned.across = layout.along;
    turned.along = layout.across;
    turned.across_step = turned.shape[1];
    return turned;
}
