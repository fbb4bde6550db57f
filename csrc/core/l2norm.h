/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm.h - what backends share of te_l2norm.
 */
#ifndef TE_CORE_L2NORM_H
#define TE_CORE_L2NORM_H

#include "core/l2norm_order.h"
#include "core/tensor.h"
#include "transformer_engine.h"

static inline int64_t te_l2norm_chunks(const te_tensor *tensor)
{
    return te_ceil_div(te_tensor_numel(tensor), TE_L2NORM_CHUNK);
}

#endif
