/* SPDX-License-Identifier: Apache-2.0
 *
 * heads_place.h - in which FP8 matrices an attention with a recipe has its heads.
 */
#ifndef TE_LAYER_HEADS_PLACE_H
#define TE_LAYER_HEADS_PLACE_H

#include "layer/recipe.h"

enum { TE_HEADS_INPUTS = TE_HEADS_VALUE + 1 }; /* query, key, value */

/* Heads in an FP8 matrix: that of their value, where the node reads all of it, or one of their own.
 * Scales that are measured are those of queries, of keys and of values, wherever these lie. */
typedef struct te_heads_place {
    te_heads_role matrix; /* the role whose buffer it is */
    int32_t value;
    int whole;
    te_slice slice;
} te_heads_place;

/* The input that a role is of, or is the gradient of; none of the output. */
static inline int te_heads_input(te_heads_role role)
{
    return role >= TE_HEADS_GRAD_QUERY ? (int)(role - TE_HEADS_GRAD_QUERY) : (int)role;
}

const char *te_heads_name(te_heads_role role);
/* Where the scales of the casts come from. */
te_scale_source te_heads_scales_of(const te_node_desc *node);
te_heads_place te_heads_place_of(const te_graph_desc *graph, const te_node_desc *node,
                                 te_heads_role role);
/* dtype and shape of a buffer of a role: TE_LINK_HEADS, TE_LINK_HEADS_SCALES or TE_LINK_HEADS_WIDE.
 */
void te_heads_describe(const te_graph_desc *graph, const te_node_desc *node, te_link link,
                       te_heads_role role, te_buffer_info *info);

#endif
