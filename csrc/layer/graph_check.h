/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_check.h - what a graph has to be before plans are made of it.
 */
#ifndef TE_LAYER_GRAPH_CHECK_H
#define TE_LAYER_GRAPH_CHECK_H

#include "layer/build.h"

/* By te_node_kind. */
extern const te_node_rules *const te_rules[TE_NODE_KINDS];

/* The sizes of a graph and of its lists, and the direction. */
te_status te_check_head(const te_graph_desc *graph, te_direction direction);
/* Values, nodes and their order, of a graph whose head was checked; fills what is known of each
 * value. */
te_status te_check_graph(const te_graph_desc *graph, te_value_state *values);

#endif
