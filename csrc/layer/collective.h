/* SPDX-License-Identifier: Apache-2.0
 *
 * collective.h - what is asked of a graph about its collectives.
 */
#ifndef TE_LAYER_COLLECTIVE_H
#define TE_LAYER_COLLECTIVE_H

#include "layer/build.h"
#include "layer/recipe.h"

typedef enum te_collective_op {
    TE_DOES_NOTHING, /* no collective, or nothing to be done */
    TE_DOES_GATHER,
    TE_DOES_REDUCE_SCATTER,
    TE_DOES_ALL_REDUCE
} te_collective_op;

/* What a node does in this step; nothing for TE_NOBODY, and for a node of another kind. */
te_collective_op te_collective_does(const te_graph_desc *graph, int32_t node,
                                    te_collective_step step);
/* Whether it gathers, and quantized forms. */
int te_collective_gathers_forms(const te_graph_desc *graph, int32_t node, te_collective_step step);
int te_collective_is_copy(const te_graph_desc *graph, int32_t node);
/* Whether it sums the gradient of its input over ranks. */
int te_collective_sums_gradient(const te_graph_desc *graph, int32_t node);

/* Whether the GEMM beside it runs in pieces (TE_COLLECTIVE_PIECES_FORWARD and _BACKWARD). */
int te_collective_in_pieces(const te_graph_desc *graph, int32_t node, te_collective_step step);

/* The node that makes a value; the only one that reads a value which nobody is given. TE_NOBODY:
 * there is none. */
int32_t te_maker_of(const te_graph_desc *graph, int32_t value);
int32_t te_only_reader_of(const te_graph_desc *graph, int32_t value);
/* The collective that makes input 0 of a node; TE_NOBODY: none. */
int32_t te_collective_before(const te_graph_desc *graph, int32_t node);

/* Where a node writes its output: to what is summed in place of it, if only that reads it. */
int32_t te_collective_target(const te_graph_desc *graph, int32_t value);
/* The value of which this one is a copy, whose gradient is this one's, summed in place: nobody else
 * reads either. TE_NOBODY: none. */
int32_t te_collective_copied(const te_graph_desc *graph, int32_t value);

/* The collective that gathers the forms of an operand, input or gradient, of a linear node: that
 * casts what its rank has. TE_NOBODY: none. */
int32_t te_linear_gatherer(const te_graph_desc *graph, int32_t node, te_operand_role role);
/* The value that a node casts as an operand, or whose gradient it casts. */
int32_t te_linear_value(const te_graph_desc *graph, int32_t node, te_operand_role role);

/* ---- building (node_collective.c) ---- */

/* Sums the gradient of its input now, if it does so at all and that is complete. */
void te_collective_sum_gradient(te_build *build, int32_t node);
/* Sends the rows of the others of a sum in pieces: the stage alone. */
void te_collective_exchange(te_build *build, int32_t node);

#endif
