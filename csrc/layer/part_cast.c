/* SPDX-License-Identifier: Apache-2.0
 *
 * part_cast.c - the stages of a part that cast what its GEMMs read.
 *
 * With a recipe, forward quantizes input and weight row-wise for the GEMM and, in the same pass,
 * the input column-wise for the weight gradient; {1/scale, scale} of both are saved, so the
 * backward reads what the forward used and the state may move on. The weight is quantized again,
 * column-wise, in the backward unless it is cached. Features and tokens are padded to multiples of
 * 16 inside quantize, which FP8 GEMMs ask for.
 */
#include "layer/part_stages.h"

#include <string.h>

/* A module's slots in the forward and in the backward chunk, per part. */
enum { FORWARD_SLOTS = 3, BACKWARD_SLOTS = 2 };

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
        part->input_pair = te_part_new_pair(part, TE_PART_BUFFER_INPUT_PAIR, TE_ROLE_SCRATCH);
    }
    te_part_new_input_row(part);
    t.row = part->input_row;
    t.pair = part->input_pair;
    if (part->input.op != TE_OP_QUANTIZE && part->input.output == TE_NO_BUFFER &&
        part->desc->external != 0) {
        te_part_new_input_wide(part, TE_ROLE_SCRATCH);
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
    if (part->weight_row == TE_NO_BUFFER) te_part_new_weight_row(part, TE_ROLE_SCRATCH);
    if (part->weight_pair == TE_NO_BUFFER) {
        part->weight_pair = te_part_new_pair(part, TE_PART_BUFFER_WEIGHT_PAIR, TE_ROLE_SCRATCH);
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
        te_part_new_weight_row(part, TE_ROLE_SCRATCH);
        usages.row = part->weight_row;
    }
    if (column) {
        te_part_new_weight_column(part, TE_ROLE_SCRATCH);
        usages.column = part->weight_column;
    }
    requantize(part, TE_LINEAR_STAGE_REQUANTIZE_WEIGHT, &source, &usages);
}

void te_part_requantize_input(te_part *part, int row, int column)
{
    te_part_usages usages = {TE_NO_BUFFER, TE_NO_BUFFER, part->input_pair};
    if (row) {
        te_part_new_input_row(part);
        usages.row = part->input_row;
    }
    if (column) {
        te_part_new_input_column(part, TE_ROLE_SCRATCH);
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
    if (wgrad) te_part_new_grad_column(part, deferred);
    part->grad_pair =
        te_part_new_pair(part, TE_PART_BUFFER_GRAD_OUTPUT_PAIR, wgrad ? deferred : TE_ROLE_SCRATCH);
    if (te_part_needs_dgrad(part)) {
        te_part_new_grad_row(part);
    }
    if (part->grad.op != TE_OP_QUANTIZE && part->desc->external != 0) {
        te_part_new_grad_wide(part, TE_ROLE_SCRATCH);
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
        te_part_new_input_wide(part, TE_ROLE_SCRATCH);
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
        te_part_new_grad_wide(part, deferred ? TE_ROLE_OUTPUT : TE_ROLE_SCRATCH);
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
    cast = te_part_new_bias_cast(part, wanted);
    stage = te_part_stage(part, TE_LINEAR_STAGE_CAST_BIAS, TE_OP_CAST);
    stage->buffer[TE_CAST_INPUT] = part->bias;
    stage->buffer[TE_CAST_OUTPUT] = cast;
    return cast;
}

int16_t te_part_gather(te_part *part)
{
    if (part->desc->gather == 1) return part->input_row;
    (void)te_part_stage(part, TE_LINEAR_STAGE_GATHER_INPUT, TE_OP_QUANTIZE);
    return te_part_new_gathered_input(part);
}
