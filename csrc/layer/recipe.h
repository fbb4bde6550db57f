/* SPDX-License-Identifier: Apache-2.0
 *
 * recipe.h - the recipe table: how each operand of a linear layer is cast under each recipe.
 */
#ifndef TE_LAYER_RECIPE_H
#define TE_LAYER_RECIPE_H

#include "layer/plan.h"

/* One operand role under one recipe. */
typedef struct te_recipe_rule {
    te_scaling_mode mode;
    int32_t measured;  /* its largest magnitude is found in a pass of its own, before the cast */
    int32_t backward;  /* it has the FP8 dtype of gradients */
    int32_t alignment; /* the GEMM's inner size, which quantize pads to */
} te_recipe_rule;

const te_recipe_rule *te_recipe_rule_of(const te_quantization *quantization, te_operand_role role);

static inline int te_is_quantized(const te_quantization *quantization)
{
    return quantization->recipe != TE_RECIPE_NONE;
}

/* dtype and shape of the row-wise form, the column-wise form or the scales of an operand that is
 * [shape[0], shape[1]] in high precision. */
void te_describe_form(const te_quantization *quantization, te_operand_role role, te_link form,
                      const te_extent *shape, te_buffer_info *info);
/* The dtype that a GEMM with this output wants its bias in. */
te_dtype te_bias_dtype(const te_quantization *quantization, te_dtype output);

#endif
