/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_desc.h - which descriptions of a linear layer and of an MLP make sense.
 */
#ifndef TE_LAYER_LINEAR_DESC_H
#define TE_LAYER_LINEAR_DESC_H

#include "transformer_engine.h"

/* INVALID or TYPE, with the field and its value, for a description that can not be. */
te_status te_linear_check(const te_linear_desc *desc);
te_status te_mlp_check(const te_mlp_desc *desc);

#endif
