/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.h - the sizes and offsets of a plan's buffers for one number of rows.
 */
#ifndef TE_LAYER_LAYOUT_H
#define TE_LAYER_LAYOUT_H

#include "layer/plan.h"

/* Members of a packed buffer begin at multiples of this: enough for every vector access and
 * cuBLASLt. */
#define TE_MEMBER_ALIGN 256

typedef struct te_layout {
    int64_t rows[TE_PLAN_MAX_BUFFERS];    /* shape[0] (the length of a vector) */
    int64_t columns[TE_PLAN_MAX_BUFFERS]; /* shape[1]; 1 for a vector */
    int64_t bytes[TE_PLAN_MAX_BUFFERS];   /* of members of the packed buffers */
    int64_t offset[TE_PLAN_MAX_BUFFERS];  /* into the packed buffer; -1 for other roles */
    int64_t saved_bytes, scratch_bytes;
} te_layout;

/* Scratch buffers that are never alive at the same time share memory. */
void te_plan_layout(const te_plan *plan, int64_t rows, te_layout *layout);
/* The same, remembered per thread; valid until this thread's next call. */
const te_layout *te_plan_layout_cached(const te_plan *plan, int64_t rows);

#endif
