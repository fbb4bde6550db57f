/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.c - host side of the norms and of their gradients.
 *
 * Forward: a kernel on rows makes the statistics and whatever is wanted row by row; where FP8 is
 * wanted transposed too, a kernel on tiles makes both forms of it with these statistics.
 */
#include "cuda/kernels/norm.h"

#include "core/status.h"
#include "cuda/ops.h"
#include "cuda/tiles.h"

#define NARROW_THREADS 256
#define MANY_BLOCKS (1 << 20)

static te_norm_factors factors_of(const te_tensor *gamma, const te_tensor *beta, uint32_t flags)
{
    const te_dtype dtype = te_tensor_present(gamma) ? gamma->dtype : beta->dtype;
    return (te_norm_factors){.gamma = gamma->data,
                             .beta = beta->data,
                             .dtype = te_cuda_store(dtype),
                             .aligned = (uintptr_t)gamma->data % 16 == 0 &&
                                        (uintptr_t)beta->data % 16 == 0,
                             .zero_centered = te_tensor_present(gamma) &&
                                              (flags & TE_NORM_ZERO_CENTERED) != 0};
}

static float inverse_of(te_norm_kind kind, int64_t columns)
{
    return kind == TE_NORM_L2 ? 1.0F : 1.0F / (float)columns;
}

/* How rows are dealt out; -1: they do not fit the registers of a block. */
typedef enum row_plan { NARROW = 0, WIDE = 1, LONG = 2 } row_plan;

static row_plan plan_rows(const te_norm_params *params, te_cuda_dims *dims)
{
    /* The padding of FP8 rows is written by the threads that reach into it. */
    const int64_t width = params->to.rowwise.columns > params->input.columns
                              ? params->to.rowwise.columns
                              : params->input.columns;
    const int64_t vectors = te_ceil_div(width, 8);
    const int64_t most = params->amax_partials != NULL || params->to.partials != NULL
                             ? TE_CAST_PARTIALS
                             : MANY_BLOCKS;
    row_plan plan = WIDE;
    int64_t lanes = 32, threads = NARROW_THREADS, rows, blocks;
    if (vectors <= 32) {
        plan = NARROW;
        for (lanes = 1; lanes < vectors; lanes *= 2) {}
    } else if (vectors > (int64_t)TE_NORM_THREADS * TE_NORM_VECTORS) {
        plan = LONG;
        lanes = threads = TE_NORM_THREADS;
    } else if (vectors > lanes * TE_NORM_VECTORS) {
        lanes = threads = te_round_up(te_ceil_div(vectors, TE_NORM_VECTORS), 32);
    }
    rows = threads / lanes * (plan == NARROW ? TE_NORM_ROWS : 1); /* of a block at a time */
    blocks = te_ceil_div(params->input.rows, rows);
    if (blocks > most) blocks = most;
    *dims = (te_cuda_dims){blocks > 0 ? (uint32_t)blocks : 1, 1, 1, (uint32_t)threads, 1, 1,
                           (uint32_t)lanes};
    return plan;
}
