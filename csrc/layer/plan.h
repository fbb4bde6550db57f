/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.h - how a composed operation is built: an immutable list of buffers and of stages over them.
 *
 * A composed operation (linear.c, ...) adds buffers and stages to a builder; plan.c interns the
 * result under the hash of its description, infers sizes and runs it. A stage is an operator with
 * the numbers of its buffers, never a pointer: weights and state are reassigned between calls.
 */
#ifndef TE_LAYER_PLAN_H
#define TE_LAYER_PLAN_H

#include "transformer_engine.h"

#define TE_PLAN_MAX_BUFFERS 56
#define TE_PLAN_MAX_STAGES 40
#define TE_NO_BUFFER (-1)

/* Positions of te_stage.buffer per operator. A scale is read, and an amax recorded, at the stage's
 * slot where the buffer is a state chunk, and from a pair otherwise. The operators that cast to FP8
 * (quantize, norm, activation, activation_backward) share the first ones. */
enum {
    TE_QUANTIZE_INPUT,
    TE_QUANTIZE_ROW,
    TE_QUANTIZE_COLUMN,
    TE_QUANTIZE_PAIR,
    TE_QUANTIZE_SCALE,
    TE_QUANTIZE_HISTORY,
    TE_QUANTIZE_PARTIALS,
    TE_QUANTIZE_BIAS_GRAD,
    /* of norm, activation and activation_backward */
    TE_PRODUCE_OUTPUT,
    TE_PRODUCE_AMAX_PARTIALS,
    /* of norm */
    TE_NORM_GAMMA,
    TE_NORM_BETA,
    TE_NORM_MEAN,
    TE_NORM_RSIGMA,
    /* of activation_backward */
    TE_ACTIVATION_GRAD_OUTPUT = TE_NORM_GAMMA
};
enum {
    TE_NORM_BACKWARD_GRAD_OUTPUT,
    TE_NORM_BACKWARD_GRAD_ADD,
    TE_NORM_BACKWARD_INPUT,
    TE_NORM_BACKWARD_GAMMA,
    TE_NORM_BACKWARD_MEAN,
    TE_NORM_BACKWARD_RSIGMA,
    TE_NORM_BACKWARD_GRAD_INPUT,
    TE_NORM_BACKWARD_GRAD_GAMMA,
    TE_NORM_BACKWARD_GRAD_BETA
};
enum {
    TE_GEMM_A,
    TE_GEMM_B,
    TE_GEMM_D,
    TE_GEMM_A_PAIR,
    TE_GEMM_B_PAIR,
    TE_GEMM_BIAS,
    TE_GEMM_BIAS_GRAD,
    TE_GEMM_AUX
};
enum { TE_AMAX_INPUT, TE_AMAX_OUTPUT };
enum { TE_CAST_INPUT, TE_CAST_OUTPUT };
#define TE_STAGE_BUFFERS 14

typedef struct te_stage {
    const char *name;
    int32_t external; /* the caller runs it: run stops before it */
    te_op op;
    int16_t buffer[TE_STAGE_BUFFERS];
    int32_t direction; /* which of te_plan_call.slots: 0 forward, 1 backward */
    int32_t slot;      /* added to it: the tensor's place among the module's slots */
    int32_t kind;      /* te_norm_kind, te_activation_kind, or te_epilogue of a GEMM */
    uint32_t flags;    /* TE_GEMM_* or TE_NORM_* */
    int32_t a_transposed, b_transposed;
    float amax_epsilon;
    int32_t power_2_scale;
    float norm_eps;
    te_activation_params activation;
} te_stage;

typedef struct te_plan {
    int64_t id;
    const char *kind;
    int32_t buffer_count, stage_count;
    te_buffer_info buffers[TE_PLAN_MAX_BUFFERS];
    te_stage stages[TE_PLAN_MAX_STAGES];
    te_stage_info stage_info[TE_PLAN_MAX_STAGES];
    te_extent saved_bytes;
    size_t desc_bytes;
    unsigned char desc[512];                /* canonical bytes, to tell a hash collision */
    int16_t first_use[TE_PLAN_MAX_BUFFERS]; /* stages between which a scratch buffer is alive */
    int16_t last_use[TE_PLAN_MAX_BUFFERS];
    struct te_plan *next; /* bucket of the intern table */
} te_plan;

/* Length of a chunk of slots: whatever the caller's has, checked against the slots used. */
#define TE_ANY_LENGTH INT32_MAX

/* Extents of a shape. */
te_extent te_constant(int64_t value);
te_extent te_rows(int64_t multiply, int64_t align); /* multiply * roundup(rows, align) */
int64_t te_extent_value(const te_extent *extent, int64_t rows);

/* Adds a buffer and returns its number. Failures are remembered by the builder's te_plan and
 * reported by te_plan_intern. */
int16_t te_plan_vector(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype,
                       int64_t length);
/* One element per row of the call. */
int16_t te_plan_row_vector(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype);
int16_t te_plan_matrix(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype,
                       te_extent rows, te_extent columns);
/* A matrix whose rows are the leading dims of the call. */
int16_t te_plan_leading(te_plan *plan, const char *name, te_buffer_role role, te_dtype dtype,
                        int64_t gather, int64_t columns);

/* Appends a stage with no buffers yet. */
te_stage *te_plan_stage(te_plan *plan, const char *name, te_op op, int external);

/* Looks a description of a family ("linear", ...) up; *found is NULL where it is not interned yet.
 */
te_status te_plan_find_desc(const char *family, const void *desc, size_t bytes, int64_t *id,
                            const te_plan **found);
/* Interns a built plan (copied) under its description. */
te_status te_plan_intern(const te_plan *plan, const char *family, const void *desc, size_t bytes);
/* The plan of an id; INVALID where there is none. */
te_status te_plan_get(int64_t id, const te_plan **plan);

#endif
