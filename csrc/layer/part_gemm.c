/* SPDX-License-Identifier: Apache-2.0
 *
 * part_gemm.c - the GEMMs of a part, forward and backward, and the backward of the norm before it.
 */
#include "layer/part_stages.h"

static te_stage *add_gemm(te_part *part, te_linear_stage name, uint32_t fast_flag)
{
    te_stage *stage = te_part_stage(part, name, TE_OP_GEMM);
    stage->flags =
        (te_part_has(part, fast_flag) && te_part_is_fp8(part) ? TE_GEMM_FAST_ACCUMULATION : 0U) |
        (te_part_has(part, TE_LINEAR_ALLOW_TF32) ? TE_GEMM_ALLOW_TF32 : 0U);
    stage->b_transposed = 1; /* FP8 always; high precision sets what its layouts need */
    return stage;
}

static void output_gemm(te_part *part, int16_t a, int16_t bias, const te_part_output *output)
{
    te_stage *gemm = add_gemm(part, TE_LINEAR_STAGE_GEMM_OUTPUT, TE_LINEAR_FAST_FPROP);
    gemm->buffer[TE_GEMM_A] = a;
    gemm->buffer[TE_GEMM_A_PAIR] = part->input_pair;
    gemm->buffer[TE_GEMM_B] = te_part_is_fp8(part) ? part->weight_row : part->weight;
    gemm->buffer[TE_GEMM_B_PAIR] = part->weight_pair;
    gemm->buffer[TE_GEMM_D] = output->d;
    gemm->buffer[TE_GEMM_BIAS] = bias;
    gemm->buffer[TE_GEMM_AUX] = output->aux;
    gemm->kind = output->epilogue;
}

void te_part_forward(te_part *part, const te_part_output *output)
{
    int16_t a, bias;
    if (te_part_is_fp8(part)) {
        te_part_quantize_input(part);
        te_part_quantize_weight(part);
        bias = te_part_cast_bias(part);
        a = te_part_gather(part);
    } else {
        a = te_part_wide_input(part);
        bias = part->bias;
    }
    output_gemm(part, a, bias, output);
}

void te_part_forward_again(te_part *part, const te_part_output *output)
{
    int16_t a, bias;
    if (te_part_is_fp8(part)) {
        te_part_requantize_input(part, 1, te_part_has(part, TE_LINEAR_WGRAD_NEEDED));
        te_part_requantize_weight(part, 1, te_part_needs_dgrad(part));
        bias = te_part_cast_bias(part);
        a = part->input_row;
    } else {
        a = te_part_wide_input(part);
        bias = part->bias;
    }
    output_gemm(part, a, bias, output);
}

void te_part_input_again(te_part *part)
{
    if (te_part_is_fp8(part)) {
        te_part_requantize_input(part, 0, 1);
    } else {
        (void)te_part_wide_input(part);
    }
}

static void dgrad_gemm(te_part *part, int16_t grad, int16_t grad_input)
{
    te_stage *gemm = add_gemm(part, TE_LINEAR_STAGE_GEMM_GRAD_INPUT, TE_LINEAR_FAST_DGRAD);
    gemm->buffer[TE_GEMM_D] = grad_input;
    gemm->buffer[TE_GEMM_A] = grad;
    if (te_part_is_fp8(part)) {
        gemm->buffer[TE_GEMM_A_PAIR] = part->grad_pair;
        gemm->buffer[TE_GEMM_B] = part->weight_column;
        gemm->buffer[TE_GEMM_B_PAIR] = part->weight_pair;
    } else {
        gemm->buffer[TE_GEMM_B] = part->weight;
        gemm->b_transposed = 0;
    }
}

void te_part_wgrad(te_part *part, int16_t grad_weight, int16_t grad_bias)
{
    te_stage *gemm = add_gemm(part, TE_LINEAR_STAGE_GEMM_GRAD_WEIGHT, TE_LINEAR_FAST_WGRAD);
    gemm->buffer[TE_GEMM_D] = grad_weight;
    if (te_part_has(part, TE_LINEAR_ACCUMULATE_WGRAD)) gemm->flags |= TE_GEMM_ACCUMULATE;
    if (te_part_is_fp8(part)) {
        gemm->buffer[TE_GEMM_A] = part->grad_column;
        gemm->buffer[TE_GEMM_A_PAIR] = part->grad_pair;
        gemm->buffer[TE_GEMM_B] = part->input_column;
        gemm->buffer[TE_GEMM_B_PAIR] = part->input_pair;
        return;
    }
    gemm->buffer[TE_GEMM_A] = part->grad_wide != TE_NO_BUFFER ? part->grad_wide : part->grad.input;
    gemm->a_transposed = 1;
    gemm->buffer[TE_GEMM_B] =
        part->input_wide != TE_NO_BUFFER ? part->input_wide : part->input.input;
    gemm->b_transposed = 0;
    gemm->buffer[TE_GEMM_BIAS_GRAD] = grad_bias;
}

static void backward_fp8(te_part *part, const te_part_gradients *gradients)
{
    te_part_quantize_grad(part, gradients->bias);
    if (te_part_needs_dgrad(part)) {
        if (part->weight_column == TE_NO_BUFFER) te_part_requantize_weight(part, 0, 1);
        dgrad_gemm(part, part->grad_row, gradients->input);
    }
    if (!te_part_wgrad_now(part)) return;
    if (part->input_column == TE_NO_BUFFER) te_part_input_again(part);
    te_part_wgrad(part, gradients->weight, TE_NO_BUFFER);
}

static void backward_high_precision(te_part *part, const te_part_gradients *gradients)
{
    int plain = part->grad.op == TE_OP_QUANTIZE;
    int needed = te_part_needs_dgrad(part) || te_part_has(part, TE_LINEAR_WGRAD_NEEDED);
    int16_t grad;
    if (!needed) {
        te_part_bias_grad(part, gradients->bias);
        return;
    }
    grad = te_part_wide_grad(part, gradients->bias);
    if (te_part_needs_dgrad(part)) dgrad_gemm(part, grad, gradients->input);
    if (te_part_wgrad_now(part)) {
        te_part_wgrad(part, gradients->weight, plain ? gradients->bias : TE_NO_BUFFER);
    } else if (plain) {
        te_part_bias_grad(part, gradients->bias);
    }
}

void te_part_backward(te_part *part, const te_part_gradients *gradients)
{
    if (te_part_is_fp8(part)) {
        backward_fp8(part, gradients);
    } else {
        backward_high_precision(part, gradients);
    }
}

void te_part_add_norm_gradients(te_part *part, te_norm_gradients *gradients)
{
    te_dtype dtype = (te_dtype)part->desc->norm_dtype;
    int64_t features = part->desc->in_features;
    gradients->input = gradients->gamma = gradients->beta = TE_NO_BUFFER;
    if (te_part_has(part, TE_LINEAR_DGRAD)) {
        gradients->input = te_plan_leading(part->plan, "grad_input", TE_ROLE_OUTPUT,
                                           (te_dtype)part->desc->input_dtype, 1, features);
    }
    if (part->desc->norm == 0) return;
    if (te_part_has(part, TE_LINEAR_GRAD_GAMMA)) {
        gradients->gamma =
            te_plan_vector(part->plan, "grad_gamma", TE_ROLE_OUTPUT, dtype, features);
    }
    if (te_part_has(part, TE_LINEAR_GRAD_BETA)) {
        gradients->beta = te_plan_vector(part->plan, "grad_beta", TE_ROLE_OUTPUT, dtype, features);
    }
}

void te_part_norm_backward(te_part *part, int16_t input, const te_norm_gradients *gradients)
{
    te_stage *stage = te_part_stage(part, TE_LINEAR_STAGE_NORM_BACKWARD, TE_OP_NORM_BACKWARD);
    stage->kind = part->desc->norm - 1;
    stage->flags = te_part_has(part, TE_LINEAR_ZERO_CENTERED) ? TE_NORM_ZERO_CENTERED : 0U;
    stage->buffer[TE_NORM_BACKWARD_GRAD_OUTPUT] = gradients->grad_output;
    stage->buffer[TE_NORM_BACKWARD_GRAD_ADD] = gradients->grad_add;
    stage->buffer[TE_NORM_BACKWARD_INPUT] = input;
    stage->buffer[TE_NORM_BACKWARD_GAMMA] = part->gamma;
    stage->buffer[TE_NORM_BACKWARD_MEAN] = part->mean;
    stage->buffer[TE_NORM_BACKWARD_RSIGMA] = part->rsigma;
    stage->buffer[TE_NORM_BACKWARD_GRAD_INPUT] = gradients->input;
    stage->buffer[TE_NORM_BACKWARD_GRAD_GAMMA] = gradients->gamma;
    stage->buffer[TE_NORM_BACKWARD_GRAD_BETA] = gradients->beta;
}
