/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_emulated.c - the GEMM of MXFP8 and NVFP4 operands, which no device here multiplies as they
 * are: they are multiplied out to bf16 in the workspace, and cuBLASLt multiplies those.
 *
 * bf16 holds both exactly: an E4M3 or E5M2 number times a power of two, unless its magnitude is
 * below 2^-126, where bf16 has multiples of 2^-133; and E2M1 times E4M3. The factor of NVFP4's
 * amaxes multiplies the product, as alpha, by pointer. bf16 operands give bf16 or f32: an f16
 * result is cast from f32. The bias is added in the dtype of the result.
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

/* The matrix of an operand in high precision. */
static te_operand take_operand(emulated *call, const te_gemm_args *args, const te_operand *operand,
                               const te_gemm_operand *form)
{
    const int turned = form->mode == TE_SCALING_NVFP4 && form->data == &operand->column;
    te_operand wide = {.mode = TE_SCALING_NONE};
    wide.wide = take_matrix(call, args, TE_DTYPE_BF16, te_gemm_extent(form, turned),
                            te_gemm_extent(form, !turned));
    return wide;
}

static emulated lay_out(const te_gemm_args *args)
{
    emulated call = {.wide = *args, .a = te_gemm_a(args), .b = te_gemm_b(args)};
    const te_tensor *d = &args->d, *bias = &args->bias;
    call.wide.a = take_operand(&call, args, &args->a, &call.a);
    call.wide.b = take_operand(&call, args, &args->b, &call.b);
    if (call.a.mode == TE_SCALING_NVFP4) call.alpha = take(&call, args, 2 * sizeof(float));
    call.copies_d = d->dtype == TE_DTYPE_F16;
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

static te_status emulated_gemm(void *self, te_context *context, const te_gemm_args *args,
                               void *stream)
{
    const emulated call = lay_out(args);
    te_cuda_state *cuda = te_context_state(context);
    const float beta = (args->flags & TE_GEMM_ACCUMULATE) != 0 ? 1.0F : 0.0F;
    if (args->d.shape[0] == 0 || args->d.shape[1] == 0) return TE_OK;
    TE_TRY(te_check_workspace(TE_OP_GEMM, args->workspace, args->workspace_size, call.used));
    if (te_gemm_extent(&call.a, !call.a.transposed) > 0) {
        TE_TRY(te_cuda_micro_dequantize(cuda, &args->a, call.a.data == &args->a.row, 1,
                                        &call.wide.a.wide, stream));
        TE_TRY(te_cuda_micro_dequantize(cuda, &args->b, call.b.data == &args->b.row, 1,
                                        &call.wide.b.wide, stream));
    }
    if (call.alpha != NULL) {
        TE_TRY(te_cuda_nvfp4_alpha(cuda, call.a.amax, call.b.amax, beta, call.alpha, stream));
    }
    if (call.copies_bias) {
        te_cast_args cast = {
            .size = sizeof cast, .input = as_row(&args->bias), .output = as_row(&call.wide.bias)};
        TE_TRY(te_cuda_cast(self, context, &cast, stream));
    }
    TE_TRY(te_cuda_wide_gemm(self, context, &call.wide, call.alpha, stream));
    te_count_emulated(call.a.mode);
    if (call.copies_d) {
        te_cast_args cast = {.size = sizeof cast, .input = call.wide.d, .output = args->d};
        TE_TRY(te_cuda_cast(self, context, &cast, stream));
    }
    return TE_OK;
}

/* ---- the operator ------------------------------------------------------------------------- */

te_status te_cuda_gemm(void *self, te_context *context, const void *untyped, void *stream)
{
    const te_gemm_args *args = untyped;
    if (te_scales_micro(args->a.mode)) return emulated_gemm(self, context, args, stream);
    return te_cuda_wide_gemm(self, context, args, NULL, stream);
}

te_status te_cuda_gemm_workspace(void *self, te_context *context, const void *untyped,
                                 size_t *bytes)
{
    const te_gemm_args *args = untyped;
    if (te_scales_micro(args->a.mode)) {
        return emulated_workspace(self, context, args, bytes);
    }
    return te_cuda_wide_gemm_workspace(self, context, args, NULL, bytes);
}
