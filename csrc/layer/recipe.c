/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/recipe.h"

#define DIM(number, to)                                                                            \
    {                                                                                              \
        .symbol = (number), .align = (to), .multiply = 1                                           \
    }

/* One scale for the whole tensor, and data along k, which GEMMs want in multiples of 16 (Hopper's
 * cuBLASLt; the CPU backend takes the same forms). */
#define PER_TENSOR(rows, columns)                                                                  \
    {                                                                                              \
        .shape = {DIM(rows, 1), DIM(columns, 16)}, .scales = TE_LINK_SCALES,                       \
        .scales_dtype = TE_DTYPE_F32, .scales_ndim = 1, .scales_shape = {                          \
            {.align = 1, .add = TE_TENSOR_SCALES}                                                  \
        }                                                                                          \
    }

/* What Hopper's FP8 GEMMs read, whose operands both lie along k. */
#define INPUT_USAGE                                                                                \
    {                                                                                              \
        TE_LINK_ROW, TE_LINK_VALUE, TE_LINK_COLUMN                                                 \
    }
#define WEIGHT_USAGE                                                                               \
    {                                                                                              \
        TE_LINK_ROW, TE_LINK_COLUMN, TE_LINK_VALUE                                                 \
    }
#define GRAD_USAGE                                                                                 \
    {                                                                                              \
        TE_LINK_VALUE, TE_LINK_ROW, TE_LINK_COLUMN                                                 \
    }

#define E4M3 (1U << TE_DTYPE_E4M3)
#define E5M2 (1U << TE_DTYPE_E5M2)

#define WIDE                                                                                       \
    {                                                                                              \
        .mode = TE_SCALING_NONE, .usage = { TE_LINK_VALUE, TE_LINK_VALUE, TE_LINK_VALUE }          \
    }
#define FP8(source, of_grads, can_be, ...)                                                         \
    {                                                                                              \
        .mode = TE_SCALING_TENSOR, .scale = (source), .dtypes = (can_be),                          \
        .grad_dtype = (of_grads), .row = PER_TENSOR(1, 2), .column = PER_TENSOR(2, 1),             \
        .usage = __VA_ARGS__                                                                       \
    }
#define FP8_RECIPE(source)                                                                         \
    {                                                                                              \
        FP8(source, 0, E4M3, INPUT_USAGE), FP8(source, 0, E4M3, WEIGHT_USAGE),                     \
            FP8(source, 1, E4M3 | E5M2, GRAD_USAGE)                                                \
    }

static const te_recipe_rule rules[][TE_OPERAND_ROLES] = {
    [TE_RECIPE_NONE] = {WIDE, WIDE, WIDE},
    [TE_RECIPE_DELAYED] = FP8_RECIPE(TE_SCALE_STATE),
    [TE_RECIPE_CURRENT] = FP8_RECIPE(TE_SCALE_MEASURED),
};

int te_recipe_exists(int32_t recipe)
{
    return recipe >= 0 && recipe < (int32_t)(sizeof rules / sizeof rules[0]);
}

const te_recipe_rule *te_recipe_rule_of(const te_quantization *quantization, te_operand_role role)
{
    return &rules[quantization->recipe][role];
}

te_dtype te_role_dtype(const te_quantization *quantization, te_operand_role role)
{
    int32_t of_grads = te_recipe_rule_of(quantization, role)->grad_dtype;
    return (te_dtype)(of_grads ? quantization->backward_fp8 : quantization->forward_fp8);
}

/* An extent of the table for an operand of this shape: a constant at once, one of rows when their
 * number is known. */
static te_extent extent_of(const te_extent *rule, const te_extent *shape)
{
    te_extent result = *rule;
    const te_extent *dim;
    te_sizes sizes;
    if (rule->symbol == TE_SYMBOL_NONE) return result;
    dim = &shape[rule->symbol - 1];
    if (dim->symbol == TE_SYMBOL_NONE) {
        sizes.of[rule->symbol] = dim->add;
        return te_constant(te_extent_value(rule, &sizes));
    }
    result.symbol = dim->symbol;
    result.multiply *= dim->multiply;
    if (result.align < dim->align) result.align = dim->align;
    return result;
}

void te_describe_form(const te_quantization *quantization, te_operand_role role, te_link form,
                      const te_extent *shape, te_buffer_info *info)
{
    const te_recipe_rule *rule = te_recipe_rule_of(quantization, role);
    const te_form_rule *of =
        form == TE_LINK_ROW || form == rule->row.scales ? &rule->row : &rule->column;
    int scales = form == of->scales;
    const te_extent *extents = scales ? of->scales_shape : of->shape;
    info->dtype = scales ? of->scales_dtype : te_role_dtype(quantization, role);
    info->ndim = scales ? of->scales_ndim : 2;
    for (int32_t d = 0; d < info->ndim; d++) info->shape[d] = extent_of(&extents[d], shape);
}

te_dtype te_bias_dtype(const te_quantization *quantization, te_dtype output)
{
    if (!te_is_quantized(quantization)) return output;
    return output == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
}
