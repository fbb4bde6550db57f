/* SPDX-License-Identifier: Apache-2.0
 *
 * recipe.h - the recipe table: how each operand of a linear layer is cast under each recipe, and
 * what its GEMMs read of it. Nothing else knows a recipe by name.
 *
 * In these tables TE_LINK_VALUE, the link of the operand in high precision, stands where there is
 * no form, no scale or no amax.
 */
#ifndef TE_LAYER_RECIPE_H
#define TE_LAYER_RECIPE_H

#include "layer/plan.h"

/* GEMMs of a linear layer. */
typedef enum te_linear_gemm {
    TE_GEMM_OUTPUT,
    TE_GEMM_GRAD_INPUT,
    TE_GEMM_GRAD_WEIGHT,
    TE_LINEAR_GEMMS
} te_linear_gemm;

/* Where the scale of a cast comes from. */
typedef enum te_scale_source {
    TE_SCALE_NONE,     /* high precision: no cast */
    TE_SCALE_STATE,    /* a slot of the scaling state, which records the amax */
    TE_SCALE_MEASURED, /* the largest magnitude, found in a pass of its own before the cast */
    TE_SCALE_OWN       /* the cast measures what each of its scales is for */
} te_scale_source;

/* One form of an operand. The symbols of extents number the dims of the operand, from 1. */
typedef struct te_form_rule {
    te_extent shape[2]; /* of the data, which GEMMs want aligned */
    te_link scales;     /* forms with the same link share their scales; VALUE: there are none */
    te_dtype scales_dtype;
    int32_t scales_ndim;
    te_extent scales_shape[2];
    te_link amax; /* f32 [1], the amax of all of it; VALUE: there is none */
} te_form_rule;

/* One operand role under one recipe. */
typedef struct te_recipe_rule {
    te_scaling_mode mode;
    te_scale_source scale;
    uint32_t dtypes;   /* 1 << te_dtype of those that it can have */
    uint32_t separate; /* TE_CAST_* options whose maxima are found in a matrix, so that who makes
                          the values writes them in high precision */
    int32_t square;    /* of a mode that has no other for tiles as high as they are wide */
    te_form_rule row, column;
    te_link usage[TE_LINEAR_GEMMS]; /* see te_usage_of */
} te_recipe_rule;

/* The operand as which one is cast: with the same settings, dtype and scales. */
static inline te_operand_role te_cast_as(te_operand_role role)
{
    static const te_operand_role as[] = {
        [TE_INPUT_OPERAND] = TE_INPUT_OPERAND,     [TE_WEIGHT_OPERAND] = TE_WEIGHT_OPERAND,
        [TE_GRAD_OPERAND] = TE_GRAD_OPERAND,       [TE_OUTPUT_OPERAND] = TE_INPUT_OPERAND,
        [TE_GRAD_INPUT_OPERAND] = TE_GRAD_OPERAND, [TE_WHOLE_INPUT_OPERAND] = TE_INPUT_OPERAND,
        [TE_WHOLE_GRAD_OPERAND] = TE_GRAD_OPERAND,
    };
    return as[role];
}
/* Whether it is cast in a backward. */
static inline int te_is_gradient(te_operand_role role)
{
    return te_cast_as(role) == TE_GRAD_OPERAND;
}
int te_recipe_exists(int32_t recipe);
/* Whether tiles of a recipe can be as high as they are wide (TE_CAST_TILES_2D). */
int te_recipe_has_tiles_2d(int32_t recipe);
static inline const te_operand_cast *te_cast_of(const te_quantization *quantization,
                                                te_operand_role role)
{
    return &quantization->casts[te_cast_as(role)];
}
static inline int te_cast_has(const te_quantization *quantization, te_operand_role role,
                              uint32_t option)
{
    return (quantization->casts[te_cast_as(role)].options & option) != 0;
}
/* How a cast with these options transforms. */
static inline te_hadamard te_hadamard_of(uint32_t options)
{
    if ((options & TE_CAST_HADAMARD) == 0) return TE_HADAMARD_NONE;
    return (options & TE_CAST_UNSIGNED) == 0 ? TE_HADAMARD_SIGNED : TE_HADAMARD_UNSIGNED;
}
/* Whether it has the Hadamard transform, stochastic rounding and so on. */
static inline int te_is_fp4(const te_quantization *quantization, te_operand_role role)
{
    return quantization->casts[te_cast_as(role)].recipe == TE_RECIPE_NVFP4;
}
/* Whether the caller's quantizer makes what GEMMs read of an operand. */
static inline int te_is_made_outside(const te_quantization *quantization, te_operand_role role)
{
    return quantization->casts[te_cast_as(role)].recipe == TE_RECIPE_EXTERNAL;
}
const te_recipe_rule *te_recipe_rule_of(const te_quantization *quantization, te_operand_role role);
/* Whether who makes an operand writes it in high precision for its cast, whatever its forms are:
 * all of them are casts of the same values. */
int te_is_cast_apart(const te_quantization *quantization, te_operand_role role);
/* The form of an operand that a GEMM reads; VALUE: high precision. */
te_link te_usage_of(const te_quantization *quantization, te_operand_role role, te_linear_gemm gemm);
/* Whether a GEMM reads one that is not in high precision. */
int te_has_forms(const te_quantization *quantization, te_operand_role role);
/* The cast of an operand of a linear node has a pass before it that finds its largest magnitude. */
int te_is_measured(const te_node_desc *node, te_operand_role role);
te_dtype te_role_dtype(const te_quantization *quantization, te_operand_role role);

/* Whether any operand has a recipe. */
static inline int te_is_quantized(const te_quantization *quantization)
{
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        if (quantization->casts[role].recipe != TE_RECIPE_NONE) return 1;
    }
    return 0;
}

/* dtype and shape of the row-wise form, the column-wise form or the scales of an operand that is
 * [shape[0], shape[1]] in high precision. */
void te_describe_form(const te_quantization *quantization, te_operand_role role, te_link form,
                      const te_extent *shape, te_buffer_info *info);
/* The dtype that a GEMM with this output wants its bias in. */
te_dtype te_bias_dtype(const te_quantization *quantization, te_dtype output);

#endif
