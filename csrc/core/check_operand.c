/* SPDX-License-Identifier: Apache-2.0
 *
 * check_operand.c - how operands are checked: quantized forms and their scales, what a cast is
 * asked for, and the operators that cast (norms and activations, too) and multiply.
 */
#include "core/check.h"
#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"

/* A quantized form: [major, >= minor]. */
static te_status check_form(const te_check_site *site, const char *name, const te_tensor *data,
                            int64_t major, int64_t minor)
{
    if (!te_tensor_requested(data) || (data->shape[0] == major && data->shape[1] >= minor))
        return TE_OK;
    return INVALID(name, "shape [%lld, %lld], expected [%lld, >= %lld]", LL(data->shape[0]),
                   LL(data->shape[1]), LL(major), LL(minor));
}

/* The scales of a form [rows, columns]. */
static te_status check_scales(const te_check_site *site, const char *name, te_scaling_mode mode,
                              const te_tensor *scales, te_scale_layout layout)
{
    const int64_t *shape = scales->shape;
    if (!te_tensor_requested(scales)) return TE_OK;
    TE_TRY(te_check_dtype(site, name, scales->dtype,
                          te_scales_micro(mode) ? TE_DTYPE_U8 : TE_DTYPE_F32));
    if (layout.ndim == 1) {
        if (scales->ndim == 1 && shape[0] == layout.shape[0]) return TE_OK;
        return INVALID(name, "ndim %d and length %lld, expected a vector of %lld",
                       (int)scales->ndim, LL(shape[0]), LL(layout.shape[0]));
    }
    if (scales->ndim == 2 && shape[0] == layout.shape[0] && shape[1] == layout.shape[1] &&
        (shape[0] <= 1 || shape[1] == 0 || scales->strides[0] == shape[1])) {
        return TE_OK;
    }
    return INVALID(name, "ndim %d, shape [%lld, %lld], expected [%lld, %lld] without gaps",
                   (int)scales->ndim, LL(shape[0]), LL(scales->ndim > 1 ? shape[1] : 0),
                   LL(layout.shape[0]), LL(layout.shape[1]));
}

static te_status check_codes(const te_check_site *site, const char *name, te_scaling_mode mode,
                             const te_tensor *data)
{
    const int bytes = mode == TE_SCALING_NVFP4;
    if (!te_tensor_requested(data) || te_dtype_is_fp8(data->dtype) == !bytes) return TE_OK;
    return WRONG_TYPE(name, "dtype %s, expected %s", te_dtype_name(data->dtype),
                      bytes ? "u8: two e2m1 to a byte" : "e4m3 or e5m2");
}

/* The quantized forms of [rows, columns], and their scales. */
static te_status check_forms(const te_check_site *site, const te_operand *operand, int64_t rows,
                             int64_t columns)
{
    const te_tensor *row = &operand->row, *column = &operand->column;
    int micro;
    INVALID_IF((unsigned)operand->mode >= TE_SCALING_COUNT, "mode",
               "%d does not exist, expected 0 to %d", (int)operand->mode, TE_SCALING_COUNT - 1);
    if (operand->mode == TE_SCALING_NONE) {
        if (!te_tensor_present(row) && !te_tensor_present(column)) return TE_OK;
        return INVALID("mode", "scaling mode none casts nothing");
    }
    TE_TRY(check_codes(site, "row", operand->mode, row));
    TE_TRY(check_codes(site, "column", operand->mode, column));
    TE_TRY(check_form(site, "row", row, rows, te_row_bytes(operand->mode, columns)));
    if (operand->mode == TE_SCALING_MXFP8) {
        TE_TRY(check_form(site, "column", column, rows, columns));
    } else {
        TE_TRY(check_form(site, "column", column, columns, te_row_bytes(operand->mode, rows)));
    }
    if (operand->mode == TE_SCALING_NVFP4) {
        const int64_t each = te_tensor_numel(&operand->row_amax) == rows ? rows : 1;
        TE_TRY(te_check_length(site, "row_amax", &operand->row_amax, each));
        TE_TRY(te_check_length(site, "column_amax", &operand->column_amax, 1));
    }
    if (te_tensor_requested(row) && te_tensor_requested(column)) {
        TE_TRY(te_check_dtype(site, "column", column->dtype, row->dtype));
    }
    /* But for bytes of groups, scales cover the padding of data too. */
    micro = te_scales_micro(operand->mode);
    TE_TRY(check_scales(
        site, "row_scales", operand->mode, &operand->row_scales,
        te_scale_layout_of(operand->mode, rows,
                           !micro && te_tensor_requested(row) ? row->shape[1] : columns)));
    return check_scales(
        site, "column_scales", operand->mode, &operand->column_scales,
        te_column_scale_layout_of(operand->mode,
                                  !micro && te_tensor_requested(column) ? column->shape[1] : rows,
                                  columns));
}

/* What NVFP4 alone may be asked for, of any other mode. */
static te_status check_mxfp8(const te_check_site *site, const te_cast_request *cast)
{
    const int to_256 = cast->result.scales_to_256;
    INVALID_IF(cast->four_over_six != 0 || to_256 != 0 || cast->row_scaled != 0,
               cast->four_over_six != 0 ? "four_over_six"
               : to_256 != 0            ? "scales_to_256"
                                        : "row_scaled",
               "mode %d does not have it, only nvfp4 (%d) has", (int)cast->result.mode,
               (int)TE_SCALING_NVFP4);
    if (cast->margin == 0 ||
        (cast->result.mode == TE_SCALING_MXFP8 && cast->margin >= -126 && cast->margin <= 126)) {
        return TE_OK;
    }
    return INVALID("margin", "%d with mode %d: mxfp8 (%d) has one, of -126 to 126", cast->margin,
                   (int)cast->result.mode, (int)TE_SCALING_MXFP8);
}

/* The ways to cast to NVFP4 that go together. */
static te_status check_fp4_ways(const te_check_site *site, const te_cast_request *cast,
                                int64_t rows)
{
    const int way = cast->four_over_six;
    INVALID_IF(cast->margin != 0, "margin", "%d with nvfp4, which has none", cast->margin);
    INVALID_IF(cast->hadamard < TE_HADAMARD_NONE || cast->hadamard > TE_HADAMARD_UNSIGNED,
               "hadamard", "%d, expected 0 (none), 1 (signed) or 2 (unsigned)", cast->hadamard);
    INVALID_IF(cast->hadamard != 0 && cast->square != 0, "hadamard",
               "a square is not transformed: leave it or square out");
    INVALID_IF(way < TE_FOUR_OVER_SIX_NONE || way > TE_FOUR_OVER_SIX_MSE, "four_over_six",
               "%d, expected 0 (none), 1 (mae) or 2 (mse)", way);
    INVALID_IF(way != 0 && (cast->hadamard != 0 || cast->rng != NULL), "four_over_six",
               "not with hadamard, and not rounded by rng");
    INVALID_IF(cast->row_scaled != 0 && cast->square != 0, "row_scaled",
               "rows of a square share its scale: leave it or square out");
    INVALID_IF(cast->row_scaled != 0 && site->op != TE_OP_QUANTIZE, "row_scaled",
               "te_quantize alone finds the amax of each row");
    if (!te_tensor_present(&cast->result.row_amax)) return TE_OK;
    return te_check_length(site, "row_amax", &cast->result.row_amax,
                           cast->row_scaled != 0 ? rows : 1);
}

/* What MXFP8 and NVFP4 alone may be asked for. */
static te_status check_micro(const te_check_site *site, const te_cast_request *cast, int64_t rows)
{
    const te_operand *result = &cast->result;
    const int fp4 = result->mode == TE_SCALING_NVFP4;
    INVALID_IF(!te_scales_micro(result->mode) && cast->square != 0, "square",
               "mode %d has a mode of its own for squares, or none", (int)result->mode);
    INVALID_IF(!fp4 && (cast->hadamard != 0 || cast->column_partials != NULL || cast->rng != NULL),
               cast->hadamard != 0             ? "hadamard"
               : cast->column_partials != NULL ? "column_partials"
                                               : "rng",
               "mode %d does not have it, only nvfp4 (%d) has", (int)result->mode,
               (int)TE_SCALING_NVFP4);
    if (!fp4) return check_mxfp8(site, cast);
    TE_TRY(check_fp4_ways(site, cast, rows));
    INVALID_IF(cast->partials == NULL &&
                   ((te_tensor_requested(&result->row) && cast->row_scaled == 0) ||
                    (te_tensor_requested(&result->column) && cast->column_partials == NULL)),
               "partials", "is NULL: nvfp4 scales by the amax");
    INVALID_IF(cast->hadamard != 0 && te_tensor_requested(&result->column) &&
                   cast->column_partials == NULL,
               "column_partials",
               "is NULL: the transform has an amax of its own, which te_amax finds");
    INVALID_IF(te_tensor_present(&result->row) && !te_tensor_present(&result->row_amax), "row_amax",
               "is missing: row can not be read without");
    INVALID_IF(te_tensor_present(&result->column) && !te_tensor_present(&result->column_amax),
               "column_amax", "is missing: column can not be read without");
    return TE_OK;
}

/* What is asked of a cast that measures by itself: forms with the scales that they need. */
static te_status check_own_scales(const te_check_site *site, const te_cast_request *cast)
{
    const te_operand *result = &cast->result;
    const int measured = result->mode == TE_SCALING_NVFP4;
    INVALID_IF(cast->scale != NULL || (cast->partials != NULL && !measured),
               cast->scale != NULL ? "scale" : "partials",
               "it is given, and the mode makes its scales by itself");
    INVALID_IF(cast->amax != NULL || cast->amax_partials != NULL,
               cast->amax != NULL ? "amax" : "amax_partials",
               "the mode measures rows or tiles: take it without a cast");
    INVALID_IF(te_tensor_requested(&result->row) && !te_tensor_requested(&result->row_scales),
               "row_scales", "is missing: row can not be read without");
    INVALID_IF(te_tensor_requested(&result->column) && !te_tensor_requested(&result->column_scales),
               "column_scales", "is missing: column can not be read without");
    INVALID_IF(te_tensor_requested(&result->row_scales) && !te_tensor_requested(&result->row),
               "row_scales", "there is no row that they are for");
    INVALID_IF(te_tensor_requested(&result->column_scales) && !te_tensor_requested(&result->column),
               "column_scales", "there is no column that they are for");
    return TE_OK;
}

/* What is asked of values of [rows, columns]. */
te_status te_check_cast_request(const te_check_site *site, const te_cast_request *cast,
                                int64_t rows, int64_t columns)
{
    const te_operand *result = &cast->result;
    const te_tensor like = {.ndim = 2, .shape = {rows, columns}};
    if (te_tensor_requested(&result->wide))
        TE_TRY(te_check_sizes(site, "wide", &result->wide, &like, 0));
    TE_TRY(check_forms(site, result, rows, columns));
    if (result->mode == TE_SCALING_NONE) {
        if (cast->amax == NULL || site->op == TE_OP_QUANTIZE) return TE_OK;
        return INVALID("amax", "scaling mode none records none: take amax_partials, or cast");
    }
    TE_TRY(check_micro(site, cast, rows));
    if (te_scales_own(result->mode) || te_scales_micro(result->mode)) {
        return check_own_scales(site, cast);
    }
    INVALID_IF(cast->scale == NULL && cast->partials == NULL, "mode",
               "neither scale nor partials is given, which say how to scale");
    if (cast->partials == NULL || te_dtype_is_fp8(te_operand_dtype(result))) return TE_OK;
    return WRONG_TYPE("partials", "they scale to the dtype of row or column, and none is FP8");
}
te_status te_check_quantize(const te_check_site *site, const te_quantize_args *args)
{
    if (!te_tensor_present(&args->cast.result.wide) && args->cast.amax_partials == NULL) {
        return TE_OK;
    }
    return INVALID("wide", "neither it nor amax_partials is written: te_cast and te_amax do that");
}

te_status te_check_dequantize(const te_check_site *site, const te_dequantize_args *args)
{
    const te_operand *input = &args->input;
    const int by_rows = te_tensor_present(&input->row);
    INVALID_IF(input->mode == TE_SCALING_NONE || te_tensor_present(&input->wide), "mode",
               "the input is not quantized: give its mode, or te_cast it");
    TE_TRY(check_forms(site, input, args->output.shape[0], args->output.shape[1]));
    if (te_tensor_numel(&args->output) == 0) return TE_OK;
    if (!by_rows) TE_TRY(te_check_missing(site, "row", &input->column, "and so is column"));
    TE_TRY(te_check_missing(site, by_rows ? "row_scales" : "column_scales",
                            by_rows ? &input->row_scales : &input->column_scales,
                            "the data can not be read without"));
    if (input->mode != TE_SCALING_NVFP4) return TE_OK;
    return te_check_missing(site, by_rows ? "row_amax" : "column_amax",
                            by_rows ? &input->row_amax : &input->column_amax,
                            "the data can not be read without");
}

te_status te_check_transpose(const te_check_site *site, const te_transpose_args *args)
{
    const te_tensor *input = &args->input;
    WRONG_TYPE_IF(te_dtype_bits(input->dtype) != 8, "input", "dtype %s, expected one-byte elements",
                  te_dtype_name(input->dtype));
    return check_form(site, "output", &args->output, input->shape[1], input->shape[0]);
}

te_status te_check_cast(const te_check_site *site, const te_cast_args *args)
{
    const te_dtype from = args->input.dtype, to = args->output.dtype;
    const int wrong_input = !te_dtype_is_high_precision(from);
    if (from == to || (!wrong_input && te_dtype_is_high_precision(to))) return TE_OK;
    return WRONG_TYPE(wrong_input ? "input" : "output", "dtype %s, expected f32, f16 or bf16",
                      te_dtype_name(wrong_input ? from : to));
}

/* The form of an operand that is read, and its scales. `first` is the operand's first field. */
static te_status check_gemm_operand(const te_check_site *site, int first, const te_operand *operand,
                                    const te_gemm_operand *form)
{
    const te_field *fields = te_op_describe(TE_OP_GEMM)->fields + first;
    const te_field *mode = fields + (te_at_gemm_a_mode - te_at_gemm_a);
    const te_field *data = form->data == &operand->row      ? mode + 1
                           : form->data == &operand->column ? mode + 3
                                                            : fields;
    INVALID_IF(operand->mode == TE_SCALING_NONE &&
                   (te_tensor_present(&operand->row) || te_tensor_present(&operand->column)),
               mode->name, "none, but there is quantized data: how is it scaled?");
    INVALID_IF(!te_tensor_requested(form->data), data->name,
               "is missing: a_transposed and b_transposed say which is read");
    TE_TRY(te_check_tensor(site, data, form->data, 1));
    if (form->scales == NULL) return TE_OK;
    TE_TRY(te_check_tensor(site, data + 1, form->scales, 1));
    TE_TRY(check_codes(site, data->name, form->mode, form->data));
    if (form->mode == TE_SCALING_NVFP4) {
        const int by_rows = form->data == &operand->row;
        const te_field *amax = mode + (by_rows ? 5 : 6);
        const int64_t rows = te_tensor_numel(form->amax) == 1 ? 1 : form->data->shape[0];
        TE_TRY(te_check_tensor(site, amax, form->amax, 1));
        TE_TRY(te_check_length(site, amax->name, form->amax, by_rows ? rows : 1));
    }
    return check_scales(
        site, data[1].name, form->mode, form->scales,
        form->mode == TE_SCALING_MXFP8 && form->data == &operand->column
            ? te_column_scale_layout_of(form->mode, form->data->shape[0], form->data->shape[1])
            : te_scale_layout_of(form->mode, form->data->shape[0], te_gemm_extent(form, 1)));
}

/* Inner sizes: equal, or of operands that are multiplied out padded to the same multiple of 16;
 * high precision is never padded. */
static int same_depth(te_gemm_way way, const te_gemm_operand *a, const te_gemm_operand *b)
{
    const int64_t of_a = te_gemm_extent(a, !a->transposed), of_b = te_gemm_extent(b, b->transposed);
    if (of_a == of_b) return 1;
    return way == TE_GEMM_MIXED && te_round_up(of_a, 16) == te_round_up(of_b, 16) &&
           (of_a < of_b ? b : a)->mode != TE_SCALING_NONE;
}

/* Dtypes: of the operands a and b, and what they make of the others. */
static te_status check_gemm_dtypes(const te_check_site *site, const te_gemm_args *args,
                                   te_gemm_way way, te_dtype a)
{
    const te_dtype d = args->d.dtype, narrow = d == TE_DTYPE_F16 ? d : TE_DTYPE_BF16;
    const int fp8 = way != TE_GEMM_AS_IT_IS || !te_dtype_is_high_precision(a),
              accumulates = (args->flags & TE_GEMM_ACCUMULATE) != 0;
    WRONG_TYPE_IF(way == TE_GEMM_MIXED && te_dtype_is_fp8(d), "d",
                  "dtype %s from operands that are multiplied out", te_dtype_name(d));
    if (te_dtype_is_fp8(d)) {
        INVALID_IF(!fp8 || args->d_scale == NULL || accumulates, "d",
                   "FP8 output %s needs FP8 operands and d_scale, and can not accumulate",
                   te_dtype_name(d));
    } else if (!te_dtype_is_high_precision(d)) {
        return WRONG_TYPE("d", "dtype %s, expected f32, f16 or bf16", te_dtype_name(d));
    }
    if (te_tensor_present(&args->bias)) {
        const int of_d = !fp8 || (way == TE_GEMM_MIXED && args->bias.dtype == d);
        TE_TRY(te_check_dtype(site, "bias", args->bias.dtype, of_d ? d : narrow));
    }
    WRONG_TYPE_IF(te_tensor_present(&args->bias_grad) && (fp8 || args->bias_grad.dtype != a),
                  "bias_grad", "dtype %s with %s operands, expected the same high precision",
                  te_dtype_name(args->bias_grad.dtype), te_dtype_name(a));
    if (!accumulates || (!te_tensor_present(&args->bias) && args->epilogue == TE_EPILOGUE_NONE)) {
        return TE_OK;
    }
    return INVALID("accumulate", "into %s: only without bias or activation", te_dtype_name(d));
}

te_status te_check_gemm(const te_check_site *site, const te_gemm_args *args)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    const int64_t *d = args->d.shape;
    te_gemm_way way;
    int64_t m, n, k;
    TE_TRY(check_gemm_operand(site, te_at_gemm_a, &args->a, &a));
    TE_TRY(check_gemm_operand(site, te_at_gemm_b, &args->b, &b));
    way = te_gemm_way_of(&a, &b);
    m = te_gemm_extent(&a, a.transposed);
    k = te_gemm_extent(&a, !a.transposed);
    n = te_gemm_extent(&b, !b.transposed);
    INVALID_IF(!same_depth(way, &a, &b) || d[0] != m || d[1] != n, "d",
               "[%lld, %lld] from a [%lld, %lld] and b [%lld, %lld]: inner sizes must "
               "agree, outer sizes are those of d",
               LL(d[0]), LL(d[1]), LL(m), LL(k), LL(te_gemm_extent(&b, b.transposed)), LL(n));
    TE_TRY(check_gemm_dtypes(site, args, way, a.data->dtype));
    WRONG_TYPE_IF(a.mode > TE_SCALING_TENSOR && te_dtype_is_fp8(args->d.dtype), "d",
                  "dtype %s from operands scaled by rows or tiles, expected f32, f16 "
                  "or bf16",
                  te_dtype_name(args->d.dtype));
    INVALID_IF(way == TE_GEMM_MIXED && args->epilogue != TE_EPILOGUE_NONE, "epilogue",
               "%d with operands that are multiplied out: there is none", (int)args->epilogue);
    INVALID_IF(way == TE_GEMM_AS_IT_IS && a.scales != NULL && k % 16 != 0, "a",
               "k = %lld of quantized operands, expected a multiple of 16: pad them", LL(k));
    if (!te_tensor_requested(&args->aux) || args->epilogue != TE_EPILOGUE_NONE) return TE_OK;
    return INVALID("aux", "there is no activation: d is what it would receive");
}

/* ---- norms and activations ---------------------------------------------------------------- */

/* Rows that are normalized. */
static te_status check_normalized(const te_check_site *site, const te_tensor *input)
{
    INVALID_IF(input->ndim < 2, "input", "ndim = %d, expected rows: 2 to 4", (int)input->ndim);
    return TE_OK;
}

te_status te_check_norm(const te_check_site *site, const te_norm_args *args)
{
    const te_cast_request *cast = &args->cast;
    TE_TRY(check_normalized(site, &args->input));
    INVALID_IF(te_tensor_rows(&args->input).strides[0] == TE_NO_STRIDE &&
                   (cast->result.mode != TE_SCALING_NONE || cast->amax_partials != NULL),
               "input", "its rows are those of no matrix: only `wide` is made of them");
    if ((args->flags & TE_NORM_STATISTICS_GIVEN) == 0 || te_tensor_numel(&args->input) == 0) {
        return TE_OK;
    }
    TE_TRY(te_check_missing(site, "rsigma", &args->rsigma, "statistics_given reads it"));
    if (args->kind != TE_NORM_LAYERNORM) return TE_OK;
    return te_check_missing(site, "mean", &args->mean, "statistics_given reads it");
}

te_status te_check_norm_backward(const te_check_site *site, const te_norm_backward_args *args)
{
    const te_tensor *input = &args->input;
    te_tensor rows;
    TE_TRY(check_normalized(site, input));
    rows = te_tensor_rows(input);
    TE_TRY(te_check_sizes(site, "grad_output", &args->grad_output, &rows, 0));
    if (args->kind != TE_NORM_LAYERNORM || te_tensor_numel(input) == 0) return TE_OK;
    return te_check_missing(site, "mean", &args->mean, "the gradient of layernorm reads it");
}

/* *columns is the width of the output. */
static te_status check_activation_input(const te_check_site *site, te_activation_kind kind,
                                        const te_activation_params *params, const te_tensor *input,
                                        int64_t *columns)
{
    const int gated = te_activation_is_gated(kind);
    *columns = gated ? input->shape[1] / 2 : input->shape[1];
    INVALID_IF(gated && input->shape[1] % 2 != 0, "input",
               "%lld columns, expected an even number for the two halves of %s",
               LL(input->shape[1]), te_activation_name(kind));
    if (kind != TE_ACTIVATION_CLAMPED_SWIGLU || params->limit >= 0.0F) return TE_OK;
    return INVALID("limit", "%g, expected a number from 0 on", (double)params->limit);
}

te_status te_check_activation(const te_check_site *site, const te_activation_args *args)
{
    int64_t columns = 0;
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &columns));
    return te_check_cast_request(site, &args->cast, args->input.shape[0], columns);
}

te_status te_check_activation_backward(const te_check_site *site,
                                       const te_activation_backward_args *args)
{
    te_tensor like = {.ndim = 2, .shape = {args->input.shape[0]}};
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &like.shape[1]));
    return te_check_sizes(site, "grad_output", &args->grad_output, &like, 0);
}
