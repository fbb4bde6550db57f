/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.c - y = norm(x) W^T + b as plans, the norm being optional: forward, backward, and the
 * weight gradient by itself.
 */
#include "core/status.h"
#include "layer/linear_desc.h"
#include "layer/part.h"

#include <string.h>

static int16_t add_norm_output(te_part *part, const char *name, te_buffer_role role)
{
    return te_plan_leading(part->plan, name, role, (te_dtype)part->desc->output_dtype, 1,
                           part->desc->in_features);
}

static void build_forward(te_part *part)
{
    te_part_output output = {TE_NO_BUFFER, TE_NO_BUFFER, TE_EPILOGUE_NONE};
    int16_t input;
    part->plan->kind = part->desc->norm == 0 ? "linear_forward" : "norm_linear_forward";
    input = te_part_add_input(part);
    te_part_add_norm_parameters(part);
    te_part_add_weight(part);
    te_part_add_bias(part);
    te_part_add_state(part, 1);
    output.d =
        te_plan_leading(part->plan, "output", TE_ROLE_OUTPUT, (te_dtype)part->desc->output_dtype,
                        part->desc->gather, part->desc->out_features);
    if (te_part_has(part, TE_LINEAR_RETURN_NORM)) {
        part->norm_output = add_norm_output(part, "norm_output", TE_ROLE_OUTPUT);
    }
    te_part_add_weight_cache(part);
    te_part_add_statistics(part, te_part_needs_dgrad(part) ? TE_ROLE_SAVED : TE_ROLE_SCRATCH);
    part->input = te_norm_producer(part, input);
    te_part_add_saved(part);
    te_part_forward(part, &output);
}

/* The backward reads what the forward was given again: for the norm's gradient, for a weight
 * gradient in high precision, or because the input was not saved in FP8. */
static int reads_input(const te_part *part)
{
    int again =
        !te_part_is_fp8(part) ? part->desc->norm == 0 : te_part_has(part, TE_LINEAR_SAVE_INPUT);
    return (part->desc->norm != 0 && te_part_needs_dgrad(part)) ||
           (again && te_part_wgrad_now(part));
}

static void add_norm_output_for_wgrad(te_part *part)
{
    if (te_part_is_fp8(part) || !te_part_has(part, TE_LINEAR_RETURN_NORM)) return;
    part->norm_output = part->input_wide = add_norm_output(part, "norm_output", TE_ROLE_INPUT);
}

static void build_backward(te_part *part)
{
    te_part_gradients gradients = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    te_norm_gradients norm = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    int16_t input = TE_NO_BUFFER;
    int with_norm = part->desc->norm != 0 && te_part_needs_dgrad(part);
    part->plan->kind = part->desc->norm == 0 ? "linear_backward" : "norm_linear_backward";
    part->grad = te_plain_producer(te_part_add_grad_output(part));
    if (with_norm && te_part_has(part, TE_LINEAR_RETURN_NORM)) {
        norm.grad_add = add_norm_output(part, "grad_norm_output", TE_ROLE_INPUT);
    }
    if (reads_input(part)) input = te_part_add_input(part);
    if (with_norm) te_part_add_norm_parameters(part);
    if (te_part_needs_dgrad(part)) te_part_add_weight_for_dgrad(part);
    if (te_part_wgrad_now(part)) add_norm_output_for_wgrad(part);
    if (te_part_needs_dgrad(part) || te_part_has(part, TE_LINEAR_WGRAD_NEEDED)) {
        te_part_add_state(part, 1);
    }
    te_part_add_norm_gradients(part, &norm);
    if (te_part_wgrad_now(part)) gradients.weight = te_part_add_grad_weight(part);
    gradients.bias = te_part_add_grad_bias(part);
    if (with_norm) te_part_add_statistics(part, TE_ROLE_SAVED);
    part->input = te_norm_producer(part, input);
    te_part_add_saved(part);
    gradients.input = norm.input;
    if (with_norm) {
        norm.grad_output = gradients.input = te_plan_matrix(
            part->plan, "grad_norm", TE_ROLE_SCRATCH, (te_dtype)part->desc->output_dtype,
            te_rows(1, 1), te_constant(part->desc->in_features));
    }
    te_part_backward(part, &gradients);
    if (with_norm) te_part_norm_backward(part, input, &norm);
}

/* The weight gradient that an earlier backward put off. */
static void build_wgrad(te_part *part)
{
    int16_t input = TE_NO_BUFFER;
    int16_t grad_weight;
    int with_norm = part->desc->norm != 0;
    part->plan->kind = part->desc->norm == 0 ? "linear_wgrad" : "norm_linear_wgrad";
    te_part_add_deferred(part);
    if (te_part_is_fp8(part) ? te_part_has(part, TE_LINEAR_SAVE_INPUT) : !with_norm) {
        input = te_part_add_input(part);
        if (with_norm) te_part_add_norm_parameters(part);
    }
    add_norm_output_for_wgrad(part);
    grad_weight = te_part_add_grad_weight(part);
    if (with_norm && te_part_needs_dgrad(part)) te_part_add_statistics(part, TE_ROLE_SAVED);
    part->input = te_norm_producer(part, input);
    te_part_add_saved(part);
    if (te_part_is_fp8(part) && part->input_column == TE_NO_BUFFER) te_part_input_again(part);
    te_part_wgrad(part, grad_weight, TE_NO_BUFFER);
}

te_status te_plan_linear(const te_linear_desc *desc, int64_t *id)
{
    te_plan plan;
    te_part part;
    const te_plan *found = NULL;
    TE_TRY(te_linear_check(desc));
    TE_TRY(te_plan_find_desc("linear", desc, sizeof *desc, id, &found));
    if (found != NULL) return TE_OK;
    memset(&plan, 0, sizeof plan);
    te_part_init(&part, &plan, desc, TE_PART_ALONE);
    switch (desc->direction) {
    case TE_LINEAR_FORWARD:
        build_forward(&part);
        break;
    case TE_LINEAR_BACKWARD:
        build_backward(&part);
        break;
    default:
        build_wgrad(&part);
        break;
    }
    return te_plan_intern(&plan, "linear", desc, sizeof *desc);
}
