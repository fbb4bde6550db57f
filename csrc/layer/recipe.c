/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/recipe.h"

/* FP8 GEMMs read both operands along k and ask for k % 16 == 0 (Hopper's cuBLASLt; the CPU backend
 * takes the same forms). */
#define FP8(measured, backward)                                                                    \
    {                                                                                              \
        TE_SCALING_TENSOR, measured, backward, 16                                                  \
    }

static const te_recipe_rule rules[][TE_OPERAND_ROLES] = {
    [TE_RECIPE_NONE] = {{TE_SCALING_NONE, 0, 0, 1},
                        {TE_SCALING_NONE, 0, 0, 1},
                        {TE_SCALING_NONE, 0, 1, 1}},
    [TE_RECIPE_DELAYED] = {FP8(0, 0), FP8(0, 0), FP8(0, 1)},
    [TE_RECIPE_CURRENT] = {FP8(1, 0), FP8(1, 0), FP8(1, 1)},
};

const te_recipe_rule *te_recipe_rule_of(const te_quantization *quantization, te_operand_role role)
{
    return &rules[quantization->recipe][role];
}

/* The extent rounded up: a constant at once, one of rows when it is known. */
static te_extent padded(const te_extent *extent, int32_t alignment)
{
    te_extent result = *extent;
    if (extent->symbol == TE_SYMBOL_NONE) {
        result.add = (extent->add + alignment - 1) / alignment * alignment;
    } else {
        result.align = alignment;
    }
    return result;
}

void te_describe_form(const te_quantization *quantization, te_operand_role role, te_link form,
                      const te_extent *shape, te_buffer_info *info)
{
    const te_recipe_rule *rule = te_recipe_rule_of(quantization, role);
    int across = form == TE_LINK_COLUMN;
    if (form == TE_LINK_SCALES) {
        info->dtype = TE_DTYPE_F32;
        info->ndim = 1;
        info->shape[0] = te_constant(TE_TENSOR_SCALES);
        return;
    }
    info->dtype =
        (te_dtype)(rule->backward ? quantization->backward_fp8 : quantization->forward_fp8);
    info->ndim = 2;
    info->shape[0] = shape[across];
    info->shape[1] = padded(&shape[!across], rule->alignment);
}

te_dtype te_bias_dtype(const te_quantization *quantization, te_dtype output)
{
    if (!te_is_quantized(quantization)) return output;
    return output == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
}
