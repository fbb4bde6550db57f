/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine.h - public C API: FP8 operators, and through transformer_engine_graphs.h and
 * transformer_engine_plans.h the operations composed of them.
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

#define TE_VERSION "2.20.2"

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
/* Sets it, as a function of a backend that fails has to, and returns the kind. The file is named
 * from "csrc/" on where that is part of its path. */
TE_API te_status te_fail(te_status kind, const char *file, int line, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 4, 5)))
#endif
    ;
/* return TE_FAIL(TE_ERROR_INVALID, "rows = %lld must not be negative", rows); */
#define TE_FAIL(kind, ...) te_fail((kind), __FILE__, __LINE__, __VA_ARGS__)

/* ---- dtypes ------------------------------------------------------------------------------- */

/* X(ENUM, name, bits, DLPack code, cudaDataType or -1, largest finite value or 0). Elements of less
 * than a byte lie packed, the first in the low bits; shapes and strides count elements. */
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

TE_API const char *te_dtype_name(te_dtype dtype); /* "bf16"; "invalid" for a bad value */
TE_API int32_t te_dtype_bits(te_dtype dtype);     /* of one element; 0 for a bad value */
TE_API size_t te_dtype_bytes(te_dtype dtype);     /* of one element; 0 if it has no whole one */
TE_API size_t te_dtype_size(te_dtype dtype, int64_t elements); /* bytes of dense elements */
TE_API float te_dtype_max(te_dtype dtype);             /* largest finite value; 0 for integers */
TE_API int te_dtype_is_fp8(te_dtype dtype);            /* e4m3 or e5m2 */
TE_API int te_dtype_is_high_precision(te_dtype dtype); /* f32, f16 or bf16 */

/* ---- devices and contexts ----------------------------------------------------------------- */

typedef enum te_device_type {
    TE_DEVICE_ANY = -1, /* of a backend of a te_selection alone: it is asked on every device */
    TE_DEVICE_CPU = 0,
    TE_DEVICE_CUDA = 1,
    TE_DEVICE_OTHER = 2, /* the first of those that te_device_type_add makes */
    TE_DEVICE_COUNT = 8  /* as many as there may be */
} te_device_type;

/* Adds a type of device for which this library has no kernels: backends that are registered for it
 * run its operators. `name` is the one that torch has for it ("npu"): at most 15 letters, digits
 * and _. `dlpack` is its DLDeviceType. A type that is there already stays as it is. INVALID for
 * another name, for a name that has another number, and for a number that has another name; STATE
 * where no more types fit. *type is -1 on failure. */
TE_API te_status te_device_type_add(const char *name, int32_t dlpack, te_device_type *type);
TE_API const char *te_device_type_name(te_device_type type); /* "cuda"; "invalid": there is none */
/* DLDeviceType of a type, 0: there is none; and the type of one, -1: there is none. CUDA's host
 * memory is the CPU's. */
TE_API int32_t te_device_type_dlpack(te_device_type type);
TE_API int32_t te_device_type_of_dlpack(int32_t dlpack);

typedef struct te_device {
    te_device_type type;
    int32_t index; /* 0 on the CPU; below TE_DEVICE_INDICES */
} te_device;

#define TE_DEVICE_INDICES 64

/* The device on which the calling thread works: on CUDA that of its current context, DEVICE where
 * it has none. UNSUPPORTED for types of devices that this library has no driver for. */
TE_API te_status te_device_current(te_device_type type, te_device *device);

/* Host objects of one device: vendor handles, loaded kernels, plan and algorithm caches.
 * Thread-safe. */
typedef struct te_context te_context;

/* Creates a context; *out is NULL on failure. UNSUPPORTED where the library was built without the
 * device, DEVICE where the device or its libraries can not be opened. */
TE_API te_status te_context_create(te_device device, te_context **out);
/* Releases everything the context holds; NULL is legal. No call may be in flight, and graphs that
 * were captured with its calls can not be replayed any more; captures in progress stay valid. */
TE_API void te_context_destroy(te_context *context);
TE_API te_device te_context_device(const te_context *context);
/* STATE for NULL and for a context of a process of which this one is a forked child: it has handles
 * and locks that do not outlive a fork. Calls on such a context fail so; destroying it is legal. */
TE_API te_status te_context_check(const te_context *context);
/* CUDA: while enabled, the first run of each new GEMM problem times the candidates of cuBLASLt on
 * the operands of that call and keeps the fastest; the host waits for it, and a call under stream
 * capture or one that accumulates is not timed. cache_file, where not NULL, keeps winners across
 * processes, if it and its folder are as cuda_configure wants a folder. Problems met before keep
 * what they have. Off by default; UNSUPPORTED on other devices.
 */
TE_API te_status te_context_tune_gemm(te_context *context, int32_t enabled, const char *cache_file);

/* Where the CUDA backend gets its device code, for the process and from the next context on:
 * force_source compiles the embedded source with NVRTC even where an embedded binary would load;
 * cache_dir keeps what was compiled (NULL or "": nothing is kept). INVALID for a path that is too
 * long; STATE where the folder belongs to neither this user nor root, or others may write to it:
 * then nothing is kept, and the rest holds. UNSUPPORTED where the library was built without CUDA.
 */
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

#define TE_MAX_DIMS 4

typedef struct te_tensor {
    void *data; /* NULL: absent (an optional argument), or no elements */
    te_dtype dtype;
    te_device device;
    int32_t ndim;
    int64_t shape[TE_MAX_DIMS];
    int64_t strides[TE_MAX_DIMS]; /* elements, not bytes */
} te_tensor;

/* One list of scaling modes: X(ENUM, name, elements of data per scale along a row, rows that share
 * it), of a quantized form as it lies: rows of `column` are columns of the matrix. 0: all.
 *
 * Scales are fp32 and dense; of data [rows, columns], its padding included, they are
 * - TENSOR: [TE_TENSOR_SCALES]; delayed and current scaling
 * - ROW: [TE_ROW_SCALES, rows]
 * - BLOCK_1D: inverse scales [ceil(columns / 128), roundup(rows, 4)], transposed
 * - BLOCK_2D: inverse scales [ceil(rows / 128), roundup(ceil(columns / 128), 4)]
 * as Hopper's GEMMs read them. Those of nothing but padding are 0.
 *
 * MXFP8 and NVFP4 (core/microscale.h) have their scales as bytes, u8:
 * - MXFP8: E8M0, [roundup(rows, 128), roundup(ceil(columns / 32), 4)]. Its `column` is not
 *   transposed: [rows, >= columns], scales [roundup(ceil(rows / 32), 4), roundup(columns, 128)].
 * - NVFP4: E4M3, [roundup(rows, 128), roundup(ceil(columns / 16), 4)], and the amax of the tensor.
 *   Data is u8, two E2M1 numbers to a byte, the first in the low half, rows padded to 16 numbers.
 * No GEMM reads these two as they are: te_gemm multiplies them out first, exactly, and counts
 * "emulated.mxfp8" or "emulated.nvfp4". */
#define TE_SCALING_MODES(X)                                                                        \
    X(NONE, none, 0, 0)     /* high precision */                                                   \
    X(TENSOR, tensor, 0, 0) /* the scale is given, or made of partial maxima */                    \
    X(ROW, row, 0, 1)       /* from here on a cast measures what its scales are for */             \
    X(BLOCK_1D, block_1d, 128, 1)                                                                  \
    X(BLOCK_2D, block_2d, 128, 128)                                                                \
    X(MXFP8, mxfp8, 32, 1)                                                                         \
    X(NVFP4, nvfp4, 16, 1) /* made of partial maxima besides */

typedef enum te_scaling_mode {
#define X(NAME, name, along, across) TE_SCALING_##NAME,
    TE_SCALING_MODES(X)
#undef X
        TE_SCALING_COUNT
} te_scaling_mode;

/* Elements of a tensor's scales under TE_SCALING_TENSOR: 1 / scale, to multiply data with, and the
 * scale that the data was made with, for whoever casts it again. The inverse comes first, for GEMM
 * libraries want its address aligned to 16 bytes. */
enum { TE_SCALES_INVERSE = 0, TE_SCALES_SCALE = 1, TE_TENSOR_SCALES = 2 };
/* Rows of the scales under TE_SCALING_ROW: the inverse scale of each row, and the largest magnitude
 * that it was made of. */
enum { TE_ROW_SCALES_INVERSE = 0, TE_ROW_SCALES_AMAX = 1, TE_ROW_SCALES = 2 };

/* One matrix [rows, columns] in up to three forms; a tensor whose data is NULL: not there, or not
 * wanted. `mode` says what the scales of the quantized forms mean; with NONE there are none.
 * Padding (columns up to row.shape[1], rows up to column.shape[1]) is zero. */
typedef struct te_operand {
    te_scaling_mode mode;
    int32_t scales_to_256;   /* NVFP4: scales go up to 256 instead of 448, so that 4 has one */
    te_tensor wide;          /* [rows, columns] f32, f16, bf16 */
    te_tensor row;           /* [rows, >= columns] e4m3, e5m2; NVFP4: u8 */
    te_tensor row_scales;    /* of `row`: f32 or u8, see TE_SCALING_MODES */
    te_tensor column;        /* [columns, >= rows], but for MXFP8: physically transposed */
    te_tensor column_scales; /* of `column`; TENSOR: the same memory as row_scales, or other */
    te_tensor row_amax, column_amax; /* NVFP4: f32 [1], the amax that `row`, `column` was made with;
                                        `row_amax` may be one of each row, [rows] */
} te_operand;

#define TE_AMAX_PARTIALS 1024

/* The outputs that an operator makes of the fp32 values that it reads or computes: any of high
 * precision, FP8 in two usages, and their largest magnitude, in one pass.
 *
 * TENSOR: q = saturate(x * scale), and the scales where they are wanted. scale is *scale (delayed
 * scaling), or made from `partials` (current scaling): amax = max(partials), raised to
 * amax_epsilon; 1 if that is 0, Inf or NaN; else max / amax, Inf -> FLT_MAX, rounded down to a
 * power of two if asked. Of both, *scale counts unless it is 0: a slot that has recorded nothing.
 * NaN stays NaN, Inf saturates, amax ignores NaN.
 *
 * ROW, BLOCK_1D, BLOCK_2D: the same with a scale for each row, or each tile of 1 x 128 or 128 x 128
 * elements, of each form that is wanted, made of the largest magnitude there; an Inf scale becomes
 * the largest number of the dtype that the values have (fp32 where they are computed). Neither
 * scale nor partials are given, and neither amax nor amax_partials is written.
 *
 * MXFP8, NVFP4: what a scale is, core/microscale.h says. For NVFP4 partials are given, of values
 * that an operator computes those of a call before; what follows `power_2_scale` is theirs. */
typedef enum te_hadamard {
    TE_HADAMARD_NONE = 0,
    TE_HADAMARD_SIGNED = 1,  /* with the signs of the recipe */
    TE_HADAMARD_UNSIGNED = 2 /* H16 / 4 alone: nothing is negated first */
} te_hadamard;

typedef enum te_four_over_six {
    TE_FOUR_OVER_SIX_NONE = 0,
    TE_FOUR_OVER_SIX_MAE = 1, /* by the sum of errors */
    TE_FOUR_OVER_SIX_MSE = 2  /* by the sum of their squares */
} te_four_over_six;

typedef struct te_cast_request {
    te_operand result;
    const float *scale;    /* device float */
    float *amax;           /* device float: max-accumulates max|x|; NULL: not recorded */
    const float *partials; /* device float[TE_AMAX_PARTIALS] of an earlier amax_partials */
    float *amax_partials;  /* device float[TE_AMAX_PARTIALS] to write, as te_amax does; or NULL */
    float amax_epsilon;
    int32_t power_2_scale;
    int32_t square; /* MXFP8, NVFP4: squares of 32 x 32 or 16 x 16 values share a scale, repeated */
    /* NVFP4: groups of 16 values of the column-wise form are transformed before they are cast:
     * negated by TE_HADAMARD_SIGNS, times the Hadamard matrix H16 / 4, all in bf16. A product of
     * two operands so made is that of the operands. Not with `square`. */
    int32_t hadamard;             /* te_hadamard */
    const float *column_partials; /* NVFP4: partials of the column-wise values, where they are
                                     others: te_amax with `hadamard`; NULL: the same */
    /* NVFP4: rounds stochastically, by device int64[2] {seed, offset}; element (r, c) of `row`
     * takes word c % 4 of counter offset + (r * roundup(columns, 16) + c) / 4, those of `column`
     * come after; NULL: to nearest even. */
    const int64_t *rng;
    int32_t margin;        /* MXFP8: powers of two left free below the largest number */
    int32_t four_over_six; /* NVFP4: te_four_over_six: a group's largest magnitude becomes 4 instead
                              of 6 where that loses less; to nearest, and nothing transformed */
    int32_t row_scaled;    /* NVFP4: `row` has an amax for each row, which the cast finds; of
                              te_quantize alone, not with `square` */
} te_cast_request;

#include "transformer_engine_ops.h"    /* te_op, and the args struct of each */
#include "transformer_engine_fields.h" /* te_op_info and te_field */

/* ---- calling an operator ------------------------------------------------------------------ */

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

/* One slot alone, with the checks of te_op_run and te_op_workspace; UNSUPPORTED where it does not
 * take the call. The context is of its device. */
TE_API te_status te_slot_run(const te_op_slot *slot, te_context *context, te_op op,
                             const void *args, void *stream);
TE_API te_status te_slot_workspace(const te_op_slot *slot, te_context *context, te_op op,
                                   const void *args, size_t *bytes);
/* TE_OK where te_slot_run would call its function. */
TE_API te_status te_slot_supports(const te_op_slot *slot, te_context *context, te_op op,
                                  const void *args);

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

/* Backends that a caller has its calls and runs of plans ask, in this order, before those that are
 * registered (te_plan_call.selection): each run by a choice of its own. All is the caller's, as
 * long as a run goes on. */
typedef struct te_selection {
    size_t size;
    int64_t number; /* above 0: of no other selection of the process, for what contexts remember */
    int32_t count;
    const te_backend *const *backends; /* `priority` and `release` are not read */
} te_selection;

TE_API int64_t te_selection_next_number(void); /* one that no selection has had */

/* te_op_workspace and te_op_run of a call that asks a selection first; NULL: none. */
TE_API te_status te_op_workspace_selected(te_context *context, const te_selection *selection,
                                          te_op op, const void *args, size_t *bytes);
TE_API te_status te_op_run_selected(te_context *context, const te_selection *selection, te_op op,
                                    const void *args, void *stream);

/* ---- counters ----------------------------------------------------------------------------- */

typedef struct te_counter {
    const char *name; /* "gemm.cpu.e4m3.e4m3", "scaling.cpu.row.row", "op.cuda.quantize",
                         "fallback.gemm_output_padded" */
    int64_t value;
} te_counter;

/* Copies at most capacity counters with a value other than 0; *count is how many there are. */
TE_API te_status te_counters_read(te_counter *out, size_t capacity, size_t *count);
TE_API void te_counters_reset(void);

/* Numbers of no device, dtype or mode are not counted. What a backend tells of its GEMMs and
 * attentions, where it hands them to the device: a GEMM by the dtypes of its operands, */
TE_API void te_count_gemm(te_device_type device, te_dtype a, te_dtype b);
/* or, where operands had to be multiplied out, having no kernel for this mode (mixed: none that
 * reads both), as emulated; */
TE_API void te_count_emulated(te_scaling_mode mode);
TE_API void te_count_mixed(void);
/* an attention, or its gradient, by the dtype of the queries. */
TE_API void te_count_attention(te_device_type device, te_dtype dtype, int backward);

#include "transformer_engine_graphs.h" /* needs all of the above */
#include "transformer_engine_plans.h"
#include "transformer_engine_records.h"
#include "transformer_engine_updates.h"

#ifdef __cplusplus
}
#endif
#endif
