/* SPDX-License-Identifier: Apache-2.0
 *
 * collective.h - what other nodes know of collectives beside them.
 */
#ifndef TE_LAYER_COLLECTIVE_H
#define TE_LAYER_COLLECTIVE_H

#include "layer/build.h"
#include "layer/recipe.h"

/* The collective that makes input 0 of a node; that alone reads its output. TE_NOBODY: none. */
int32_t te_collective_before(const te_graph_desc *graph, int32_t node);
int32_t te_collective_behind(const te_graph_desc *graph, int32_t node);
/* Of a node, or TE_NOBODY: whether it is a collective that gathers, in a forward; that sums the
 * gradient of its input over ranks; that gathers quantized forms in this step; that is a copy. */
int te_collective_gathers(const te_graph_desc *graph, int32_t node);
int te_collective_sums_gradient(const te_graph_desc *graph, int32_t node);
int te_collective_gathers_forms(const te_graph_desc *graph, int32_t node, te_collective_step step);
int te_collective_is_copy(const te_graph_desc *graph, int32_t node);
/* Where a node writes its output: to what is summed in place of it, if only that reads it. */
int32_t te_collective_target(const te_graph_desc *graph, int32_t value);
/* The value of which this one is a copy, whose gradient is this one's, summed in place: nobody else
 * reads either. TE_NOBODY: none. */
int32_t te_collective_copied(const te_graph_desc *graph, int32_t value);

/* A stage of a collective, without its buffers. */
te_stage *te_collective_stage(te_build *build, int32_t node, const char *prefix, const char *name,
                              te_collective_step step);
/* Sums the gradient of its input now, if it does so at all and that is complete. */
void te_collective_sum_gradient(te_build *build, int32_t node);

#endif
