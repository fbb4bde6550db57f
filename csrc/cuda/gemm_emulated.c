/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_emulated.c - the GEMM of operands that no device here multiplies as they are, and of results
 * that cuBLASLt does not make: operands are multiplied out in the workspace, and the result is cast
 * from there.
 *
 * Two of MXFP8 or two of NVFP4: to bf16, which holds both exactly: an E4M3 or E5M2 number times a
 * power of two, unless its magnitude is below 2^-126, where bf16 has multiples of 2^-133; and E2M1
 * times E4M3. The factor of NVFP4's amaxes multiplies the product, as alpha, by pointer.
 *
 * Operands of different kinds: to fp32, without TF32; one in high precision is cast to it.
 *
 * bf16 operands give bf16 or f32, fp16 ones fp16 or f32, fp32 ones f32: another result is cast from
 * f32 (and to it before, where it is added to). The bias is added in the dtype of the result.
 */
#include "cuda/microscale.h"

#include "core/check.h"
#include "core/context.h"
#include "core/counters.h"
#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"
#include "cuda/gemm_cublaslt.h"
#include "cuda/ops.h"

/* The call on bf16 operands, and what of it lies in the workspace. */
typedef struct emulated {
    te_gemm_args wide;
    te_gemm_operand a, b;
    te_gemm_way way;
    float *alpha; /* {alpha, beta}; NULL: 1, and 0 or 1 */
    int copies_d, copies_bias;
    size_t used;
} emulated;

static void *take(emulated *call, const te_gemm_args *args, size_t bytes)
{
    /* At a query the workspace is not there; where its parts lie decides how aligned they are. */
    char *base = args->workspace != NULL ? args->workspace : (char *)(uintptr_t)0x10000;
    void *piece = base + call->used;
    call->used += (bytes + 255) / 256 * 256;
    return piece;
}

static te_tensor take_matrix(emulated *call, const te_gemm_args *args, te_dtype dtype, int64_t rows,
                             int64_t columns)
{
    void *data = take(call, args, te_dtype_size(dtype, rows * columns));
    return te_matrix(data, dtype, args->d.device, rows, columns);
}

/* The matrix of an operand in high precision, where it is not there. */
static te_operand take_operand(emulated *call, const te_gemm_args *args, const te_operand *operand,
                               int64_t rows, int64_t columns)
{
    te_operand wide = {.mode = TE_SCALING_NONE};
    if (call->way == TE_GEMM_AS_IT_IS ||
        (operand->mode == TE_SCALING_NONE && operand->wide.dtype == TE_DTYPE_F32)) {
        return *operand;
    }
    wide.wide = take_matrix(call, args, call->way == TE_GEMM_MIXED ? TE_DTYPE_F32 : TE_DTYPE_BF16,
                            rows, columns);
    return wide;
}

static emulated lay_out(const te_gemm_args *args)
{
    emulated call = {.wide = *args, .a = te_gemm_a(args), .b = te_gemm_b(args)};
    const te_tensor *d = &args->d, *bias = &args->bias;
    const int64_t m = d->shape[0], n = d->shape[1], k = te_gemm_depth(&call.a, &call.b);
    const int a_turned = args->a_transposed != 0, b_turned = args->b_transposed != 0;
    call.way = te_gemm_way_of(&call.a, &call.b);
    call.wide.a = take_operand(&call, args, &args->a, a_turned ? k : m, a_turned ? m : k);
    call.wide.b = take_operand(&call, args, &args->b, b_turned ? n : k, b_turned ? k : n);
    if (call.way == TE_GEMM_MICRO && call.a.mode == TE_SCALING_NVFP4) {
        call.alpha = take(&call, args, 2 * sizeof(float));
    }
    if (call.way == TE_GEMM_MIXED) call.wide.flags &= ~(uint32_t)TE_GEMM_ALLOW_TF32;
    call.copies_d = !te_gemm_makes_d(args, call.way, call.a.data->dtype);
    if (call.copies_d) {
        call.wide.d = take_matrix(&call, args, TE_DTYPE_F32, d->shape[0], d->shape[1]);
    }
    call.copies_bias = te_tensor_requested(bias) && bias->dtype != call.wide.d.dtype;
    if (call.copies_bias) {
        call.wide.bias =
            te_vector(take(&call, args, te_dtype_size(call.wide.d.dtype, bias->shape[0])),
                      call.wide.d.dtype, bias->device, bias->shape[0]);
    }
    call.wide.workspace = args->workspace == NULL ? NULL : (char *)args->workspace + call.used;
    call.wide.workspace_size =
        args->workspace_size > call.used ? args->workspace_size - call.used : 0;
    return call;
}

static te_status emulated_workspace(void *self, te_context *context, const te_gemm_args *args,
                                    size_t *bytes)
{
    const emulated call = lay_out(args);
    TE_TRY(te_cuda_wide_gemm_workspace(self, context, &call.wide, call.alpha, bytes));
    *bytes += call.used;
    return TE_OK;
}

static te_tensor as_row(const te_tensor *vector)
{
    return te_matrix(vector->data, vector->dtype, vector->device, 1, vector->shape[0]);
}

static te_status copy(void *self, te_context *context, const te_tensor *from, const te_tensor *to,
                      void *stream)
{
    const te_cast_args cast = {.size = sizeof cast, .input = *from, .output = *to};
    return te_cuda_cast(self, context, &cast, stream);
}

/* Writes the numbers that the form stands for: of an operand for fp32. */
static te_status widen(void *self, te_context *context, const te_operand *operand,
                       const te_gemm_operand *form, const te_tensor *output, void *stream)
{
    te_dequantize_args args;
    if (form->mode == TE_SCALING_NONE) {
        return form->data->dtype == TE_DTYPE_F32 ? TE_OK
                                                 : copy(self, context, form->data, output, stream);
    }
    args = te_dequantize_of(operand, form, output);
    return te_cuda_dequantize(self, context, &args, stream);
}

/* Makes the operands of the call in high precision. */
static te_status make_operands(void *self, te_context *context, const te_gemm_args *args,
                               const emulated *call, void *stream)
{
    te_cuda_state *cuda = te_context_state(context);
    const float beta = (args->flags & TE_GEMM_ACCUMULATE) != 0 ? 1.0F : 0.0F;
    const te_tensor *a = &call->wide.a.wide, *b = &call->wide.b.wide;
    if (te_gemm_depth(&call->a, &call->b) > 0 && call->way == TE_GEMM_MIXED) {
        TE_TRY(widen(self, context, &args->a, &call->a, a, stream));
        TE_TRY(widen(self, context, &args->b, &call->b, b, stream));
    } else if (te_gemm_depth(&call->a, &call->b) > 0 && call->way == TE_GEMM_MICRO) {
        const int a_row = call->a.data == &args->a.row, b_row = call->b.data == &args->b.row;
        TE_TRY(te_cuda_micro_dequantize(cuda, &args->a, a_row, 1, a, stream));
        TE_TRY(te_cuda_micro_dequantize(cuda, &args->b, b_row, 1, b, stream));
    }
    if (call->alpha == NULL) return TE_OK;
    return te_cuda_nvfp4_alpha(cuda, &call->a, &call->b, beta, call->alpha, stream);
}

/* d keeps its bits. */
static int adds_nothing(const te_gemm_args *args, const emulated *call)
{
    return (args->flags & TE_GEMM_ACCUMULATE) != 0 && te_gemm_depth(&call->a, &call->b) == 0;
}

static te_status emulated_gemm(void *self, te_context *context, const te_gemm_args *args,
                               void *stream)
{
    emulated call;
    if (args->d.shape[0] == 0 || args->d.shape[1] == 0) return TE_OK;
    call = lay_out(args);
    TE_TRY(te_check_workspace(TE_OP_GEMM, args->workspace, args->workspace_size, call.used));
    TE_TRY(make_operands(self, context, args, &call, stream));
    if (call.copies_bias) {
        const te_tensor from = as_row(&args->bias), to = as_row(&call.wide.bias);
        TE_TRY(copy(self, context, &from, &to, stream));
    }
    if (call.copies_d && (args->flags & TE_GEMM_ACCUMULATE) != 0) {
        TE_TRY(copy(self, context, &args->d, &call.wide.d, stream));
    }
    TE_TRY(te_cuda_wide_gemm(self, context, &call.wide, call.alpha, stream));
    if (call.way == TE_GEMM_MICRO) {
        te_count_emulated(call.a.mode);
    } else if (call.way == TE_GEMM_MIXED || (args->flags & TE_GEMM_MULTIPLIED_OUT) != 0) {
        te_count_mixed();
    }
    if (!call.copies_d || adds_nothing(args, &call)) return TE_OK;
    return copy(self, context, &call.wide.d, &args->d, stream);
}

/* Whether the operands are multiplied out, or the result is cast. */
static int is_emulated(const te_gemm_args *args)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    const te_gemm_way way = te_gemm_way_of(&a, &b);
    return way != TE_GEMM_AS_IT_IS || !te_gemm_makes_d(args, way, a.data->dtype);
}

/* ---- the operator ------------------------------------------------------------------------- */

te_status te_cuda_gemm(void *self, te_context *context, const void *untyped, void *stream)
{
    const te_gemm_args *args = untyped;
    if (is_emulated(args)) return emulated_gemm(self, context, args, stream);
    if ((args->flags & TE_GEMM_MULTIPLIED_OUT) != 0) te_count_mixed();
    return te_cuda_wide_gemm(self, context, args, NULL, stream);
}

te_status te_cuda_gemm_workspace(void *self, te_context *context, const void *untyped,
                                 size_t *bytes)
{
    const te_gemm_args *args = untyped;
    if (is_emulated(args)) return emulated_workspace(self, context, args, bytes);
    return te_cuda_wide_gemm_workspace(self, context, args, NULL, bytes);
}
