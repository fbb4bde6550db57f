/* SPDX-License-Identifier: Apache-2.0
 *
 * part.c - the buffers of a part: their names, dtypes and sizes.
 */
#include "layer/part_stages.h"

#include "core/tensor.h"

static const char *const buffer_names[][TE_PART_BUFFER_COUNT] = {
#define X(NAME, name) [TE_PART_BUFFER_##NAME] = #name,
    {TE_PART_BUFFERS(X)},
#undef X
#define X(NAME, name) [TE_PART_BUFFER_##NAME] = "fc1_" #name,
    {TE_PART_BUFFERS(X)},
#undef X
#define X(NAME, name) [TE_PART_BUFFER_##NAME] = "fc2_" #name,
    {TE_PART_BUFFERS(X)},
#undef X
};

static const char *name_of(const te_part *part, te_part_buffer name)
{
    return buffer_names[part->prefix][name];
}

static int64_t in_padded(const te_part *part)
{
    return te_round_up(part->desc->in_features, TE_FP8_ALIGN);
}

static int64_t out_padded(const te_part *part)
{
    return te_round_up(part->desc->out_features, TE_FP8_ALIGN);
}

static te_dtype forward_fp8(const te_part *part)
{
    return (te_dtype)part->desc->forward_fp8;
}

static te_dtype backward_fp8(const te_part *part)
{
    return (te_dtype)part->desc->backward_fp8;
}

void te_part_init(te_part *part, te_plan *plan, const te_linear_desc *desc, te_part_prefix prefix)
{
    part->plan = plan;
    part->desc = desc;
    part->prefix = prefix;
    part->input = part->grad = te_plain_producer(TE_NO_BUFFER);
    part->weight = part->bias = TE_NO_BUFFER;
    part->input_pair = part->weight_pair = part->grad_pair = TE_NO_BUFFER;
    part->input_row = part->input_column = part->weight_row = part->weight_column = TE_NO_BUFFER;
    part->grad_row = part->grad_column = part->input_wide = part->grad_wide = TE_NO_BUFFER;
    part->scale = part->history = part->partials = TE_NO_BUFFER;
    part->gamma = part->beta = part->mean = part->rsigma = part->norm_output = TE_NO_BUFFER;
}

/* ---- buffers ------------------------------------------------------------------------------ */

int16_t te_part_add_input(te_part *part)
{
    return te_plan_leading(part->plan, "input", TE_ROLE_INPUT, (te_dtype)part->desc->input_dtype, 1,
                           part->desc->in_features);
}

int16_t te_part_add_grad_output(te_part *part)
{
    return te_plan_leading(part->plan, "grad_output", TE_ROLE_INPUT,
                           (te_dtype)part->desc->output_dtype, 1, part->desc->out_features);
}

int16_t te_part_new_pair(te_part *part, te_part_buffer name, te_buffer_role role)
{
    return te_plan_vector(part->plan, name_of(part, name), role, TE_DTYPE_F32, 2);
}

void te_part_new_weight_row(te_part *part, te_buffer_role role)
{
    part->weight_row = te_plan_matrix(part->plan, name_of(part, TE_PART_BUFFER_WEIGHT_ROW), role,
                                      forward_fp8(part), te_constant(part->desc->out_features),
                                      te_constant(in_padded(part)));
}

void te_part_new_weight_column(te_part *part, te_buffer_role role)
{
    part->weight_column = te_plan_matrix(
        part->plan, name_of(part, TE_PART_BUFFER_WEIGHT_COLUMN), role, forward_fp8(part),
        te_constant(part->desc->in_features), te_constant(out_padded(part)));
}

static void add_whole_weight(te_part *part)
{
    part->weight =
        te_plan_matrix(part->plan, name_of(part, TE_PART_BUFFER_WEIGHT), TE_ROLE_PARAMETER,
                       (te_dtype)part->desc->weight_dtype, te_constant(part->desc->out_features),
                       te_constant(part->desc->in_features));
}

void te_part_add_weight(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_CACHE_READ)) {
        add_whole_weight(part);
        return;
    }
    te_part_new_weight_row(part, TE_ROLE_PARAMETER);
    if (part->weight_pair == TE_NO_BUFFER) {
        part->weight_pair = te_part_new_pair(part, TE_PART_BUFFER_WEIGHT_PAIR, TE_ROLE_PARAMETER);
    }
}

void te_part_add_weight_for_dgrad(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_CACHE_READ)) {
        if (part->weight == TE_NO_BUFFER) add_whole_weight(part);
        return;
    }
    te_part_new_weight_column(part, TE_ROLE_PARAMETER);
    if (part->weight_pair == TE_NO_BUFFER) {
        part->weight_pair = te_part_new_pair(part, TE_PART_BUFFER_WEIGHT_PAIR, TE_ROLE_PARAMETER);
    }
}

void te_part_add_weight_cache(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_CACHE_WRITE)) return;
    te_part_new_weight_row(part, TE_ROLE_OUTPUT);
    te_part_new_weight_column(part, TE_ROLE_OUTPUT);
    part->weight_pair = te_part_new_pair(part, TE_PART_BUFFER_WEIGHT_PAIR, TE_ROLE_OUTPUT);
}

void te_part_add_bias(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_BIAS)) return;
    part->bias = te_plan_vector(part->plan, name_of(part, TE_PART_BUFFER_BIAS), TE_ROLE_PARAMETER,
                                (te_dtype)part->desc->bias_dtype, part->desc->out_features);
}

void te_part_add_norm_parameters(te_part *part)
{
    te_dtype dtype = (te_dtype)part->desc->norm_dtype;
    int64_t features = part->desc->in_features;
    if (part->desc->norm == 0) return;
    part->gamma = te_plan_vector(part->plan, "gamma", TE_ROLE_PARAMETER, dtype, features);
    if (part->desc->norm != 1 + TE_NORM_LAYERNORM) return;
    part->beta = te_plan_vector(part->plan, "beta", TE_ROLE_PARAMETER, dtype, features);
}

void te_part_add_state(te_part *parts, int count)
{
    te_part *first = &parts[0];
    if (!te_part_is_fp8(first)) return;
    if (first->desc->recipe == TE_RECIPE_DELAYED) {
        first->scale =
            te_plan_vector(first->plan, "scale", TE_ROLE_STATE, TE_DTYPE_F32, TE_ANY_LENGTH);
        if (!te_part_has(first, TE_LINEAR_NO_AMAX)) {
            first->history = te_plan_matrix(first->plan, "history", TE_ROLE_STATE, TE_DTYPE_F32,
                                            te_constant(TE_ANY_LENGTH), te_constant(TE_ANY_LENGTH));
        }
    } else {
        first->partials = te_plan_vector(first->plan, "partials", TE_ROLE_SCRATCH, TE_DTYPE_F32,
                                         TE_AMAX_PARTIALS);
    }
    for (int i = 1; i < count; i++) {
        parts[i].scale = first->scale;
        parts[i].history = first->history;
        parts[i].partials = first->partials;
    }
}

void te_part_add_statistics(te_part *part, te_buffer_role role)
{
    if (part->desc->norm == 0) return;
    if (part->desc->norm == 1 + TE_NORM_LAYERNORM) {
        part->mean = te_plan_row_vector(part->plan, "mean", role, TE_DTYPE_F32);
    }
    part->rsigma = te_plan_row_vector(part->plan, "rsigma", role, TE_DTYPE_F32);
}

static int weight_pair_is_saved(const te_part *part)
{
    return !te_part_has(part, TE_LINEAR_CACHE_WRITE | TE_LINEAR_CACHE_READ);
}

void te_part_new_input_column(te_part *part, te_buffer_role role)
{
    part->input_column = te_plan_matrix(
        part->plan, name_of(part, TE_PART_BUFFER_INPUT_COLUMN), role, forward_fp8(part),
        te_constant(part->desc->in_features), te_rows(1, TE_FP8_ALIGN));
}

/* A high-precision operand between the producer and the GEMM. */
void te_part_new_input_wide(te_part *part, te_buffer_role role)
{
    te_dtype dtype = te_part_is_fp8(part) && part->desc->norm == 0
                         ? (te_dtype)part->desc->input_dtype
                         : (te_dtype)part->desc->output_dtype;
    part->input_wide = te_plan_matrix(part->plan, name_of(part, TE_PART_BUFFER_INPUT_WIDE), role,
                                      dtype, te_rows(1, 1), te_constant(part->desc->in_features));
}

void te_part_add_saved(te_part *part)
{
    int wgrad = te_part_has(part, TE_LINEAR_WGRAD_NEEDED);
    if (!te_part_is_fp8(part)) {
        int returned = part->input.op == TE_OP_NORM && te_part_has(part, TE_LINEAR_RETURN_NORM);
        if (wgrad && part->input.op != TE_OP_QUANTIZE && !returned) {
            te_part_new_input_wide(part, TE_ROLE_SAVED);
        }
        return;
    }
    if (wgrad) part->input_pair = te_part_new_pair(part, TE_PART_BUFFER_INPUT_PAIR, TE_ROLE_SAVED);
    if (te_part_needs_dgrad(part) && weight_pair_is_saved(part)) {
        part->weight_pair = te_part_new_pair(part, TE_PART_BUFFER_WEIGHT_PAIR, TE_ROLE_SAVED);
    }
    if (wgrad && !te_part_has(part, TE_LINEAR_SAVE_INPUT))
        te_part_new_input_column(part, TE_ROLE_SAVED);
}

void te_part_add_saved_scales(te_part *part)
{
    if (!te_part_is_fp8(part)) return;
    part->input_pair = te_part_new_pair(part, TE_PART_BUFFER_INPUT_PAIR, TE_ROLE_SAVED);
    if (weight_pair_is_saved(part)) {
        part->weight_pair = te_part_new_pair(part, TE_PART_BUFFER_WEIGHT_PAIR, TE_ROLE_SAVED);
    }
}

int16_t te_part_add_grad_weight(te_part *part)
{
    int into_main = te_part_has(part, TE_LINEAR_ACCUMULATE_WGRAD | TE_LINEAR_OVERWRITE_WGRAD);
    return te_plan_matrix(
        part->plan,
        name_of(part, into_main ? TE_PART_BUFFER_MAIN_GRAD : TE_PART_BUFFER_GRAD_WEIGHT),
        into_main ? TE_ROLE_STATE : TE_ROLE_OUTPUT, (te_dtype)part->desc->grad_weight_dtype,
        te_constant(part->desc->out_features), te_constant(part->desc->in_features));
}

int16_t te_part_add_grad_bias(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_BIAS) || te_part_has(part, TE_LINEAR_BIAS_FROZEN)) {
        return TE_NO_BUFFER;
    }
    return te_plan_vector(part->plan, name_of(part, TE_PART_BUFFER_GRAD_BIAS), TE_ROLE_OUTPUT,
                          (te_dtype)part->desc->bias_dtype, part->desc->out_features);
}

void te_part_new_grad_column(te_part *part, te_buffer_role role)
{
    part->grad_column = te_plan_matrix(
        part->plan, name_of(part, TE_PART_BUFFER_GRAD_OUTPUT_COLUMN), role, backward_fp8(part),
        te_constant(part->desc->out_features), te_rows(1, TE_FP8_ALIGN));
}

void te_part_new_grad_wide(te_part *part, te_buffer_role role)
{
    part->grad_wide =
        te_plan_leading(part->plan, name_of(part, TE_PART_BUFFER_GRAD_OUTPUT_WIDE), role,
                        (te_dtype)part->desc->output_dtype, 1, part->desc->out_features);
}

void te_part_add_deferred(te_part *part)
{
    if (te_part_is_fp8(part)) {
        te_part_new_grad_column(part, TE_ROLE_INPUT);
        part->grad_pair = te_part_new_pair(part, TE_PART_BUFFER_GRAD_OUTPUT_PAIR, TE_ROLE_INPUT);
    } else if (part->grad.op == TE_OP_QUANTIZE) {
        part->grad.input = te_part_add_grad_output(part);
    } else {
        te_part_new_grad_wide(part, TE_ROLE_INPUT);
    }
}

void te_part_new_input_row(te_part *part)
{
    part->input_row =
        te_plan_matrix(part->plan, name_of(part, TE_PART_BUFFER_INPUT_ROW), TE_ROLE_SCRATCH,
                       forward_fp8(part), te_rows(1, 1), te_constant(in_padded(part)));
}

void te_part_new_grad_row(te_part *part)
{
    part->grad_row =
        te_plan_matrix(part->plan, name_of(part, TE_PART_BUFFER_GRAD_OUTPUT_ROW), TE_ROLE_SCRATCH,
                       backward_fp8(part), te_rows(1, 1), te_constant(out_padded(part)));
}

int16_t te_part_new_bias_cast(te_part *part, te_dtype dtype)
{
    return te_plan_vector(part->plan, name_of(part, TE_PART_BUFFER_BIAS_CAST), TE_ROLE_SCRATCH,
                          dtype, part->desc->out_features);
}

int16_t te_part_new_gathered_input(te_part *part)
{
    return te_plan_matrix(part->plan, name_of(part, TE_PART_BUFFER_INPUT_GATHERED), TE_ROLE_SCRATCH,
                          forward_fp8(part), te_rows(part->desc->gather, 1),
                          te_constant(in_padded(part)));
}
