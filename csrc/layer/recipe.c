/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/recipe.h"

#define DIM(number, to)                                                                            \
    {                                                                                              \
        .symbol = (number), .align = (to), .multiply = 1                                           \
    }

#define TILES(number, to, each)                                                                    \
    {                                                                                              \
        .symbol = (number), .align = (to), .multiply = 1, .divide = (each)                         \
    }

/* Data along k, which GEMMs want in multiples of 16 (Hopper's cuBLASLt; the CPU backend takes the
 * same forms), and its scales as TE_SCALING_MODES has them. */
#define FORM(rows, columns, link, ndim, ...)                                                       \
    {                                                                                              \
        .shape = {DIM(rows, 1), DIM(columns, 16)}, .scales = (link), .amax = TE_LINK_VALUE,        \
        .scales_dtype = TE_DTYPE_F32, .scales_ndim = (ndim), .scales_shape = {                     \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
#define PER_TENSOR(rows, columns, link)                                                            \
    FORM(rows, columns, TE_LINK_SCALES, 1, {.align = 1, .add = TE_TENSOR_SCALES})
#define PER_ROW(rows, columns, link)                                                               \
    FORM(rows, columns, link, 2, {.align = 1, .add = TE_ROW_SCALES}, DIM(rows, 1))
#define PER_TILE_1D(rows, columns, link)                                                           \
    FORM(rows, columns, link, 2, TILES(columns, 128, 128), DIM(rows, 4))
#define PER_TILE_2D(rows, columns, link)                                                           \
    FORM(rows, columns, link, 2, TILES(rows, 128, 128), TILES(columns, 512, 128))

/* Bytes of groups, and their scales: what te_gemm multiplies out, of any size. */
#define MICRO_FORM(amax_link, link, data, ...)                                                     \
    {                                                                                              \
        .shape = data, .scales = (link), .scales_dtype = TE_DTYPE_U8, .scales_ndim = 2,            \
        .scales_shape = {__VA_ARGS__}, .amax = (amax_link)                                         \
    }
#define MATRIX(rows, columns)                                                                      \
    {                                                                                              \
        DIM(rows, 1), DIM(columns, 1)                                                              \
    }
#define PACKED(rows, columns)                                                                      \
    {                                                                                              \
        DIM(rows, 1), TILES(columns, 16, 2)                                                        \
    }
#define MICRO(scaling, source, apart, is_square, can_be, row_form, column_form, ...)               \
    {                                                                                              \
        .mode = (scaling), .scale = (source), .dtypes = (can_be), .separate = (apart),             \
        .square = (is_square), .row = row_form, .column = column_form, .usage = __VA_ARGS__        \
    }
#define MXFP8(is_square, ...)                                                                      \
    MICRO(TE_SCALING_MXFP8, TE_SCALE_OWN, 0, is_square, E4M3 | E5M2,                               \
          MICRO_FORM(TE_LINK_VALUE, TE_LINK_ROW_SCALES, MATRIX(1, 2), DIM(1, 128),                 \
                     TILES(2, 128, 32)),                                                           \
          MICRO_FORM(TE_LINK_VALUE, TE_LINK_COLUMN_SCALES, MATRIX(1, 2), TILES(1, 128, 32),        \
                     DIM(2, 128)),                                                                 \
          __VA_ARGS__)
/* The amaxes of rows and of transformed columns are found in a matrix. */
#define FP4_APART (TE_CAST_HADAMARD | TE_CAST_ROW_SCALED)
#define NVFP4(is_square, ...)                                                                      \
    MICRO(TE_SCALING_NVFP4, TE_SCALE_MEASURED, FP4_APART, is_square, 1U << TE_DTYPE_U8,            \
          MICRO_FORM(TE_LINK_ROW_AMAX, TE_LINK_ROW_SCALES, PACKED(1, 2), DIM(1, 128),              \
                     TILES(2, 64, 16)),                                                            \
          MICRO_FORM(TE_LINK_COLUMN_AMAX, TE_LINK_COLUMN_SCALES, PACKED(2, 1), DIM(2, 128),        \
                     TILES(1, 64, 16)),                                                            \
          __VA_ARGS__)

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
/* The rules of all operands, which differ in what GEMMs read of them. */
#define OPERANDS(OF, ...)                                                                          \
    {                                                                                              \
        OF(__VA_ARGS__, INPUT_USAGE), OF(__VA_ARGS__, WEIGHT_USAGE), OF(__VA_ARGS__, GRAD_USAGE)   \
    }

#define E4M3 (1U << TE_DTYPE_E4M3)
#define E5M2 (1U << TE_DTYPE_E5M2)

#define WIDE                                                                                       \
    {                                                                                              \
        .mode = TE_SCALING_NONE, .usage = { TE_LINK_VALUE, TE_LINK_VALUE, TE_LINK_VALUE }          \
    }
/* One operand. */
#define FP8(scaling, source, form, ...)                                                            \
    {                                                                                              \
        .mode = (scaling), .scale = (source), .dtypes = E4M3 | E5M2,                               \
        .row = form(1, 2, TE_LINK_ROW_SCALES), .column = form(2, 1, TE_LINK_COLUMN_SCALES),        \
        .usage = __VA_ARGS__                                                                       \
    }

/* What the caller makes: matrices in high precision, as the operand is. */
#define PLAIN                                                                                      \
    {                                                                                              \
        .shape = MATRIX(1, 2), .scales = TE_LINK_VALUE, .amax = TE_LINK_VALUE                      \
    }
#define OUTSIDE(...)                                                                               \
    {                                                                                              \
        .mode = TE_SCALING_NONE, .row = PLAIN, .column = PLAIN,                                    \
        .dtypes = 1U << TE_DTYPE_F32 | 1U << TE_DTYPE_F16 | 1U << TE_DTYPE_BF16,                   \
        .usage = __VA_ARGS__                                                                       \
    }

/* By recipe, and whether tiles are as high as they are wide. */
static const te_recipe_rule rules[][2][TE_GEMM_OPERANDS] = {
    [TE_RECIPE_NONE] = {{WIDE, WIDE, WIDE}},
    [TE_RECIPE_DELAYED] = {OPERANDS(FP8, TE_SCALING_TENSOR, TE_SCALE_STATE, PER_TENSOR)},
    [TE_RECIPE_CURRENT] = {OPERANDS(FP8, TE_SCALING_TENSOR, TE_SCALE_MEASURED, PER_TENSOR)},
    [TE_RECIPE_BLOCK] = {OPERANDS(FP8, TE_SCALING_BLOCK_1D, TE_SCALE_OWN, PER_TILE_1D),
                         OPERANDS(FP8, TE_SCALING_BLOCK_2D, TE_SCALE_OWN, PER_TILE_2D)},
    [TE_RECIPE_ROW] = {OPERANDS(FP8, TE_SCALING_ROW, TE_SCALE_OWN, PER_ROW)},
    [TE_RECIPE_MXFP8] = {OPERANDS(MXFP8, 0), OPERANDS(MXFP8, 1)},
    [TE_RECIPE_NVFP4] = {OPERANDS(NVFP4, 0), OPERANDS(NVFP4, 1)},
    [TE_RECIPE_EXTERNAL] = {{OUTSIDE(INPUT_USAGE), OUTSIDE(WEIGHT_USAGE), OUTSIDE(GRAD_USAGE)}},
};

int te_recipe_exists(int32_t recipe)
{
    return recipe >= 0 && recipe < (int32_t)(sizeof rules / sizeof rules[0]);
}

int te_recipe_has_tiles_2d(int32_t recipe)
{
    return rules[recipe][1][TE_INPUT_OPERAND].mode != TE_SCALING_NONE;
}

const te_recipe_rule *te_recipe_rule_of(const te_quantization *quantization, te_operand_role role)
{
    const te_operand_role as = te_cast_as(role);
    const te_operand_cast *cast = &quantization->casts[as];
    return &rules[cast->recipe][(cast->options & TE_CAST_TILES_2D) != 0][as];
}

int te_is_cast_apart(const te_quantization *quantization, te_operand_role role)
{
    return te_is_made_outside(quantization, role) ||
           te_cast_has(quantization, role, te_recipe_rule_of(quantization, role)->separate);
}

te_link te_usage_of(const te_quantization *quantization, te_operand_role role, te_linear_gemm gemm)
{
    int wide = gemm != TE_GEMM_OUTPUT && quantization->backward != TE_BACKWARD_QUANTIZED;
    return wide ? TE_LINK_VALUE : te_recipe_rule_of(quantization, role)->usage[gemm];
}

int te_has_forms(const te_quantization *quantization, te_operand_role role)
{
    for (int gemm = 0; gemm < TE_LINEAR_GEMMS; gemm++) {
        if (te_usage_of(quantization, role, (te_linear_gemm)gemm) != TE_LINK_VALUE) return 1;
    }
    return 0;
}

int te_is_measured(const te_node_desc *node, te_operand_role role)
{
    uint32_t first = role >= TE_GEMM_OPERANDS  ? TE_LINEAR_MEASURE_RETURNED
                     : role == TE_GRAD_OPERAND ? TE_LINEAR_MEASURE_GRAD
                                               : TE_LINEAR_MEASURE_OPERANDS;
    te_scale_source source = te_recipe_rule_of(&node->quantization, role)->scale;
    return source == TE_SCALE_MEASURED || (source == TE_SCALE_STATE && (node->flags & first) != 0);
}

te_dtype te_role_dtype(const te_quantization *quantization, te_operand_role role)
{
    return (te_dtype)quantization->casts[te_cast_as(role)].dtype;
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
        form == TE_LINK_ROW || form == rule->row.scales || form == rule->row.amax ? &rule->row
                                                                                  : &rule->column;
    int scales = form == of->scales;
    const te_extent *extents = scales ? of->scales_shape : of->shape;
    if (form == of->amax) {
        int by_rows = of == &rule->row && te_cast_has(quantization, role, TE_CAST_ROW_SCALED);
        info->shape[0] = by_rows ? shape[0] : te_constant(1);
        return;
    }
    info->dtype = scales ? of->scales_dtype : te_role_dtype(quantization, role);
    info->ndim = scales ? of->scales_ndim : 2;
    for (int32_t d = 0; d < info->ndim; d++) info->shape[d] = extent_of(&extents[d], shape);
}

te_dtype te_bias_dtype(const te_quantization *quantization, te_dtype output)
{
    if (te_recipe_rule_of(quantization, TE_INPUT_OPERAND)->mode == TE_SCALING_NONE &&
        te_recipe_rule_of(quantization, TE_WEIGHT_OPERAND)->mode == TE_SCALING_NONE) {
        return output;
    }
    return output == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
}
