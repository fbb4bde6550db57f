/* SPDX-License-Identifier: Apache-2.0
 *
 * node_linear.c - y = x W^T + b as a node: three GEMMs, and the order of what they read.
 *
 * With a recipe the forward casts input and weight row-wise for its GEMM and, in the same pass, the
 * input column-wise for the weight gradient; the scales of both are saved, so that the backward
 * reads what the forward used and the state may move on. The weight is cast again, column-wise, in
 * the backward, to the same bits. An operand that arrives quantized is read as it comes.
 *
 * What a GEMM reads of an operand is its usage (recipe.h), whose forms are cast, given or saved;
 * the usage of high precision is that of a node without a recipe, and of a backward that does
 * without.
 */
#include "core/status.h"
#include "layer/linear_gemm.h"

static int32_t weight_of(const te_build *build, int32_t k)
{
    return te_node(build, k)->inputs[1];
}

static int32_t bias_of(const te_build *build, int32_t k)
{
    return te_node(build, k)->inputs[2];
}

static int wants(const te_build *build, int32_t value, uint32_t flag)
{
    return value >= 0 && (te_value(build, value)->flags & flag) != 0;
}

static int needs_grad_input(const te_build *build, int32_t k)
{
    return build->values[te_node(build, k)->inputs[0]].needs_grad;
}

static int needs_grad_weight(const te_build *build, int32_t k)
{
    return wants(build, weight_of(build, k), TE_VALUE_GRADIENT);
}

/* GEMMs of a backward, as a set. */
static uint32_t gradients_of(const te_build *build, int32_t k)
{
    return (needs_grad_input(build, k) ? 1U << TE_GEMM_GRAD_INPUT : 0) |
           (needs_grad_weight(build, k) ? 1U << TE_GEMM_GRAD_WEIGHT : 0);
}

/* ---- forward ------------------------------------------------------------------------------ */

/* The activation that the GEMM's epilogue applies: where the result is 16-bit and nobody casts it
 * to FP8 anyway. cuBLASLt's tanh is not as accurate as fp32 results would show. */
static int32_t activation_in_epilogue(const te_build *build, int32_t k)
{
    int32_t y = te_node(build, k)->output;
    if (te_linear_is_quantized(build, k) || te_value(build, y)->dtype == TE_DTYPE_F32 ||
        te_value_is_shared(build, y) ||
        te_linear_is_external(build, k, TE_LINEAR_STAGE_GEMM_OUTPUT)) {
        return TE_NOBODY;
    }
    for (int32_t n = k + 1; n < build->graph->node_count; n++) {
        const te_node_desc *reader = te_node(build, n);
        if (reader->inputs[0] != y) continue;
        return reader->kind == TE_NODE_ACTIVATION && reader->variant == TE_ACTIVATION_GELU &&
                       !te_is_read(build, reader->output, 1)
                   ? n
                   : TE_NOBODY;
    }
    return TE_NOBODY;
}

static int32_t cast_bias(te_build *build, int32_t k)
{
    const te_node_desc *node = te_node(build, k);
    int32_t bias = bias_of(build, k);
    te_stage *stage;
    if (bias < 0) return TE_NO_BUFFER;
    if (te_bias_dtype(&node->quantization, (te_dtype)te_value(build, node->output)->dtype) ==
        (te_dtype)te_value(build, bias)->dtype) {
        return te_get(build, TE_LINK_VALUE, bias);
    }
    stage = te_linear_add(build, k, TE_LINEAR_STAGE_CAST_BIAS, TE_OP_CAST);
    te_use_as(build, stage, "input", te_get(build, TE_LINK_VALUE, bias));
    te_use_as(build, stage, "output", te_get(build, TE_LINK_BIAS_CAST, k));
    return te_get(build, TE_LINK_BIAS_CAST, k);
}

static void multiply(te_build *build, int32_t k, int32_t input, int32_t bias)
{
    const te_node_desc *node = te_node(build, k);
    const te_graph_desc *graph = build->graph;
    const int32_t activation = activation_in_epilogue(build, k);
    const int32_t n = te_linear_collective_beside(build, k, TE_GEMM_OUTPUT);
    te_linear_product of = {TE_GEMM_OUTPUT, input, TE_NO_BUFFER, TE_NO_BUFFER,
                            TE_NO_BUFFER,   bias,  TE_NO_BUFFER, activation >= 0};
    if (of.gelu && (build->direction != TE_DIRECTION_FORWARD ||
                    te_links_has(&build->saved, TE_LINK_VALUE, node->output))) {
        of.aux = te_get(build, TE_LINK_VALUE, node->output);
    }
    if (n == TE_NOBODY || te_linear_is_beside_gather(build, n, TE_GEMM_OUTPUT)) {
        of.d = te_get(build, TE_LINK_VALUE,
                      activation < 0 ? te_collective_target(graph, node->output)
                                     : te_node(build, activation)->output);
    }
    if (n == TE_NOBODY) {
        te_linear_add_product(build, k, &of);
    } else {
        te_linear_multiply_pieces(build, k, &of, n,
                                  te_find(build, TE_LINK_VALUE, te_node(build, n)->inputs[0]));
    }
}

static int reads_wide_input(const te_build *build, int32_t k)
{
    return te_linear_usage(build, k, TE_INPUT_OPERAND, TE_GEMM_OUTPUT) == TE_LINK_VALUE;
}

/* Casts input and weight to what these GEMMs read of them, or casts them again; gathers them. */
static void cast_operands(te_build *build, int32_t k, uint32_t gemms, int again)
{
    for (te_operand_role role = TE_INPUT_OPERAND; role <= TE_WEIGHT_OPERAND; role++) {
        int forms = te_linear_read_by(build, k, role, gemms);
        if (forms == 0 || te_linear_arrives(build, k, role)) continue;
        if (!again) {
            te_linear_quantize(build, k, role, forms, TE_NO_BUFFER);
        } else if (te_is_made_outside(&te_node(build, k)->quantization, role)) {
            (void)te_linear_form_again(build, k, role, TE_LINK_ROW);
        } else {
            te_linear_quantize_again(build, k, role, forms);
        }
        te_linear_gather(build, k, role, forms);
    }
}

static void forward(te_build *build, int32_t k)
{
    const int32_t y = te_node(build, k)->output;
    int32_t bias, input = TE_NO_BUFFER;
    cast_operands(build, k, 1U << TE_GEMM_OUTPUT, 0);
    if (reads_wide_input(build, k)) input = te_linear_wide_input(build, k);
    bias = cast_bias(build, k);
    multiply(build, k, input, bias);
    if (wants(build, y, TE_VALUE_RETURN_QUANTIZED)) {
        te_linear_return(build, k, TE_OUTPUT_OPERAND, y, te_get(build, TE_LINK_VALUE, y));
    }
}

static void again(te_build *build, int32_t k)
{
    int32_t input = reads_wide_input(build, k) ? te_linear_wide_input(build, k) : TE_NO_BUFFER;
    uint32_t gemms = 1U << TE_GEMM_OUTPUT | gradients_of(build, k);
    if (wants(build, weight_of(build, k), TE_VALUE_DEFER) &&
        build->direction == TE_DIRECTION_BACKWARD) {
        gemms &= ~(1U << TE_GEMM_GRAD_WEIGHT);
    }
    cast_operands(build, k, gemms, 1);
    multiply(build, k, input, cast_bias(build, k));
}

/* ---- backward ----------------------------------------------------------------------------- */

/* The weight as the GEMM reads it: in high precision, given or cast again, or made of the row-wise
 * one that arrived. */
static int32_t weight_of_input(te_build *build, int32_t k)
{
    te_link read = te_linear_usage(build, k, TE_WEIGHT_OPERAND, TE_GEMM_GRAD_INPUT);
    int32_t of = te_operand_of(k, TE_WEIGHT_OPERAND);
    if (read == TE_LINK_VALUE) return te_linear_wide(build, k, TE_WEIGHT_OPERAND);
    if (te_operand_is_transposed(build, of)) {
        te_linear_transpose(build, k, TE_WEIGHT_OPERAND);
    } else if (te_is_made_outside(&te_node(build, k)->quantization, TE_WEIGHT_OPERAND)) {
        return te_linear_form_again(build, k, TE_WEIGHT_OPERAND, read);
    } else if (!te_linear_arrives(build, k, TE_WEIGHT_OPERAND) &&
               te_find(build, read, of) == TE_NO_BUFFER) {
        te_linear_quantize_again(build, k, TE_WEIGHT_OPERAND, te_form_set(read));
    }
    return te_get(build, read, of);
}

static int32_t input_of_weight(te_build *build, int32_t k)
{
    te_link read = te_linear_usage(build, k, TE_INPUT_OPERAND, TE_GEMM_GRAD_WEIGHT);
    if (read == TE_LINK_VALUE) return te_linear_wide(build, k, TE_INPUT_OPERAND);
    if (!te_linear_is_part(build, k, TE_INPUT_OPERAND)) {
        return te_linear_form_again(build, k, TE_INPUT_OPERAND, read);
    }
    te_linear_gather_again(build, k, read);
    return te_linear_gathered(build, k, TE_INPUT_OPERAND, read);
}

/* Gathers the input that the gradient of the weight reads, while other work goes on. */
static void gather_input_early(te_build *build, int32_t k)
{
    const te_link read = te_linear_usage(build, k, TE_INPUT_OPERAND, TE_GEMM_GRAD_WEIGHT);
    const int wide = read == TE_LINK_VALUE;
    const int dequantized = te_node(build, k)->quantization.backward == TE_BACKWARD_DEQUANTIZED;
    if (te_linear_is_part(build, k, TE_INPUT_OPERAND) && (!wide || dequantized)) {
        te_linear_gather_again(build, k, wide ? TE_LINK_ROW : read);
    } else if (wide && !dequantized &&
               te_collective_does(build->graph, te_collective_before(build->graph, k),
                                  TE_COLLECTIVE_FORWARD) == TE_DOES_GATHER) {
        (void)te_linear_wide_input(build, k);
    }
}

static void multiply_grad_input(te_build *build, int32_t k, int32_t grad)
{
    const int32_t x = te_node(build, k)->inputs[0];
    const int32_t n = te_linear_collective_beside(build, k, TE_GEMM_GRAD_INPUT);
    te_linear_product of = {.gemm = TE_GEMM_GRAD_INPUT, .a = grad};
    if (!needs_grad_input(build, k)) return;
    of.b = weight_of_input(build, k);
    of.d = te_grad_target(build, x);
    of.a_scales = of.bias = of.aux = TE_NO_BUFFER;
    if (n == TE_NOBODY) {
        te_linear_add_product(build, k, &of);
    } else {
        te_linear_multiply_pieces(build, k, &of, n,
                                  te_find(build, TE_LINK_GRADIENT, te_node(build, n)->output));
    }
    te_collective_sum_gradient(build, te_collective_before(build->graph, k));
}

/* Sums of the gradient over the rows by the GEMM itself, in high precision, where the gradient is
 * read as it lies. */
static void multiply_grad_weight(te_build *build, int32_t k, int32_t grad, int32_t bias_grad)
{
    int32_t weight = weight_of(build, k), input = input_of_weight(build, k);
    te_stage *gemm = te_linear_is_transposed(build, k)
                         ? te_linear_add_gemm(build, k, TE_GEMM_GRAD_WEIGHT, input, grad)
                         : te_linear_add_gemm(build, k, TE_GEMM_GRAD_WEIGHT, grad, input);
    te_use_as(build, gemm, "d", te_parameter_grad(build, weight));
    te_use_as(build, gemm, "bias_grad", bias_grad);
    te_set_number(build, gemm, "accumulate", wants(build, weight, TE_VALUE_ACCUMULATE));
}

/* Whether the gradient of the weight is computed first: its operands can be freed before the
 * gradient of the input has memory. Not where ranks add up the latter, which can go on meanwhile,
 * nor where it is computed in pieces. */
static int weight_goes_first(const te_build *build, int32_t k)
{
    return !te_collective_sums_gradient(build->graph, te_collective_before(build->graph, k)) &&
           te_linear_collective_beside(build, k, TE_GEMM_GRAD_INPUT) == TE_NOBODY;
}

/* Whether the GEMM of the weight's gradient can sum the columns of its operand a. */
static int gemm_sums(const te_build *build, int32_t k)
{
    int32_t bias = bias_of(build, k);
    return needs_grad_weight(build, k) && !te_linear_is_transposed(build, k) &&
           !wants(build, weight_of(build, k), TE_VALUE_DEFER) && bias >= 0 &&
           te_linear_usage(build, k, TE_INPUT_OPERAND, TE_GEMM_GRAD_WEIGHT) == TE_LINK_VALUE &&
           te_value(build, bias)->grad_dtype == te_value(build, te_node(build, k)->output)->dtype;
}

/* The gradient of the output as GEMMs read it in high precision. The bias gradient is summed by who
 * makes it; left over for the GEMM, it stays in *bias_grad. */
static int32_t wide_grad(te_build *build, int32_t k, int32_t *bias_grad)
{
    te_linear_source from = {TE_GRAD_OPERAND, te_node(build, k)->output, TE_NOBODY, TE_NO_BUFFER};
    if (te_linear_arrives(build, k, TE_GRAD_OPERAND)) {
        from.wide = te_linear_wide(build, k, TE_GRAD_OPERAND);
    } else {
        from = te_linear_source_of(build, k, TE_GRAD_OPERAND);
    }
    if (gradients_of(build, k) != 0 && from.pending != TE_NOBODY) {
        te_linear_write_source(build, k, &from, *bias_grad);
    } else if (gemm_sums(build, k)) {
        return from.wide;
    } else {
        te_linear_sum_grad(build, k, &from, *bias_grad);
    }
    *bias_grad = TE_NO_BUFFER;
    return from.wide;
}

/* The gradient of the output as that of the weight reads it, where it arrives row-wise alone. */
static void transpose_grad(te_build *build, int32_t k, int forms)
{
    int transposed = te_operand_is_transposed(build, te_operand_of(k, TE_GRAD_OPERAND));
    if (transposed && (forms & TE_FORM_COLUMN) != 0) te_linear_transpose(build, k, TE_GRAD_OPERAND);
}

/* What the gradient of the weight reads of a gradient of all ranks that was gathered. */
static void take_gathered_grad(te_build *build, int32_t k, int forms)
{
    if (!te_linear_is_part(build, k, TE_GRAD_OPERAND) || (forms & TE_FORM_COLUMN) == 0) return;
    (void)te_linear_gathered(build, k, TE_GRAD_OPERAND, TE_LINK_COLUMN);
}

static void backward(te_build *build, int32_t k)
{
    int put_off = wants(build, weight_of(build, k), TE_VALUE_DEFER);
    uint32_t wanted = gradients_of(build, k);
    int forms = te_linear_read_by(build, k, TE_GRAD_OPERAND, wanted);
    int32_t bias_grad, grad = TE_NO_BUFFER;
    if (!te_has_grad(build, te_linear_value(build->graph, k, TE_GRAD_OPERAND))) return;
    bias_grad = te_parameter_grad(build, bias_of(build, k));
    if (wanted == 0 && bias_grad == TE_NO_BUFFER) return;
    if (needs_grad_weight(build, k) && !put_off) gather_input_early(build, k);
    if (forms == 0) {
        grad = wide_grad(build, k, &bias_grad);
    } else if (te_linear_arrives(build, k, TE_GRAD_OPERAND)) {
        te_linear_sum_arrived(build, k, bias_grad);
        if (!put_off) transpose_grad(build, k, forms);
    } else {
        te_linear_quantize(build, k, TE_GRAD_OPERAND, forms, bias_grad);
        te_linear_gather(build, k, TE_GRAD_OPERAND, forms);
    }
    if (forms != 0) bias_grad = TE_NO_BUFFER;
    if (!weight_goes_first(build, k)) multiply_grad_input(build, k, grad);
    take_gathered_grad(build, k, forms);
    if (needs_grad_weight(build, k) && !put_off) multiply_grad_weight(build, k, grad, bias_grad);
    if (weight_goes_first(build, k)) multiply_grad_input(build, k, grad);
}

/* What the deferred plan is handed of the gradient. */
static int32_t defer_form(te_build *build, int32_t k, te_link link)
{
    const te_operand_role role = te_linear_read_as(build, k, TE_GRAD_OPERAND, link);
    return te_defer(build, link, te_operand_of(k, role));
}

/* The weight gradient that an earlier backward put off. */
static void deferred(te_build *build, int32_t k)
{
    const te_node_desc *node = te_node(build, k);
    te_link read = te_linear_usage(build, k, TE_GRAD_OPERAND, TE_GEMM_GRAD_WEIGHT);
    int32_t of = te_operand_of(k, TE_GRAD_OPERAND), grad;
    te_link amax;
    if (!needs_grad_weight(build, k) || !wants(build, weight_of(build, k), TE_VALUE_DEFER)) return;
    if (read == TE_LINK_VALUE) {
        grad = te_linear_arrives(build, k, TE_GRAD_OPERAND)
                   ? te_linear_wide(build, k, TE_GRAD_OPERAND)
                   : te_defer(build, te_grad_link(build, node->output), node->output);
    } else {
        amax = te_linear_form_rule(build, k, TE_GRAD_OPERAND, read)->amax;
        te_link scales = te_linear_scales(build, k, TE_GRAD_OPERAND, read);
        if (te_operand_is_transposed(build, of)) {
            te_linear_transpose(build, k, TE_GRAD_OPERAND);
            grad = te_get(build, read, of);
        } else {
            grad = defer_form(build, k, read);
        }
        if (scales != TE_LINK_VALUE) (void)defer_form(build, k, scales);
        if (amax != TE_LINK_VALUE) (void)defer_form(build, k, amax);
    }
    multiply_grad_weight(build, k, grad, TE_NO_BUFFER);
}

const te_node_rules te_linear_rules = {
    .name = "gemm",
    .inputs = 5,
    .flags = TE_LINEAR_SAVE_INPUT | TE_LINEAR_NO_AMAX | TE_LINEAR_ALLOW_TF32 |
             TE_LINEAR_FAST_OUTPUT | TE_LINEAR_FAST_GRAD_INPUT | TE_LINEAR_FAST_GRAD_WEIGHT |
             TE_LINEAR_MEASURE_OPERANDS | TE_LINEAR_MEASURE_GRAD | TE_LINEAR_MEASURE_RETURNED |
             TE_LINEAR_WEIGHT_TRANSPOSED,
    .steps = TE_LINEAR_STAGE_COUNT,
    .casts = 1,
    .check = te_check_linear,
    .forward = forward,
    .backward = backward,
    .deferred = deferred,
    .again = again};
