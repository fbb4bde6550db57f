/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_cublaslt.c - the GEMM operator of the CUDA backend.
 *
 * cuBLASLt takes most calls as they are: one matmul, everything fused. What it refuses (measured by
 * benchmarks/cublaslt_support.c) goes through scratch in the caller's workspace, and is counted:
 *
 * FP8 requires 16-byte rows and addresses, and n such that a row of d is a multiple of 16 bytes;
 * else d (and b, bias and aux with it) goes through padded copies, and so it does with a where
 * scales of tiles want multiples of 8 rows. Bias and inverse scales require a 16-byte address too,
 * aux rows of a multiple of 8 elements. k = 0 is a matmul of zeros, so that bias, activation and
 * cast stay where they are. The amax of an FP8 output is overwritten, not accumulated: a float of
 * scratch, then a maximum; and with a bias it also sees the bias alone, in rows of a tile that lie
 * beyond m: then d is made wide, and the quantize operator casts it. The fused bias gradient costs
 * more than reading a once more, but for small a.
 */
#include "cuda/gemm_cublaslt.h"

#include "core/context.h"
#include "core/counters.h"
#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"
#include "core/tensor.h"
#include "cuda/ops.h"

/* Largest number of elements of a for which the fused bias gradient (a second kernel inside the
 * library) is not slower than column sums of our own. */
#define FUSED_BIAS_GRAD_ELEMENTS ((int64_t)1 << 20)
#define FP8_ALIGNMENT 16
#define AUX_ALIGNMENT 8  /* elements */
#define TILE_ALIGNMENT 8 /* rows of operands that are scaled by tiles */

typedef enum bias_grad_way {
    BIAS_GRAD_NONE,
    BIAS_GRAD_FUSED,
    BIAS_GRAD_COLUMN_SUMS, /* of a's data, by the quantize operator */
    BIAS_GRAD_GEMM         /* a times ones: a is not transposed, its rows are summed */
} bias_grad_way;

/* One call, laid out: the problem for the library, and which views are scratch (data NULL: none).
 */
typedef struct gemm_call {
    const te_gemm_args *args;
    te_gemm_operand given_a, given_b;
    void *self;
    te_context *context;
    void *stream;
    te_gemm_key key;
    te_gemm_pointers at;
    te_tensor a, b, bias, d, aux; /* padded copies */
    te_tensor a_scale, b_scale;   /* copies of inverse scales at an address, and of a length, that
                                     the library takes */
    te_tensor zeros;              /* both operands when k = 0 */
    te_tensor amax;               /* [1, 1], what the library overwrites */
    te_tensor wide;               /* d before an FP8 cast of our own */
    te_tensor ones;               /* second operand of BIAS_GRAD_GEMM */
    bias_grad_way bias_grad;
    void *helper; /* workspace of the quantize operator or of the second GEMM */
    size_t helper_size;
    char *base;  /* of the workspace */
    size_t used; /* bytes taken for the above */
} gemm_call;

/* ---- layout: pure arithmetic -------------------------------------------------------------- */

static void *take(gemm_call *call, size_t bytes)
{
    char *piece = call->base + call->used;
    call->used += (bytes + 255) / 256 * 256;
    return piece;
}

static te_tensor take_matrix(gemm_call *call, te_dtype dtype, int64_t rows, int64_t columns)
{
    void *data = take(call, te_dtype_size(dtype, rows * columns));
    return te_matrix(data, dtype, te_context_device(call->context), rows, columns);
}

static te_tensor as_row(const te_tensor *vector)
{
    return te_matrix(vector->data, vector->dtype, vector->device, 1, vector->shape[0]);
}

static int is_aligned(const void *data, size_t to)
{
    return (uintptr_t)data % to == 0;
}

static uint8_t align_log2(const void *data)
{
    uintptr_t bits = (uintptr_t)data | (uintptr_t)1 << TE_GEMM_ALIGNMENT_LOG2;
    return (uint8_t)__builtin_ctzll((unsigned long long)bits);
}

/* The row stride to tell the library: one of a single row means nothing and may be anything. */
static int64_t stride_of(const te_tensor *tensor)
{
    return tensor->shape[0] > 1 ? tensor->strides[0] : te_round_up(tensor->shape[1], FP8_ALIGNMENT);
}

/* An operand's data with `rows` rows: the caller's, or a copy where FP8 can not use it. */
static const te_tensor *place_operand(gemm_call *call, const te_tensor *data, int64_t rows,
                                      te_tensor *copy)
{
    if (!te_dtype_is_fp8(data->dtype)) return data;
    if (data->shape[0] == rows && stride_of(data) % FP8_ALIGNMENT == 0 &&
        is_aligned(data->data, FP8_ALIGNMENT))
        return data;
    *copy = take_matrix(call, data->dtype, rows, data->shape[1]);
    return copy;
}

/* The inverse scales of an operand as a matrix, those of data with `rows` rows. */
static te_tensor inverse_scales(const gemm_call *call, const te_gemm_operand *form, int64_t rows)
{
    const te_scale_layout layout = te_scale_layout_of(form->mode, rows, form->data->shape[1]);
    const te_device device = te_context_device(call->context);
    float *values = form->scales->data;
    if (form->mode == TE_SCALING_TENSOR) {
        return te_matrix(values + TE_SCALES_INVERSE, TE_DTYPE_F32, device, 1, 1);
    }
    if (form->mode == TE_SCALING_ROW) {
        return te_matrix(values, TE_DTYPE_F32, device, 1, layout.shape[1]);
    }
    return te_matrix(values, TE_DTYPE_F32, device, layout.shape[0], layout.shape[1]);
}

/* An operand's inverse scales: the caller's, or a copy at an address, and with as many of them as
 * the library reads for `rows` rows. */
static const float *place_scales(gemm_call *call, const te_gemm_operand *form, int64_t rows,
                                 te_tensor *copy)
{
    te_tensor given, wanted;
    if (form->scales == NULL) return NULL;
    given = inverse_scales(call, form, form->data->shape[0]);
    wanted = inverse_scales(call, form, rows);
    if (is_aligned(given.data, FP8_ALIGNMENT) && wanted.shape[1] == given.shape[1]) {
        return given.data;
    }
    *copy = take_matrix(call, TE_DTYPE_F32, wanted.shape[0], wanted.shape[1]);
    return copy->data;
}

static void place_operands(gemm_call *call)
{
    te_gemm_key *key = &call->key;
    const te_tensor *a = call->given_a.data, *b = call->given_b.data;
    key->a_transposed = (uint8_t)call->given_a.transposed;
    key->b_transposed = (uint8_t)call->given_b.transposed;
    key->a_dtype = (uint8_t)a->dtype;
    key->b_dtype = (uint8_t)b->dtype;
    key->modes = (uint8_t)(call->given_a.mode | call->given_b.mode << 4);
    if (key->k == 0) {
        key->k = FP8_ALIGNMENT;
        key->a_transposed = 0;
        key->b_transposed = 1;
        key->modes = 0; /* zeros whatever their scales */
        call->zeros = take_matrix(call, a->dtype, key->m > key->n ? key->m : key->n, key->k);
        a = b = &call->zeros;
    } else {
        a = place_operand(call, a, te_dtype_is_fp8(a->dtype) ? key->m : a->shape[0], &call->a);
        b = place_operand(call, b, te_dtype_is_fp8(b->dtype) ? key->n : b->shape[0], &call->b);
    }
    key->a_stride = stride_of(a);
    key->b_stride = stride_of(b);
    key->a_align = align_log2(a->data);
    key->b_align = align_log2(b->data);
    call->at.a = a->data;
    call->at.b = b->data;
    if (te_tensor_present(&call->zeros) && te_scales_own(call->given_a.mode)) return;
    call->at.a_scale = place_scales(call, &call->given_a, key->m, &call->a_scale);
    call->at.b_scale = place_scales(call, &call->given_b, key->n, &call->b_scale);
}

/* The library's amax of this FP8 output would be wrong. */
static int casts_separately(const te_gemm_args *args)
{
    return te_dtype_is_fp8(args->d.dtype) && args->d_amax != NULL && te_tensor_present(&args->bias);
}

static void place_output(gemm_call *call)
{
    const te_gemm_args *args = call->args;
    te_gemm_key *key = &call->key;
    const te_tensor *d = &args->d;
    int64_t row_bytes = (int64_t)te_dtype_size(d->dtype, stride_of(d));
    if (casts_separately(args)) {
        te_dtype wide = te_tensor_present(&args->aux) ? TE_DTYPE_BF16 : TE_DTYPE_F32;
        call->wide = take_matrix(call, wide, key->m, key->n);
        d = &call->wide;
    } else if (te_dtype_is_fp8((te_dtype)key->a_dtype) &&
               (key->n != d->shape[1] || key->m != d->shape[0] || row_bytes % FP8_ALIGNMENT != 0 ||
                !is_aligned(d->data, FP8_ALIGNMENT))) {
        call->d = take_matrix(call, d->dtype, key->m, key->n);
        d = &call->d;
    }
    key->d_dtype = key->c_dtype = (uint8_t)d->dtype;
    key->d_stride = stride_of(d);
    key->d_align = align_log2(d->data);
    call->at.d = d->data;
    if (!te_dtype_is_fp8(d->dtype)) return;
    call->at.d_scale = args->d_scale;
    if (args->d_amax != NULL) {
        call->amax = take_matrix(call, TE_DTYPE_F32, 1, 1);
        call->at.amax = call->amax.data;
        key->features |= TE_GEMM_FEATURE_AMAX;
    }
}

static void place_epilogue(gemm_call *call)
{
    const te_gemm_args *args = call->args;
    te_gemm_key *key = &call->key;
    const te_tensor *bias = &args->bias, *aux = &args->aux;
    key->bias_dtype = key->aux_dtype = TE_GEMM_NO_DTYPE;
    if (args->epilogue == TE_EPILOGUE_GELU) key->features |= TE_GEMM_FEATURE_GELU;
    if (te_tensor_present(bias)) {
        if (key->n != bias->shape[0] || !is_aligned(bias->data, FP8_ALIGNMENT)) {
            call->bias = take_matrix(call, bias->dtype, 1, key->n);
            bias = &call->bias;
        }
        key->bias_dtype = (uint8_t)bias->dtype;
        key->bias_align = align_log2(bias->data);
        call->at.bias = bias->data;
    }
    if (te_tensor_present(aux)) {
        if (key->n != aux->shape[1] || stride_of(aux) % AUX_ALIGNMENT != 0 ||
            !is_aligned(aux->data, FP8_ALIGNMENT)) {
            call->aux = take_matrix(call, aux->dtype, key->m, te_round_up(key->n, AUX_ALIGNMENT));
            aux = &call->aux;
        }
        key->aux_dtype = (uint8_t)aux->dtype;
        key->aux_stride = stride_of(aux);
        key->aux_align = align_log2(aux->data);
        call->at.aux = aux->data;
    }
    /* By the library's rule the (unread) c of an FP8 output has the dtype of its bias and aux. */
    if (te_dtype_is_fp8((te_dtype)key->d_dtype)) {
        int half = key->bias_dtype == TE_DTYPE_F16 || key->aux_dtype == TE_DTYPE_F16;
        key->c_dtype = half ? TE_DTYPE_F16 : TE_DTYPE_BF16;
    }
}

static te_quantize_args quantize_args(const gemm_call *call, const te_tensor *input)
{
    return (te_quantize_args){.size = sizeof(te_quantize_args),
                              .input = *input,
                              .workspace = call->helper,
                              .workspace_size = call->helper_size};
}

static te_quantize_args column_sums_args(const gemm_call *call)
{
    te_quantize_args sums = quantize_args(call, call->given_a.data);
    sums.bias_grad = call->args->bias_grad;
    return sums;
}

static te_quantize_args amax_args(const gemm_call *call)
{
    te_quantize_args amax = quantize_args(call, &call->amax);
    amax.cast.amax = call->args->d_amax;
    return amax;
}

static te_quantize_args wide_args(const gemm_call *call)
{
    const te_gemm_args *args = call->args;
    te_quantize_args cast = quantize_args(call, &call->wide);
    cast.input.shape[1] = args->d.shape[1]; /* without its padding */
    cast.cast.result.mode = TE_SCALING_TENSOR;
    cast.cast.result.row = args->d;
    cast.cast.scale = args->d_scale;
    cast.cast.amax = args->d_amax;
    return cast;
}

/* bias_grad[m, 1] = a[m, k] ones[k, 1]. */
static te_gemm_args row_sums_args(const gemm_call *call)
{
    te_gemm_args sums = {.size = sizeof sums, .a = call->args->a};
    const te_tensor *out = &call->args->bias_grad;
    sums.b.wide = call->ones;
    sums.b_transposed = 1;
    sums.d = te_matrix(out->data, out->dtype, out->device, out->shape[0], 1);
    sums.flags = call->args->flags & TE_GEMM_ALLOW_TF32;
    sums.workspace = call->helper;
    sums.workspace_size = call->helper_size;
    return sums;
}

static bias_grad_way choose_bias_grad(const gemm_call *call)
{
    const te_gemm_args *args = call->args;
    const te_tensor *out = &args->bias_grad;
    if (!te_tensor_present(out)) return BIAS_GRAD_NONE;
    if (!args->a_transposed) return BIAS_GRAD_GEMM;
    if (te_tensor_present(&args->bias) || args->epilogue != TE_EPILOGUE_NONE ||
        out->dtype != args->d.dtype || !is_aligned(out->data, FP8_ALIGNMENT) ||
        call->key.m * call->key.k > FUSED_BIAS_GRAD_ELEMENTS)
        return BIAS_GRAD_COLUMN_SUMS;
    return BIAS_GRAD_FUSED;
}

/* Bias gradient, and the workspace of the operators that help. */
static te_status place_helpers(gemm_call *call)
{
    const te_gemm_args *args = call->args;
    size_t need = 0;
    if (te_tensor_present(&call->wide)) {
        te_quantize_args cast = wide_args(call);
        TE_TRY(te_cuda_quantize_workspace(call->self, call->context, &cast, &need));
    } else if (te_tensor_present(&call->amax)) {
        te_quantize_args amax = amax_args(call);
        TE_TRY(te_cuda_quantize_workspace(call->self, call->context, &amax, &need));
    }
    call->bias_grad = choose_bias_grad(call);
    if (call->bias_grad == BIAS_GRAD_FUSED) {
        call->key.features |= TE_GEMM_FEATURE_BIAS_GRAD;
        call->key.bias_dtype = (uint8_t)args->bias_grad.dtype;
        call->key.bias_align = align_log2(args->bias_grad.data);
        call->at.bias = args->bias_grad.data;
    } else if (call->bias_grad == BIAS_GRAD_COLUMN_SUMS) {
        te_quantize_args sums = column_sums_args(call);
        TE_TRY(te_cuda_quantize_workspace(call->self, call->context, &sums, &need));
    } else if (call->bias_grad == BIAS_GRAD_GEMM) {
        te_gemm_args sums;
        call->ones = take_matrix(call, args->a.wide.dtype, 1, args->a.wide.shape[1]);
        sums = row_sums_args(call);
        TE_TRY(te_cuda_wide_gemm_workspace(call->self, call->context, &sums, NULL, &need));
    }
    call->helper_size = need;
    if (need > 0) call->helper = take(call, need);
    return TE_OK;
}

/* Lays out everything but the library's own workspace, which follows at call->used. */
static te_status lay_out(gemm_call *call)
{
    const te_gemm_args *args = call->args;
    te_gemm_key *key = &call->key;
    int64_t row_bytes = (int64_t)te_dtype_size(args->d.dtype, args->d.shape[1]);
    key->m = args->d.shape[0];
    key->n = args->d.shape[1];
    call->given_a = te_gemm_a(args);
    call->given_b = te_gemm_b(args);
    key->k = call->given_a.data->shape[!call->given_a.transposed];
    if (args->a.mode != TE_SCALING_NONE && row_bytes % FP8_ALIGNMENT != 0)
        key->n = te_round_up(key->n, FP8_ALIGNMENT);
    if (te_scales_own(args->a.mode) && args->a.mode != TE_SCALING_ROW) {
        key->m = te_round_up(key->m, TILE_ALIGNMENT);
        key->n = te_round_up(key->n, TILE_ALIGNMENT);
    }
    if (args->flags & TE_GEMM_ACCUMULATE) key->features |= TE_GEMM_FEATURE_ACCUMULATE;
    if (args->a.mode != TE_SCALING_NONE) {
        const int tiles = te_scales_own(args->a.mode) && args->a.mode != TE_SCALING_ROW;
        if ((args->flags & TE_GEMM_FAST_ACCUMULATION) && !tiles)
            key->features |= TE_GEMM_FEATURE_FAST;
    } else if (args->a.wide.dtype == TE_DTYPE_F32) {
        if (args->flags & TE_GEMM_ALLOW_TF32) key->features |= TE_GEMM_FEATURE_TF32;
    }
    key->workspace_log2 = TE_GEMM_WORKSPACE_LOG2;
    place_operands(call);
    place_output(call);
    place_epilogue(call);
    return place_helpers(call);
}

/* ---- copies around the matmul ------------------------------------------------------------- */

static te_status copy(const gemm_call *call, te_tensor from, te_tensor to)
{
    te_cast_args args = {.size = sizeof args, .input = from, .output = to};
    return te_cuda_cast(call->self, call->context, &args, call->stream);
}

static te_status fill(const gemm_call *call, te_tensor output, double value)
{
    te_fill_args args = {.size = sizeof args, .output = output, .value = value};
    return te_cuda_fill(call->self, call->context, &args, call->stream);
}

static te_status copy_scales(const gemm_call *call, const te_gemm_operand *form, te_tensor to)
{
    te_count_fallback(TE_FALLBACK_GEMM_OPERAND_COPIED);
    return copy(call, inverse_scales(call, form, form->data->shape[0]), to);
}

static te_status copy_in(const gemm_call *call)
{
    const te_gemm_args *args = call->args;
    if (te_tensor_present(&call->a_scale)) TE_TRY(copy_scales(call, &call->given_a, call->a_scale));
    if (te_tensor_present(&call->b_scale)) TE_TRY(copy_scales(call, &call->given_b, call->b_scale));
    if (te_tensor_present(&call->zeros)) TE_TRY(fill(call, call->zeros, 0.0));
    if (te_tensor_present(&call->a)) TE_TRY(copy(call, *call->given_a.data, call->a));
    if (te_tensor_present(&call->b)) TE_TRY(copy(call, *call->given_b.data, call->b));
    if (te_tensor_present(&call->a) || te_tensor_present(&call->b))
        te_count_fallback(TE_FALLBACK_GEMM_OPERAND_COPIED);
    if (te_tensor_present(&call->bias)) {
        TE_TRY(copy(call, as_row(&args->bias), call->bias));
        te_count_fallback(TE_FALLBACK_GEMM_BIAS_SEPARATE);
    }
    if (te_tensor_present(&call->d) && (args->flags & TE_GEMM_ACCUMULATE))
        TE_TRY(copy(call, args->d, call->d));
    return TE_OK;
}

static te_status copy_out(const gemm_call *call)
{
    const te_gemm_args *args = call->args;
    if (te_tensor_present(&call->d)) TE_TRY(copy(call, call->d, args->d));
    if (te_tensor_present(&call->aux)) TE_TRY(copy(call, call->aux, args->aux));
    if (te_tensor_present(&call->d) || te_tensor_present(&call->aux))
        te_count_fallback(TE_FALLBACK_GEMM_OUTPUT_PADDED);
    if (te_tensor_present(&call->wide)) {
        te_quantize_args cast = wide_args(call);
        TE_TRY(te_cuda_quantize(call->self, call->context, &cast, call->stream));
        te_count_fallback(TE_FALLBACK_GEMM_CAST_SEPARATE);
    } else if (te_tensor_present(&call->amax)) {
        te_quantize_args amax = amax_args(call);
        TE_TRY(te_cuda_quantize(call->self, call->context, &amax, call->stream));
    }
    return TE_OK;
}

static te_status separate_bias_grad(const gemm_call *call)
{
    if (call->bias_grad == BIAS_GRAD_NONE || call->bias_grad == BIAS_GRAD_FUSED) return TE_OK;
    if (te_tensor_present(&call->zeros)) return fill(call, as_row(&call->args->bias_grad), 0.0);
    if (call->bias_grad == BIAS_GRAD_COLUMN_SUMS) {
        te_quantize_args sums = column_sums_args(call);
        TE_TRY(te_cuda_quantize(call->self, call->context, &sums, call->stream));
    } else {
        te_gemm_args sums = row_sums_args(call);
        TE_TRY(fill(call, call->ones, 1.0));
        TE_TRY(te_cuda_wide_gemm(call->self, call->context, &sums, NULL, call->stream));
    }
    te_count_fallback(TE_FALLBACK_GEMM_BIAS_SEPARATE);
    return TE_OK;
}

/* ---- the operator ------------------------------------------------------------------------- */

static te_status expect_workspace(const gemm_call *call, size_t need)
{
    const te_gemm_args *args = call->args;
    TE_FAIL_IF(need > 0 && !is_aligned(args->workspace, 256), TE_ERROR_INVALID,
               "gemm: workspace at %p, expected a multiple of 256 bytes", args->workspace);
    TE_FAIL_IF(
        need > args->workspace_size, TE_ERROR_INVALID,
        "gemm: workspace of %zu bytes, expected at least %zu (d at %p, bias at %p: what is "
        "not 16-byte aligned goes through it; te_op_workspace counts with the same addresses)",
        args->workspace_size, need, args->d.data, args->bias.data);
    return TE_OK;
}

/* The entry to use with what is left of the workspace. */
static te_status find_algorithm(te_cublaslt *lt, gemm_call *call, te_gemm_entry *spare,
                                te_gemm_entry **out)
{
    size_t left = call->args->workspace_size - call->used;
    TE_TRY(te_gemm_find(lt, &call->key, &call->at, call->stream, spare, out));
    if ((*out)->workspace <= left) return TE_OK;
    call->key.workspace_log2 =
        (uint8_t)(left < 256 ? 0 : 63 - __builtin_clzll((unsigned long long)left));
    return te_gemm_find(lt, &call->key, &call->at, call->stream, spare, out);
}

static te_status run_call(te_cuda_state *cuda, gemm_call *call)
{
    te_cublaslt *lt = NULL;
    te_gemm_entry spare, *entry = NULL;
    TE_TRY(te_cublaslt_open(cuda, &lt));
    TE_TRY(lay_out(call));
    TE_TRY(expect_workspace(call, call->used));
    call->at.workspace = call->base + call->used;
    call->at.workspace_size = call->args->workspace_size - call->used;
    TE_TRY(copy_in(call));
    TE_TRY(find_algorithm(lt, call, &spare, &entry));
    TE_TRY(expect_workspace(call, call->used + entry->workspace));
    TE_TRY(te_gemm_launch(lt, entry, &call->at, call->stream));
    TE_TRY(copy_out(call));
    return separate_bias_grad(call);
}

/* k = 0 without bias or activation: zeros, or nothing where they are added. */
static int is_empty(const te_gemm_args *args)
{
    const te_gemm_operand a = te_gemm_a(args);
    return a.data->shape[!a.transposed] == 0 && !te_tensor_present(&args->bias) &&
           args->epilogue == TE_EPILOGUE_NONE && !te_dtype_is_fp8(args->d.dtype);
}

static te_status run_empty(const gemm_call *call)
{
    const te_gemm_args *args = call->args;
    if (te_tensor_present(&args->bias_grad)) TE_TRY(fill(call, as_row(&args->bias_grad), 0.0));
    return (args->flags & TE_GEMM_ACCUMULATE) ? TE_OK : fill(call, args->d, 0.0);
}

static void use_alpha(gemm_call *call, const float *alpha)
{
    if (alpha == NULL) return;
    call->at.alpha = alpha;
    call->key.features |= TE_GEMM_FEATURE_ALPHA;
}

te_status te_cuda_wide_gemm(void *self, te_context *context, const te_gemm_args *args,
                            const float *alpha, void *stream)
{
    gemm_call call = {.args = args, .self = self, .context = context, .stream = stream};
    te_cuda_state *cuda = te_context_state(context);
    te_cuda_scope scope;
    te_status st;
    if (args->d.shape[0] == 0 || args->d.shape[1] == 0) return TE_OK;
    call.base = args->workspace;
    use_alpha(&call, alpha);
    TE_TRY(te_cuda_enter(cuda, &scope));
    if (is_empty(args)) {
        st = run_empty(&call);
    } else {
        st = run_call(cuda, &call);
    }
    te_cuda_leave(cuda, &scope);
    return st;
}

te_status te_cuda_wide_gemm_workspace(void *self, te_context *context, const te_gemm_args *args,
                                      const float *alpha, size_t *bytes)
{
    gemm_call call = {.args = args, .self = self, .context = context};
    te_cuda_state *cuda = te_context_state(context);
    te_cuda_scope scope;
    te_cublaslt *lt = NULL;
    te_gemm_entry spare, *entry = NULL;
    te_status st;
    *bytes = 0;
    if (args->d.shape[0] == 0 || args->d.shape[1] == 0 || is_empty(args)) return TE_OK;
    call.base = (char *)(uintptr_t)0x10000; /* never read: scratch is aligned wherever it will be */
    use_alpha(&call, alpha);
    TE_TRY(te_cuda_enter(cuda, &scope));
    TE_TRY_DONE(te_cublaslt_open(cuda, &lt));
    TE_TRY_DONE(lay_out(&call));
    TE_TRY_DONE(te_gemm_find(lt, &call.key, NULL, NULL, &spare, &entry));
    *bytes = call.used + entry->workspace;
done:
    te_cuda_leave(cuda, &scope);
    return st;
}
