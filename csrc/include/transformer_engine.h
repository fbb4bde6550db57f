/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine.h - public C API: FP8 operators, and through transformer_engine_plans.h the
 * operations composed of them (plans).
 *
 * C11, usable from C++, no Python. The library owns no device memory: every tensor, scratch buffer
 * and scaling state belongs to the caller and is borrowed for the call. Streams are the device's
 * own (cudaStream_t) passed as void *, ignored on the CPU. Matrices are row-major; strides count
 * elements. Every function returns TE_OK or a negative kind; te_last_error() has the text, with the
 * offending values.
 */
#ifndef TRANSFORMER_ENGINE_H
#define TRANSFORMER_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TE_API __attribute__((visibility("default")))
#else
#define TE_API
#endif

#define TE_VERSION "2.6.0"

/* ---- status ------------------------------------------------------------------------------- */

typedef enum te_status {
    TE_OK = 0,
    TE_ERROR_INVALID = -1,     /* a value, shape or size that can not be (ValueError) */
    TE_ERROR_TYPE = -2,        /* a dtype or kind of object that can not be (TypeError) */
    TE_ERROR_UNSUPPORTED = -3, /* legal, but no backend has it (NotImplementedError) */
    TE_ERROR_MEMORY = -4,      /* host memory ran out (MemoryError) */
    TE_ERROR_STATE = -5,       /* wrong moment: closed context, capture, ... (RuntimeError) */
    TE_ERROR_DEVICE = -6,      /* a driver or vendor library call failed (RuntimeError) */
    TE_ERROR_CALLBACK = -7,    /* a plug-in failed and has kept its own error */
    TE_ERROR_INTERRUPTED = -8  /* the caller's te_interrupt stopped the call */
} te_status;

/* Text of the last failure of this thread: "file:line: message with values". Never NULL; valid
 * until the next failure in this thread. */
TE_API const char *te_last_error(void);

/* ---- dtypes ------------------------------------------------------------------------------- */

/* X(ENUM, name, bits, DLPack code, cudaDataType or -1, largest finite value or 0) */
#define TE_DTYPES(X)                                                                               \
    X(F32, f32, 32, 2, 0, 3.402823466e+38F)                                                        \
    X(F16, f16, 16, 2, 2, 65504.0F)                                                                \
    X(BF16, bf16, 16, 4, 14, 3.389531389e+38F)                                                     \
    X(E4M3, e4m3, 8, 10, 28, 448.0F)                                                               \
    X(E5M2, e5m2, 8, 12, 29, 57344.0F)                                                             \
    X(U8, u8, 8, 1, -1, 0.0F)                                                                      \
    X(I32, i32, 32, 0, -1, 0.0F)                                                                   \
    X(I64, i64, 64, 0, -1, 0.0F)

typedef enum te_dtype {
#define X(NAME, name, bits, dlpack, cuda, max) TE_DTYPE_##NAME,
    TE_DTYPES(X)
#undef X
        TE_DTYPE_COUNT
} te_dtype;

TE_API const char *te_dtype_name(te_dtype dtype);      /* "bf16"; "invalid" for a bad value */
TE_API size_t te_dtype_bytes(te_dtype dtype);          /* bytes of one element; 0 for a bad value */
TE_API float te_dtype_max(te_dtype dtype);             /* largest finite value; 0 for integers */
TE_API int te_dtype_is_fp8(te_dtype dtype);            /* e4m3 or e5m2 */
TE_API int te_dtype_is_high_precision(te_dtype dtype); /* f32, f16 or bf16 */

/* ---- devices and contexts ----------------------------------------------------------------- */

typedef enum te_device_type {
    TE_DEVICE_CPU = 0,
    TE_DEVICE_CUDA = 1,
    TE_DEVICE_COUNT = 2
} te_device_type;

typedef struct te_device {
    te_device_type type;
    int32_t index; /* 0 on the CPU */
} te_device;

/* Host objects of one device: vendor handles, loaded kernels, plan and algorithm caches.
 * Thread-safe. */
typedef struct te_context te_context;

/* Creates a context; *out is NULL on failure. UNSUPPORTED where the library was built without the
 * device, DEVICE where the device or its libraries can not be opened. */
TE_API te_status te_context_create(te_device device, te_context **out);
/* Releases everything the context holds; NULL is legal. No call may be in flight. */
TE_API void te_context_destroy(te_context *context);
TE_API te_device te_context_device(const te_context *context);
/* STATE for NULL and for a context of a process of which this one is a forked child: it has handles
 * and locks that do not outlive a fork. Calls on such a context fail so; destroying it is legal. */
TE_API te_status te_context_check(const te_context *context);
/* CUDA: while enabled, the first run of each new GEMM problem times the candidates of cuBLASLt on
 * the operands of that call and keeps the fastest; the host waits for it, and a call under stream
 * capture or one that accumulates is not timed. cache_file, where not NULL, keeps winners across
 * processes. Problems met before keep what they have. Off by default; UNSUPPORTED on other devices.
 */
TE_API te_status te_context_tune_gemm(te_context *context, int32_t enabled, const char *cache_file);

/* Where the CUDA backend gets its device code, for the process and from the next context on:
 * force_source compiles the embedded source with NVRTC even where an embedded binary would load;
 * cache_dir keeps what was compiled (NULL or "": nothing is kept). INVALID for a path that is too
 * long, UNSUPPORTED where the library was built without CUDA. */
TE_API te_status te_cuda_configure(int force_source, const char *cache_dir);

/* ---- interrupts --------------------------------------------------------------------------- */

/* Asked now and then (about ten times a second) while an operator computes on the CPU: by the
 * thread that called it, with no lock held. Nonzero: the call stops soon and returns INTERRUPTED;
 * what it was writing to is undefined then. check NULL: nobody is asked. */
typedef struct te_interrupt {
    int (*check)(void *self);
    void *self;
} te_interrupt;

/* Sets it for the calling thread, and returns what it was. */
TE_API te_interrupt te_set_interrupt(te_interrupt hook);

/* ---- tensors ------------------------------------------------------------------------------ */

#define TE_MAX_DIMS 8

typedef struct te_tensor {
    void *data; /* NULL: absent (an optional argument), or no elements */
    te_dtype dtype;
    te_device device;
    int32_t ndim;
    int64_t shape[TE_MAX_DIMS];
    int64_t strides[TE_MAX_DIMS]; /* elements, not bytes */
} te_tensor;

/* One list of scaling modes: X(ENUM, name, elements of data per scale along a row, along a column).
 * 0 elements: one scale serves the whole tensor. */
#define TE_SCALING_MODES(X)                                                                        \
    X(NONE, none, 0, 0)     /* high precision */                                                   \
    X(TENSOR, tensor, 0, 0) /* one fp32 scale; delayed and current scaling */

typedef enum te_scaling_mode {
#define X(NAME, name, row, column) TE_SCALING_##NAME,
    TE_SCALING_MODES(X)
#undef X
        TE_SCALING_COUNT
} te_scaling_mode;

/* Elements of a scale pair. */
enum { TE_PAIR_INVERSE = 0, TE_PAIR_SCALE = 1 };

/* An FP8 tensor in up to two usages. Logical shape [rows, columns]. Padding (columns up to
 * rowwise.shape[1], rows up to columnwise.shape[1]) is written as zero by quantize. */
typedef struct te_quantized {
    te_scaling_mode mode;
    te_tensor rowwise;    /* [rows, >= columns] FP8; data NULL: usage not wanted */
    te_tensor columnwise; /* [columns, >= rows] FP8, physically transposed; data NULL: not wanted */
    float *scale_pair;    /* device float[2]: {1/scale, scale} this data was made with. The inverse
                             comes first, for GEMM libraries want its address aligned to 16 bytes */
    const float *scale;   /* device float: the scale to quantize with; NULL: from partial amaxes */
    float *amax;          /* device float: max-accumulates max|x|; NULL: not recorded */
} te_quantized;

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
    X(SOFTMAX, softmax)                                                                            \
    X(SOFTMAX_BACKWARD, softmax_backward)                                                          \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(DROPOUT_ADD, dropout_add)                                                                    \
    X(DROPOUT_BACKWARD, dropout_backward)                                                          \
    X(ROPE, rope)

typedef enum te_op {
#define X(NAME, name) TE_OP_##NAME,
    TE_OPS(X)
#undef X
        TE_OP_COUNT
} te_op;

TE_API const char *te_op_name(te_op op);

/* Every args struct begins with its size, set by the caller to sizeof: later versions append
 * fields. */

#define TE_AMAX_PARTIALS 1024

/* Casts [rows, columns] of f32, f16 or bf16 to FP8 per tensor: q = saturate(x * scale), in one pass
 * over the input for everything asked: row-wise data, column-wise (transposed) data, max|x|, column
 * sums. scale is read from output.scale (delayed scaling) or made from `partials` (current scaling:
 * amax = max(partials), raised to amax_epsilon; 1 if that is 0, Inf or NaN; else max/amax, Inf ->
 * FLT_MAX, rounded down to a power of two if asked). With mode NONE nothing is cast: amax and
 * column sums only. NaN stays NaN, Inf saturates, amax ignores NaN. scale_pair, where given,
 * receives {1/scale, scale} (also when rows or columns are 0). A non-zero *noop leaves every output
 * untouched. */
typedef struct te_quantize_args {
    size_t size;
    te_tensor input; /* [rows, columns] f32, f16, bf16; unit column stride, any row stride */
    te_quantized output;
    te_tensor bias_grad; /* [columns] f32, f16, bf16: column sums in fp32; data NULL: not wanted */
    const float *noop;   /* device float or NULL */
    const float *partials; /* device float[TE_AMAX_PARTIALS] from te_amax, or NULL */
    float amax_epsilon;
    int32_t power_2_scale;
    void *workspace; /* te_op_workspace bytes; NULL if 0 */
    size_t workspace_size;
} te_quantize_args;

/* x = q * scale_inv, from the row-wise data, or from the column-wise data where row-wise is absent.
 */
typedef struct te_dequantize_args {
    size_t size;
    te_quantized input; /* scale_pair[TE_PAIR_INVERSE] is used */
    te_tensor output;   /* [rows, columns] f32, f16, bf16; unit column stride */
} te_dequantize_args;

/* Partial maxima of |x|, NaN ignored; their maximum is the amax. All TE_AMAX_PARTIALS entries are
 * written (unused ones with 0), so nothing has to be cleared before. */
typedef struct te_amax_args {
    size_t size;
    te_tensor input; /* [rows, columns] f32, f16, bf16; unit column stride */
    float *partials; /* device float[TE_AMAX_PARTIALS] */
} te_amax_args;

/* output[c, r] = input[r, c] of one-byte elements (FP8, u8); columns of output beyond the input's
 * rows are zeroed. */
typedef struct te_transpose_args {
    size_t size;
    te_tensor input;  /* [rows, columns] */
    te_tensor output; /* [columns, >= rows] */
} te_transpose_args;

typedef struct te_gemm_operand {
    te_tensor data;         /* matrix, unit column stride, any row stride */
    const float *scale_inv; /* device float; NULL for high precision */
    int32_t transposed;     /* the operand is the transpose of data */
} te_gemm_operand;

typedef enum te_epilogue { TE_EPILOGUE_NONE = 0, TE_EPILOGUE_GELU = 1 } te_epilogue; /* tanh GELU */

enum {
    TE_GEMM_ACCUMULATE = 1,        /* d += ... (d f32 or bf16, no bias or epilogue) */
    TE_GEMM_FAST_ACCUMULATION = 2, /* FP8: less precise accumulation that is faster on Hopper */
    TE_GEMM_ALLOW_TF32 = 4         /* f32 operands may be rounded to TF32 */
};

/* d[m, n] = epilogue(a[m, k] b[k, n] + bias), accumulated in fp32. Operands: both f32, f16 or bf16
 * (the same), or each e4m3 or e5m2 (not both e5m2) with their inverse scales and padded to k % 16
 * == 0 in the layout a row-major, b transposed. m == 0 or n == 0 does nothing; k == 0 gives d =
 * bias (or leaves d when accumulating). bias_grad, where given, receives the sums of a over k (bias
 * gradient of the weight-gradient GEMM, whose a is the transposed output gradient); high precision
 * only. */
typedef struct te_gemm_args {
    size_t size;
    te_gemm_operand a, b;
    te_tensor d; /* [m, n] f32, f16, bf16, or FP8 with d_scale; unit column stride */
    te_tensor
        bias; /* [n]; d's dtype in high precision; with FP8 operands f16 if d is f16, else bf16 */
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

/* One update of a chunk of delayed-scaling slots, in place (see core/scaling_math.h). */
typedef struct te_scaling_update_args {
    size_t size;
    te_tensor scale; /* [slots] f32 */
    te_tensor
        history;   /* [length, slots] f32; row 0 accumulates, the newest finished step is last */
    float fp8_max; /* largest FP8 value times 2^-margin */
    te_amax_algo algo;
} te_scaling_update_args;

typedef struct te_fill_args {
    size_t size;
    te_tensor output; /* [rows, columns] any dtype, unit column stride */
    double value;     /* rounded to the dtype (FP8 saturates) */
} te_fill_args;

/* Converts and copies between strided matrices. input smaller than output: the rest is zeroed;
 * output smaller: the surplus of input is not read. Same dtype: bits are kept. */
typedef struct te_cast_args {
    size_t size;
    te_tensor input; /* [rows, columns] f32, f16, bf16 (any dtype when output has the same) */
    te_tensor output;
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

/* output = normalized(input) * gamma + beta per row, in fp32, and cast in the same call: `output`
 * in high precision, `quantized` to FP8 from the fp32 value, each where wanted. `quantized` is as
 * in te_quantize_args: scale from quantized.scale, or made from `partials` (which then belong to an
 * earlier call that wrote `amax_partials`), scale_pair written, padding zeroed, amax recorded.
 * amax_partials receives the partial maxima of |fp32 value| as te_amax does (all entries). NaN and
 * Inf propagate as in the formula. 0 columns are INVALID. */
typedef struct te_norm_args {
    size_t size;
    te_norm_kind kind;
    uint32_t flags;         /* TE_NORM_ZERO_CENTERED, TE_NORM_STATISTICS_GIVEN */
    te_tensor input;        /* [rows, columns] f32, f16, bf16; unit column stride, any row stride */
    te_tensor gamma;        /* [columns] f32, f16, bf16; data NULL: 1 */
    te_tensor beta;         /* [columns] in the dtype of gamma; data NULL: 0; LAYERNORM only */
    te_tensor mean;         /* [rows] f32; LAYERNORM only; data NULL: not wanted */
    te_tensor rsigma;       /* [rows] f32; data NULL: not wanted */
    te_tensor output;       /* [rows, columns] f32, f16, bf16; data NULL: not wanted */
    te_quantized quantized; /* mode NONE: not wanted */
    const float *partials;  /* device float[TE_AMAX_PARTIALS] to make the scale from, or NULL */
    float *amax_partials;   /* device float[TE_AMAX_PARTIALS] to write, or NULL */
    float amax_epsilon;     /* with partials, as in te_quantize_args */
    int32_t power_2_scale;
    float eps;
    void *workspace;
    size_t workspace_size;
} te_norm_args;

/* Gradients of te_norm. With dz = grad_output + grad_add, w = gamma (or 1 + gamma, or 1) and xhat
 * the normalized input: gamma_grad = column sums of dz * xhat, beta_grad = column sums of dz, and
 * grad_input = rsigma * (dz w - c1 - xhat * c2), c1 = row mean of dz w (LAYERNORM, else 0), c2 =
 * row mean of dz w xhat (row sum for L2). fp32, in a fixed order: bitwise repeatable. */
typedef struct te_norm_backward_args {
    size_t size;
    te_norm_kind kind;
    uint32_t flags;        /* TE_NORM_ZERO_CENTERED */
    te_tensor grad_output; /* [rows, columns] f32, f16, bf16 */
    te_tensor grad_add;    /* [rows, columns] in the dtype of grad_output; data NULL: none */
    te_tensor input;       /* [rows, columns] f32, f16, bf16 */
    te_tensor gamma;       /* [columns]; data NULL: 1 */
    te_tensor mean;        /* [rows] f32; LAYERNORM only */
    te_tensor rsigma;      /* [rows] f32 */
    te_tensor grad_input;  /* [rows, columns] f32, f16, bf16; data NULL: not wanted */
    te_tensor gamma_grad;  /* [columns] f32, f16, bf16; data NULL: not wanted */
    te_tensor beta_grad;   /* [columns]; LAYERNORM only; data NULL: not wanted */
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

/* output = activation(input) in fp32, to high precision and (or) FP8; the casts as in te_norm. */
typedef struct te_activation_args {
    size_t size;
    te_activation_kind kind;
    te_activation_params params;
    te_tensor input;        /* [rows, columns] (gated: [rows, 2 columns]) f32, f16, bf16 */
    te_tensor output;       /* [rows, columns] f32, f16, bf16; data NULL: not wanted */
    te_quantized quantized; /* mode NONE: not wanted */
    const float *partials;  /* device float[TE_AMAX_PARTIALS] to make the scale from, or NULL */
    float *amax_partials;   /* device float[TE_AMAX_PARTIALS] to write, or NULL */
    float amax_epsilon;
    int32_t power_2_scale;
    void *workspace;
    size_t workspace_size;
} te_activation_args;

/* grad_input = grad_output * activation'(input) in fp32, to high precision and (or) FP8, with the
 * column sums of the fp32 values as the bias gradient of the linear layer before. The derivative of
 * relu and srelu at 0 is 0; of a clamped value it is 0 outside of the limit and 1 at it.
 * grad_input may be the memory of grad_output where the activation is not gated. */
typedef struct te_activation_backward_args {
    size_t size;
    te_activation_kind kind;
    te_activation_params params;
    te_tensor grad_output;  /* [rows, columns] f32, f16, bf16 */
    te_tensor input;        /* [rows, columns] (gated: [rows, 2 columns]) f32, f16, bf16 */
    te_tensor grad_input;   /* shape of input; f32, f16, bf16; data NULL: not wanted */
    te_quantized quantized; /* of grad_input; mode NONE: not wanted */
    te_tensor bias_grad;    /* [columns of input] f32, f16, bf16; data NULL: not wanted */
    const float *partials;  /* device float[TE_AMAX_PARTIALS] to make the scale from, or NULL */
    float *amax_partials;   /* device float[TE_AMAX_PARTIALS] to write, or NULL */
    float amax_epsilon;
    int32_t power_2_scale;
    void *workspace;
    size_t workspace_size;
} te_activation_backward_args;

/* Random decisions are Philox4x32-10 (core/philox.h): `rng` is a device int64[2] {seed, offset};
 * element i of a tensor takes word i % 4 of counter offset + i / 4, u = (word >> 8) * 2^-24, and is
 * kept if u >= p; what is kept is multiplied by 1 / (1 - p) (0 everywhere for p = 1). The same bits
 * on every backend. */

/* Softmax over the keys of scale * input + bias, in fp32. Query i may attend keys
 * i + diagonal - window_left .. i + diagonal + window_right (a negative window: no limit on that
 * side; causal: right = 0) that `mask` does not forbid; a score of -Inf forbids too. Forbidden keys
 * get 0, so a row with no key is 0; NaN or +Inf among the other scores makes all of these NaN. What
 * dropout drops is 0. Element order for dropout: dense [batch, heads, queries, keys]. */
typedef struct te_softmax_args {
    size_t size;
    te_tensor input;  /* [batch, heads, queries, keys] f32, f16, bf16; unit last stride */
    te_tensor mask;   /* u8, each dim 1 or the input's; non-zero: masked out; data NULL: none */
    te_tensor bias;   /* f32, f16, bf16, each dim 1 or the input's; data NULL: none */
    te_tensor output; /* as input: with dropout */
    te_tensor probabilities; /* as input: without dropout; data NULL: not wanted */
    const int64_t *rng;      /* NULL where dropout is 0 */
    float scale, dropout;
    int64_t window_left, window_right, diagonal;
} te_softmax_args;

/* grad_input = scale * p * (dp - sum over keys of dp * p), dp = grad_output through the dropout. */
typedef struct te_softmax_backward_args {
    size_t size;
    te_tensor grad_output;   /* [batch, heads, queries, keys] f32, f16, bf16; unit last stride */
    te_tensor probabilities; /* as grad_output: without dropout */
    te_tensor grad_input;    /* as grad_output; may be the same memory */
    const int64_t *rng;
    float scale, dropout;
} te_softmax_backward_args;

/* Which query attends which key, and how much: what te_attention and its gradient read. Query head
 * h goes with key and value head h / (heads / kv_heads). Scores are scale * query . key + bias;
 * mask, window, NaN, Inf and dropout are as in te_softmax, over [batch, heads, queries, keys]. Of a
 * sequence with a length, tokens from there on are not read: such a query attends nothing, such a
 * key is attended by none. A forbidden key adds nothing, whatever its key and value hold. */
typedef struct te_attention_problem {
    te_tensor query; /* [batch, queries, heads, d_k] f32, f16, bf16; unit last stride, any others */
    te_tensor key;   /* [batch, keys, kv_heads, d_k]; dtype of query; kv_heads divides heads */
    te_tensor value; /* [batch, keys, kv_heads, d_v]; dtype of query */
    te_tensor mask;  /* u8, each dim 1 or the scores'; non-zero: masked out; data NULL: none */
    te_tensor bias;  /* f32, f16, bf16, each dim 1 or the scores'; data NULL: none */
    te_tensor query_lengths, key_lengths; /* [batch] i32, 0 to queries or keys; data NULL: all */
    const int64_t *rng;                   /* NULL where dropout is 0 */
    float scale, dropout;
    int64_t window_left, window_right, diagonal;
    int32_t bottom_right; /* the diagonal is further right by (keys - queries) of each sequence */
} te_attention_problem;

/* output = dropout(softmax(scores)) value, block by block in fp32: no matrix of scores is kept. The
 * statistic of a query is the logarithm of the sum of its exponentiated scores: -Inf where it
 * attends no key (its output is 0), NaN where its output is NaN. CPU alone. */
typedef struct te_attention_args {
    size_t size;
    te_attention_problem problem;
    te_tensor output; /* [batch, queries, heads, d_v]; dtype of query; any strides but the last */
    te_tensor statistics; /* [batch, heads, queries] f32, dense; data NULL: not wanted */
    void *workspace;
    size_t workspace_size;
} te_attention_args;

/* Gradients of te_attention, from its output and statistics. Sums are fp32 in a fixed order:
 * bitwise repeatable. Results may be views into one packed buffer. CPU alone. */
typedef struct te_attention_backward_args {
    size_t size;
    te_attention_problem problem;               /* as in the forward */
    te_tensor grad_output;                      /* as output */
    te_tensor output;                           /* of the forward */
    te_tensor statistics;                       /* of the forward */
    te_tensor grad_query, grad_key, grad_value; /* shape and dtype of each; any strides but the
                                                   last; data NULL: not wanted */
    te_tensor grad_bias; /* shape of bias: summed over its dims of 1; f32, f16, bf16; data NULL: not
                            wanted */
    void *workspace;
    size_t workspace_size;
} te_attention_backward_args;

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
} te_dropout_add_args;

/* Gradient of te_dropout_add with respect to input and bias; that of residual is grad_output. */
typedef struct te_dropout_backward_args {
    size_t size;
    te_tensor grad_output; /* [rows, columns] f32, f16, bf16 */
    te_tensor grad_input;  /* [rows, columns] in the dtype of grad_output; data NULL: not wanted */
    te_tensor bias_grad;   /* [columns] f32, f16, bf16: column sums; data NULL: not wanted */
    const int64_t *rng;
    float dropout, drop_path;
    int64_t samples;
    void *workspace;
    size_t workspace_size;
} te_dropout_backward_args;

/* Rotary position embedding: output = t cos + rot(t) sin over the first rotary channels, the others
 * are copied. rot(t) = (-second half, first half), or (-odd, even) pairs if interleaved. cos and
 * sin of freqs[position] in fp32. The position is the index in the sequence plus the batch entry's
 * start. backward: the transposed map, for gradients. Tokens of no sequence are copied. A position
 * that freqs lack is INVALID on the CPU; on a GPU no host sees it, and it gives NaN. */
typedef struct te_rope_args {
    size_t size;
    te_tensor input;           /* [batch, sequence, heads, dim], or packed [tokens, heads, dim] with
                                  cu_seqlens; f32, f16, bf16; unit last stride, any others */
    te_tensor output;          /* as input, with strides of its own; may be the same memory */
    te_tensor freqs;           /* [positions, rotary] f32 angles; rotary even, at most dim; dense */
    te_tensor cu_seqlens;      /* [batch + 1] i32: first token of each sequence; data NULL: none */
    te_tensor start_positions; /* [batch] i32; data NULL: 0 */
    int32_t interleaved;
    int32_t backward;
} te_rope_args;

/* Device bytes of workspace that one call needs (pointers in args are not read). */
TE_API te_status te_op_workspace(te_context *context, te_op op, const void *args, size_t *bytes);
/* Runs an operator by number; args points to its args struct. */
TE_API te_status te_op_run(te_context *context, te_op op, const void *args, void *stream);

#define X(NAME, name)                                                                              \
    TE_API te_status te_##name(te_context *context, const te_##name##_args *args, void *stream);
TE_OPS(X)
#undef X

/* ---- backends ----------------------------------------------------------------------------- */

/* UNSUPPORTED hands the call to the candidate with the next lower priority; nothing may be written
 * then. */
typedef te_status (*te_op_function)(void *self, te_context *context, const void *args,
                                    void *stream);
/* TE_OK or UNSUPPORTED with a text that says which value is not supported. */
typedef te_status (*te_op_supports)(void *self, te_context *context, const void *args);
typedef te_status (*te_op_workspace_function)(void *self, te_context *context, const void *args,
                                              size_t *bytes);

typedef struct te_op_slot {
    te_op_function function; /* NULL: the backend lacks this operator */
    te_op_supports supports; /* NULL: supports whatever the argument checks let through */
    te_op_workspace_function workspace; /* NULL: needs none */
    void *self;
} te_op_slot;

typedef struct te_backend {
    size_t size;
    const char *name; /* unique; kept by the caller until release */
    te_device_type device;
    int32_t priority; /* the highest priority that supports a call runs it; built-in ones have 0 */
    /* Called once, with no lock held, when no call can come any more: by te_backend_unregister, or
     * by the thread of the last call in flight. NULL: nothing to release. */
    void (*release)(void *self);
    void *self; /* of release; slots have their own */
    te_op_slot slots[TE_OP_COUNT];
} te_backend;

/* Adds or removes a backend; the struct is copied. A call in flight keeps the backends it began
 * with; plans hold none and run with those in force. STATE where calls in flight hold too many. */
TE_API te_status te_backend_register(const te_backend *backend);
TE_API te_status te_backend_unregister(const char *name);

/* ---- counters ----------------------------------------------------------------------------- */

typedef struct te_counter {
    const char *name; /* "gemm.cpu.e4m3.e4m3", "op.cuda.quantize", "fallback.gemm_output_padded" */
    int64_t value;
} te_counter;

/* Copies at most capacity counters with a value other than 0; *count is how many there are. */
TE_API te_status te_counters_read(te_counter *out, size_t capacity, size_t *count);
TE_API void te_counters_reset(void);

#ifdef __cplusplus
}
#endif

#include "transformer_engine_plans.h" /* needs all of the above */

#endif
