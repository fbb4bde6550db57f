/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.h - sizes of an attention, of packed sequences or not.
 */
#ifndef TE_CORE_ATTENTION_H
#define TE_CORE_ATTENTION_H

#include "core/tensor.h"

static inline int te_attention_is_packed(const te_attention_problem *p)
{
    return te_tensor_requested(&p->query_offsets);
}

/* Sequences; of each of them at most so many queries and keys. */
static inline int64_t te_attention_batch(const te_attention_problem *p)
{
    return te_attention_is_packed(p) ? p->query_offsets.shape[0] - 1 : p->query.shape[0];
}

static inline int64_t te_attention_queries(const te_attention_problem *p)
{
    return te_attention_is_packed(p) ? p->max_queries : p->query.shape[1];
}

static inline int64_t te_attention_keys(const te_attention_problem *p)
{
    return te_attention_is_packed(p) ? p->max_keys : p->key.shape[1];
}

/* Whether queries, keys and values are FP8. */
static inline int te_attention_is_fp8(const te_attention_problem *p)
{
    return te_dtype_is_fp8(p->query.dtype);
}

/* By how much dropout may enlarge weights and what they add up to, inverted. */
static inline float te_attention_kept(float dropout)
{
    return dropout < 1.0F ? 1.0F - dropout : 1.0F;
}

/* What an FP8 forward casts its weights with: none exceeds 1 / (1 - dropout). */
static inline float te_attention_weights_scale(float dropout)
{
    return te_dtype_max(TE_DTYPE_E4M3) * te_attention_kept(dropout);
}

#endif
