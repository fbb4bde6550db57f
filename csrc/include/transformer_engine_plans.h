/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_plans.h - public C API: the plans that run graphs.
 *
 * One builder makes plans of a graph (transformer_engine_graphs.h): the forward, the backward, and
 * the weight gradients that a backward has put off. A plan is an immutable list of stages (an
 * operator, or a point where the caller works) over buffers; it is known by an id, and holds no
 * memory and no weights. It lives as long as somebody holds it. Part of transformer_engine.h, which
 * has the types of everything here.
 */
#ifndef TRANSFORMER_ENGINE_PLANS_H
#define TRANSFORMER_ENGINE_PLANS_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

/* ---- plans -------------------------------------------------------------------------------- */

typedef enum te_direction {
    TE_DIRECTION_FORWARD,
    TE_DIRECTION_BACKWARD,
    TE_DIRECTION_DEFERRED, /* the weight gradients that a backward has put off */
    TE_DIRECTION_COUNT
} te_direction;

/* X(ENUM, name) */
#define TE_BUFFER_ROLES(X)                                                                         \
    X(INPUT, input)         /* read; data of this call */                                          \
    X(PARAMETER, parameter) /* read; weights */                                                    \
    X(STATE, state)     /* lives across calls; read, and written where buffer.written says so */   \
    X(OUTPUT, output)   /* written */                                                              \
    X(SAVED, saved)     /* packed into the saved buffer: written in forward, read in backward */   \
    X(SCRATCH, scratch) /* packed into the scratch buffer */                                       \
    X(VIEW, view)       /* elements of another buffer */

typedef enum te_buffer_role {
#define X(NAME, name) TE_ROLE_##NAME,
    TE_BUFFER_ROLES(X)
#undef X
        TE_ROLE_COUNT
} te_buffer_role;

/* Meaning of a buffer, the same in every plan of a graph: whoever runs a backward finds by it what
 * of the forward to hand on. X(ENUM, name, what `of` numbers). */
#define TE_LINKS(X)                                                                                \
    X(GRADIENT, gradient, value)                                                                   \
    X(VALUE, value, value)                                                                         \
    X(ROW, row, node *TE_OPERAND_ROLES + te_operand_role)                                          \
    X(COLUMN, column, likewise)                                                                    \
    X(SCALES, scales, likewise) /* of both forms */                                                \
    X(ROW_SCALES, row_scales, likewise)                                                            \
    X(COLUMN_SCALES, column_scales, likewise)                                                      \
    X(ROW_AMAX, row_amax, likewise) /* of a whole form */                                          \
    X(COLUMN_AMAX, column_amax, likewise)                                                          \
    X(PIECE_SCALES, piece_scales, likewise) /* row-wise ones of some rows after others */          \
    X(WIDE, wide, likewise) /* in the dtype of the output, for GEMMs of the backward */            \
    X(MEAN, mean, node)                                                                            \
    X(RSIGMA, rsigma, node)                                                                        \
    X(BIAS_CAST, bias_cast, node)                                                                  \
    X(STATISTICS, statistics, node)                                                                \
    X(MAX_SCORES, max_scores, node) /* of an attention, [heads] */                                 \
    X(HEADS, heads, node *TE_HEADS_ROLES + te_heads_role)                                          \
    X(HEADS_SCALES, heads_scales, likewise)                                                        \
    X(HEADS_WIDE, heads_wide, likewise) /* read again */                                           \
    X(SENT, sent, node)         /* of a sum in pieces: rows of the other ranks, in their order */  \
    X(RECEIVED, received, node) /* terms of this rank's rows, of the others */                     \
    X(PARTIALS, partials, nothing) /* 1: of the column-wise form alone */                          \
    X(SCALE, scale, owner)                                                                         \
    X(HISTORY, history, owner)                                                                     \
    X(PART, part, value + n * count of values) /* its gradient's contribution n; 0: their sum */

typedef enum te_link {
#define X(NAME, name, of) TE_LINK_##NAME,
    TE_LINKS(X)
#undef X
        TE_LINK_COUNT
} te_link;

/* How a view lies in its base. */
typedef enum te_view_kind {
    TE_VIEW_PART,      /* at offset and strides of a dense base */
    TE_VIEW_EXCHANGED, /* it is the base with its first two dims exchanged, whatever its strides */
    TE_VIEW_BATCH      /* the base with a first dim of 1 before the others, likewise */
} te_view_kind;

typedef struct te_buffer_info {
    const char *name; /* for people */
    te_buffer_role role;
    te_link link;
    int32_t of;
    te_dtype dtype;
    int32_t written; /* of a state: the run changes it */
    int32_t leading; /* shape[0] stands for the leading dims of its sequence (times multiply); of 3
                        dims and more, those before the last two are these */
    int32_t ndim;
    te_extent shape[TE_MAX_DIMS];
    int32_t base; /* of a view: the buffer that it is part of */
    te_view_kind view;
    te_extent offset; /* of a part, in elements */
    te_extent strides[TE_MAX_DIMS];
} te_buffer_info;

typedef struct te_stage_info {
    const char *name; /* "quantize_input", "gemm_output", ... */
    te_op op;
    int32_t external;
    const int32_t *buffers; /* numbers of those that it reads or writes */
    int32_t buffer_count;
    int32_t node; /* that it belongs to, or -1 */
    int32_t
        step; /* te_linear_stage, te_function_step or te_collective_step of such a node, or -1 */
    int32_t half; /* the stage that is its other half; -1: it is whole */
} te_stage_info;

typedef struct te_plan_info {
    size_t size;
    int64_t id; /* a hash of the graph and the direction: the same in every process */
    te_direction direction;
    const te_buffer_info *buffers;
    const te_stage_info *stages;
    int32_t buffer_count, stage_count;
    int32_t quantized;                   /* GEMMs of it run in FP8 */
    te_extent saved_bytes[TE_SEQUENCES]; /* their sum: of the packed saved buffer */
    int32_t owners;                      /* modules whose slots it takes */
    uint32_t symbols;                    /* 1 << te_symbol of those that a call has to give */
    /* What else a front end goes by: */
    int32_t argument_count; /* buffers from 0 on that a call gives: inputs, parameters and state */
    int32_t output_count;   /* buffers behind them, which are its results */
    int32_t external;       /* a stage is external */
    int32_t has_saved;      /* something is saved: a forward makes it, the others are given it */
    int32_t sized_by[TE_SEQUENCES]; /* the input whose leading dims are those of a sequence: the
                                       first that has them, or -1: then the call says its rows */
} te_plan_info;

/* The sequence whose leading dims a buffer has. */
static inline int te_sequence_of(const te_buffer_info *buffer)
{
    return buffer->shape[0].symbol >= TE_SYMBOL_SOURCE_ROWS;
}

#define TE_MAX_LEADING 64

/* Leading dims of a sequence as the caller has them: those before the last dim, of heads those
 * before the last two. A plan is given matrices, in which they are one dim. */
typedef struct te_leading {
    int32_t count;
    int64_t dims[TE_MAX_LEADING];
} te_leading;

/* All who hold the plan of a graph share it. Whoever has got one from te_plan_make or te_plan_find,
 * or retains one, holds it until it has released it as often: for as long as it hands the plan to
 * the functions below, and no call runs it longer. Any thread may do any of this at any time. */
typedef struct te_plan te_plan;

/* The plan of a graph, made where nobody holds it, which takes from some 10 microseconds to
 * milliseconds. INVALID or TYPE for a graph that can not be: what a node makes is a result or read,
 * a parameter with a gradient is read once (else UNSUPPORTED). */
TE_API te_status te_plan_make(const te_graph_desc *graph, te_direction direction, te_plan **plan);
/* The plan of an id; INVALID where nobody holds it. */
TE_API te_status te_plan_find(int64_t id, te_plan **plan);
TE_API void te_plan_retain(te_plan *plan);
TE_API void te_plan_release(te_plan *plan); /* the last one frees it; NULL is legal */
/* Plans that somebody in the process holds. */
TE_API int64_t te_plan_count(void);
/* Buffers and stages of a plan; the pointers live as long as it. */
TE_API te_status te_plan_describe(const te_plan *plan, te_plan_info *info);
/* Values of the symbols, from the first arguments that have them: argument_count views, and the
 * leading dims of what sized_by names. Those of several ranks are divided, so that what is left is
 * one rank's. What no argument says stays as it is. INVALID for leading dims that can not be. */
TE_API te_status te_plan_take_sizes(const te_plan_info *info, const te_tensor *arguments,
                                    te_leading leading[TE_SEQUENCES], te_sizes *sizes);

/* Results of te_plan_infer for given sizes: pure arithmetic, no device. */
typedef struct te_plan_sizes {
    size_t size;
    int64_t saved_bytes;   /* of the packed saved buffer; 0: none */
    int64_t scratch_bytes; /* of the plan's own scratch, without operator workspaces */
} te_plan_sizes;

/* offsets, where not NULL, has room for buffer_count byte offsets into the saved or scratch buffer
 * (-1 for buffers of other roles). */
TE_API te_status te_plan_infer(const te_plan *plan, const te_sizes *given, te_plan_sizes *sizes,
                               int64_t *offsets);
/* Bytes of scratch that a run over dense, aligned buffers takes on this device: the plan's own plus
 * the largest operator workspace. */
TE_API te_status te_plan_scratch(te_context *context, const te_plan *plan, const te_sizes *sizes,
                                 size_t *bytes);

/* Function that a run calls at an external stage: it does the stage's work on the buffers of the
 * plan, which are all there, on the stream of the run. With `observed` set it is called before and
 * after every other stage too. Where a run fails between the halves of a stage, whose first one has
 * succeeded, ABANDON comes in place of the second one: what was started may not touch the buffers
 * any more once the stream has come to what follows. Its status is ignored. */
typedef enum te_stage_event {
    TE_STAGE_RUN,
    TE_STAGE_BEFORE,
    TE_STAGE_AFTER,
    TE_STAGE_ABANDON
} te_stage_event;
typedef te_status (*te_stage_function)(void *self, int32_t stage, te_stage_event event,
                                       te_tensor *buffers);

/* What a run of the stages from `first` to before `end` has to do with each buffer that is no view,
 * at buffer_count places: it reads or changes what was there before; who runs other stages reads
 * what it leaves there. With all stages arguments are given, and outputs, what a forward saves and
 * the state that is written are made. */
enum { TE_PORT_GIVEN = 1, TE_PORT_MADE = 2 };
TE_API te_status te_plan_ports(const te_plan *plan, int32_t first, int32_t end,
                               unsigned char *ports);

typedef struct te_plan_call {
    size_t size;
    const te_plan *plan;
    te_sizes sizes;
    const te_tensor *buffers; /* buffer_count entries in plan order, matrices flattened to 2-D;
                                 those of VIEW buffers are ignored, and of SAVED and SCRATCH ones
                                 unless `apart` is set */
    void *saved;              /* packed saved buffer, 16-byte aligned */
    void *scratch;            /* packed scratch, 256-byte aligned */
    size_t scratch_size;
    const int32_t *slots;    /* two per owner: its first one in the forward and backward chunk */
    te_stage_function stage; /* NULL where no stage is external */
    void *stage_self;
    int32_t observed;
    int32_t consumes_saved; /* nobody reads `saved` after this run: scratch lies in members that no
                               stage reads any more. Of a later plan, where no other one follows */
    const te_selection *selection; /* whom operators ask first; NULL: nobody else */
    int32_t apart; /* SAVED and SCRATCH buffers whose entry of `buffers` has data lie there; entries
                      that no stage of the run uses need not be there */
    int32_t first_stage, end_stage; /* the run is of the stages from the first to before the end;
                                       an end of 0: of all */
} te_plan_call;

/* Bytes of scratch for the buffers of one call: a misaligned or strided one may need a copy that
 * dense, aligned buffers do not. Entries of role OUTPUT need not be there yet. */
TE_API te_status te_plan_scratch_for(te_context *context, const te_plan_call *call, size_t *bytes);

TE_API te_status te_plan_run(te_context *context, const te_plan_call *call, void *stream);

#endif
