/* SPDX-License-Identifier: Apache-2.0
 *
 * scaling.c - one step of delayed scaling: the live row of the history joins the window, and new
 * scales follow from it.
 */
#include "core/scaling_math.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"
#include "cpu/record.h"

static float *at(const te_cpu_matrix *matrix, int64_t row, int64_t slot)
{
    return (float *)(void *)te_cpu_at(matrix, row, slot);
}

/* The amax the next scale is made from: the live one and, with TE_AMAX_MAX, the window. */
static float window_amax(const te_cpu_matrix *history, int64_t slot, te_amax_algo algo, float amax)
{
    if (algo == TE_AMAX_MOST_RECENT) return amax;
    for (int64_t row = 1; row < history->rows; row++) {
        amax = te_max_ignoring_nan(amax, *at(history, row, slot));
    }
    return amax;
}

/* Rows 2.. move down by one (row 1 drops out), the live amax becomes the last one. */
static void roll(const te_cpu_matrix *history, int64_t slot, float live)
{
    if (history->rows < 2) return;
    for (int64_t row = 1; row + 1 < history->rows; row++) {
        *at(history, row, slot) = *at(history, row + 1, slot);
    }
    *at(history, history->rows - 1, slot) = live;
}

te_status te_cpu_scaling_update(const te_scaling_update_args *args)
{
    const te_cpu_matrix scale = te_cpu_matrix_of(&args->scale);
    const te_cpu_matrix history = te_cpu_matrix_of(&args->history);
    if (history.rows == 0) return TE_OK;
    for (int64_t slot = 0; slot < scale.columns; slot++) {
        float live = te_cpu_take_amax(at(&history, 0, slot)), *value = at(&scale, 0, slot);
        float amax;
        if (te_is_idle(live)) continue;
        amax = window_amax(&history, slot, args->algo, live);
        *value = te_delayed_scale(amax, *value, args->fp8_max);
        roll(&history, slot, live);
    }
    return TE_OK;
}
