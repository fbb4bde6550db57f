/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_cast.h - the operands of a linear node: where they come from, and their casts.
 */
#ifndef TE_LAYER_LINEAR_CAST_H
#define TE_LAYER_LINEAR_CAST_H

#include "layer/collective.h"

/* ---- stages ---- */

int te_linear_is_external(const te_build *build, int32_t node, te_linear_stage number);
/* A stage of the node; the caller's, where the graph says so. */
te_stage *te_linear_add(te_build *build, int32_t node, te_linear_stage number, te_op op);

/* ---- forms ---- */

/* Sets of forms. */
enum { TE_FORM_ROW = 1, TE_FORM_COLUMN = 2 };

static inline int te_form_set(te_link form)
{
    return form == TE_LINK_ROW ? TE_FORM_ROW : form == TE_LINK_COLUMN ? TE_FORM_COLUMN : 0;
}

static inline int te_linear_is_quantized(const te_build *build, int32_t node)
{
    return te_is_quantized(&te_node(build, node)->quantization);
}
static inline const te_recipe_rule *te_linear_rule(const te_build *build, int32_t node,
                                                   te_operand_role role)
{
    return te_recipe_rule_of(&te_node(build, node)->quantization, role);
}
static inline const te_form_rule *te_linear_form_rule(const te_build *build, int32_t node,
                                                      te_operand_role role, te_link form)
{
    const te_recipe_rule *rule = te_linear_rule(build, node, role);
    return form == TE_LINK_ROW ? &rule->row : &rule->column;
}
static inline int te_linear_is_transposed(const te_build *build, int32_t node)
{
    return (te_node(build, node)->flags & TE_LINEAR_WEIGHT_TRANSPOSED) != 0;
}
/* The form that a GEMM reads; VALUE: high precision. Of a transposed weight it is the other one. */
static inline te_link te_linear_usage(const te_build *build, int32_t node, te_operand_role role,
                                      te_linear_gemm gemm)
{
    const te_quantization *quantization = &te_node(build, node)->quantization;
    const te_link read = te_usage_of(quantization, role, gemm);
    if (role != TE_WEIGHT_OPERAND || read == TE_LINK_VALUE ||
        !te_linear_is_transposed(build, node) || te_is_made_outside(quantization, role)) {
        return read;
    }
    return read == TE_LINK_ROW ? TE_LINK_COLUMN : TE_LINK_ROW;
}
/* The link of the scales of a form. */
static inline te_link te_linear_scales(const te_build *build, int32_t node, te_operand_role role,
                                       te_link form)
{
    return te_linear_form_rule(build, node, role, form)->scales;
}
/* The buffer of a form, or of its scales or amax; TE_NO_BUFFER where a rule has none. */
static inline int32_t te_linear_form(te_build *build, int32_t node, te_operand_role role,
                                     te_link link)
{
    return link == TE_LINK_VALUE ? TE_NO_BUFFER : te_get(build, link, te_operand_of(node, role));
}
static inline int te_linear_arrives(const te_build *build, int32_t node, te_operand_role role)
{
    return te_operand_arrives(build, te_operand_of(node, role));
}
/* Whether a node casts what its rank has of an operand, and a collective gathers what GEMMs read.
 */
static inline int te_linear_is_part(const te_build *build, int32_t node, te_operand_role role)
{
    return te_linear_gatherer(build->graph, node, role) != TE_NOBODY;
}
/* The operand among whose forms GEMMs find this one: where it is gathered that of all ranks. */
te_operand_role te_linear_read_as(const te_build *build, int32_t node, te_operand_role role,
                                  te_link form);
/* Gathers what GEMMs find of an operand, whose forms here are there: the stage alone. With one
 * scale for the tensor it is the row-wise form. */
void te_linear_gather(te_build *build, int32_t node, te_operand_role role, int forms);
/* The same of an input in a backward, which is given it, or has its forms saved or cast again. */
void te_linear_gather_again(te_build *build, int32_t node, te_link form);
/* What GEMMs find, after that; transposed where it was gathered row-wise. */
int32_t te_linear_gathered(te_build *build, int32_t node, te_operand_role role, te_link form);
/* The forms of an operand that these GEMMs, a set of 1 << te_linear_gemm, read. */
int te_linear_read_by(const te_build *build, int32_t node, te_operand_role role, uint32_t gemms);

/* ---- sources and casts ---- */

/* Where an operand comes from: a buffer in high precision, or an operator that has not run yet. */
typedef struct te_linear_source {
    te_operand_role role;
    int32_t value;
    int32_t pending; /* node whose operator makes it; TE_NOBODY: it is in `wide` */
    int32_t wide;
} te_linear_source;

te_linear_source te_linear_source_of(te_build *build, int32_t node, te_operand_role role);
/* Lets the operator that makes it write it in high precision, and sum its columns too. */
void te_linear_write_source(te_build *build, int32_t node, te_linear_source *from,
                            int32_t bias_grad);
/* The input in high precision. */
int32_t te_linear_wide_input(te_build *build, int32_t node);
/* Column sums of a gradient by themselves; TE_NO_BUFFER: none. */
void te_linear_sum_grad(te_build *build, int32_t node, const te_linear_source *from,
                        int32_t bias_grad);
/* The same of a gradient that arrives quantized: of its values in high precision. */
void te_linear_sum_arrived(te_build *build, int32_t node, int32_t bias_grad);
/* Casts an operand to these forms, and to those that are saved or kept, with the recipe's scales.
 */
void te_linear_quantize(te_build *build, int32_t node, te_operand_role role, int forms,
                        int32_t bias_grad);
/* Casts an operand with the scales of the forward, or to those that it makes of the same values:
 * the same bits, no amax. */
void te_linear_quantize_again(te_build *build, int32_t node, te_operand_role role, int forms);
/* The linear node that casts what is returned quantized of a value: that makes the result, or the
 * first that an input comes to, behind its norm; TE_NOBODY where there is none. */
int32_t te_caster_of(const te_graph_desc *graph, int32_t value);
/* Casts what a call is returned of a value, OUTPUT or GRAD_INPUT, and is in `wide`. */
void te_linear_return(te_build *build, int32_t node, te_operand_role role, int32_t value,
                      int32_t wide);
/* Makes the column-wise form of an operand of the row-wise one, which alone arrives. */
void te_linear_transpose(te_build *build, int32_t node, te_operand_role role);
/* In a backward: a form of input or weight, given, saved, or cast again from what the forward was
 * given. */
int32_t te_linear_form_again(te_build *build, int32_t node, te_operand_role role, te_link form);
/* In a backward: an operand in high precision, in the dtype of the output: as the forward was given
 * it, or dequantized; a gradient that arrives quantized. */
int32_t te_linear_wide(te_build *build, int32_t node, te_operand_role role);

#endif
