/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_plans.h - public C API: plans, the operations that a layer is composed of.
 *
 * A plan is an immutable list of stages (an operator, or a point where the caller works) over named
 * buffers, made from a description and known by an id. It holds no memory and no weights. Part of
 * transformer_engine.h, which has the types of everything here.
 */
#ifndef TRANSFORMER_ENGINE_PLANS_H
#define TRANSFORMER_ENGINE_PLANS_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- buffers and stages ------------------------------------------------------------------- */

typedef enum te_buffer_role {
    TE_ROLE_INPUT,     /* read; data of this call */
    TE_ROLE_PARAMETER, /* read; weights */
    TE_ROLE_STATE,     /* read and written; lives across calls */
    TE_ROLE_OUTPUT,    /* written */
    TE_ROLE_SAVED, /* packed into the one saved byte buffer: written in forward, read in backward */
    TE_ROLE_SCRATCH /* packed into the one scratch byte buffer */
} te_buffer_role;

/* multiply * roundup(rows, align) + add */
typedef struct te_extent {
    int64_t multiply, align, add;
} te_extent;

typedef struct te_buffer_info {
    const char *name;
    te_buffer_role role;
    te_dtype dtype;
    int32_t ndim;    /* 1 or 2 */
    int32_t leading; /* shape[0] stands for the leading dims of the first input (times gather) */
    te_extent shape[2];
} te_buffer_info;

typedef struct te_stage_info {
    const char *name; /* "quantize_input", "gemm_output", ... */
    const char *op;   /* operator name, or "external" */
} te_stage_info;

typedef struct te_plan_info {
    size_t size;
    const char *kind; /* "linear_forward", ... */
    const te_buffer_info *buffers;
    int32_t buffer_count;
    const te_stage_info *stages;
    int32_t stage_count;
    te_extent saved_bytes; /* of the packed saved buffer; te_plan_infer evaluates it */
} te_plan_info;

/* What te_plan_infer says for a number of rows: pure arithmetic, no device. */
typedef struct te_plan_sizes {
    size_t size;
    int64_t saved_bytes;   /* of the packed saved buffer; 0: none */
    int64_t scratch_bytes; /* of the plan's own scratch, without operator workspaces */
} te_plan_sizes;

/* ---- descriptions ------------------------------------------------------------------------- */

enum { TE_LINEAR_FORWARD = 0, TE_LINEAR_BACKWARD = 1, TE_LINEAR_WGRAD = 2 };

enum {                                  /* te_linear_desc.flags */
       TE_LINEAR_BIAS = 1 << 0,         /* forward adds the bias; backward makes its gradient */
       TE_LINEAR_DGRAD = 1 << 1,        /* the input needs a gradient */
       TE_LINEAR_WGRAD_NEEDED = 1 << 2, /* the weight needs a gradient */
       TE_LINEAR_SAVE_INPUT =
           1 << 3, /* backward reads the original input: nothing of it is saved in FP8 */
       TE_LINEAR_NO_AMAX = 1 << 4,       /* recompute: record no amax (delayed scaling) */
       TE_LINEAR_POWER_2_INPUT = 1 << 5, /* current scaling: power-of-two scale of the input */
       TE_LINEAR_POWER_2_WEIGHT = 1 << 6,
       TE_LINEAR_POWER_2_GRAD = 1 << 7,
       TE_LINEAR_FAST_FPROP = 1 << 8, /* fast accumulation, per GEMM */
       TE_LINEAR_FAST_DGRAD = 1 << 9,
       TE_LINEAR_FAST_WGRAD = 1 << 10,
       TE_LINEAR_ALLOW_TF32 = 1 << 11,
       TE_LINEAR_ACCUMULATE_WGRAD =
           1 << 12, /* add to main_grad (a state buffer), no weight-gradient output */
       TE_LINEAR_OVERWRITE_WGRAD = 1 << 13, /* write main_grad */
       TE_LINEAR_DEFER_WGRAD = 1 << 14,     /* backward saves what TE_LINEAR_WGRAD needs later */
       TE_LINEAR_CACHE_WRITE =
           1 << 15, /* forward: the quantized weight, both usages, is an output */
       TE_LINEAR_CACHE_READ = 1 << 16, /* the quantized weight of an earlier forward is an input */
       TE_LINEAR_ZERO_CENTERED = 1 << 17, /* norm: the factor is 1 + gamma */
       TE_LINEAR_GRAD_GAMMA = 1 << 18,    /* norm: gamma needs a gradient */
       TE_LINEAR_GRAD_BETA = 1 << 19,     /* norm: beta needs a gradient */
       TE_LINEAR_RETURN_NORM = 1 << 20, /* the norm's output is an output, its gradient an input */
       TE_LINEAR_BIAS_FROZEN = 1 << 21, /* backward: the bias has no gradient */
       TE_LINEAR_NO_GAMMA = 1 << 22,    /* norm by itself: it has neither gamma nor beta */
       TE_LINEAR_NO_BETA = 1 << 23      /* norm by itself: it has no beta */
};

typedef enum te_recipe {
    TE_RECIPE_NONE = 0,
    TE_RECIPE_DELAYED = 1,
    TE_RECIPE_CURRENT = 2
} te_recipe;

/* Canonical description of a linear's forward, backward or separate weight-gradient plan, with or
 * without a norm before it. Zero-fill it first: its bytes are hashed. The number of rows is no part
 * of it. */
typedef struct te_linear_desc {
    uint32_t size;
    int32_t direction; /* TE_LINEAR_FORWARD, ... */
    int64_t in_features, out_features;
    int32_t input_dtype, weight_dtype, bias_dtype, output_dtype; /* te_dtype */
    int32_t grad_weight_dtype;         /* of the weight gradient or main_grad */
    int32_t recipe;                    /* te_recipe */
    int32_t forward_fp8, backward_fp8; /* te_dtype; E4M3 when recipe is NONE */
    uint32_t flags;                    /* TE_LINEAR_* */
    int32_t gather; /* > 1: the quantized input is gathered from this many ranks before the GEMM */
    uint32_t external; /* 1 << stage number of TE_LINEAR_STAGES that the caller runs itself */
    float amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad; /* current scaling */
    int32_t norm;       /* 0: none; else 1 + te_norm_kind (LAYERNORM or RMSNORM) */
    int32_t norm_dtype; /* te_dtype of gamma and beta; 0 without a norm */
    float norm_eps;
    uint32_t reserved;
} te_linear_desc;

enum { /* te_mlp_desc.flags */
       /* Forward saves its input and scales only; backward repeats norm, fc1 and activation. */
       TE_MLP_RECOMPUTE = 1 << 0
};

/* norm (optional, of fc1), fc1, activation, fc2. fc1.out_features is fc2.in_features, or twice it
 * for a gated activation; recipe, FP8 dtypes and direction are the same in both; fc1.output_dtype
 * is fc2.input_dtype. fc2 needs DGRAD where anything before it needs a gradient. */
typedef struct te_mlp_desc {
    uint32_t size;
    int32_t direction;
    int32_t activation; /* te_activation_kind */
    te_activation_params params;
    uint32_t flags; /* TE_MLP_* */
    uint32_t reserved;
    te_linear_desc fc1, fc2;
} te_mlp_desc;

/* A norm by itself, forward or backward: te_norm over [rows, features]. */
typedef struct te_norm_desc {
    uint32_t size;
    int32_t direction; /* TE_LINEAR_FORWARD or TE_LINEAR_BACKWARD */
    int64_t features;
    int32_t kind; /* te_norm_kind */
    int32_t input_dtype, weight_dtype, output_dtype;
    uint32_t flags; /* TE_LINEAR_DGRAD, _GRAD_GAMMA, _GRAD_BETA, _ZERO_CENTERED, _NO_GAMMA,
                       _NO_BETA */
    float eps;
} te_norm_desc;

/* Stages of the linear plans, in order of execution: X(ENUM, name). A plan has those it needs. In
 * an MLP they are called fc1_... and fc2_... . */
#define TE_LINEAR_STAGES(X)                                                                        \
    X(PRODUCE_INPUT, produce_input) /* norm or activation, where no cast to FP8 is fused */        \
    X(AMAX_INPUT, amax_input)                                                                      \
    X(REDUCE_AMAX_INPUT, reduce_amax_input) /* external only */                                    \
    X(QUANTIZE_INPUT, quantize_input)                                                              \
    X(AMAX_WEIGHT, amax_weight)                                                                    \
    X(REDUCE_AMAX_WEIGHT, reduce_amax_weight) /* external only */                                  \
    X(QUANTIZE_WEIGHT, quantize_weight)                                                            \
    X(CAST_BIAS, cast_bias)                                                                        \
    X(GATHER_INPUT, gather_input) /* external only */                                              \
    X(GEMM_OUTPUT, gemm_output)                                                                    \
    X(PRODUCE_GRAD_OUTPUT, produce_grad_output) /* gradient of the activation, likewise */         \
    X(AMAX_GRAD_OUTPUT, amax_grad_output)                                                          \
    X(REDUCE_AMAX_GRAD_OUTPUT, reduce_amax_grad_output) /* external only */                        \
    X(QUANTIZE_GRAD_OUTPUT, quantize_grad_output)                                                  \
    X(REQUANTIZE_WEIGHT, requantize_weight)                                                        \
    X(GEMM_GRAD_INPUT, gemm_grad_input)                                                            \
    X(REQUANTIZE_INPUT, requantize_input)                                                          \
    X(GEMM_GRAD_WEIGHT, gemm_grad_weight)                                                          \
    X(NORM_BACKWARD, norm_backward)

typedef enum te_linear_stage {
#define X(NAME, name) TE_LINEAR_STAGE_##NAME,
    TE_LINEAR_STAGES(X)
#undef X
        TE_LINEAR_STAGE_COUNT
} te_linear_stage;

/* ---- making and running ------------------------------------------------------------------- */

/* Interns a plan: the same description gives the same id in every process. INVALID or TYPE for a
 * description that can not be. */
TE_API te_status te_plan_linear(const te_linear_desc *desc, int64_t *id);
TE_API te_status te_plan_mlp(const te_mlp_desc *desc, int64_t *id);
TE_API te_status te_plan_norm(const te_norm_desc *desc, int64_t *id);
/* Buffers and stages of a plan; the pointers live as long as the process. */
TE_API te_status te_plan_describe(int64_t id, te_plan_info *info);
/* Sizes for a number of rows; offsets, where not NULL, has room for buffer_count byte offsets into
 * the saved or scratch buffer (-1 for buffers of other roles). */
TE_API te_status te_plan_infer(int64_t id, int64_t rows, te_plan_sizes *sizes, int64_t *offsets);
/* Bytes of scratch that a run over dense, aligned buffers takes on this device: the plan's own plus
 * the largest operator workspace. */
TE_API te_status te_plan_scratch(te_context *context, int64_t id, int64_t rows, size_t *bytes);

#define TE_PLAN_SLOTS 4

typedef struct te_plan_call {
    size_t size;
    int64_t plan;
    int64_t rows;             /* product of the leading dims of the first input */
    int32_t first, last;      /* stages [first, last) ; last < 0: to the end */
    const te_tensor *buffers; /* buffer_count entries in plan order, matrices flattened to 2-D;
                                 SAVED and SCRATCH entries are ignored */
    void *saved;              /* packed saved buffer, 16-byte aligned */
    void *scratch;            /* packed scratch, 256-byte aligned */
    size_t scratch_size;
    int32_t slots[TE_PLAN_SLOTS]; /* first slot of this module in the chunks of its direction: [0]
                                     forward, [1] backward */
} te_plan_call;

/* The same for the buffers of one call: a misaligned or strided one may need a copy that dense,
 * aligned buffers do not. Entries of role OUTPUT need not be there yet. */
TE_API te_status te_plan_scratch_for(te_context *context, const te_plan_call *call, size_t *bytes);

/* Runs the stages [first, last). Stops before an external stage; *next (where not NULL) is the
 * stage to continue with, stage_count when done. */
TE_API te_status te_plan_run(te_context *context, const te_plan_call *call, int32_t *next,
                             void *stream);

#ifdef __cplusplus
}
#endif
#endif
