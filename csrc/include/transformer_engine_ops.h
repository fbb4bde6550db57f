/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_ops.h - public C API: the operators, what each computes and its args struct.
 *
 * Part of transformer_engine.h, which has the types of everything here.
 */
#ifndef TRANSFORMER_ENGINE_OPS_H
#define TRANSFORMER_ENGINE_OPS_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

/* ---- operators ---------------------------------------------------------------------------- */

/* The one list of operators: X(ENUM, name). te_<name>(context, &te_<name>_args, stream) runs it. */
#define TE_OPS(X)                                                                                  \
    X(QUANTIZE, quantize)                                                                          \
    X(DEQUANTIZE, dequantize)                                                                      \
    X(AMAX, amax)                                                                                  \
    X(TRANSPOSE, transpose)                                                                        \
    X(GEMM, gemm)                                                                                  \
    X(SCALING_UPDATE, scaling_update)                                                              \
    X(FILL, fill)                                                                                  \
    X(CAST, cast)                                                                                  \
    X(NORM, norm)                                                                                  \
    X(NORM_BACKWARD, norm_backward)                                                                \
    X(ACTIVATION, activation)                                                                      \
    X(ACTIVATION_BACKWARD, activation_backward)                                                    \
    X(SOFTCAP, softcap)                                                                            \
    X(SOFTMAX, softmax)                                                                            \
    X(SOFTMAX_BACKWARD, softmax_backward)                                                          \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(DROPOUT_ADD, dropout_add)                                                                    \
    X(DROPOUT_BACKWARD, dropout_backward)                                                          \
    X(ROPE, rope)                                                                                  \
    X(CACHE_APPEND, cache_append)                                                                  \
    X(CACHE_GATHER, cache_gather)                                                                  \
    X(ATTENTION_MERGE, attention_merge)

typedef enum te_op {
#define X(NAME, name) TE_OP_##NAME,
    TE_OPS(X)
#undef X
        TE_OP_COUNT
} te_op;

TE_API const char *te_op_name(te_op op);

/* Every args struct begins with its size, set by the caller to sizeof: later versions append
 * fields. A smaller size is that of an older caller: what it lacks is as te_op_initial has it. A
 * larger one is that of a newer caller, which may use nothing of what this library does not know.
 *
 * What an operator writes may be the memory of another field only where it says so, and then with
 * the same dtype, shape and strides; else te_op_run returns INVALID where dense memory overlaps. */

/* Casts a matrix, and sums its columns. With mode NONE nothing is cast: amax and sums only. Scales,
 * where wanted, are written also when rows or columns are 0. A non-zero *noop leaves every output
 * untouched. */
typedef struct te_quantize_args {
    size_t size;
    te_tensor input;      /* [rows, columns] f32, f16, bf16; unit column stride, any row stride */
    te_cast_request cast; /* but for `wide` and `amax_partials` */
    te_tensor bias_grad;  /* [columns] f32, f16, bf16: column sums in fp32; data NULL: not wanted */
    const float *noop;    /* device float or NULL */
    void *workspace;      /* te_op_workspace bytes; NULL if 0 */
    size_t workspace_size;
} te_quantize_args;

/* x = q * inverse scale, from the row-wise data, or where there is none from the column-wise. */
typedef struct te_dequantize_args {
    size_t size;
    te_operand input; /* but for `wide` */
    te_tensor output; /* [rows, columns] f32, f16, bf16; unit column stride */
    void *workspace;
    size_t workspace_size;
} te_dequantize_args;

/* Partial maxima of |x|, NaN ignored; their maximum is the amax. All TE_AMAX_PARTIALS entries are
 * written (unused ones with 0), so nothing has to be cleared before. */
typedef struct te_amax_args {
    size_t size;
    te_tensor input;  /* [rows, columns] f32, f16, bf16; unit column stride */
    float *partials;  /* device float[TE_AMAX_PARTIALS] */
    int32_t hadamard; /* te_hadamard: of the columns as te_cast_request.hadamard transforms them */
    void *workspace;
    size_t workspace_size;
} te_amax_args;

/* output[c, r] = input[r, c] of one-byte elements (FP8, u8); columns of output beyond the input's
 * rows are zeroed. */
typedef struct te_transpose_args {
    size_t size;
    te_tensor input;  /* [rows, columns] */
    te_tensor output; /* [columns, >= rows] */
    void *workspace;
    size_t workspace_size;
} te_transpose_args;

typedef enum te_epilogue { TE_EPILOGUE_NONE = 0, TE_EPILOGUE_GELU = 1 } te_epilogue; /* tanh GELU */

enum {
    TE_GEMM_ACCUMULATE = 1,        /* d += ... (no bias or epilogue) */
    TE_GEMM_FAST_ACCUMULATION = 2, /* FP8: less precise accumulation that is faster on Hopper */
    TE_GEMM_ALLOW_TF32 = 4,        /* f32 operands may be rounded to TF32 */
    TE_GEMM_MULTIPLIED_OUT = 8     /* the caller has multiplied an operand out: counted so */
};

/* d[m, n] = epilogue(a[m, k] b[k, n] + bias), accumulated in fp32; with a_transposed the matrix of
 * the operand `a` is [k, m], with b_transposed that of `b` [n, k]. Operands: both in high precision
 * (mode NONE: `wide`), of one dtype; or each e4m3 or e5m2 (not both e5m2), padded to k % 16 == 0.
 * Of quantized data that form is read whose rows run along k: of a `row`, or `column` if it is
 * transposed; of b `column`, or `row` if it is transposed. MXFP8 and NVFP4 are multiplied out to
 * high precision first (the latter but for the amaxes, whose part multiplies the product). A d that
 * a device's library does not make of the operands is made in fp32 and cast. m == 0 or n == 0 does
 * nothing; k == 0 gives d = bias (or leaves d when accumulating). bias_grad receives the sums of a
 * over k: the bias gradient, in the GEMM of a weight gradient, whose a is the transposed output
 * gradient; high precision only. */
typedef struct te_gemm_args {
    size_t size;
    te_operand a, b;
    int32_t a_transposed, b_transposed;
    te_tensor d;    /* [m, n] f32, f16, bf16, or FP8 with d_scale; unit column stride */
    te_tensor bias; /* [n]; d's dtype in high precision; with FP8 operands f16 if d is f16, else
                       bf16 */
    te_tensor bias_grad; /* [m] in the dtype of the operands; data NULL: not wanted */
    te_tensor aux; /* [m, n] receives the value before the activation; data NULL: not wanted */
    const float *d_scale; /* device float: FP8 output = saturate(value * *d_scale) */
    float *d_amax;        /* device float: max-accumulates max|value| of an FP8 output, or NULL */
    te_epilogue epilogue;
    uint32_t flags; /* TE_GEMM_* */
    void *workspace;
    size_t workspace_size;
} te_gemm_args;

typedef enum te_amax_algo { TE_AMAX_MAX = 0, TE_AMAX_MOST_RECENT = 1 } te_amax_algo;

/* One update of a chunk of delayed-scaling slots, in place (see core/scaling_math.h). A slot whose
 * row 0 is 0 stays as it is. */
typedef struct te_scaling_update_args {
    size_t size;
    te_tensor scale;   /* [slots] f32 */
    te_tensor history; /* [length, slots] f32; row 0 accumulates, the newest finished one is last */
    float fp8_max;     /* largest FP8 value times 2^-margin */
    te_amax_algo algo;
    void *workspace;
    size_t workspace_size;
} te_scaling_update_args;

typedef struct te_fill_args {
    size_t size;
    te_tensor output; /* [rows, columns] any dtype, unit column stride */
    double value;     /* rounded to the dtype (FP8 saturates) */
    void *workspace;
    size_t workspace_size;
} te_fill_args;

/* Converts and copies between strided matrices. input smaller than output: the rest is zeroed;
 * output smaller: the surplus of input is not read. Same dtype: bits are kept. */
typedef struct te_cast_args {
    size_t size;
    te_tensor input; /* [rows, columns] f32, f16, bf16 (any dtype when output has the same) */
    te_tensor output;
    void *workspace;
    size_t workspace_size;
} te_cast_args;

/* ---- operators of a Transformer layer ------------------------------------------------------ */

typedef enum te_norm_kind {
    TE_NORM_LAYERNORM = 0, /* (x - mean) * rsigma, rsigma = rsqrt(var + eps), var biased */
    TE_NORM_RMSNORM = 1,   /* x * rsigma, rsigma = rsqrt(mean of squares + eps) */
    TE_NORM_L2 = 2         /* x * rsigma, rsigma = rsqrt(sum of squares + eps) */
} te_norm_kind;

enum {
    TE_NORM_ZERO_CENTERED = 1,   /* the factor is 1 + gamma */
    TE_NORM_STATISTICS_GIVEN = 2 /* mean and rsigma are read instead of computed and written */
};

#define TE_NORM_HEAD_COLUMNS 256

/* normalized(input) * gamma + beta per row, in fp32, cast as asked. NaN and Inf propagate as in the
 * formula. 0 columns are INVALID. Rows that no matrix has (heads of a projection) are neither cast
 * to FP8 nor measured, and on CUDA have at most TE_NORM_HEAD_COLUMNS. */
typedef struct te_norm_args {
    size_t size;
    te_norm_kind kind;
    uint32_t flags;   /* TE_NORM_ZERO_CENTERED, TE_NORM_STATISTICS_GIVEN */
    te_tensor input;  /* [.., columns] f32, f16, bf16; unit column stride, any others: rows are all
                         dims before, in their order */
    te_tensor gamma;  /* [columns] f32, f16, bf16; data NULL: 1 */
    te_tensor beta;   /* [columns] in the dtype of gamma; data NULL: 0; LAYERNORM only */
    te_tensor mean;   /* [rows] f32; LAYERNORM only; data NULL: not wanted */
    te_tensor rsigma; /* [rows] f32; data NULL: not wanted */
    te_cast_request cast;
    float eps;
    void *workspace;
    size_t workspace_size;
} te_norm_args;

/* Gradients of te_norm. With dz = grad_output + grad_add, w = gamma (or 1 + gamma, or 1) and xhat
 * the normalized input: gamma_grad = column sums of dz * xhat, beta_grad = column sums of dz, and
 * grad_input = rsigma * (dz w - c1 - xhat * c2), c1 = row mean of dz w (LAYERNORM, else 0), c2 =
 * row mean of dz w xhat (row sum for L2). fp32, in a fixed order: bitwise repeatable.
 * grad_residual, what another reader of the input has as its gradient, is added to grad_input as
 * rounded. */
typedef struct te_norm_backward_args {
    size_t size;
    te_norm_kind kind;
    uint32_t flags;          /* TE_NORM_ZERO_CENTERED */
    te_tensor grad_output;   /* [rows, columns] f32, f16, bf16 */
    te_tensor grad_add;      /* [rows, columns] in the dtype of grad_output; data NULL: none */
    te_tensor input;         /* [.., columns] f32, f16, bf16, as of te_norm */
    te_tensor gamma;         /* [columns]; data NULL: 1 */
    te_tensor mean;          /* [rows] f32; LAYERNORM only */
    te_tensor rsigma;        /* [rows] f32 */
    te_tensor grad_input;    /* as input, with strides of its own; f32, f16, bf16; data NULL: not
                                wanted */
    te_tensor grad_residual; /* as grad_input where that is a matrix, may be its memory; data
                                NULL: none */
    te_tensor gamma_grad;    /* [columns] f32, f16, bf16; data NULL: not wanted */
    te_tensor beta_grad;     /* [columns]; LAYERNORM only; data NULL: not wanted */
    void *workspace;
    size_t workspace_size;
} te_norm_backward_args;

/* X(ENUM, name, gated). A gated activation takes [rows, 2 columns]: the first half, a, is
 * activated, the second, b, multiplies it. With s the logistic function:
 * - gelu: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); qgelu: x s(1.702 x)
 * - relu: max(x, 0); srelu: max(x, 0)^2
 * - silu: x s(x); glu: s(a) b
 * - clamped_swiglu: a' s(alpha a') (b' + linear_offset), a' = min(a, limit), b' = clamp(b, +-limit)
 */
#define TE_ACTIVATIONS(X)                                                                          \
    X(GELU, gelu, 0)                                                                               \
    X(GEGLU, geglu, 1)                                                                             \
    X(QGELU, qgelu, 0)                                                                             \
    X(QGEGLU, qgeglu, 1)                                                                           \
    X(RELU, relu, 0)                                                                               \
    X(REGLU, reglu, 1)                                                                             \
    X(SRELU, srelu, 0)                                                                             \
    X(SREGLU, sreglu, 1)                                                                           \
    X(SILU, silu, 0)                                                                               \
    X(SWIGLU, swiglu, 1)                                                                           \
    X(GLU, glu, 1)                                                                                 \
    X(CLAMPED_SWIGLU, clamped_swiglu, 1)

typedef enum te_activation_kind {
#define X(NAME, name, gated) TE_ACTIVATION_##NAME,
    TE_ACTIVATIONS(X)
#undef X
        TE_ACTIVATION_COUNT
} te_activation_kind;

TE_API const char *te_activation_name(te_activation_kind kind); /* "invalid" for a bad value */
TE_API int te_activation_is_gated(te_activation_kind kind);

/* Numbers of clamped_swiglu; the other kinds ignore them. */
typedef struct te_activation_params {
    float limit, alpha, linear_offset;
} te_activation_params;

/* activation(input) in fp32, cast as asked. */
typedef struct te_activation_args {
    size_t size;
    te_activation_kind kind;
    te_activation_params params;
    te_tensor input; /* [rows, columns] (gated: [rows, 2 columns]) f32, f16, bf16 */
    te_cast_request cast;
    void *workspace;
    size_t workspace_size;
} te_activation_args;

/* grad_output * activation'(input) in fp32, cast as asked, with the column sums of the fp32 values
 * as the bias gradient of the linear layer before. The derivative of relu and srelu at 0 is 0; of a
 * clamped value it is 0 outside of the limit and 1 at it. `wide` may be the memory of grad_output
 * where the activation is not gated. */
typedef struct te_activation_backward_args {
    size_t size;
    te_activation_kind kind;
    te_activation_params params;
    te_tensor grad_output; /* [rows, columns] f32, f16, bf16 */
    te_tensor input;       /* [rows, columns] (gated: [rows, 2 columns]) f32, f16, bf16 */
    te_cast_request cast;  /* shape of input */
    te_tensor bias_grad;   /* [columns of input] f32, f16, bf16; data NULL: not wanted */
    void *workspace;
    size_t workspace_size;
} te_activation_backward_args;

/* cap tanh(input / cap), or with grad_output the gradient of input: grad_output (1 - tanh(input /
 * cap)^2). In fp32, cast as asked; NaN stays NaN. `wide` may be the memory of one of the two. */
typedef struct te_softcap_args {
    size_t size;
    te_tensor input;       /* [rows, columns] f32, f16, bf16 */
    te_tensor grad_output; /* [rows, columns] in the dtype of input; data NULL: forward */
    te_cast_request cast;
    float cap; /* positive */
    void *workspace;
    size_t workspace_size;
} te_softcap_args;

/* Random decisions are Philox4x32-10 (core/philox.h): `rng` is a device int64[2] {seed, offset};
 * element i of a tensor takes word i % 4 of counter offset + i / 4, u = (word >> 8) * 2^-24, and is
 * kept if u >= p; what is kept is multiplied by 1 / (1 - p) (0 everywhere for p = 1). The same bits
 * on every backend. */

/* Softmax over the keys of scale * input + bias, in fp32. Query i may attend keys
 * i + diagonal - window_left .. i + diagonal + window_right (a negative window: no limit on that
 * side; causal: right = 0) that `mask` does not forbid; a score of -Inf forbids too. Forbidden keys
 * get 0, so a row with no key is 0; NaN or +Inf among the other scores makes all of these NaN. What
 * dropout drops is 0. Element order for dropout: dense [batch, heads, queries, keys]. A sink is a
 * score of each row that belongs to no key: its exponential joins the sum that the others are
 * divided by. */
typedef struct te_softmax_args {
    size_t size;
    te_tensor input;  /* [batch, heads, queries, keys] f32, f16, bf16; unit last stride */
    te_tensor mask;   /* u8, each dim 1 or the input's; non-zero: masked out; data NULL: none */
    te_tensor bias;   /* f32, f16, bf16, each dim 1 or the input's; data NULL: none */
    te_tensor sink;   /* [heads] f32; data NULL: none */
    te_tensor output; /* as input: with dropout */
    te_tensor probabilities; /* as input: without dropout; data NULL: not wanted */
    te_tensor log_sum;  /* [batch * heads * queries] f32: the logarithm of the sum that a row is
                           divided by, +Inf where it has no term; data NULL: not wanted */
    const int64_t *rng; /* NULL where dropout is 0 */
    float scale, dropout;
    int64_t window_left, window_right, diagonal;
    void *workspace;
    size_t workspace_size;
} te_softmax_args;

/* grad_input = scale * p * (dp - sum over keys of dp * p), dp = grad_output through the dropout.
 * The same sum, times the sink's own probability exp(sink - log_sum), is less the gradient of a
 * row's sink: of the rounded gradients of a row no sum is accurate, for that of all is 0. */
typedef struct te_softmax_backward_args {
    size_t size;
    te_tensor grad_output;   /* [batch, heads, queries, keys] f32, f16, bf16; unit last stride */
    te_tensor probabilities; /* as grad_output: without dropout */
    te_tensor grad_input;    /* as grad_output; may be the same memory */
    te_tensor sink;          /* [heads] f32, of the forward; these three: all, or data NULL */
    te_tensor log_sum;       /* [batch * heads * queries] f32, of the forward */
    te_tensor grad_sinks;    /* as log_sum: what each row adds to the gradient of its head's sink */
    const int64_t *rng;
    float scale, dropout;
    void *workspace;
    size_t workspace_size;
} te_softmax_backward_args;

/* Which query attends which key, and how much: what te_attention and its gradient read. Query head
 * h goes with key and value head h / (heads / kv_heads). Scores are scale * query . key + bias,
 * with a softcap softcap * tanh(scale * query . key / softcap) + bias; mask, window, NaN, Inf,
 * dropout and sink are as in te_softmax, over [batch, heads, queries, keys]; slopes add -slope *
 * |key - diagonal's key| to the scores. Of a sequence with a length, tokens from there on are not
 * read: such a query attends nothing, such a key is attended by none. A forbidden key adds nothing,
 * whatever its key and value hold.
 *
 * Packed sequences lie one behind the other: query is [1, tokens, heads, d_k], key and value are
 * [1, key tokens, kv_heads, ...], and sequence b has the tokens from offsets[b] on, as many as its
 * length says; where there are no lengths, up to offsets[b + 1]. Scores are those of [batch, heads,
 * max_queries, max_keys]. What is written of tokens of no sequence is 0 (of statistics -Inf). There
 * is neither mask nor bias.
 *
 * A sequence, packed or not, whose length is below 0 or exceeds a bound, the next one's offset or
 * the tensor is INVALID on the CPU; on a GPU no host sees it, and all that is its is NaN. */
typedef struct te_attention_problem {
    te_tensor query;  /* [batch, queries, heads, d_k] f32, f16, bf16, e4m3; unit last stride, any
                         others */
    te_tensor key;    /* [batch, keys, kv_heads, d_k]; dtype of query; kv_heads divides heads */
    te_tensor value;  /* [batch, keys, kv_heads, d_v]; dtype of query */
    te_tensor mask;   /* u8, each dim 1 or the scores'; non-zero: masked out; data NULL: none */
    te_tensor bias;   /* f32, f16, bf16, each dim 1 or the scores'; data NULL: none */
    te_tensor sink;   /* [heads] f32; data NULL: none */
    te_tensor slopes; /* [heads], or [1 or batch, heads], f32; data NULL: none */
    te_tensor query_lengths, key_lengths; /* [batch] i32, 0 to queries or keys; data NULL: all */
    te_tensor query_offsets, key_offsets; /* [batch + 1] i32: the token with which each packed
                                             sequence begins; both, or data NULL: not packed */
    const int64_t *rng;                   /* NULL where dropout is 0 */
    float scale, dropout;
    int64_t window_left, window_right, diagonal;
    int32_t bottom_right; /* the diagonal is further right by (keys - queries) of each sequence */
    int64_t max_queries, max_keys; /* bounds of the lengths of packed sequences; else not read */
    te_tensor query_scales, key_scales, value_scales; /* f32 [TE_TENSOR_SCALES], where e4m3 */
} te_attention_problem;

/* In FP8 (queries, keys and values in e4m3, each with a scale) both products of a forward multiply
 * FP8: the weights of all keys, those of softmax with their dropout, are cast to e4m3 with the
 * scale that their bound asks for, 448 (1 - dropout), and the output is cast to e4m3 with
 * *output_scale, or where there is none with the scale of the values times (1 - dropout), which no
 * output exceeds as it is a mean of values. All sums are fp32, statistics are those of the uncast
 * weights. There is no mask, bias, sink or largest score then.
 *
 * A gradient in FP8 multiplies FP8 likewise: the weights, made again, as in the forward, the
 * gradient of the scores (times the scale of the scores) in the dtype of grad_output with
 * *grad_scores_scale; gradients of query, key and value get that dtype with *grads_scale. It has no
 * dropout. A gradient in high precision reads the operands of the forward in that: it is a call
 * without scales. */

/* output = dropout(softmax(scores)) value, block by block in fp32: no matrix of scores is kept. The
 * statistic of a query is the logarithm of the sum of its exponentiated scores, with that of a
 * sink: where it attends no key (its output is 0) -Inf, or the sink, and NaN where its output is
 * NaN. On CUDA cuDNN's kernels run it: f16 and bf16 on compute capability 9.0, heads of multiples
 * of 8 channels up to 256 that begin at 16 bytes and share no memory, statistics at 16 bytes, no
 * largest scores, no softcap in FP8, and slopes that all sequences share, from the diagonal that
 * begins in the top left corner; the random numbers of its dropout are cuDNN's. */
typedef struct te_attention_args {
    size_t size;
    te_attention_problem problem;
    te_tensor output; /* [batch, queries, heads, d_v]; dtype of query; any strides but the last */
    te_tensor statistics; /* [batch, heads, queries] f32, packed: [1, tokens, heads]; dense; data
                             NULL: not wanted */
    te_tensor top; /* [heads] f32: the largest score of a head, without a sink; -Inf where there is
                      none; data NULL: not wanted */
    te_tensor output_scales;   /* of FP8: f32 [TE_TENSOR_SCALES] */
    const float *output_scale; /* device float, or NULL */
    float *output_amax;        /* device floats that max-accumulate the largest magnitude: of the */
    float *weights_amax;       /* output, of the weights; NULL: not recorded */
    void *workspace;
    size_t workspace_size;
    float softcap; /* bounds the scaled scores before bias and mask; 0: they are as they are */
} te_attention_args;

/* Gradients of te_attention, from its output and statistics. Sums are fp32. Results may be views
 * into one packed buffer. On CUDA as te_attention, and a gradient of the bias in the dtype of the
 * queries, dense, of one that has all queries and keys, without a softcap. */
typedef struct te_attention_backward_args {
    size_t size;
    te_attention_problem problem;               /* as in the forward */
    te_tensor grad_output;                      /* as output; of FP8 e4m3 or e5m2 */
    te_tensor output;                           /* of the forward */
    te_tensor statistics;                       /* of the forward */
    te_tensor grad_query, grad_key, grad_value; /* shape of each, dtype of grad_output; any strides
                                                   but the last; data NULL: not wanted */
    te_tensor grad_bias; /* shape of bias: summed over its dims of 1; f32, f16, bf16; data NULL: not
                            wanted */
    te_tensor grad_sink; /* [heads] f32; data NULL: not wanted */
    int32_t deterministic; /* sums in a fixed order; the CPU's always are. On CUDA without it those
                              of grad_query are not, and with it (or grad_bias) the workspace has a
                              matrix of scores; in FP8 it means nothing there */
    te_tensor output_scales;                      /* of FP8: as the forward wrote them */
    te_tensor grad_output_scales;                 /* f32 [TE_TENSOR_SCALES] */
    te_tensor grads_scales;                       /* the same, written: of the gradients */
    const float *grad_scores_scale, *grads_scale; /* device floats */
    float *grad_scores_amax, *grads_amax; /* as output_amax; all three gradients share one */
    void *workspace;
    size_t workspace_size;
    float softcap; /* as in the forward */
} te_attention_backward_args;

/* Joins what two attentions of the same queries to different keys have given: with the weights
 * e^(statistic - merged statistic), where that of both is the logarithm of the sum of their
 * exponentiated scores, output = total's + step's. A part of weight 0 adds nothing, whatever it
 * holds; where both statistics are -Inf the output is 0. Without statistics output = total + step,
 * as gradients of several attentions add up. All is computed in fp32 and rounded once. */
typedef struct te_attention_merge_args {
    size_t size;
    te_tensor total;  /* [batch, queries, heads, channels] f32, f16, bf16; unit last stride, any
                         others */
    te_tensor step;   /* likewise, in any of these dtypes */
    te_tensor output; /* likewise; may be total or step */
    te_tensor total_statistics; /* [batch, queries, heads, 1] f32, any strides; all three, or data
                                   NULL: a sum */
    te_tensor step_statistics;
    te_tensor statistics; /* of the output; may be total_statistics */
    void *workspace;
    size_t workspace_size;
} te_attention_merge_args;

/* output = residual + drop_path(dropout(input + bias)). drop_path keeps or drops rows / samples
 * rows at a time; its decisions are elements 0 .. samples - 1 of a stream that begins at offset +
 * ceil(rows * columns / 4). */
typedef struct te_dropout_add_args {
    size_t size;
    te_tensor input;    /* [rows, columns] f32, f16, bf16 */
    te_tensor bias;     /* [columns] f32, f16, bf16; data NULL: none */
    te_tensor residual; /* [rows, columns] in the dtype of input; data NULL: none */
    te_tensor output;   /* [rows, columns] in the dtype of input; may be input's memory */
    const int64_t *rng; /* NULL where both probabilities are 0 */
    float dropout, drop_path;
    int64_t samples; /* divides rows */
    void *workspace;
    size_t workspace_size;
} te_dropout_add_args;

/* Gradient of te_dropout_add with respect to input and bias; that of residual is grad_output. */
typedef struct te_dropout_backward_args {
    size_t size;
    te_tensor grad_output; /* [rows, columns] f32, f16, bf16 */
    te_tensor grad_input;  /* [rows, columns] in the dtype of grad_output, may be its memory; data
                              NULL: not wanted */
    te_tensor bias_grad;   /* [columns] f32, f16, bf16: column sums; data NULL: not wanted */
    const int64_t *rng;
    float dropout, drop_path;
    int64_t samples;
    void *workspace;
    size_t workspace_size;
} te_dropout_backward_args;

/* Heads that a call of te_rope turns, or copies. */
typedef struct te_rope_part {
    te_tensor input;  /* [batch, sequence, heads, dim], or packed [tokens, heads, dim] with
                         cu_seqlens; f32, f16, bf16; unit last stride, any others */
    te_tensor output; /* as input, with strides of its own; may be the same memory */
    te_tensor freqs;  /* [positions, rotary] f32 angles; rotary even, at most the channels of a
                         head; dense; data NULL: all is copied */
} te_rope_part;

#define TE_ROPE_PARTS 3

/* Rotary position embedding: output = t cos + rot(t) sin over the first rotary channels, the others
 * are copied. rot(t) = (-second half, first half), or (-odd, even) pairs if interleaved. cos and
 * sin of freqs[position] in fp32. backward: the transposed map, for gradients.
 *
 * The position is the index in the sequence plus the start of that. With cp_size ranks a sequence
 * is 2 cp_size chunks, of which cp_rank has number cp_rank and its counterpart from the end: the
 * tensors hold these two, one behind the other, and cu_seqlens counts tokens of all ranks. Tokens
 * of no sequence are copied. A position that freqs lack, or lengths that do not divide, are INVALID
 * on the CPU; on a GPU no host sees them, and such a position gives NaN.
 *
 * All parts have the same tokens and one dtype: queries, keys and values of one projection, say. */
typedef struct te_rope_args {
    size_t size;
    te_rope_part parts[TE_ROPE_PARTS]; /* without an input: not there; the first one is */
    te_tensor cu_seqlens;      /* [batch + 1] i32: first token of each sequence; data NULL: none */
    te_tensor start_positions; /* [batch] i32; data NULL: 0 */
    int64_t channels; /* of a head: each line of the last dim is several heads side by side, in
                         parts that turn; 0: it is one head */
    int32_t cp_size, cp_rank; /* 0, 0: one rank */
    int32_t interleaved;
    int32_t backward;
    void *workspace;
    size_t workspace_size;
} te_rope_args;

/* Keys and values that sequences keep, in pages of so many tokens: token p of sequence i is token
 * p % page_size of page page_table[i][p / page_size]. Without a table page i is all of sequence i.
 * Pages that a table does not have (the CPU says so) are passed over. */
typedef struct te_cache {
    te_tensor key;        /* [pages, page_size, heads, d_k] f32, f16, bf16; unit last stride */
    te_tensor value;      /* [pages, page_size, heads, d_v]; dtype of key */
    te_tensor page_table; /* [batch, pages of a sequence] i32; data NULL: none */
} te_cache;

/* Puts the keys and values of new tokens, bits as they are, behind those that sequences have: new
 * token j of sequence i becomes its token starts[i] + j. What would be beyond the end of its pages
 * is refused on the CPU; on CUDA, where only the kernel knows, the last token that there is room
 * for becomes NaN. */
typedef struct te_cache_append_args {
    size_t size;
    te_cache cache;       /* written */
    te_tensor key;        /* [batch, tokens, heads, d_k], or packed [tokens, heads, d_k] with
                             cu_seqlens; dtype of the cache; unit last stride, any others */
    te_tensor value;      /* likewise, of d_v */
    te_tensor starts;     /* [batch] i32: how many tokens each sequence had before */
    te_tensor counts;     /* [batch] i32: how many of its tokens are new ones; data NULL: all */
    te_tensor cu_seqlens; /* [batch + 1] i32: first token of each sequence; data NULL: none */
    void *workspace;
    size_t workspace_size;
} te_cache_append_args;

/* The keys and values of the first lengths[i] tokens of each sequence, one after the other; zeros
 * behind them. */
typedef struct te_cache_gather_args {
    size_t size;
    te_cache cache;
    te_tensor lengths; /* [batch] i32, 0 to tokens */
    te_tensor key;   /* [batch, tokens, heads, d_k]; dtype of the cache; any strides but the last */
    te_tensor value; /* [batch, tokens, heads, d_v] */
    void *workspace;
    size_t workspace_size;
} te_cache_gather_args;

#endif
