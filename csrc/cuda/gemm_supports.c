/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_supports.c - which matrix products the CUDA backend has.
 */
#include "core/context.h"
#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"
#include "core/tensor.h"
#include "cuda/api.h"
#include "cuda/gemm_cublaslt.h"
#include "cuda/ops.h"

/* Scales of rows and tiles: what Hopper's kernels have. */
static te_status supports_modes(const te_gemm_args *args, int capability)
{
    const int rows = args->a.mode == TE_SCALING_ROW;
    TE_FAIL_IF(capability != 90, TE_ERROR_UNSUPPORTED,
               "gemm: scales of rows or tiles need compute capability 9.0, this device has "
               "%d.%d",
               capability / 10, capability % 10);
    if (rows || args->epilogue == TE_EPILOGUE_NONE) return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "gemm: GELU of operands scaled by tiles");
}

/* Of products that go through scratch: the library makes f32, which is cast to another d. */
static te_status emulated_supports(const te_gemm_args *args, te_gemm_way way, te_dtype a)
{
    const te_dtype made = te_gemm_makes_d(args, way, a) ? args->d.dtype : TE_DTYPE_F32;
    if (!te_tensor_present(&args->aux) || args->aux.dtype == made) return TE_OK;
    return TE_FAIL(TE_ERROR_UNSUPPORTED,
                   "gemm: aux of dtype %s with d %s, which is made in %s: expected aux %s",
                   te_dtype_name(args->aux.dtype), te_dtype_name(args->d.dtype),
                   te_dtype_name(made), te_dtype_name(made));
}

/* From the table that benchmarks/cublaslt_support.c prints. */
te_status te_cuda_gemm_supports(void *self, te_context *context, const void *untyped)
{
    const te_gemm_args *args = untyped;
    const te_gemm_operand of_a = te_gemm_a(args), of_b = te_gemm_b(args);
    const te_gemm_way way = te_gemm_way_of(&of_a, &of_b);
    te_dtype a = of_a.data->dtype, b = of_b.data->dtype, d = args->d.dtype;
    int aux = te_tensor_present(&args->aux), bias = te_tensor_present(&args->bias);
    int capability = te_cuda_compute_capability(te_context_state(context));
    (void)self;
    if (way != TE_GEMM_AS_IT_IS || !te_gemm_makes_d(args, way, a)) {
        return emulated_supports(args, way, a);
    }
    TE_FAIL_IF(te_dtype_is_fp8(a) && capability < 89, TE_ERROR_UNSUPPORTED,
               "gemm: FP8 needs compute capability 8.9, this device has %d.%d", capability / 10,
               capability % 10);
    if (te_scales_own(args->a.mode)) TE_TRY(supports_modes(args, capability));
    TE_FAIL_IF(d == TE_DTYPE_E5M2 && a == TE_DTYPE_E4M3 && b == TE_DTYPE_E4M3, TE_ERROR_UNSUPPORTED,
               "gemm: d = e5m2 from e4m3 x e4m3, expected e4m3 or no FP8");
    if (aux) {
        te_dtype expected = !te_dtype_is_fp8(d) ? d : bias ? args->bias.dtype : TE_DTYPE_BF16;
        int either = te_dtype_is_fp8(d) && !bias && args->aux.dtype == TE_DTYPE_F16;
        TE_FAIL_IF(args->aux.dtype != expected && !either, TE_ERROR_UNSUPPORTED,
                   "gemm: aux of dtype %s with d %s, expected %s", te_dtype_name(args->aux.dtype),
                   te_dtype_name(d), te_dtype_name(expected));
        TE_FAIL_IF(te_dtype_is_fp8(a) && d == TE_DTYPE_F32 && bias, TE_ERROR_UNSUPPORTED,
                   "gemm: aux and bias with FP8 operands and d = f32, expected d f16 or bf16");
    }
    return TE_OK;
}
