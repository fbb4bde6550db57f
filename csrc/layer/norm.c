/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.c - a norm by itself as plans of one stage: forward and backward.
 */
#include "core/status.h"
#include "layer/plan.h"

#include <string.h>

typedef struct norm_buffers {
    int16_t input, gamma, beta, mean, rsigma;
} norm_buffers;

static int has_mean(const te_norm_desc *desc)
{
    return desc->kind == TE_NORM_LAYERNORM;
}

static int has_gamma(const te_norm_desc *desc)
{
    return desc->kind != TE_NORM_L2 && (desc->flags & TE_LINEAR_NO_GAMMA) == 0;
}

static int has_beta(const te_norm_desc *desc)
{
    return has_mean(desc) && has_gamma(desc) && (desc->flags & TE_LINEAR_NO_BETA) == 0;
}

static void add_parameters(te_plan *plan, const te_norm_desc *desc, norm_buffers *b)
{
    te_dtype dtype = (te_dtype)desc->weight_dtype;
    if (has_gamma(desc)) {
        b->gamma = te_plan_vector(plan, "gamma", TE_ROLE_PARAMETER, dtype, desc->features);
    }
    if (has_beta(desc)) {
        b->beta = te_plan_vector(plan, "beta", TE_ROLE_PARAMETER, dtype, desc->features);
    }
}

static void add_statistics(te_plan *plan, const te_norm_desc *desc, te_buffer_role role,
                           norm_buffers *b)
{
    if (has_mean(desc)) b->mean = te_plan_row_vector(plan, "mean", role, TE_DTYPE_F32);
    b->rsigma = te_plan_row_vector(plan, "rsigma", role, TE_DTYPE_F32);
}

static uint32_t norm_flags(const te_norm_desc *desc)
{
    return (desc->flags & TE_LINEAR_ZERO_CENTERED) != 0 ? TE_NORM_ZERO_CENTERED : 0U;
}

static int needs_backward(const te_norm_desc *desc)
{
    return (desc->flags & (TE_LINEAR_DGRAD | TE_LINEAR_GRAD_GAMMA | TE_LINEAR_GRAD_BETA)) != 0;
}

static void build_forward(te_plan *plan, const te_norm_desc *desc)
{
    norm_buffers b = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    te_stage *stage;
    int16_t output;
    plan->kind = "norm_forward";
    b.input = te_plan_leading(plan, "input", TE_ROLE_INPUT, (te_dtype)desc->input_dtype, 1,
                              desc->features);
    add_parameters(plan, desc, &b);
    output = te_plan_leading(plan, "output", TE_ROLE_OUTPUT, (te_dtype)desc->output_dtype, 1,
                             desc->features);
    if (needs_backward(desc)) add_statistics(plan, desc, TE_ROLE_SAVED, &b);
    stage = te_plan_stage(plan, "norm", TE_OP_NORM, 0);
    stage->kind = desc->kind;
    stage->flags = norm_flags(desc);
    stage->norm_eps = desc->eps;
    stage->buffer[TE_QUANTIZE_INPUT] = b.input;
    stage->buffer[TE_NORM_GAMMA] = b.gamma;
    stage->buffer[TE_NORM_BETA] = b.beta;
    stage->buffer[TE_NORM_MEAN] = b.mean;
    stage->buffer[TE_NORM_RSIGMA] = b.rsigma;
    stage->buffer[TE_PRODUCE_OUTPUT] = output;
}

static void build_backward(te_plan *plan, const te_norm_desc *desc)
{
    norm_buffers b = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    te_dtype dtype = (te_dtype)desc->weight_dtype;
    int16_t grad_output, grad_input = TE_NO_BUFFER, gamma = TE_NO_BUFFER, beta = TE_NO_BUFFER;
    te_stage *stage;
    plan->kind = "norm_backward";
    grad_output = te_plan_leading(plan, "grad_output", TE_ROLE_INPUT, (te_dtype)desc->output_dtype,
                                  1, desc->features);
    b.input = te_plan_leading(plan, "input", TE_ROLE_INPUT, (te_dtype)desc->input_dtype, 1,
                              desc->features);
    if (has_gamma(desc)) {
        b.gamma = te_plan_vector(plan, "gamma", TE_ROLE_PARAMETER, dtype, desc->features);
    }
    if ((desc->flags & TE_LINEAR_DGRAD) != 0) {
        grad_input = te_plan_leading(plan, "grad_input", TE_ROLE_OUTPUT,
                                     (te_dtype)desc->input_dtype, 1, desc->features);
    }
    if ((desc->flags & TE_LINEAR_GRAD_GAMMA) != 0) {
        gamma = te_plan_vector(plan, "grad_gamma", TE_ROLE_OUTPUT, dtype, desc->features);
    }
    if ((desc->flags & TE_LINEAR_GRAD_BETA) != 0) {
        beta = te_plan_vector(plan, "grad_beta", TE_ROLE_OUTPUT, dtype, desc->features);
    }
    add_statistics(plan, desc, TE_ROLE_SAVED, &b);
    stage = te_plan_stage(plan, "norm_backward", TE_OP_NORM_BACKWARD, 0);
    stage->kind = desc->kind;
    stage->flags = norm_flags(desc);
    stage->buffer[TE_NORM_BACKWARD_GRAD_OUTPUT] = grad_output;
    stage->buffer[TE_NORM_BACKWARD_INPUT] = b.input;
    stage->buffer[TE_NORM_BACKWARD_GAMMA] = b.gamma;
    stage->buffer[TE_NORM_BACKWARD_MEAN] = b.mean;
    stage->buffer[TE_NORM_BACKWARD_RSIGMA] = b.rsigma;
    stage->buffer[TE_NORM_BACKWARD_GRAD_INPUT] = grad_input;
    stage->buffer[TE_NORM_BACKWARD_GRAD_GAMMA] = gamma;
    stage->buffer[TE_NORM_BACKWARD_GRAD_BETA] = beta;
}

static te_status check(const te_norm_desc *d)
{
    const uint32_t known = TE_LINEAR_DGRAD | TE_LINEAR_GRAD_GAMMA | TE_LINEAR_GRAD_BETA |
                           TE_LINEAR_ZERO_CENTERED | TE_LINEAR_NO_GAMMA | TE_LINEAR_NO_BETA;
    if (d == NULL || d->size != sizeof *d) {
        return TE_FAIL(TE_ERROR_INVALID, "norm: size = %u, expected %zu", d == NULL ? 0U : d->size,
                       sizeof *d);
    }
    if (d->features < 1 || d->features > INT32_MAX || d->kind < TE_NORM_LAYERNORM ||
        d->kind > TE_NORM_L2 || d->direction < TE_LINEAR_FORWARD ||
        d->direction > TE_LINEAR_BACKWARD || (d->flags & ~known) != 0) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "norm: features = %lld, kind = %d, direction = %d, flags = 0x%x",
                       (long long)d->features, d->kind, d->direction, d->flags);
    }
    if ((!has_gamma(d) && (d->flags & TE_LINEAR_GRAD_GAMMA) != 0) ||
        (!has_beta(d) && (d->flags & TE_LINEAR_GRAD_BETA) != 0)) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "norm: kind = %d, flags = 0x%x ask for the gradient of a parameter that it "
                       "has not",
                       d->kind, d->flags);
    }
    if (!te_dtype_is_high_precision((te_dtype)d->input_dtype) ||
        !te_dtype_is_high_precision((te_dtype)d->weight_dtype) ||
        !te_dtype_is_high_precision((te_dtype)d->output_dtype)) {
        return TE_FAIL(
            TE_ERROR_TYPE, "norm: input %s, weight %s, output %s, expected f32, f16 or bf16",
            te_dtype_name((te_dtype)d->input_dtype), te_dtype_name((te_dtype)d->weight_dtype),
            te_dtype_name((te_dtype)d->output_dtype));
    }
    return TE_OK;
}

te_status te_plan_norm(const te_norm_desc *desc, int64_t *id)
{
    te_plan plan;
    const te_plan *found = NULL;
    TE_TRY(check(desc));
    TE_TRY(te_plan_find_desc("norm", desc, sizeof *desc, id, &found));
    if (found != NULL) return TE_OK;
    memset(&plan, 0, sizeof plan);
    if (desc->direction == TE_LINEAR_FORWARD) {
        build_forward(&plan, desc);
    } else {
        build_backward(&plan, desc);
    }
    return te_plan_intern(&plan, "norm", desc, sizeof *desc);
}
