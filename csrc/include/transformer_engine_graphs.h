/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_graphs.h - public C API: graphs of nodes, what a module computes.
 *
 * A graph is a list of nodes (norm, linear layer, activation, ...) over values. Plans are made of
 * it (transformer_engine_plans.h). Part of transformer_engine.h, which has the types of everything
 * here.
 */
#ifndef TRANSFORMER_ENGINE_GRAPHS_H
#define TRANSFORMER_ENGINE_GRAPHS_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

/* ---- shapes ------------------------------------------------------------------------------- */

/* Numbers that a plan does not fix: they are given with each run. Of the tokens, and of a second
 * sequence that they attend to (the source, encoder_output): how many there are, and their two
 * leading dims, whose product that is. Of packed sequences: how many there are, and bounds of the
 * lengths of their queries and of their keys. */
typedef enum te_symbol {
    TE_SYMBOL_NONE, /* of constants */
    TE_SYMBOL_ROWS,
    TE_SYMBOL_DIM_0,
    TE_SYMBOL_DIM_1,
    TE_SYMBOL_SOURCE_ROWS,
    TE_SYMBOL_SOURCE_DIM_0,
    TE_SYMBOL_SOURCE_DIM_1,
    TE_SYMBOL_SEQUENCES,
    TE_SYMBOL_MAX_QUERIES,
    TE_SYMBOL_MAX_KEYS,
    TE_SYMBOL_COUNT
} te_symbol;
#define TE_SEQUENCES 2 /* the tokens, the source */

/* Values of the symbols; [TE_SYMBOL_NONE] is not read, nor are the dims where no extent names them.
 */
typedef struct te_sizes {
    int64_t of[TE_SYMBOL_COUNT];
} te_sizes;

static inline te_sizes te_sizes_of_rows(int64_t rows)
{
    te_sizes sizes = {{0, rows, 0, 0, 0, 0, 0, 0, 0, 0}};
    return sizes;
}

/* roundup(multiply * symbol, align) / divide + add */
typedef struct te_extent {
    int32_t symbol;               /* te_symbol */
    int64_t multiply, align, add; /* align at least 1 */
    int64_t divide; /* divides align; 0: 1. Of scales, of which several elements share one */
} te_extent;

TE_API int64_t te_extent_value(const te_extent *extent, const te_sizes *sizes);

/* Constant length that is whatever the caller's buffer has (chunks of slots). */
#define TE_ANY_LENGTH INT32_MAX

/* ---- graphs ------------------------------------------------------------------------------- */

#define TE_NAME_BYTES 24

enum {                              /* te_value_desc.flags */
       TE_VALUE_INPUT = 1 << 0,     /* given; data of a call */
       TE_VALUE_PARAMETER = 1 << 1, /* given; a weight */
       TE_VALUE_RESULT = 1 << 2,    /* what the graph is for; its gradient is given to a backward */
       /* shape[0] stands for the leading dims of tokens or source; of heads, a value [rows, heads,
        * channels] or [dim 0, dim 1, heads, channels], the dims before the heads are these */
       TE_VALUE_LEADING = 1 << 3,
       TE_VALUE_GRADIENT = 1 << 4,   /* of an input or parameter: its gradient is wanted */
       TE_VALUE_ACCUMULATE = 1 << 5, /* the gradient is added to the caller's buffer (main_grad) */
       TE_VALUE_OVERWRITE = 1 << 6,  /* it is written there */
       TE_VALUE_DEFER = 1 << 7,      /* it is put off, to the plan TE_DIRECTION_DEFERRED */
       /* Of an input, a parameter, or the gradient of a result, as linear nodes cast it: */
       TE_VALUE_KEEP_QUANTIZED = 1 << 8, /* the plan that casts it returns its quantized forms */
       /* It arrives in these forms, in high precision not at all. With ROW_WISE also of what an
        * attention with a recipe makes and one linear node reads: that multiplies the attention's
        * output as it is, with the scale that the attention gave it. */
       TE_VALUE_QUANTIZED = 1 << 9,
       /* Besides QUANTIZED, with one scale for the tensor and columns that need no padding: it
        * arrives row-wise alone, and a backward that reads it column-wise transposes it. Besides
        * RETURN_QUANTIZED: it is returned row-wise alone. */
       TE_VALUE_ROW_WISE = 1 << 10,
       /* Of a result that a linear node makes: it is returned in quantized forms, in high precision
        * not at all; of an input with a gradient: that is. Cast by the recipe of the linear node
        * that makes it, or of the first one that it comes to, the result as inputs are and the
        * gradient as gradients are (operands OUTPUT and GRAD_INPUT). With ROW_WISE also of a result
        * that an attention with a recipe makes, as it makes it (HEADS and HEADS_SCALES). */
       TE_VALUE_RETURN_QUANTIZED = 1 << 11,
       /* Of a weight besides QUANTIZED: it is given in high precision too, for the GEMMs that read
        * it so (te_quantization.backward). */
       TE_VALUE_ALSO_WIDE = 1 << 12,
       /* Of what a node makes: who reads it reads what its dtype holds of it, and its gradient is
        * whole and rounded before it is read. So the graph of several modules has the bits that
        * these have one by one; inside a module, operators are joined over a value. */
       TE_VALUE_ROUNDED = 1 << 13
};

/* A tensor of the graph. */
typedef struct te_value_desc {
    char name[TE_NAME_BYTES];
    uint32_t flags;
    int32_t dtype, grad_dtype; /* te_dtype; grad_dtype of a parameter's gradient */
    int32_t ndim;
    te_extent shape[TE_MAX_DIMS];
} te_value_desc;

typedef enum te_recipe {
    TE_RECIPE_NONE = 0,
    TE_RECIPE_DELAYED = 1,
    TE_RECIPE_CURRENT = 2,
    TE_RECIPE_BLOCK = 3,   /* a scale per tile of 1 x 128 or 128 x 128 elements */
    TE_RECIPE_ROW = 4,     /* a scale per row of what a GEMM reads */
    TE_RECIPE_MXFP8 = 5,   /* a power of two per 32 elements; GEMMs multiply it out */
    TE_RECIPE_NVFP4 = 6,   /* likewise an E4M3 number per 16, and one number per tensor */
    TE_RECIPE_EXTERNAL = 7 /* the caller's: its stage writes what GEMMs multiply, in the dtype of
                              the output, row-wise and column-wise by themselves */
} te_recipe;

/* Operands of a linear layer's GEMMs, and what it makes that is returned quantized. */
typedef enum te_operand_role {
    TE_INPUT_OPERAND,
    TE_WEIGHT_OPERAND,
    TE_GRAD_OPERAND,
    TE_GEMM_OPERANDS,                     /* those that GEMMs multiply */
    TE_OUTPUT_OPERAND = TE_GEMM_OPERANDS, /* cast as an input */
    TE_GRAD_INPUT_OPERAND,                /* cast as a gradient */
    TE_WHOLE_INPUT_OPERAND, /* input and gradient of all ranks, where each has a part (see */
    TE_WHOLE_GRAD_OPERAND,  /* TE_COLLECTIVE_FORMS) */
    TE_OPERAND_ROLES
} te_operand_role;

/* Heads that an attention with a recipe has in FP8: X(ENUM, name). */
#define TE_HEADS(X)                                                                                \
    X(QUERY, query)                                                                                \
    X(KEY, key)                                                                                    \
    X(VALUE, value)                                                                                \
    X(OUTPUT, output)                                                                              \
    X(GRAD_OUTPUT, grad_output)                                                                    \
    X(GRAD_QUERY, grad_query)                                                                      \
    X(GRAD_KEY, grad_key)                                                                          \
    X(GRAD_VALUE, grad_value)

typedef enum te_heads_role {
#define X(NAME, name) TE_HEADS_##NAME,
    TE_HEADS(X)
#undef X
        TE_HEADS_ROLES
} te_heads_role;

/* Operands of the GEMMs of a linear layer's backward, where its forward has a recipe. In high
 * precision that is the dtype of the output: no gradient is cast, and nothing column-wise is made.
 * An operand that arrives quantized and not in high precision is dequantized either way. */
typedef enum te_backward {
    TE_BACKWARD_QUANTIZED = 0,      /* casts, as the recipe has them */
    TE_BACKWARD_HIGH_PRECISION = 1, /* input and weight as the forward was given them */
    TE_BACKWARD_DEQUANTIZED = 2     /* what the forward multiplied: they are saved row-wise, and
                                       dequantized */
} te_backward;

/* te_operand_cast.options */
enum {
    TE_CAST_POWER_2 = 1,        /* power-of-two scales; not of delayed scaling */
    TE_CAST_TILES_2D = 2,       /* tiles as high as they are wide, where a recipe has such */
    TE_CAST_HADAMARD = 4,       /* NVFP4: the column-wise form is transformed: of input and gradient
                                   alike, which a GEMM multiplies */
    TE_CAST_STOCHASTIC = 8,     /* NVFP4, of the gradient: rounded by the node's fourth input; one
                                   of its input that is returned quantized by the fifth */
    TE_CAST_FOUR_OVER_SIX = 16, /* NVFP4: te_cast_request.four_over_six by the sum of errors */
    TE_CAST_SQUARED = 32,       /* besides: by that of their squares */
    TE_CAST_TO_256 = 64,        /* NVFP4: te_operand.scales_to_256 */
    TE_CAST_ROW_SCALED = 128,   /* NVFP4: te_cast_request.row_scaled */
    TE_CAST_UNSIGNED = 256,     /* with HADAMARD: TE_HADAMARD_UNSIGNED */
    TE_CAST_OPTIONS = 511
};

/* How an operand of a linear layer's GEMMs is cast. */
typedef struct te_operand_cast {
    int32_t recipe;     /* te_recipe */
    int32_t dtype;      /* te_dtype of its data; EXTERNAL: of the output */
    float amax_epsilon; /* not of delayed scaling */
    uint32_t options;   /* TE_CAST_* */
    int32_t margin;     /* MXFP8: te_cast_request.margin */
} te_operand_cast;

/* How a linear layer casts what its GEMMs multiply; an attention its heads as the input, and the
 * gradient of its output as that. Each operand has a recipe of its own; GEMMs of operands that no
 * kernel reads together multiply them out. */
typedef struct te_quantization {
    te_operand_cast casts[TE_GEMM_OPERANDS];
    int32_t backward; /* te_backward; not of attention, see TE_NODE_FP8_GRADIENT */
} te_quantization;

typedef enum te_node_kind {
    TE_NODE_LINEAR,      /* y = x W^T + b; inputs x, W, b, and twice i64 [2] {seed, offset} */
    TE_NODE_NORM,        /* inputs x, gamma, beta */
    TE_NODE_ACTIVATION,  /* inputs x */
    TE_NODE_SOFTCAP,     /* inputs x */
    TE_NODE_ATTENTION,   /* TE_ATTENTION_INPUTS */
    TE_NODE_ROPE,        /* inputs x (by slice), angles, offsets; without angles heads are copied.
                            Two in a row that turn the same tokens are one stage */
    TE_NODE_DROPOUT_ADD, /* inputs x, bias, residual, with dropout or drop path i64 [2]
                            {seed, offset}; x and residual in the dtype of the output, or
                            of any other where that is f32 */
    TE_NODE_HEAD_NORM,   /* a norm of each head; inputs x (by slice), gamma, beta */
    TE_NODE_FUNCTION,    /* the caller's, of rows: any number of different inputs, whose rows the
                            output has, or a multiple or part of them; external stages "function"
                            and "function_backward" (node_function.c: their buffers) */
    TE_NODE_CONVERT,     /* inputs x; the output is of another high-precision dtype */
    TE_NODE_COLLECTIVE,  /* inputs x, a matrix of rows; variant te_collective_kind, over `ranks`;
                            external stages as te_collective_step (node_collective.c: their
                            buffers) */
    TE_NODE_KINDS
} te_node_kind;

/* Inputs and numbers of an attention, by the fields of its operator that they fill: X(NAME, name).
 * Queries, keys and values are heads by slices, the bounds of packed sequences fill two numbers. */
#define TE_ATTENTION_INPUTS(X)                                                                     \
    X(QUERY, query)                                                                                \
    X(KEY, key)                                                                                    \
    X(VALUE, value)                                                                                \
    X(MASK, mask)                                                                                  \
    X(BIAS, bias)                                                                                  \
    X(QUERY_LENGTHS, query_lengths)                                                                \
    X(KEY_LENGTHS, key_lengths)                                                                    \
    X(QUERY_OFFSETS, query_offsets)                                                                \
    X(KEY_OFFSETS, key_offsets)                                                                    \
    X(SINK, sink)                                                                                  \
    X(SLOPES, slopes)                                                                              \
    X(BOUNDS,                                                                                      \
      bounds)   /* i32 [max queries, max keys, 0]: no elements, their shape says the sizes */      \
    X(RNG, rng) /* with dropout i64 [2] {seed, offset} */
#define TE_ATTENTION_NUMBERS(X)                                                                    \
    X(SCALE, scale)                                                                                \
    X(DROPOUT, dropout)                                                                            \
    X(WINDOW_LEFT, window_left)                                                                    \
    X(WINDOW_RIGHT, window_right)                                                                  \
    X(SOFTCAP, softcap)

/* What a collective makes of the rows x of each rank, and of the gradients of what it has made. */
typedef enum te_collective_kind {
    TE_COLLECTIVE_GATHER,         /* those of all ranks, rank by rank; REDUCE_SCATTER */
    TE_COLLECTIVE_REDUCE_SCATTER, /* the sum over the ranks, of which each rank has its rows;
                                     GATHER */
    TE_COLLECTIVE_ALL_REDUCE,     /* the sum over the ranks; what it is given */
    TE_COLLECTIVE_COPY,           /* what it is given; ALL_REDUCE */
    TE_COLLECTIVE_KINDS
} te_collective_kind;

enum {                           /* te_node_desc.flags */
       TE_LINEAR_SAVE_INPUT = 1, /* nothing of the input is saved in FP8: it is cast again */
       TE_LINEAR_NO_AMAX = 2,    /* recompute: record no amax (delayed scaling) */
       TE_LINEAR_ALLOW_TF32 = 4,
       TE_LINEAR_FAST_OUTPUT = 8, /* fast accumulation, per GEMM */
       TE_LINEAR_FAST_GRAD_INPUT = 16,
       TE_LINEAR_FAST_GRAD_WEIGHT = 32,
       TE_NODE_ZERO_CENTERED = 64,   /* norms: the factor is 1 + gamma */
       TE_NODE_SEQUENCE_FIRST = 128, /* attention, rope: the leading dims are (sequence, batch) */
       TE_NODE_BOTTOM_RIGHT = 256,   /* attention: see te_attention_problem */
       TE_NODE_INTERLEAVED = 512,    /* rope */
       TE_NODE_DETERMINISTIC = 1024, /* attention: see te_attention_backward_args */
       TE_NODE_PACKED = 2048,        /* attention, rope: rows are tokens of packed sequences, which
                                        begin at the offsets */
       /* delayed scaling: input and weight, or the gradient of the output, are measured before they
        * are cast, so that a slot whose scale is 0 is cast with its own */
       TE_LINEAR_MEASURE_OPERANDS = 4096,
       TE_LINEAR_MEASURE_GRAD = 8192,
       TE_NODE_FP8_GRADIENT = 16384, /* attention with a recipe (delayed): its gradients are made in
                                       FP8, else in high precision from what was saved in FP8 */
       TE_LINEAR_MEASURE_RETURNED = 32768, /* likewise what is returned quantized is measured */
       TE_NODE_MAX_SCORES = 65536,         /* attention: the forward returns the largest score of
                                              each head too (link MAX_SCORES) */
       /* collective that gathers, in either direction: what linear nodes with a recipe read of it
        * is cast by each rank, and gathered as they read it. With one scale for the tensor all
        * ranks have the same one; other scales are gathered. It takes rows in a multiple of what
        * tiles are high. */
       TE_COLLECTIVE_FORMS = 131072,
       /* collective that gathers, or reduce-scatters in the forward: in this direction the GEMM of
        * a linear node beside it, in high precision or with one scale for the tensor, runs in
        * pieces. One that reads what is gathered multiplies the rows of this rank while those of
        * the others arrive. One whose output is summed multiplies the rows of the others first: the
        * rank sends them, and multiplies its own meanwhile, to which what it receives is added. */
       TE_COLLECTIVE_PIECES_FORWARD = 262144,
       TE_COLLECTIVE_PIECES_BACKWARD = 524288,
       TE_LINEAR_WEIGHT_TRANSPOSED = 1048576 /* the weight and its gradient are [in, out] */
};

/* Heads of a matrix of rows: head h of a row begins at element offset + h * stride, or where
 * `together` of them lie side by side at offset + h / together * stride + h % together * channels.
 * All columns of a matrix that is read by slices belong to one of them. Attention also reads values
 * of heads, wherever they lie: all of one, as a slice without offset and gaps says. */
typedef struct te_slice {
    int32_t heads, channels;
    int64_t offset, stride;
    int64_t together; /* rope, norm of heads; 0: 1 */
} te_slice;

/* Of lists that are shorter than what the kind reads the rest is not there, or 0. */
typedef struct te_node_desc {
    char name[TE_NAME_BYTES]; /* prefix of its stages and buffers, "" or with a "_" behind */
    int32_t kind;             /* te_node_kind */
    int32_t variant;          /* te_norm_kind (also of heads), te_activation_kind */
    uint32_t flags;
    int32_t output;
    const int32_t *inputs; /* values; -1: not there */
    /* norms: eps; activation: limit, alpha, linear_offset; softcap: cap; attention:
     * TE_ATTENTION_NUMBERS; dropout + add: dropout, drop path */
    const double *numbers;
    const te_slice *slices;  /* attention, rope, norm of heads: of the first inputs */
    const int32_t *external; /* steps that the caller runs, ascending; linear: te_linear_stage */
    /* Those of them that it runs in two halves, ascending; of a function, whose steps are all the
     * caller's, te_function_step, of a collective te_collective_step. The first half is a stage
     * where the step is; the second one, a stage with "_finish" behind its name and the same
     * buffers, stands before the first stage that reads what the step writes or writes what it
     * reads, else at the end of the plan. Until then no other buffer has the memory of what the
     * step reads and writes. */
    const int32_t *halves;
    int32_t input_count, number_count, slice_count, external_count, halves_count;
    te_quantization quantization; /* linear, attention */
    int32_t owner;                /* the same: module of the call whose slots it takes */
    int32_t slots[2]; /* of the node in the owner's slots of the forward and backward chunk. A
                         linear layer has 3 and 2: input, weight, output; gradients of output and
                         of input. An attention has 9 and 6: 2, queries, keys and values; 3, output;
                         8, weights  (recorded alone); 0, their gradients; 3, that of the output; 5,
                         that of the  scores */
    int32_t ranks;    /* collective: how many there are; of others 1 */
    int32_t rank;     /* collective in pieces: which one this is; of others 0 */
} te_node_desc;

/* Stages of a linear node, in order of execution: X(ENUM, name). A plan has those it needs. */
#define TE_LINEAR_STAGES(X)                                                                        \
    X(PRODUCE_INPUT, produce_input) /* norm or activation, where no cast to FP8 is fused */        \
    X(AMAX_INPUT, amax_input)                                                                      \
    X(REDUCE_AMAX_INPUT, reduce_amax_input) /* external only */                                    \
    X(QUANTIZE_INPUT, quantize_input)                                                              \
    X(AMAX_WEIGHT, amax_weight)                                                                    \
    X(REDUCE_AMAX_WEIGHT, reduce_amax_weight) /* external only */                                  \
    X(QUANTIZE_WEIGHT, quantize_weight)                                                            \
    X(CAST_BIAS, cast_bias)                                                                        \
    X(GEMM_OUTPUT, gemm_output)                                                                    \
    X(AMAX_OUTPUT, amax_output)                                                                    \
    X(REDUCE_AMAX_OUTPUT, reduce_amax_output)         /* external only */                          \
    X(QUANTIZE_OUTPUT, quantize_output)               /* where it is returned so */                \
    X(DEQUANTIZE_GRAD_OUTPUT, dequantize_grad_output) /* of one that arrives so, for a bias */     \
    X(PRODUCE_GRAD_OUTPUT, produce_grad_output)       /* gradient of the activation, likewise */   \
    X(AMAX_GRAD_OUTPUT, amax_grad_output)                                                          \
    X(REDUCE_AMAX_GRAD_OUTPUT, reduce_amax_grad_output) /* external only */                        \
    X(QUANTIZE_GRAD_OUTPUT, quantize_grad_output)                                                  \
    X(TRANSPOSE_GRAD_OUTPUT, transpose_grad_output) /* of one that comes row-wise */               \
    X(REQUANTIZE_WEIGHT, requantize_weight)                                                        \
    X(DEQUANTIZE_WEIGHT, dequantize_weight) /* for GEMMs in high precision, as the next one */     \
    X(CAST_WEIGHT, cast_weight)             /* to the dtype of the output */                       \
    X(GEMM_GRAD_INPUT, gemm_grad_input)                                                            \
    X(AMAX_GRAD_INPUT, amax_grad_input)                                                            \
    X(REDUCE_AMAX_GRAD_INPUT, reduce_amax_grad_input) /* external only */                          \
    X(QUANTIZE_GRAD_INPUT, quantize_grad_input)       /* where it is returned so */                \
    X(REQUANTIZE_INPUT, requantize_input)                                                          \
    X(TRANSPOSE_INPUT, transpose_input) /* of one that is gathered row-wise */                     \
    X(DEQUANTIZE_INPUT, dequantize_input)                                                          \
    X(CAST_INPUT, cast_input)                                                                      \
    X(GEMM_GRAD_WEIGHT, gemm_grad_weight)

typedef enum te_linear_stage {
#define X(NAME, name) TE_LINEAR_STAGE_##NAME,
    TE_LINEAR_STAGES(X)
#undef X
        TE_LINEAR_STAGE_COUNT
} te_linear_stage;

typedef enum te_function_step {
    TE_FUNCTION_FORWARD,
    TE_FUNCTION_BACKWARD,
    TE_FUNCTION_STEPS
} te_function_step;

/* Of a collective; in a backward FORWARD gathers once more. */
typedef enum te_collective_step {
    TE_COLLECTIVE_FORWARD,
    TE_COLLECTIVE_BACKWARD,
    TE_COLLECTIVE_EXCHANGE, /* of a sum in pieces: ranks send each other's rows */
    TE_COLLECTIVE_STEPS
} te_collective_step;

/* te_graph_desc.flags: save inputs, scales and statistics; the backward repeats the rest. */
enum { TE_GRAPH_RECOMPUTE = 1 };

#define TE_GRAPH_NODES 1024 /* at most: the builder follows chains of them */
#define TE_GRAPH_VALUES 8192

typedef struct te_graph_desc {
    size_t size;
    const te_value_desc *values; /* inputs and parameters in the order of a call's arguments */
    const te_node_desc *nodes;   /* each after those whose outputs it reads */
    int32_t value_count, node_count;
    uint32_t flags;
} te_graph_desc;

#endif
