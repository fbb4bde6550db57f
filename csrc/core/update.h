/* SPDX-License-Identifier: Apache-2.0
 *
 * update.h - what backends share of te_update and te_l2norm.
 */
#ifndef TE_CORE_UPDATE_H
#define TE_CORE_UPDATE_H

#include "core/l2norm_order.h"
#include "core/tensor.h"
#include "core/update_math.h"
#include "transformer_engine.h"

/* The numbers of a call but for those on the device. */
te_update_numbers te_update_numbers_of(const te_update_args *args);

static inline int64_t te_l2norm_chunks(const te_tensor *tensor)
{
    return te_ceil_div(te_tensor_numel(tensor), TE_L2NORM_CHUNK);
}

#endif
