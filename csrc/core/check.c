/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

#include "core/check_helpers.h"
#include "core/status.h"
#include "core/tensor.h"

te_status te_check_device(const te_check_site *site, const char *name, const te_tensor *tensor)
{
    if (tensor->device.type != site->device.type || tensor->device.index != site->device.index) {
        return FAIL_AT(TE_ERROR_INVALID, site, name,
                       "device (%d, %d) is not the context's (%d, %d): move the tensor",
                       (int)tensor->device.type, (int)tensor->device.index, (int)site->device.type,
                       (int)site->device.index);
    }
    return TE_OK;
}

te_status te_check_matrix(const te_check_site *site, const char *name, const te_tensor *tensor)
{
    if (tensor->ndim != 2) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "ndim = %d, expected a matrix (2)",
                       tensor->ndim);
    }
    if (tensor->shape[0] < 0 || tensor->shape[1] < 0) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "shape [%lld, %lld] is negative",
                       LL(tensor->shape[0]), LL(tensor->shape[1]));
    }
    if (tensor->shape[1] > 1 && tensor->strides[1] != 1) {
        return FAIL_AT(TE_ERROR_INVALID, site, name,
                       "column stride %lld, expected 1: make it contiguous",
                       LL(tensor->strides[1]));
    }
    if (tensor->shape[0] > 1 && tensor->strides[0] < tensor->shape[1]) {
        return FAIL_AT(TE_ERROR_INVALID, site, name,
                       "row stride %lld is less than the %lld columns: rows overlap",
                       LL(tensor->strides[0]), LL(tensor->shape[1]));
    }
    if (tensor->data == NULL && tensor->shape[0] > 0 && tensor->shape[1] > 0) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "data is NULL for %lld x %lld elements",
                       LL(tensor->shape[0]), LL(tensor->shape[1]));
    }
    return te_check_device(site, name, tensor);
}

te_status te_check_vector(const te_check_site *site, const char *name, const te_tensor *tensor,
                          int64_t length)
{
    if (tensor->ndim != 1 || tensor->shape[0] != length) {
        return FAIL_AT(TE_ERROR_INVALID, site, name,
                       "ndim %d and length %lld, expected a vector of %lld", tensor->ndim,
                       LL(tensor->ndim > 0 ? tensor->shape[0] : 0), LL(length));
    }
    if (length > 1 && tensor->strides[0] != 1) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "stride %lld, expected 1: make it contiguous",
                       LL(tensor->strides[0]));
    }
    return te_check_device(site, name, tensor);
}

te_status te_check_high_precision(const te_check_site *site, const char *name, te_dtype dtype)
{
    if (te_dtype_is_high_precision(dtype)) return TE_OK;
    return FAIL_AT(TE_ERROR_TYPE, site, name, "dtype %s, expected f32, f16 or bf16",
                   te_dtype_name(dtype));
}

static te_status expect_fp8(const te_check_site *site, const char *name, te_dtype dtype)
{
    if (te_dtype_is_fp8(dtype)) return TE_OK;
    return FAIL_AT(TE_ERROR_TYPE, site, name, "dtype %s, expected e4m3 or e5m2",
                   te_dtype_name(dtype));
}

/* One usage of a quantized tensor: [major, >= minor] FP8. */
static te_status check_usage(const te_check_site *site, const char *name, const te_tensor *data,
                             int64_t major, int64_t minor)
{
    if (!te_tensor_present(data)) return TE_OK;
    TE_TRY(te_check_matrix(site, name, data));
    TE_TRY(expect_fp8(site, name, data->dtype));
    if (data->shape[0] != major || data->shape[1] < minor) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "shape [%lld, %lld], expected [%lld, >= %lld]",
                       LL(data->shape[0]), LL(data->shape[1]), LL(major), LL(minor));
    }
    return TE_OK;
}

static te_status check_both_usages(const te_check_site *site, const te_quantized *quantized,
                                   int64_t rows, int64_t columns)
{
    TE_TRY(check_usage(site, "rowwise", &quantized->rowwise, rows, columns));
    TE_TRY(check_usage(site, "columnwise", &quantized->columnwise, columns, rows));
    if (te_tensor_present(&quantized->rowwise) && te_tensor_present(&quantized->columnwise) &&
        quantized->rowwise.dtype != quantized->columnwise.dtype) {
        return FAIL_AT(TE_ERROR_TYPE, site, "columnwise", "dtype %s differs from row-wise %s",
                       te_dtype_name(quantized->columnwise.dtype),
                       te_dtype_name(quantized->rowwise.dtype));
    }
    return TE_OK;
}

te_status te_check_cast_to_fp8(const te_check_site *site, const char *name,
                               const te_quantized *output, const float *partials,
                               const int64_t shape[2])
{
    if (output->mode == TE_SCALING_NONE) {
        if (te_tensor_present(&output->rowwise) || te_tensor_present(&output->columnwise)) {
            return FAIL_AT(TE_ERROR_INVALID, site, name, "scaling mode %s casts nothing", "none");
        }
        return TE_OK;
    }
    if (output->mode != TE_SCALING_TENSOR) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "scaling mode %d does not exist",
                       (int)output->mode);
    }
    if ((output->scale == NULL) == (partials == NULL)) {
        return FAIL_AT(TE_ERROR_INVALID, site, name,
                       "%s: exactly one of scale and partials says how to scale",
                       output->scale == NULL ? "neither is given" : "both are given");
    }
    return check_both_usages(site, output, shape[0], shape[1]);
}

te_status te_check_quantize(const te_check_site *site, const te_quantize_args *args)
{
    const te_tensor *input = &args->input;
    TE_TRY(te_check_matrix(site, "input", input));
    TE_TRY(te_check_high_precision(site, "input", input->dtype));
    if (te_tensor_present(&args->bias_grad)) {
        TE_TRY(te_check_vector(site, "bias_grad", &args->bias_grad, input->shape[1]));
        TE_TRY(te_check_high_precision(site, "bias_grad", args->bias_grad.dtype));
    }
    return te_check_cast_to_fp8(site, "output", &args->output, args->partials, input->shape);
}

te_status te_check_dequantize(const te_check_site *site, const te_dequantize_args *args)
{
    const te_quantized *input = &args->input;
    TE_TRY(te_check_matrix(site, "output", &args->output));
    TE_TRY(te_check_high_precision(site, "output", args->output.dtype));
    if (input->mode != TE_SCALING_TENSOR) {
        return FAIL_AT(TE_ERROR_INVALID, site, "input", "scaling mode %d, expected tensor",
                       (int)input->mode);
    }
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    if (input->scale_pair == NULL) {
        return FAIL_AT(TE_ERROR_INVALID, site, "input", "%s is NULL", "scale_pair");
    }
    if (!te_tensor_present(&input->rowwise) && !te_tensor_present(&input->columnwise)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "input", "%s",
                       "it has neither row- nor column-wise data");
    }
    return check_both_usages(site, input, args->output.shape[0], args->output.shape[1]);
}

te_status te_check_amax(const te_check_site *site, const te_amax_args *args)
{
    TE_TRY(te_check_matrix(site, "input", &args->input));
    TE_TRY(te_check_high_precision(site, "input", args->input.dtype));
    if (args->partials == NULL) return FAIL_AT(TE_ERROR_INVALID, site, "partials", "%s", "is NULL");
    return TE_OK;
}

te_status te_check_transpose(const te_check_site *site, const te_transpose_args *args)
{
    const te_tensor *input = &args->input;
    const te_tensor *output = &args->output;
    TE_TRY(te_check_matrix(site, "input", input));
    TE_TRY(te_check_matrix(site, "output", output));
    if (te_dtype_bytes(input->dtype) != 1 || input->dtype != output->dtype) {
        return FAIL_AT(TE_ERROR_TYPE, site, "output",
                       "%s from %s, expected one-byte elements of one dtype",
                       te_dtype_name(output->dtype), te_dtype_name(input->dtype));
    }
    if (output->shape[0] != input->shape[1] || output->shape[1] < input->shape[0]) {
        return FAIL_AT(TE_ERROR_INVALID, site, "output",
                       "shape [%lld, %lld], expected [%lld, >= %lld]", LL(output->shape[0]),
                       LL(output->shape[1]), LL(input->shape[1]), LL(input->shape[0]));
    }
    return TE_OK;
}

static te_status check_gemm_dtypes(const te_check_site *site, const te_gemm_args *args)
{
    te_dtype a = args->a.data.dtype;
    te_dtype b = args->b.data.dtype;
    te_dtype d = args->d.dtype;
    int fp8 = te_dtype_is_fp8(a);
    if (fp8 ? !te_dtype_is_fp8(b) || (a == TE_DTYPE_E5M2 && b == TE_DTYPE_E5M2)
            : !te_dtype_is_high_precision(a) || a != b) {
        return FAIL_AT(
            TE_ERROR_TYPE, site, "b",
            "operands %s and %s, expected the same high precision or FP8 with at most one e5m2",
            te_dtype_name(a), te_dtype_name(b));
    }
    if (fp8 && (args->a.scale_inv == NULL || args->b.scale_inv == NULL)) {
        return FAIL_AT(TE_ERROR_INVALID, site, args->a.scale_inv == NULL ? "a" : "b",
                       "FP8 operand %s needs its inverse scale",
                       te_dtype_name(args->a.scale_inv == NULL ? a : b));
    }
    if (te_dtype_is_fp8(d)) {
        if (!fp8 || args->d_scale == NULL || (args->flags & TE_GEMM_ACCUMULATE) != 0) {
            return FAIL_AT(TE_ERROR_INVALID, site, "d",
                           "FP8 output %s needs FP8 operands and d_scale, and can not accumulate",
                           te_dtype_name(d));
        }
    } else {
        TE_TRY(te_check_high_precision(site, "d", d));
        if (!fp8 && d != a && d != TE_DTYPE_F32) {
            return FAIL_AT(TE_ERROR_TYPE, site, "d",
                           "dtype %s from %s operands, expected the same or f32", te_dtype_name(d),
                           te_dtype_name(a));
        }
    }
    if (te_tensor_present(&args->bias)) {
        te_dtype expected = !fp8 ? d : d == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
        if (args->bias.dtype != expected) {
            return FAIL_AT(TE_ERROR_TYPE, site, "bias", "dtype %s, expected %s",
                           te_dtype_name(args->bias.dtype), te_dtype_name(expected));
        }
    }
    return TE_OK;
}

static te_status check_gemm_extras(const te_check_site *site, const te_gemm_args *args, int64_t m,
                                   int64_t n)
{
    int fp8 = te_dtype_is_fp8(args->a.data.dtype);
    if (te_tensor_present(&args->bias)) TE_TRY(te_check_vector(site, "bias", &args->bias, n));
    if (te_tensor_present(&args->bias_grad)) {
        TE_TRY(te_check_vector(site, "bias_grad", &args->bias_grad, m));
        if (fp8 || args->bias_grad.dtype != args->a.data.dtype) {
            return FAIL_AT(TE_ERROR_TYPE, site, "bias_grad",
                           "dtype %s with %s operands, expected the same high precision",
                           te_dtype_name(args->bias_grad.dtype), te_dtype_name(args->a.data.dtype));
        }
    }
    if (te_tensor_present(&args->aux)) {
        TE_TRY(te_check_matrix(site, "aux", &args->aux));
        TE_TRY(te_check_high_precision(site, "aux", args->aux.dtype));
        if (args->aux.shape[0] != m || args->aux.shape[1] != n ||
            args->epilogue == TE_EPILOGUE_NONE) {
            return FAIL_AT(TE_ERROR_INVALID, site, "aux",
                           "shape [%lld, %lld], expected [%lld, %lld] and an activation",
                           LL(args->aux.shape[0]), LL(args->aux.shape[1]), LL(m), LL(n));
        }
    }
    if (args->epilogue != TE_EPILOGUE_NONE && args->epilogue != TE_EPILOGUE_GELU) {
        return FAIL_AT(TE_ERROR_INVALID, site, "epilogue", "%d does not exist",
                       (int)args->epilogue);
    }
    if ((args->flags & TE_GEMM_ACCUMULATE) != 0) {
        if (te_tensor_present(&args->bias) || args->epilogue != TE_EPILOGUE_NONE ||
            args->d.dtype == TE_DTYPE_F16) {
            return FAIL_AT(TE_ERROR_INVALID, site, "flags",
                           "accumulation into %s: only f32 or bf16, without bias or activation",
                           te_dtype_name(args->d.dtype));
        }
    }
    return TE_OK;
}

te_status te_check_gemm(const te_check_site *site, const te_gemm_args *args)
{
    const te_tensor *a = &args->a.data;
    const te_tensor *b = &args->b.data;
    int ta = args->a.transposed != 0;
    int tb = args->b.transposed != 0;
    int64_t m, n, k;
    TE_TRY(te_check_matrix(site, "a", a));
    TE_TRY(te_check_matrix(site, "b", b));
    TE_TRY(te_check_matrix(site, "d", &args->d));
    m = a->shape[ta];
    k = a->shape[!ta];
    n = b->shape[!tb];
    if (b->shape[tb] != k || args->d.shape[0] != m || args->d.shape[1] != n) {
        return FAIL_AT(
            TE_ERROR_INVALID, site, "d",
            "[%lld, %lld] from a [%lld, %lld] and b [%lld, %lld]: inner sizes must agree, "
            "outer sizes are those of d",
            LL(args->d.shape[0]), LL(args->d.shape[1]), LL(m), LL(k), LL(b->shape[tb]), LL(n));
    }
    TE_TRY(check_gemm_dtypes(site, args));
    if (te_dtype_is_fp8(a->dtype) && (ta || !tb || k % 16 != 0)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "a",
                       "FP8 GEMM takes a as it is and b transposed, k a multiple of 16; got "
                       "a_transposed = %d, b_transposed = %d, k = %lld",
                       ta, tb, LL(k));
    }
    return check_gemm_extras(site, args, m, n);
}

te_status te_check_scaling_update(const te_check_site *site, const te_scaling_update_args *args)
{
    const te_tensor *history = &args->history;
    TE_TRY(te_check_matrix(site, "history", history));
    TE_TRY(te_check_vector(site, "scale", &args->scale, history->shape[1]));
    if (history->shape[0] < 1 || args->scale.dtype != TE_DTYPE_F32 ||
        history->dtype != TE_DTYPE_F32) {
        return FAIL_AT(TE_ERROR_INVALID, site, "history",
                       "%lld rows of %s (scale %s), expected at least one row of f32",
                       LL(history->shape[0]), te_dtype_name(history->dtype),
                       te_dtype_name(args->scale.dtype));
    }
    if (!(args->fp8_max > 0.0F)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "fp8_max", "%g must be positive",
                       (double)args->fp8_max);
    }
    if (args->algo != TE_AMAX_MAX && args->algo != TE_AMAX_MOST_RECENT) {
        return FAIL_AT(TE_ERROR_INVALID, site, "algo", "%d does not exist", (int)args->algo);
    }
    return TE_OK;
}

te_status te_check_fill(const te_check_site *site, const te_fill_args *args)
{
    return te_check_matrix(site, "output", &args->output);
}

te_status te_check_cast(const te_check_site *site, const te_cast_args *args)
{
    TE_TRY(te_check_matrix(site, "input", &args->input));
    TE_TRY(te_check_matrix(site, "output", &args->output));
    if (args->input.dtype == args->output.dtype) return TE_OK;
    TE_TRY(te_check_high_precision(site, "input", args->input.dtype));
    return te_check_high_precision(site, "output", args->output.dtype);
}

te_status te_check_args(te_op op, te_device device, const void *args)
{
    static const size_t sizes[TE_OP_COUNT] = {
#define X(NAME, name) [TE_OP_##NAME] = sizeof(te_##name##_args),
        TE_OPS(X)
#undef X
    };
    te_check_site site = {op, device};
    if (args == NULL) return TE_FAIL(TE_ERROR_INVALID, "%s: args is NULL", te_op_name(op));
    if (*(const size_t *)args != sizes[op]) {
        return TE_FAIL(TE_ERROR_INVALID, "%s: args->size = %zu, expected %zu", te_op_name(op),
                       *(const size_t *)args, sizes[op]);
    }
    switch (op) {
#define X(NAME, name)                                                                              \
    case TE_OP_##NAME:                                                                             \
        return te_check_##name(&site, args);
        TE_OPS(X)
#undef X
    case TE_OP_COUNT:
        break;
    }
    return TE_FAIL(TE_ERROR_INVALID, "operator %d does not exist", (int)op);
}
