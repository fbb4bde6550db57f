/* SPDX-License-Identifier: Apache-2.0
 *
 * part.h - one linear layer as a part of a plan: the buffers and stages of its three GEMMs and of
 * what feeds them. linear.c makes a plan of one part, mlp.c of two.
 *
 * What a part multiplies is made by a *producer*: it is a buffer as it is, the norm of one, the
 * activation of one, or the gradient of an activation. In FP8 the producer's operator casts in the
 * same pass; in high precision, or where the caller runs the cast itself, it writes a buffer first.
 */
#ifndef TE_LAYER_PART_H
#define TE_LAYER_PART_H

#include "layer/plan.h"

/* FP8 GEMMs ask for inner sizes that are multiples of this. */
#define TE_FP8_ALIGN 16

typedef enum te_part_prefix {
    TE_PART_ALONE, /* "weight" */
    TE_PART_FC1,   /* "fc1_weight" */
    TE_PART_FC2    /* "fc2_weight" */
} te_part_prefix;

typedef struct te_producer {
    te_op op;            /* TE_OP_QUANTIZE: `input` itself; NORM, ACTIVATION, ACTIVATION_BACKWARD */
    int16_t input;       /* the tensor, the norm's input, the activation's input */
    int16_t grad_output; /* ACTIVATION_BACKWARD */
    int16_t gamma, beta, mean, rsigma; /* NORM */
    int16_t output; /* high-precision result that is wanted in any case, or TE_NO_BUFFER */
    int32_t kind;   /* te_norm_kind or te_activation_kind */
    uint32_t flags; /* TE_NORM_* */
    float eps;
    te_activation_params params;
} te_producer;

typedef struct te_part {
    te_plan *plan;
    const te_linear_desc *desc;
    te_part_prefix prefix;
    te_producer input; /* of the forward and weight-gradient GEMMs */
    te_producer grad;  /* of the input- and weight-gradient GEMMs */
    /* numbers of buffers */
    int16_t weight, bias;
    int16_t input_pair, weight_pair, grad_pair;
    int16_t input_row, input_column, weight_row, weight_column, grad_row, grad_column;
    int16_t input_wide, grad_wide; /* high-precision operands that a producer has written */
    int16_t scale, history, partials;
    int16_t gamma, beta, mean, rsigma, norm_output;
} te_part;

/* What a part's backward writes; TE_NO_BUFFER where it is not wanted. */
typedef struct te_part_gradients {
    int16_t input, weight, bias;
} te_part_gradients;

void te_part_init(te_part *part, te_plan *plan, const te_linear_desc *desc, te_part_prefix prefix);

static inline int te_part_has(const te_part *part, uint32_t flags)
{
    return (part->desc->flags & flags) != 0;
}
static inline int te_part_is_fp8(const te_part *part)
{
    return part->desc->recipe != TE_RECIPE_NONE;
}
/* Something before this linear needs a gradient: its input-gradient GEMM runs. */
static inline int te_part_needs_dgrad(const te_part *part)
{
    return te_part_has(part, TE_LINEAR_DGRAD | TE_LINEAR_GRAD_GAMMA | TE_LINEAR_GRAD_BETA);
}
/* The weight gradient is made in the backward, not later. */
static inline int te_part_wgrad_now(const te_part *part)
{
    return te_part_has(part, TE_LINEAR_WGRAD_NEEDED) && !te_part_has(part, TE_LINEAR_DEFER_WGRAD);
}

/* ---- buffers: callers add them in the order that the arguments of the plan shall have ---- */

int16_t te_part_add_input(te_part *part);       /* "input" */
int16_t te_part_add_grad_output(te_part *part); /* "grad_output" */
void te_part_add_weight(te_part *part);         /* or the cached FP8 data and pair */
/* The weight, or its column-wise data and pair, as the backward reads it. */
void te_part_add_weight_for_dgrad(te_part *part);
void te_part_add_bias(te_part *part);
/* gamma and beta of the norm before the part (beta: LayerNorm only). */
void te_part_add_norm_parameters(te_part *part);
/* Chunks of delayed scaling or partial maxima of current scaling, for the parts of one plan. */
void te_part_add_state(te_part *parts, int count);
/* mean and rsigma with a role; nothing without a norm. */
void te_part_add_statistics(te_part *part, te_buffer_role role);
/* What a backward needs of the forward besides those, the same in both plans. */
void te_part_add_saved(te_part *part);
/* Only the scales, for a backward that repeats the forward. */
void te_part_add_saved_scales(te_part *part);
int16_t te_part_add_grad_weight(te_part *part); /* output, or main_grad as state */
int16_t te_part_add_grad_bias(te_part *part);
/* Caches that a forward writes are its outputs: row, column, pair. */
void te_part_add_weight_cache(te_part *part);

/* ---- producers ---- */

te_producer te_plain_producer(int16_t tensor);
/* The norm of `input` by the part's description and norm buffers. */
te_producer te_norm_producer(const te_part *part, int16_t input);

/* ---- stages ---- */

/* d = epilogue(input W^T + bias); aux receives the value before the epilogue, or TE_NO_BUFFER. */
typedef struct te_part_output {
    int16_t d, aux;
    te_epilogue epilogue;
} te_part_output;
void te_part_forward(te_part *part, const te_part_output *output);
/* The same in a backward, with the scales that the forward saved; leaves what the backward's GEMMs
 * read. */
void te_part_forward_again(te_part *part, const te_part_output *output);
/* The column-wise input alone, again with the saved scales. */
void te_part_input_again(te_part *part);
void te_part_backward(te_part *part, const te_part_gradients *gradients);
/* The weight-gradient GEMM, over operands that are there. */
void te_part_wgrad(te_part *part, int16_t grad_weight, int16_t grad_bias);
/* Operands of a deferred weight gradient, as inputs of its plan. */
void te_part_add_deferred(te_part *part);

typedef struct te_norm_gradients {
    int16_t grad_output, grad_add; /* read; grad_add may be TE_NO_BUFFER */
    int16_t input, gamma, beta;    /* written; TE_NO_BUFFER: not wanted */
} te_norm_gradients;
void te_part_norm_backward(te_part *part, int16_t input, const te_norm_gradients *gradients);
/* Outputs grad_input, grad_gamma, grad_beta, as far as they are wanted. */
void te_part_add_norm_gradients(te_part *part, te_norm_gradients *gradients);

#endif
