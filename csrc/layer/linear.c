/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.c - y = x W^T + b as plans: forward, backward, and the weight gradient by itself.
 *
 * With a recipe, forward quantizes x and W row-wise for the GEMM and, in the same pass, x
 * column-wise for the weight gradient; {1/scale, scale} of both are saved, so the backward reads
 * what the forward used and the state may move on. W is quantized again, column-wise, in the
 * backward unless it is cached. Features and tokens are padded to multiples of 16 inside quantize,
 * which FP8 GEMMs ask for.
 */
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"
#include "layer/linear_desc.h"
#include "layer/plan.h"

#define FP8_ALIGN 16

/* A module's slots in the forward and in the backward chunk. */
enum { SLOT_INPUT = 0, SLOT_WEIGHT = 1 };
enum { SLOT_GRAD_OUTPUT = 0 };
enum { FORWARD_CHUNK = 0, BACKWARD_CHUNK = 1 };

static const char *const stage_names[TE_LINEAR_STAGE_COUNT] = {
#define X(NAME, name) [TE_LINEAR_STAGE_##NAME] = #name,
    TE_LINEAR_STAGES(X)
#undef X
};

typedef struct builder {
    te_plan plan;
    const te_linear_desc *desc;
    int64_t in_padded, out_padded;
    /* numbers of buffers that several stages share */
    int16_t input, weight, bias, grad_output;
    int16_t input_pair, weight_pair, grad_pair;
    int16_t input_row, input_column, weight_row, weight_column, grad_row, grad_column;
    int16_t scale, history, partials;
} builder;

static int has(const builder *b, uint32_t flag)
{
    return (b->desc->flags & flag) != 0;
}

static te_stage *add_stage(builder *b, te_linear_stage stage, te_op op)
{
    return te_plan_stage(&b->plan, stage_names[stage], op, (b->desc->external >> stage & 1U) != 0);
}

static te_dtype forward_fp8(const builder *b)
{
    return (te_dtype)b->desc->forward_fp8;
}

static te_dtype backward_fp8(const builder *b)
{
    return (te_dtype)b->desc->backward_fp8;
}

/* ---- buffers ------------------------------------------------------------------------------ */

static void add_input(builder *b)
{
    b->input = te_plan_leading(&b->plan, "input", TE_ROLE_INPUT, (te_dtype)b->desc->input_dtype, 1,
                               b->desc->in_features);
}

static void add_grad_output(builder *b)
{
    b->grad_output = te_plan_leading(&b->plan, "grad_output", TE_ROLE_INPUT,
                                     (te_dtype)b->desc->output_dtype, 1, b->desc->out_features);
}

static void add_weight(builder *b)
{
    b->weight =
        te_plan_matrix(&b->plan, "weight", TE_ROLE_PARAMETER, (te_dtype)b->desc->weight_dtype,
                       te_constant(b->desc->out_features), te_constant(b->desc->in_features));
}

static int16_t pair(builder *b, const char *name, te_buffer_role role)
{
    return te_plan_vector(&b->plan, name, role, TE_DTYPE_F32, 2);
}

static void add_weight_row(builder *b, te_buffer_role role)
{
    b->weight_row = te_plan_matrix(&b->plan, "weight_row", role, forward_fp8(b),
                                   te_constant(b->desc->out_features), te_constant(b->in_padded));
}

static void add_weight_column(builder *b, te_buffer_role role)
{
    b->weight_column =
        te_plan_matrix(&b->plan, "weight_column", role, forward_fp8(b),
                       te_constant(b->desc->in_features), te_constant(b->out_padded));
}

static void add_input_column(builder *b, te_buffer_role role)
{
    b->input_column = te_plan_matrix(&b->plan, "input_column", role, forward_fp8(b),
                                     te_constant(b->desc->in_features), te_rows(1, FP8_ALIGN));
}

static void add_grad_column(builder *b, te_buffer_role role)
{
    b->grad_column = te_plan_matrix(&b->plan, "grad_output_column", role, backward_fp8(b),
                                    te_constant(b->desc->out_features), te_rows(1, FP8_ALIGN));
}

/* The chunks that a recipe's quantize stages read and record in. */
static void add_state(builder *b)
{
    if (b->desc->recipe == TE_RECIPE_DELAYED) {
        b->scale = te_plan_vector(&b->plan, "scale", TE_ROLE_STATE, TE_DTYPE_F32, TE_ANY_LENGTH);
        if (!has(b, TE_LINEAR_NO_AMAX)) {
            b->history = te_plan_matrix(&b->plan, "history", TE_ROLE_STATE, TE_DTYPE_F32,
                                        te_constant(TE_ANY_LENGTH), te_constant(TE_ANY_LENGTH));
        }
    } else {
        b->partials =
            te_plan_vector(&b->plan, "partials", TE_ROLE_SCRATCH, TE_DTYPE_F32, TE_AMAX_PARTIALS);
    }
}

/* What the backward needs of the forward, in one order for both plans. */
static void add_saved(builder *b)
{
    int weight_saved =
        has(b, TE_LINEAR_DGRAD) && !has(b, TE_LINEAR_CACHE_WRITE | TE_LINEAR_CACHE_READ);
    if (has(b, TE_LINEAR_WGRAD_NEEDED)) b->input_pair = pair(b, "input_pair", TE_ROLE_SAVED);
    if (weight_saved) b->weight_pair = pair(b, "weight_pair", TE_ROLE_SAVED);
    if (has(b, TE_LINEAR_WGRAD_NEEDED) && !has(b, TE_LINEAR_SAVE_INPUT)) {
        add_input_column(b, TE_ROLE_SAVED);
    }
}

/* ---- stages ------------------------------------------------------------------------------- */

/* A tensor on its way to FP8: what differs between input, weight and gradient. */
typedef struct quantized_tensor {
    te_linear_stage amax, reduce, quantize;
    int16_t source, row, column, pair, bias_grad;
    int32_t chunk, slot;
    float epsilon;
    uint32_t power_2_flag;
} quantized_tensor;

static void add_quantize(builder *b, const quantized_tensor *t)
{
    te_stage *stage;
    if (b->desc->recipe == TE_RECIPE_CURRENT) {
        stage = add_stage(b, t->amax, TE_OP_AMAX);
        stage->buffer[TE_AMAX_INPUT] = t->source;
        stage->buffer[TE_AMAX_OUTPUT] = b->partials;
        if ((b->desc->external >> t->reduce & 1U) != 0) (void)add_stage(b, t->reduce, TE_OP_AMAX);
    }
    stage = add_stage(b, t->quantize, TE_OP_QUANTIZE);
    stage->buffer[TE_QUANTIZE_INPUT] = t->source;
    stage->buffer[TE_QUANTIZE_ROW] = t->row;
    stage->buffer[TE_QUANTIZE_COLUMN] = t->column;
    stage->buffer[TE_QUANTIZE_PAIR] = t->pair;
    stage->buffer[TE_QUANTIZE_BIAS_GRAD] = t->bias_grad;
    stage->direction = t->chunk;
    stage->slot = t->slot;
    stage->amax_epsilon = t->epsilon;
    stage->power_2_scale = has(b, t->power_2_flag);
    stage->buffer[TE_QUANTIZE_SCALE] = b->scale;
    stage->buffer[TE_QUANTIZE_HISTORY] = b->history;
    stage->buffer[TE_QUANTIZE_PARTIALS] = b->partials;
}

/* Casts again with the scale that the forward used: the same bits, no amax. */
static void add_requantize(builder *b, te_linear_stage name, int16_t source, int16_t column,
                           int16_t pair)
{
    te_stage *stage = add_stage(b, name, TE_OP_QUANTIZE);
    stage->buffer[TE_QUANTIZE_INPUT] = source;
    stage->buffer[TE_QUANTIZE_COLUMN] = column;
    stage->buffer[TE_QUANTIZE_SCALE] = pair;
}

static te_stage *add_gemm(builder *b, te_linear_stage name, uint32_t fast_flag)
{
    te_stage *stage = add_stage(b, name, TE_OP_GEMM);
    stage->gemm_flags =
        (has(b, fast_flag) && b->desc->recipe != TE_RECIPE_NONE ? TE_GEMM_FAST_ACCUMULATION : 0U) |
        (has(b, TE_LINEAR_ALLOW_TF32) ? TE_GEMM_ALLOW_TF32 : 0U);
    stage->b_transposed = 1; /* FP8 always; high precision sets what its layouts need */
    return stage;
}

/* ---- forward ------------------------------------------------------------------------------ */

/* The dtype that a GEMM with these operands wants its bias in. */
static te_dtype gemm_bias_dtype(const builder *b)
{
    if (b->desc->recipe == TE_RECIPE_NONE) return (te_dtype)b->desc->output_dtype;
    return b->desc->output_dtype == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
}

static int16_t add_bias_cast(builder *b)
{
    te_dtype wanted = gemm_bias_dtype(b);
    te_stage *stage;
    int16_t cast;
    if (b->bias == TE_NO_BUFFER || b->desc->bias_dtype == (int32_t)wanted) return b->bias;
    cast = te_plan_vector(&b->plan, "bias_cast", TE_ROLE_SCRATCH, wanted, b->desc->out_features);
    stage = add_stage(b, TE_LINEAR_STAGE_CAST_BIAS, TE_OP_CAST);
    stage->buffer[TE_CAST_INPUT] = b->bias;
    stage->buffer[TE_CAST_OUTPUT] = cast;
    return cast;
}

static void add_forward_weight(builder *b)
{
    te_buffer_role role = has(b, TE_LINEAR_CACHE_WRITE) ? TE_ROLE_OUTPUT : TE_ROLE_SCRATCH;
    quantized_tensor weight = {TE_LINEAR_STAGE_AMAX_WEIGHT,
                               TE_LINEAR_STAGE_REDUCE_AMAX_WEIGHT,
                               TE_LINEAR_STAGE_QUANTIZE_WEIGHT,
                               b->weight,
                               TE_NO_BUFFER,
                               TE_NO_BUFFER,
                               TE_NO_BUFFER,
                               TE_NO_BUFFER,
                               FORWARD_CHUNK,
                               SLOT_WEIGHT,
                               b->desc->amax_epsilon_weight,
                               TE_LINEAR_POWER_2_WEIGHT};
    if (has(b, TE_LINEAR_CACHE_READ)) return;
    add_weight_row(b, role);
    if (role == TE_ROLE_OUTPUT) add_weight_column(b, role);
    if (b->weight_pair == TE_NO_BUFFER) b->weight_pair = pair(b, "weight_pair", role);
    weight.row = b->weight_row;
    weight.column = b->weight_column;
    weight.pair = b->weight_pair;
    add_quantize(b, &weight);
}

/* Row-wise input of the GEMM: the local one, or what the caller gathers from every rank. */
static int16_t add_gather(builder *b)
{
    if (b->desc->gather == 1) return b->input_row;
    (void)add_stage(b, TE_LINEAR_STAGE_GATHER_INPUT, TE_OP_QUANTIZE);
    return te_plan_matrix(&b->plan, "input_gathered", TE_ROLE_SCRATCH, forward_fp8(b),
                          te_rows(b->desc->gather, 1), te_constant(b->in_padded));
}

static void build_forward_fp8(builder *b, int16_t output)
{
    quantized_tensor input = {TE_LINEAR_STAGE_AMAX_INPUT,
                              TE_LINEAR_STAGE_REDUCE_AMAX_INPUT,
                              TE_LINEAR_STAGE_QUANTIZE_INPUT,
                              b->input,
                              TE_NO_BUFFER,
                              TE_NO_BUFFER,
                              TE_NO_BUFFER,
                              TE_NO_BUFFER,
                              FORWARD_CHUNK,
                              SLOT_INPUT,
                              b->desc->amax_epsilon_input,
                              TE_LINEAR_POWER_2_INPUT};
    te_stage *gemm;
    int16_t bias;
    int16_t gathered;
    add_saved(b);
    if (b->input_pair == TE_NO_BUFFER) b->input_pair = pair(b, "input_pair", TE_ROLE_SCRATCH);
    b->input_row = te_plan_matrix(&b->plan, "input_row", TE_ROLE_SCRATCH, forward_fp8(b),
                                  te_rows(1, 1), te_constant(b->in_padded));
    input.row = b->input_row;
    input.column = b->input_column;
    input.pair = b->input_pair;
    add_quantize(b, &input);
    add_forward_weight(b);
    bias = add_bias_cast(b);
    gathered = add_gather(b);
    gemm = add_gemm(b, TE_LINEAR_STAGE_GEMM_OUTPUT, TE_LINEAR_FAST_FPROP);
    gemm->buffer[TE_GEMM_A] = gathered;
    gemm->buffer[TE_GEMM_A_PAIR] = b->input_pair;
    gemm->buffer[TE_GEMM_B] = b->weight_row;
    gemm->buffer[TE_GEMM_B_PAIR] = b->weight_pair;
    gemm->buffer[TE_GEMM_D] = output;
    gemm->buffer[TE_GEMM_BIAS] = bias;
}

static void build_forward(builder *b)
{
    int fp8 = b->desc->recipe != TE_RECIPE_NONE;
    te_stage *gemm;
    int16_t output;
    b->plan.kind = "linear_forward";
    add_input(b);
    if (has(b, TE_LINEAR_CACHE_READ)) {
        add_weight_row(b, TE_ROLE_PARAMETER);
        b->weight_pair = pair(b, "weight_pair", TE_ROLE_PARAMETER);
    } else {
        add_weight(b);
    }
    if (has(b, TE_LINEAR_BIAS)) {
        b->bias = te_plan_vector(&b->plan, "bias", TE_ROLE_PARAMETER, (te_dtype)b->desc->bias_dtype,
                                 b->desc->out_features);
    }
    if (fp8) add_state(b);
    output = te_plan_leading(&b->plan, "output", TE_ROLE_OUTPUT, (te_dtype)b->desc->output_dtype,
                             b->desc->gather, b->desc->out_features);
    if (fp8) {
        build_forward_fp8(b, output);
        return;
    }
    gemm = add_gemm(b, TE_LINEAR_STAGE_GEMM_OUTPUT, 0);
    gemm->buffer[TE_GEMM_A] = b->input;
    gemm->buffer[TE_GEMM_B] = b->weight;
    gemm->buffer[TE_GEMM_D] = output;
    gemm->buffer[TE_GEMM_BIAS] = b->bias;
}

/* ---- backward ----------------------------------------------------------------------------- */

/* Where the weight gradient goes: an output, or the caller's main_grad. */
static int16_t add_grad_weight(builder *b)
{
    int into_main = has(b, TE_LINEAR_ACCUMULATE_WGRAD | TE_LINEAR_OVERWRITE_WGRAD);
    return te_plan_matrix(&b->plan, into_main ? "main_grad" : "grad_weight",
                          into_main ? TE_ROLE_STATE : TE_ROLE_OUTPUT,
                          (te_dtype)b->desc->grad_weight_dtype, te_constant(b->desc->out_features),
                          te_constant(b->desc->in_features));
}

static te_stage *add_wgrad_gemm(builder *b, int16_t grad_weight)
{
    te_stage *gemm = add_gemm(b, TE_LINEAR_STAGE_GEMM_GRAD_WEIGHT, TE_LINEAR_FAST_WGRAD);
    gemm->buffer[TE_GEMM_D] = grad_weight;
    if (has(b, TE_LINEAR_ACCUMULATE_WGRAD)) gemm->gemm_flags |= TE_GEMM_ACCUMULATE;
    if (b->desc->recipe == TE_RECIPE_NONE) {
        gemm->buffer[TE_GEMM_A] = b->grad_output;
        gemm->a_transposed = 1;
        gemm->buffer[TE_GEMM_B] = b->input;
        gemm->b_transposed = 0;
    } else {
        gemm->buffer[TE_GEMM_A] = b->grad_column;
        gemm->buffer[TE_GEMM_A_PAIR] = b->grad_pair;
        gemm->buffer[TE_GEMM_B] = b->input_column;
        gemm->buffer[TE_GEMM_B_PAIR] = b->input_pair;
    }
    return gemm;
}

static void add_dgrad_gemm(builder *b, int16_t grad_input)
{
    te_stage *gemm = add_gemm(b, TE_LINEAR_STAGE_GEMM_GRAD_INPUT, TE_LINEAR_FAST_DGRAD);
    gemm->buffer[TE_GEMM_D] = grad_input;
    if (b->desc->recipe == TE_RECIPE_NONE) {
        gemm->buffer[TE_GEMM_A] = b->grad_output;
        gemm->buffer[TE_GEMM_B] = b->weight;
        gemm->b_transposed = 0;
    } else {
        gemm->buffer[TE_GEMM_A] = b->grad_row;
        gemm->buffer[TE_GEMM_A_PAIR] = b->grad_pair;
        gemm->buffer[TE_GEMM_B] = b->weight_column;
        gemm->buffer[TE_GEMM_B_PAIR] = b->weight_pair;
    }
}

/* The input's column-wise FP8 data for the weight gradient: saved, or cast again from the input. */
static void add_input_again(builder *b)
{
    if (b->desc->recipe == TE_RECIPE_NONE || !has(b, TE_LINEAR_SAVE_INPUT)) return;
    add_input_column(b, TE_ROLE_SCRATCH);
    add_requantize(b, TE_LINEAR_STAGE_REQUANTIZE_INPUT, b->input, b->input_column, b->input_pair);
}

typedef struct backward_outputs {
    int16_t grad_input, grad_weight, grad_bias;
} backward_outputs;

/* Quantizes the output gradient; with nothing to cast it is the bias gradient alone. */
static void add_grad_quantize(builder *b, const backward_outputs *outputs)
{
    te_buffer_role deferred = has(b, TE_LINEAR_DEFER_WGRAD) ? TE_ROLE_OUTPUT : TE_ROLE_SCRATCH;
    quantized_tensor grad = {TE_LINEAR_STAGE_AMAX_GRAD_OUTPUT,
                             TE_LINEAR_STAGE_REDUCE_AMAX_GRAD_OUTPUT,
                             TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT,
                             b->grad_output,
                             TE_NO_BUFFER,
                             TE_NO_BUFFER,
                             TE_NO_BUFFER,
                             outputs->grad_bias,
                             BACKWARD_CHUNK,
                             SLOT_GRAD_OUTPUT,
                             b->desc->amax_epsilon_grad,
                             TE_LINEAR_POWER_2_GRAD};
    if (!has(b, TE_LINEAR_DGRAD | TE_LINEAR_WGRAD_NEEDED)) {
        te_stage *stage = add_stage(b, TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT, TE_OP_QUANTIZE);
        stage->buffer[TE_QUANTIZE_INPUT] = b->grad_output;
        stage->buffer[TE_QUANTIZE_BIAS_GRAD] = outputs->grad_bias;
        return;
    }
    if (has(b, TE_LINEAR_WGRAD_NEEDED)) add_grad_column(b, deferred);
    b->grad_pair =
        pair(b, "grad_output_pair", has(b, TE_LINEAR_WGRAD_NEEDED) ? deferred : TE_ROLE_SCRATCH);
    if (has(b, TE_LINEAR_DGRAD)) {
        b->grad_row = te_plan_matrix(&b->plan, "grad_output_row", TE_ROLE_SCRATCH, backward_fp8(b),
                                     te_rows(1, 1), te_constant(b->out_padded));
    }
    grad.row = b->grad_row;
    grad.column = b->grad_column;
    grad.pair = b->grad_pair;
    add_quantize(b, &grad);
}

static void build_backward_fp8(builder *b, const backward_outputs *outputs, int wgrad_now)
{
    add_saved(b);
    add_grad_quantize(b, outputs);
    if (has(b, TE_LINEAR_DGRAD)) {
        if (!has(b, TE_LINEAR_CACHE_READ)) {
            add_weight_column(b, TE_ROLE_SCRATCH);
            add_requantize(b, TE_LINEAR_STAGE_REQUANTIZE_WEIGHT, b->weight, b->weight_column,
                           b->weight_pair);
        }
        add_dgrad_gemm(b, outputs->grad_input);
    }
    if (wgrad_now) {
        add_input_again(b);
        (void)add_wgrad_gemm(b, outputs->grad_weight);
    }
}

static void build_backward_high_precision(builder *b, const backward_outputs *outputs,
                                          int wgrad_now)
{
    if (has(b, TE_LINEAR_DGRAD)) add_dgrad_gemm(b, outputs->grad_input);
    if (wgrad_now) {
        te_stage *gemm = add_wgrad_gemm(b, outputs->grad_weight);
        gemm->buffer[TE_GEMM_BIAS_GRAD] = outputs->grad_bias;
    } else if (outputs->grad_bias != TE_NO_BUFFER) {
        te_stage *stage = add_stage(b, TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT, TE_OP_QUANTIZE);
        stage->buffer[TE_QUANTIZE_INPUT] = b->grad_output;
        stage->buffer[TE_QUANTIZE_BIAS_GRAD] = outputs->grad_bias;
    }
}

static void build_backward(builder *b)
{
    int fp8 = b->desc->recipe != TE_RECIPE_NONE;
    int wgrad_now = has(b, TE_LINEAR_WGRAD_NEEDED) && !has(b, TE_LINEAR_DEFER_WGRAD);
    backward_outputs outputs = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    b->plan.kind = "linear_backward";
    add_grad_output(b);
    if (has(b, TE_LINEAR_DGRAD)) {
        if (has(b, TE_LINEAR_CACHE_READ)) {
            add_weight_column(b, TE_ROLE_PARAMETER);
            b->weight_pair = pair(b, "weight_pair", TE_ROLE_PARAMETER);
        } else {
            add_weight(b);
        }
    }
    if (wgrad_now && (!fp8 || has(b, TE_LINEAR_SAVE_INPUT))) add_input(b);
    if (fp8 && has(b, TE_LINEAR_DGRAD | TE_LINEAR_WGRAD_NEEDED)) add_state(b);
    if (has(b, TE_LINEAR_DGRAD)) {
        outputs.grad_input =
            te_plan_leading(&b->plan, "grad_input", TE_ROLE_OUTPUT, (te_dtype)b->desc->input_dtype,
                            1, b->desc->in_features);
    }
    if (wgrad_now) outputs.grad_weight = add_grad_weight(b);
    if (has(b, TE_LINEAR_BIAS)) {
        outputs.grad_bias = te_plan_vector(&b->plan, "grad_bias", TE_ROLE_OUTPUT,
                                           (te_dtype)b->desc->bias_dtype, b->desc->out_features);
    }
    if (fp8) {
        build_backward_fp8(b, &outputs, wgrad_now);
    } else {
        build_backward_high_precision(b, &outputs, wgrad_now);
    }
}

/* The weight gradient that an earlier backward put off. */
static void build_wgrad(builder *b)
{
    int fp8 = b->desc->recipe != TE_RECIPE_NONE;
    int16_t grad_weight;
    b->plan.kind = "linear_wgrad";
    if (fp8) {
        add_grad_column(b, TE_ROLE_INPUT);
        b->grad_pair = pair(b, "grad_output_pair", TE_ROLE_INPUT);
    } else {
        add_grad_output(b);
    }
    if (!fp8 || has(b, TE_LINEAR_SAVE_INPUT)) add_input(b);
    grad_weight = add_grad_weight(b);
    if (fp8) add_saved(b);
    add_input_again(b);
    (void)add_wgrad_gemm(b, grad_weight);
}

te_status te_plan_linear(const te_linear_desc *desc, int64_t *id)
{
    static const char *const kinds[] = {"linear_forward", "linear_backward", "linear_wgrad"};
    builder b;
    const te_plan *found = NULL;
    TE_TRY(te_linear_check(desc));
    TE_TRY(te_plan_find_desc(kinds[desc->direction], desc, sizeof *desc, id, &found));
    if (found != NULL) return TE_OK;
    memset(&b, 0, sizeof b);
    b.desc = desc;
    b.in_padded = te_round_up(desc->in_features, FP8_ALIGN);
    b.out_padded = te_round_up(desc->out_features, FP8_ALIGN);
    b.input = b.weight = b.bias = b.grad_output = TE_NO_BUFFER;
    b.input_pair = b.weight_pair = b.grad_pair = TE_NO_BUFFER;
    b.input_row = b.input_column = b.weight_row = b.weight_column = TE_NO_BUFFER;
    b.grad_row = b.grad_column = TE_NO_BUFFER;
    b.scale = b.history = b.partials = TE_NO_BUFFER;
    switch (desc->direction) {
    case TE_LINEAR_FORWARD:
        build_forward(&b);
        break;
    case TE_LINEAR_BACKWARD:
        build_backward(&b);
        break;
    default:
        build_wgrad(&b);
        break;
    }
    return te_plan_intern(&b.plan, desc, sizeof *desc);
}
