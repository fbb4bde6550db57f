/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_updates.h - public C API: one pass over lists of tensors, as optimizers take
 * it: updates of parameters, norms of gradients.
 *
 * Part of transformer_engine.h, which has the types of everything here. Not in the operator table:
 * an operator has single tensors, these have lists of any length.
 */
#ifndef TRANSFORMER_ENGINE_UPDATES_H
#define TRANSFORMER_ENGINE_UPDATES_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

/* All in fp32, element by element, with g the gradient times grad_scale and p the value:
 * - ADAM: g += decay p (not with TE_UPDATE_DECOUPLED); mean = beta1 mean + (1 - beta1) g; square =
 *   beta2 square + (1 - beta2) g g; u = (mean / c1) / (sqrt(square / c2) + eps), with
 *   TE_UPDATE_DECOUPLED u += decay p; p -= lr u. c = 1 - beta^step, or 1 without
 *   TE_UPDATE_CORRECTED.
 * - SGD: g += decay p (not with TE_UPDATE_DECAY_LAST); with a momentum: mean = momentum mean + (1 -
 *   dampening) g, or g with TE_UPDATE_FIRST, and g = mean, or g + momentum mean with
 *   TE_UPDATE_NESTEROV; with TE_UPDATE_DECAY_LAST g += decay p; p -= lr g.
 * - SCALE: p = g.
 * - RESCALE: p = top / max(g, eps), the scale of an amax g in current scaling; 1 where max(g, eps)
 *   is 0, Inf or NaN, else at most the largest fp32, with TE_UPDATE_POWER_2 rounded down to a power
 *   of two. mean = 1 / p.
 * Every operation is rounded by itself: the same bits on every device. */
typedef enum te_update_kind {
    TE_UPDATE_ADAM = 0,
    TE_UPDATE_SGD = 1,
    TE_UPDATE_SCALE = 2,
    TE_UPDATE_RESCALE = 3,
    TE_UPDATE_KIND_COUNT
} te_update_kind;

/* X(ENUM, name): the lists of tensors.
 * grad: read; value: read (by ADAM and SGD) and written; mean: of ADAM, RESCALE, and of SGD with a
 * momentum; square: of ADAM; rounded: receives the new values, rounded; remainder: 16 bits each (of
 * dtype bf16, whatever they mean): the low half of an fp32 number of which the value, in bf16, is
 * the high half, one more where the low half is negative as an integer. */
#define TE_UPDATE_LISTS(X)                                                                         \
    X(GRAD, grad)                                                                                  \
    X(VALUE, value)                                                                                \
    X(MEAN, mean)                                                                                  \
    X(SQUARE, square)                                                                              \
    X(ROUNDED, rounded)                                                                            \
    X(REMAINDER, remainder)

typedef enum te_update_list {
#define X(NAME, name) TE_UPDATE_##NAME,
    TE_UPDATE_LISTS(X)
#undef X
        TE_UPDATE_LIST_COUNT
} te_update_list;

enum {
    TE_UPDATE_DECOUPLED = 1,
    TE_UPDATE_CORRECTED = 2,
    TE_UPDATE_NESTEROV = 4,
    TE_UPDATE_FIRST = 8,
    TE_UPDATE_DECAY_LAST = 16,
    TE_UPDATE_WRITE_GRAD = 32, /* ADAM, SGD: the gradient times grad_scale replaces the gradient */
    TE_UPDATE_POWER_2 = 64,
    TE_UPDATE_CHECK = 128 /* the call is checked, and nothing is written */
};

typedef struct te_update_args {
    size_t size;
    te_update_kind kind;
    uint32_t flags; /* TE_UPDATE_* */
    int64_t count;  /* tensors of each list */
    /* By te_update_list; NULL: there is none. Tensor i of each list has the same number of
     * elements, dense and in one order; f32, f16 or bf16, one dtype for a list. No two share
     * memory. */
    const te_tensor *lists[TE_UPDATE_LIST_COUNT];
    /* Device int32 or NULL. ADAM, SGD, RESCALE: where it is not 0 nothing is written. SCALE: set to
     * 1 where an element of grad is Inf or NaN. */
    int32_t *flag;
    double lr, beta1, beta2, eps, decay, grad_scale, momentum, dampening, top;
    int64_t step; /* of ADAM, from 1 */
    /* On the device, one element each, in place of the numbers above; NULL: those. */
    const float *lr_at, *grad_scale_at;
    const int32_t *step_at;
    /* ADAM, SGD: a cast for each tensor, or NULL. Each is run on the new values, as `value` holds
     * them: `input` is its tensor of `value`, as a matrix; `noop` and `bias_grad` are absent. Not
     * with the lists rounded and remainder. Where the cast has one scale, it is part of the pass.
     */
    const te_quantize_args *casts;
} te_update_args;

/* Waits for nothing and allocates nothing: a stream that captures may have it. */
TE_API te_status te_update(te_context *context, const te_update_args *args, void *stream);

/* Roots of sums of squares, in fp32: of each tensor and of all elements of a list. An element is
 * multiplied with the factor before it is squared. Sums are made in one order: the same bits in
 * every run and on every device (but for those of a NaN). */
enum {
    TE_L2NORM_CHECK = 1 /* the tensors are checked, and nothing is written: total and workspace may
                           be NULL */
};

typedef struct te_l2norm_args {
    size_t size;
    uint32_t flags; /* TE_L2NORM_* */
    int64_t count;
    const te_tensor *tensors; /* dense, of f32, f16 or bf16 each, maybe of 0 elements */
    const float *factor;      /* device, one element; NULL: 1 */
    float *total;             /* device, one element */
    float *each;              /* device, count elements; NULL: nobody asks */
    int32_t *flag;            /* device, or NULL: set to 1 where the total is Inf or NaN */
    void *workspace;          /* device, aligned to 4: te_l2norm_workspace bytes, or more */
    size_t workspace_size;
} te_l2norm_args;

/* The bytes of workspace that a call with these tensors takes; reads sizes, and no data. */
TE_API te_status te_l2norm_workspace(const te_l2norm_args *args, size_t *bytes);
/* Waits for nothing and allocates nothing: a stream that captures may have it. */
TE_API te_status te_l2norm(te_context *context, const te_l2norm_args *args, void *stream);

#endif
