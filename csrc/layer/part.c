/* SPDX-License-Identifier: Apache-2.0
 *
 * part.c - the buffers of a part, and the stages that cast what its GEMMs read.
 *
 * With a recipe, forward quantizes input and weight row-wise for the GEMM and, in the same pass,
 * the input column-wise for the weight gradient; {1/scale, scale} of both are saved, so the
 * backward reads what the forward used and the state may move on. The weight is quantized again,
 * column-wise, in the backward unless it is cached. Features and tokens are padded to multiples of
 * 16 inside quantize, which FP8 GEMMs ask for.
 */
#include "layer/part_stages.h"

#include <string.h>

#include "core/tensor.h"

/* A module's slots in the forward and in the backward chunk, per part. */
enum { FORWARD_SLOTS = 3, BACKWARD_SLOTS = 2 };

/* X(ENUM, name): buffers that belong to a part and carry its prefix. */
#define PART_BUFFERS(X)                                                                            \
    X(WEIGHT, weight)                                                                              \
    X(WEIGHT_ROW, weight_row)                                                                      \
    X(WEIGHT_COLUMN, weight_column)                                                                \
    X(WEIGHT_PAIR, weight_pair)                                                                    \
    X(BIAS, bias)                                                                                  \
    X(BIAS_CAST, bias_cast)                                                                        \
    X(INPUT_ROW, input_row)                                                                        \
    X(INPUT_COLUMN, input_column)                                                                  \
    X(INPUT_PAIR, input_pair)                                                                      \
    X(INPUT_WIDE, input_wide)                                                                      \
    X(INPUT_GATHERED, input_gathered)                                                              \
    X(GRAD_OUTPUT_ROW, grad_output_row)                                                            \
    X(GRAD_OUTPUT_COLUMN, grad_output_column)                                                      \
    X(GRAD_OUTPUT_PAIR, grad_output_pair)                                                          \
    X(GRAD_OUTPUT_WIDE, grad_output_wide)                                                          \
    X(GRAD_WEIGHT, grad_weight)                                                                    \
    X(MAIN_GRAD, main_grad)                                                                        \
    X(GRAD_BIAS, grad_bias)

enum {
#define X(NAME, name) NAME_##NAME,
    PART_BUFFERS(X)
#undef X
        NAME_COUNT
};

static const char *const buffer_names[][NAME_COUNT] = {
#define X(NAME, name) [NAME_##NAME] = #name,
    {PART_BUFFERS(X)},
#undef X
#define X(NAME, name) [NAME_##NAME] = "fc1_" #name,
    {PART_BUFFERS(X)},
#undef X
#define X(NAME, name) [NAME_##NAME] = "fc2_" #name,
    {PART_BUFFERS(X)},
#undef X
};

static const char *const stage_names[][TE_LINEAR_STAGE_COUNT] = {
#define X(NAME, name) [TE_LINEAR_STAGE_##NAME] = #name,
    {TE_LINEAR_STAGES(X)},
#undef X
#define X(NAME, name) [TE_LINEAR_STAGE_##NAME] = "fc1_" #name,
    {TE_LINEAR_STAGES(X)},
#undef X
#define X(NAME, name) [TE_LINEAR_STAGE_##NAME] = "fc2_" #name,
    {TE_LINEAR_STAGES(X)},
#undef X
};

static const char *name_of(const te_part *part, int name)
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

static int16_t pair(te_part *part, int name, te_buffer_role role)
{
    return te_plan_vector(part->plan, name_of(part, name), role, TE_DTYPE_F32, 2);
}

static void add_weight_row(te_part *part, te_buffer_role role)
{
    part->weight_row =
        te_plan_matrix(part->plan, name_of(part, NAME_WEIGHT_ROW), role, forward_fp8(part),
                       te_constant(part->desc->out_features), te_constant(in_padded(part)));
}

static void add_weight_column(te_part *part, te_buffer_role role)
{
    part->weight_column =
        te_plan_matrix(part->plan, name_of(part, NAME_WEIGHT_COLUMN), role, forward_fp8(part),
                       te_constant(part->desc->in_features), te_constant(out_padded(part)));
}

static void add_whole_weight(te_part *part)
{
    part->weight =
        te_plan_matrix(part->plan, name_of(part, NAME_WEIGHT), TE_ROLE_PARAMETER,
                       (te_dtype)part->desc->weight_dtype, te_constant(part->desc->out_features),
                       te_constant(part->desc->in_features));
}

void te_part_add_weight(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_CACHE_READ)) {
        add_whole_weight(part);
        return;
    }
    add_weight_row(part, TE_ROLE_PARAMETER);
    if (part->weight_pair == TE_NO_BUFFER) {
        part->weight_pair = pair(part, NAME_WEIGHT_PAIR, TE_ROLE_PARAMETER);
    }
}

void te_part_add_weight_for_dgrad(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_CACHE_READ)) {
        if (part->weight == TE_NO_BUFFER) add_whole_weight(part);
        return;
    }
    add_weight_column(part, TE_ROLE_PARAMETER);
    if (part->weight_pair == TE_NO_BUFFER) {
        part->weight_pair = pair(part, NAME_WEIGHT_PAIR, TE_ROLE_PARAMETER);
    }
}

void te_part_add_weight_cache(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_CACHE_WRITE)) return;
    add_weight_row(part, TE_ROLE_OUTPUT);
    add_weight_column(part, TE_ROLE_OUTPUT);
    part->weight_pair = pair(part, NAME_WEIGHT_PAIR, TE_ROLE_OUTPUT);
}

void te_part_add_bias(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_BIAS)) return;
    part->bias = te_plan_vector(part->plan, name_of(part, NAME_BIAS), TE_ROLE_PARAMETER,
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

static void add_input_column(te_part *part, te_buffer_role role)
{
    part->input_column =
        te_plan_matrix(part->plan, name_of(part, NAME_INPUT_COLUMN), role, forward_fp8(part),
                       te_constant(part->desc->in_features), te_rows(1, TE_FP8_ALIGN));
}

/* A high-precision operand between the producer and the GEMM. */
static void add_input_wide(te_part *part, te_buffer_role role)
{
    te_dtype dtype = te_part_is_fp8(part) && part->desc->norm == 0
                         ? (te_dtype)part->desc->input_dtype
                         : (te_dtype)part->desc->output_dtype;
    part->input_wide = te_plan_matrix(part->plan, name_of(part, NAME_INPUT_WIDE), role, dtype,
                                      te_rows(1, 1), te_constant(part->desc->in_features));
}

void te_part_add_saved(te_part *part)
{
    int wgrad = te_part_has(part, TE_LINEAR_WGRAD_NEEDED);
    if (!te_part_is_fp8(part)) {
        int returned = part->input.op == TE_OP_NORM && te_part_has(part, TE_LINEAR_RETURN_NORM);
        if (wgrad && part->input.op != TE_OP_QUANTIZE && !returned) {
            add_input_wide(part, TE_ROLE_SAVED);
        }
        return;
    }
    if (wgrad) part->input_pair = pair(part, NAME_INPUT_PAIR, TE_ROLE_SAVED);
    if (te_part_needs_dgrad(part) && weight_pair_is_saved(part)) {
        part->weight_pair = pair(part, NAME_WEIGHT_PAIR, TE_ROLE_SAVED);
    }
    if (wgrad && !te_part_has(part, TE_LINEAR_SAVE_INPUT)) add_input_column(part, TE_ROLE_SAVED);
}

void te_part_add_saved_scales(te_part *part)
{
    if (!te_part_is_fp8(part)) return;
    part->input_pair = pair(part, NAME_INPUT_PAIR, TE_ROLE_SAVED);
    if (weight_pair_is_saved(part)) {
        part->weight_pair = pair(part, NAME_WEIGHT_PAIR, TE_ROLE_SAVED);
    }
}

int16_t te_part_add_grad_weight(te_part *part)
{
    int into_main = te_part_has(part, TE_LINEAR_ACCUMULATE_WGRAD | TE_LINEAR_OVERWRITE_WGRAD);
    return te_plan_matrix(
        part->plan, name_of(part, into_main ? NAME_MAIN_GRAD : NAME_GRAD_WEIGHT),
        into_main ? TE_ROLE_STATE : TE_ROLE_OUTPUT, (te_dtype)part->desc->grad_weight_dtype,
        te_constant(part->desc->out_features), te_constant(part->desc->in_features));
}

int16_t te_part_add_grad_bias(te_part *part)
{
    if (!te_part_has(part, TE_LINEAR_BIAS) || te_part_has(part, TE_LINEAR_BIAS_FROZEN)) {
        return TE_NO_BUFFER;
    }
    return te_plan_vector(part->plan, name_of(part, NAME_GRAD_BIAS), TE_ROLE_OUTPUT,
                          (te_dtype)part->desc->bias_dtype, part->desc->out_features);
}

static void add_grad_column(te_part *part, te_buffer_role role)
{
    part->grad_column =
        te_plan_matrix(part->plan, name_of(part, NAME_GRAD_OUTPUT_COLUMN), role, backward_fp8(part),
                       te_constant(part->desc->out_features), te_rows(1, TE_FP8_ALIGN));
}

static void add_grad_wide(te_part *part, te_buffer_role role)
{
    part->grad_wide =
        te_plan_leading(part->plan, name_of(part, NAME_GRAD_OUTPUT_WIDE), role,
                        (te_dtype)part->desc->output_dtype, 1, part->desc->out_features);
}

void te_part_add_deferred(te_part *part)
{
    if (te_part_is_fp8(part)) {
        add_grad_column(part, TE_ROLE_INPUT);
        part->grad_pair = pair(part, NAME_GRAD_OUTPUT_PAIR, TE_ROLE_INPUT);
    } else if (part->grad.op == TE_OP_QUANTIZE) {
        part->grad.input = te_part_add_grad_output(part);
    } else {
        add_grad_wide(part, TE_ROLE_INPUT);
    }
}

/* ---- producers ---------------------------------------------------------------------------- */

te_producer te_plain_producer(int16_t tensor)
{
    te_producer producer;
    memset(&producer, 0, sizeof producer);
    producer.op = TE_OP_QUANTIZE;
    producer.input = tensor;
    producer.grad_output = producer.output = TE_NO_BUFFER;
    producer.gamma = producer.beta = producer.mean = producer.rsigma = TE_NO_BUFFER;
    return producer;
}

te_producer te_norm_producer(const te_part *part, int16_t input)
{
    te_producer producer = te_plain_producer(input);
    if (part->desc->norm == 0) return producer;
    producer.op = TE_OP_NORM;
    producer.gamma = part->gamma;
    producer.beta = part->beta;
    producer.mean = part->mean;
    producer.rsigma = part->rsigma;
    producer.output = part->norm_output;
    producer.kind = part->desc->norm - 1;
    producer.flags = te_part_has(part, TE_LINEAR_ZERO_CENTERED) ? TE_NORM_ZERO_CENTERED : 0U;
    producer.eps = part->desc->norm_eps;
    return producer;
}

/* A stage that runs a producer's operator; what it writes is for the caller to add. */
static te_stage *produce(te_part *part, const te_producer *producer, te_linear_stage name)
{
    te_stage *stage = te_part_stage(part, name, producer->op);
    stage->buffer[TE_QUANTIZE_INPUT] = producer->input;
    if (producer->op == TE_OP_NORM) {
        stage->buffer[TE_NORM_GAMMA] = producer->gamma;
        stage->buffer[TE_NORM_BETA] = producer->beta;
        stage->buffer[TE_NORM_MEAN] = producer->mean;
        stage->buffer[TE_NORM_RSIGMA] = producer->rsigma;
    } else if (producer->op == TE_OP_ACTIVATION_BACKWARD) {
        stage->buffer[TE_ACTIVATION_GRAD_OUTPUT] = producer->grad_output;
    }
    stage->kind = producer->kind;
    stage->flags = producer->flags;
    stage->norm_eps = producer->eps;
    stage->activation = producer->params;
    return stage;
}

/* ---- casting stages ------------------------------------------------------------------------ */

te_stage *te_part_stage(te_part *part, te_linear_stage stage, te_op op)
{
    return te_plan_stage(part->plan, stage_names[part->prefix][stage], op,
                         (part->desc->external >> stage & 1U) != 0);
}

static int is_external(const te_part *part, te_linear_stage stage)
{
    return (part->desc->external >> stage & 1U) != 0;
}

/* A tensor on its way to FP8: what differs between input, weight and gradient. */
typedef struct quantized_tensor {
    te_linear_stage produce, amax, reduce, quantize;
    te_producer source;
    int16_t wide; /* where the producer writes if it can not cast */
    int16_t row, column, pair, bias_grad;
    int32_t chunk, slot;
    float epsilon;
    uint32_t power_2_flag;
} quantized_tensor;

/* The amax stage of current scaling; a producer measures what it would write. */
static void measure(te_part *part, const quantized_tensor *t)
{
    te_stage *stage;
    if (t->source.op == TE_OP_QUANTIZE) {
        stage = te_part_stage(part, t->amax, TE_OP_AMAX);
        stage->buffer[TE_AMAX_INPUT] = t->source.input;
        stage->buffer[TE_AMAX_OUTPUT] = part->partials;
    } else {
        stage = produce(part, &t->source, t->amax);
        stage->buffer[TE_PRODUCE_OUTPUT] = t->source.output;
        stage->buffer[TE_PRODUCE_AMAX_PARTIALS] = part->partials;
    }
    if (is_external(part, t->reduce)) (void)te_part_stage(part, t->reduce, TE_OP_AMAX);
}

static void quantize(te_part *part, quantized_tensor *t)
{
    int current = part->desc->recipe == TE_RECIPE_CURRENT;
    te_stage *stage;
    if (t->source.op != TE_OP_QUANTIZE &&
        (is_external(part, t->quantize) || (current && is_external(part, t->amax)))) {
        stage = produce(part, &t->source, t->produce);
        stage->buffer[TE_PRODUCE_OUTPUT] =
            t->source.output == TE_NO_BUFFER ? t->wide : t->source.output;
        t->source = te_plain_producer(stage->buffer[TE_PRODUCE_OUTPUT]);
    }
    if (current) measure(part, t);
    stage = produce(part, &t->source, t->quantize);
    if (current && t->source.op == TE_OP_NORM) {
        stage->flags |= TE_NORM_STATISTICS_GIVEN;
    } else if (!current && t->source.op != TE_OP_QUANTIZE) {
        stage->buffer[TE_PRODUCE_OUTPUT] = t->source.output;
    }
    stage->buffer[TE_QUANTIZE_ROW] = t->row;
    stage->buffer[TE_QUANTIZE_COLUMN] = t->column;
    stage->buffer[TE_QUANTIZE_PAIR] = t->pair;
    stage->buffer[TE_QUANTIZE_BIAS_GRAD] = t->bias_grad;
    stage->buffer[TE_QUANTIZE_SCALE] = part->scale;
    stage->buffer[TE_QUANTIZE_HISTORY] = part->history;
    stage->buffer[TE_QUANTIZE_PARTIALS] = part->partials;
    stage->direction = t->chunk;
    stage->slot = t->slot;
    stage->amax_epsilon = t->epsilon;
    stage->power_2_scale = te_part_has(part, t->power_2_flag);
}

/* Casts again with the scale that the forward used: the same bits, no amax. */
static void requantize(te_part *part, te_linear_stage name, const te_producer *source,
                       const te_part_usages *usages)
{
    te_stage *stage = produce(part, source, name);
    if (source->op == TE_OP_NORM) stage->flags |= TE_NORM_STATISTICS_GIVEN;
    stage->buffer[TE_QUANTIZE_ROW] = usages->row;
    stage->buffer[TE_QUANTIZE_COLUMN] = usages->column;
    stage->buffer[TE_QUANTIZE_SCALE] = usages->pair;
}

static int part_number(const te_part *part)
{
    return part->prefix == TE_PART_FC2 ? 1 : 0;
}

static void add_input_row(te_part *part)
{
    part->input_row =
        te_plan_matrix(part->plan, name_of(part, NAME_INPUT_ROW), TE_ROLE_SCRATCH,
                       forward_fp8(part), te_rows(1, 1), te_constant(in_padded(part)));
}

void te_part_quantize_input(te_part *part)
{
    quantized_tensor t = {.produce = TE_LINEAR_STAGE_PRODUCE_INPUT,
                          .amax = TE_LINEAR_STAGE_AMAX_INPUT,
                          .reduce = TE_LINEAR_STAGE_REDUCE_AMAX_INPUT,
                          .quantize = TE_LINEAR_STAGE_QUANTIZE_INPUT,
                          .source = part->input,
                          .wide = TE_NO_BUFFER,
                          .column = part->input_column,
                          .bias_grad = TE_NO_BUFFER,
                          .chunk = 0,
                          .slot = part_number(part) * FORWARD_SLOTS,
                          .epsilon = part->desc->amax_epsilon_input,
                          .power_2_flag = TE_LINEAR_POWER_2_INPUT};
    if (part->input_pair == TE_NO_BUFFER) {
        part->input_pair = pair(part, NAME_INPUT_PAIR, TE_ROLE_SCRATCH);
    }
    add_input_row(part);
    t.row = part->input_row;
    t.pair = part->input_pair;
    if (part->input.op != TE_OP_QUANTIZE && part->input.output == TE_NO_BUFFER &&
        part->desc->external != 0) {
        add_input_wide(part, TE_ROLE_SCRATCH);
        t.wide = part->input_wide;
    }
    quantize(part, &t);
}

void te_part_quantize_weight(te_part *part)
{
    quantized_tensor t = {.produce = TE_LINEAR_STAGE_QUANTIZE_WEIGHT,
                          .amax = TE_LINEAR_STAGE_AMAX_WEIGHT,
                          .reduce = TE_LINEAR_STAGE_REDUCE_AMAX_WEIGHT,
                          .quantize = TE_LINEAR_STAGE_QUANTIZE_WEIGHT,
                          .source = te_plain_producer(part->weight),
                          .wide = TE_NO_BUFFER,
                          .bias_grad = TE_NO_BUFFER,
                          .chunk = 0,
                          .slot = part_number(part) * FORWARD_SLOTS + 1,
                          .epsilon = part->desc->amax_epsilon_weight,
                          .power_2_flag = TE_LINEAR_POWER_2_WEIGHT};
    if (te_part_has(part, TE_LINEAR_CACHE_READ)) return;
    if (part->weight_row == TE_NO_BUFFER) add_weight_row(part, TE_ROLE_SCRATCH);
    if (part->weight_pair == TE_NO_BUFFER) {
        part->weight_pair = pair(part, NAME_WEIGHT_PAIR, TE_ROLE_SCRATCH);
    }
    t.row = part->weight_row;
    t.column = part->weight_column;
    t.pair = part->weight_pair;
    quantize(part, &t);
}

void te_part_requantize_weight(te_part *part, int row, int column)
{
    te_part_usages usages = {TE_NO_BUFFER, TE_NO_BUFFER, part->weight_pair};
    te_producer source = te_plain_producer(part->weight);
    if (te_part_has(part, TE_LINEAR_CACHE_READ)) return;
    if (row) {
        add_weight_row(part, TE_ROLE_SCRATCH);
        usages.row = part->weight_row;
    }
    if (column) {
        add_weight_column(part, TE_ROLE_SCRATCH);
        usages.column = part->weight_column;
    }
    requantize(part, TE_LINEAR_STAGE_REQUANTIZE_WEIGHT, &source, &usages);
}

void te_part_requantize_input(te_part *part, int row, int column)
{
    te_part_usages usages = {TE_NO_BUFFER, TE_NO_BUFFER, part->input_pair};
    if (row) {
        add_input_row(part);
        usages.row = part->input_row;
    }
    if (column) {
        add_input_column(part, TE_ROLE_SCRATCH);
        usages.column = part->input_column;
    }
    requantize(part, TE_LINEAR_STAGE_REQUANTIZE_INPUT, &part->input, &usages);
}

void te_part_quantize_grad(te_part *part, int16_t grad_bias)
{
    te_buffer_role deferred =
        te_part_has(part, TE_LINEAR_DEFER_WGRAD) ? TE_ROLE_OUTPUT : TE_ROLE_SCRATCH;
    int wgrad = te_part_has(part, TE_LINEAR_WGRAD_NEEDED);
    quantized_tensor t = {.produce = TE_LINEAR_STAGE_PRODUCE_GRAD_OUTPUT,
                          .amax = TE_LINEAR_STAGE_AMAX_GRAD_OUTPUT,
                          .reduce = TE_LINEAR_STAGE_REDUCE_AMAX_GRAD_OUTPUT,
                          .quantize = TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT,
                          .source = part->grad,
                          .wide = TE_NO_BUFFER,
                          .bias_grad = grad_bias,
                          .chunk = 1,
                          .slot = part_number(part) * BACKWARD_SLOTS,
                          .epsilon = part->desc->amax_epsilon_grad,
                          .power_2_flag = TE_LINEAR_POWER_2_GRAD};
    if (!te_part_needs_dgrad(part) && !wgrad) { /* the bias gradient alone */
        te_part_bias_grad(part, grad_bias);
        return;
    }
    if (wgrad) add_grad_column(part, deferred);
    part->grad_pair = pair(part, NAME_GRAD_OUTPUT_PAIR, wgrad ? deferred : TE_ROLE_SCRATCH);
    if (te_part_needs_dgrad(part)) {
        part->grad_row =
            te_plan_matrix(part->plan, name_of(part, NAME_GRAD_OUTPUT_ROW), TE_ROLE_SCRATCH,
                           backward_fp8(part), te_rows(1, 1), te_constant(out_padded(part)));
    }
    if (part->grad.op != TE_OP_QUANTIZE && part->desc->external != 0) {
        add_grad_wide(part, TE_ROLE_SCRATCH);
        t.wide = part->grad_wide;
    }
    t.row = part->grad_row;
    t.column = part->grad_column;
    t.pair = part->grad_pair;
    quantize(part, &t);
}

void te_part_bias_grad(te_part *part, int16_t grad_bias)
{
    te_stage *stage;
    if (grad_bias == TE_NO_BUFFER) return;
    stage = produce(part, &part->grad, TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT);
    stage->buffer[TE_QUANTIZE_BIAS_GRAD] = grad_bias;
}

int16_t te_part_wide_input(te_part *part)
{
    te_stage *stage;
    if (part->input.op == TE_OP_QUANTIZE) return part->input.input;
    if (part->input.output != TE_NO_BUFFER) {
        part->input_wide = part->input.output;
    } else if (part->input_wide == TE_NO_BUFFER) {
        add_input_wide(part, TE_ROLE_SCRATCH);
    }
    stage = produce(part, &part->input, TE_LINEAR_STAGE_PRODUCE_INPUT);
    stage->buffer[TE_PRODUCE_OUTPUT] = part->input_wide;
    return part->input_wide;
}

int16_t te_part_wide_grad(te_part *part, int16_t grad_bias)
{
    te_stage *stage;
    int deferred =
        te_part_has(part, TE_LINEAR_DEFER_WGRAD) && te_part_has(part, TE_LINEAR_WGRAD_NEEDED);
    if (part->grad.op == TE_OP_QUANTIZE) return part->grad.input;
    if (part->grad.output != TE_NO_BUFFER && !deferred) {
        part->grad_wide = part->grad.output;
    } else {
        add_grad_wide(part, deferred ? TE_ROLE_OUTPUT : TE_ROLE_SCRATCH);
    }
    stage = produce(part, &part->grad, TE_LINEAR_STAGE_PRODUCE_GRAD_OUTPUT);
    stage->buffer[TE_PRODUCE_OUTPUT] = part->grad_wide;
    stage->buffer[TE_QUANTIZE_BIAS_GRAD] = grad_bias;
    return part->grad_wide;
}

/* The dtype that a GEMM with these operands wants its bias in. */
static te_dtype gemm_bias_dtype(const te_part *part)
{
    if (!te_part_is_fp8(part)) return (te_dtype)part->desc->output_dtype;
    return part->desc->output_dtype == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
}

int16_t te_part_cast_bias(te_part *part)
{
    te_dtype wanted = gemm_bias_dtype(part);
    te_stage *stage;
    int16_t cast;
    if (part->bias == TE_NO_BUFFER || part->desc->bias_dtype == (int32_t)wanted) return part->bias;
    cast = te_plan_vector(part->plan, name_of(part, NAME_BIAS_CAST), TE_ROLE_SCRATCH, wanted,
                          part->desc->out_features);
    stage = te_part_stage(part, TE_LINEAR_STAGE_CAST_BIAS, TE_OP_CAST);
    stage->buffer[TE_CAST_INPUT] = part->bias;
    stage->buffer[TE_CAST_OUTPUT] = cast;
    return cast;
}

int16_t te_part_gather(te_part *part)
{
    if (part->desc->gather == 1) return part->input_row;
    (void)te_part_stage(part, TE_LINEAR_STAGE_GATHER_INPUT, TE_OP_QUANTIZE);
    return te_plan_matrix(part->plan, name_of(part, NAME_INPUT_GATHERED), TE_ROLE_SCRATCH,
                          forward_fp8(part), te_rows(part->desc->gather, 1),
                          te_constant(in_padded(part)));
}
