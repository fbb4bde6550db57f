/* SPDX-License-Identifier: Apache-2.0
 *
 * heads_fp8.h - what an attention node with a recipe casts, and reads again.
 *
 * The forward casts queries, keys and values, one matrix for all of a projection that is theirs
 * alone, and gets its output in FP8; both are what is saved. The output is read again in high
 * precision, or goes on as it is: to the linear node that reads it, or to the caller. With
 * TE_NODE_FP8_GRADIENT the backward casts the gradient of the output and gets its gradients in FP8;
 * else it reads what was saved in high precision and is that of any other attention.
 */
#ifndef TE_LAYER_HEADS_FP8_H
#define TE_LAYER_HEADS_FP8_H

#include "layer/build.h"
#include "layer/heads_place.h"

int te_fp8_is_cast(const te_build *build, int32_t node);
int te_fp8_has_gradient(const te_build *build, int32_t node); /* in FP8 */
/* Numbers and dtypes of the node's quantization, and its inputs. */
te_status te_fp8_check(const te_graph_desc *graph, int32_t node);

/* Heads in FP8; in a backward those that the forward has saved, or that the cast of the gradient
 * has made. */
int32_t te_fp8_heads(te_build *build, int32_t node, te_heads_role role);
/* The same of the forward in high precision. */
int32_t te_fp8_heads_again(te_build *build, int32_t node, te_heads_role role);

/* Stages before an attention: casts of what it reads. */
void te_fp8_cast_inputs(te_build *build, int32_t node);
void te_fp8_cast_grad(te_build *build, int32_t node, int32_t grad);
/* Lets an attention, or its gradient, read and write scales and amaxes. */
void te_fp8_use_scales(te_build *build, int32_t node, te_stage *stage);
/* Stages behind it: what it has made, in high precision; none for an output that goes on in FP8. */
void te_fp8_read_output(te_build *build, int32_t node);
void te_fp8_read_grads(te_build *build, int32_t node);

#endif
