/* SPDX-License-Identifier: Apache-2.0
 *
 * scaling.c - host side of the delayed-scaling update.
 */
#include "cuda/kernels/scaling.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

te_status te_cuda_scaling_update(void *self, te_context *context, const void *args_, void *stream)
{
    const te_scaling_update_args *args = args_;
    const te_view history = te_cuda_view(&args->history);
    const te_scaling_params params = {.scale = args->scale.data,
                                      .history = args->history.data,
                                      .slots = history.columns,
                                      .length = history.rows,
                                      .stride = history.stride,
                                      .fp8_max = args->fp8_max,
                                      .most_recent = args->algo == TE_AMAX_MOST_RECENT};
    te_cuda_call call = {"scaling",
                         "te_scaling_update",
                         {1, 1, 1, TE_SCALING_SLOTS, TE_SCALING_LINES, 1, 0},
                         &params,
                         sizeof params};
    (void)self;
    if (history.columns == 0) return TE_OK;
    call.dims.grid_x = (uint32_t)te_ceil_div(history.columns, TE_SCALING_SLOTS);
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}
