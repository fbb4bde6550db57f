/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_matmul.c - the cuBLASLt descriptors of one matmul, and its launch. Descriptors are rebuilt
 * on the stack for each call (0.1 us): they hold the pointers of the call, and sharing them would
 * need a lock.
 */
#include <string.h>

#include "core/counters.h"
#include "core/scales.h"
#include "core/status.h"
#include "cuda/gemm_cublaslt.h"

static cudaDataType_t cuda_type(uint8_t dtype)
{
    static const cudaDataType_t types[TE_DTYPE_COUNT] = {
#define X(NAME, name, bits, dlpack, cuda, max) [TE_DTYPE_##NAME] = (cudaDataType_t)(cuda),
        TE_DTYPES(X)
#undef X
    };
    return types[dtype];
}

/* ---- describing a problem ----------------------------------------------------------------- */

static cublasLtEpilogue_t epilogue_of(const te_gemm_key *key)
{
    int bias = key->bias_dtype != TE_GEMM_NO_DTYPE;
    if (key->features & TE_GEMM_FEATURE_BIAS_GRAD) return CUBLASLT_EPILOGUE_BGRADB;
    if (!(key->features & TE_GEMM_FEATURE_GELU))
        return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    if (key->aux_dtype != TE_GEMM_NO_DTYPE)
        return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

static int32_t scale_mode_of(int mode)
{
    static const int32_t modes[TE_SCALING_COUNT] = {
        [TE_SCALING_TENSOR] = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        [TE_SCALING_ROW] = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
        [TE_SCALING_BLOCK_1D] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        [TE_SCALING_BLOCK_2D] = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F};
    return modes[mode];
}

te_status te_gemm_describe(const te_gemm_key *key, const te_gemm_pointers *at,
                           te_gemm_descriptor *out)
{
    cublasLtMatmulDesc_t desc = (cublasLtMatmulDesc_t)(void *)out;
    int tf32 = key->features & TE_GEMM_FEATURE_TF32;
    int32_t op_a = key->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t op_b = key->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint32_t epilogue = (uint32_t)epilogue_of(key);
    cublasStatus_t status;
    memset(out, 0, sizeof *out);
    status = te_cublaslt_functions.cublasLtMatmulDescInit_internal(
        desc, sizeof *out, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
#define SET(NAME, value)                                                                           \
    if (status == CUBLAS_STATUS_SUCCESS)                                                           \
    status = te_cublaslt_functions.cublasLtMatmulDescSetAttribute(                                 \
        desc, CUBLASLT_MATMUL_DESC_##NAME, &(value), sizeof(value))
    SET(TRANSA, op_a);
    SET(TRANSB, op_b);
    SET(EPILOGUE, epilogue);
    if (key->features & TE_GEMM_FEATURE_ALPHA) {
        int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
        SET(POINTER_MODE, mode);
    }
    if (te_dtype_is_fp8((te_dtype)key->a_dtype)) {
        int8_t fast = (key->features & TE_GEMM_FEATURE_FAST) != 0;
        if (te_scales_own((te_scaling_mode)(key->modes & 15))) {
            int32_t a_mode = scale_mode_of(key->modes >> 4),
                    b_mode = scale_mode_of(key->modes & 15);
            SET(A_SCALE_MODE, a_mode);
            SET(B_SCALE_MODE, b_mode);
        }
        SET(FAST_ACCUM, fast);
        SET(A_SCALE_POINTER, at->b_scale);
        SET(B_SCALE_POINTER, at->a_scale);
        if (te_dtype_is_fp8((te_dtype)key->d_dtype)) SET(D_SCALE_POINTER, at->d_scale);
        if (key->features & TE_GEMM_FEATURE_AMAX) SET(AMAX_D_POINTER, at->amax);
    }
    if (key->bias_dtype != TE_GEMM_NO_DTYPE) {
        int32_t type = cuda_type(key->bias_dtype);
        SET(BIAS_POINTER, at->bias);
        SET(BIAS_DATA_TYPE, type);
    }
    if (key->aux_dtype != TE_GEMM_NO_DTYPE) {
        int32_t type = cuda_type(key->aux_dtype);
        SET(EPILOGUE_AUX_POINTER, at->aux);
        SET(EPILOGUE_AUX_LD, key->aux_stride);
        SET(EPILOGUE_AUX_DATA_TYPE, type);
    }
#undef SET
    return te_cublaslt_check(status, "cublasLtMatmulDescSetAttribute", __FILE__, __LINE__);
}

/* Column-major: a row-major [rows, columns] matrix is columns x rows. */
static te_status describe_matrix(cublasLtMatrixLayoutOpaque_t *out, uint8_t dtype, int64_t rows,
                                 int64_t columns, int64_t stride)
{
    return TE_CUBLASLT(cublasLtMatrixLayoutInit_internal, out, sizeof *out, cuda_type(dtype),
                       (uint64_t)columns, (uint64_t)rows, stride);
}

te_status te_gemm_describe_matrices(const te_gemm_key *key, te_gemm_entry *out)
{
    int64_t m = key->m, n = key->n, k = key->k;
    TE_TRY(describe_matrix(&out->a, key->b_dtype, key->b_transposed ? n : k,
                           key->b_transposed ? k : n, key->b_stride));
    TE_TRY(describe_matrix(&out->b, key->a_dtype, key->a_transposed ? k : m,
                           key->a_transposed ? m : k, key->a_stride));
    TE_TRY(describe_matrix(&out->c, key->c_dtype, m, n, key->d_stride));
    return describe_matrix(&out->d, key->d_dtype, m, n, key->d_stride);
}

/* ---- launching ---------------------------------------------------------------------------- */

cublasStatus_t te_gemm_matmul(const te_cublaslt *lt, const te_gemm_entry *entry,
                              const cublasLtMatmulAlgo_t *algo, const te_gemm_pointers *at,
                              te_gemm_descriptor *desc, void *stream)
{
    static const float one = 1.0F, zero = 0.0F;
    const int given = (entry->key.features & TE_GEMM_FEATURE_ALPHA) != 0;
    const float *alpha = given ? at->alpha : &one;
    const float *beta = given                                                ? at->alpha + 1
                        : (entry->key.features & TE_GEMM_FEATURE_ACCUMULATE) ? &one
                                                                             : &zero;
    const void *c =
        entry->key.c_dtype == entry->key.d_dtype ? at->d : NULL; /* never read when beta = 0 */
    return te_cublaslt_functions.cublasLtMatmul(
        lt->handle, (cublasLtMatmulDesc_t)(void *)desc, alpha, at->b,
        (cublasLtMatrixLayout_t)&entry->a, at->a, (cublasLtMatrixLayout_t)&entry->b, beta, c,
        (cublasLtMatrixLayout_t)&entry->c, at->d, (cublasLtMatrixLayout_t)&entry->d, algo,
        at->workspace_size > 0 ? at->workspace : NULL, at->workspace_size, (cudaStream_t)stream);
}

te_status te_gemm_launch(const te_cublaslt *lt, te_gemm_entry *entry, const te_gemm_pointers *at,
                         void *stream)
{
    te_gemm_descriptor desc;
    te_cuda_relaxed relaxed;
    cublasStatus_t status;
    int cold = atomic_load_explicit(&entry->warm, memory_order_relaxed) == 0;
    TE_TRY(te_gemm_describe(&entry->key, at, &desc));
    if (cold) TE_TRY(te_cuda_relax_capture(&relaxed)); /* the first launch of a kernel loads it */
    status = te_gemm_matmul(lt, entry, &entry->algo, at, &desc, stream);
    if (cold) te_cuda_restore_capture(&relaxed);
    TE_TRY(te_cublaslt_check(status, "cublasLtMatmul", __FILE__, __LINE__));
    if (cold) atomic_store_explicit(&entry->warm, 1, memory_order_relaxed);
    te_count_gemm(TE_DEVICE_CUDA, (te_dtype)entry->key.a_dtype, (te_dtype)entry->key.b_dtype);
    te_count_scaling(TE_DEVICE_CUDA, (te_scaling_mode)(entry->key.modes & 15),
                     (te_scaling_mode)(entry->key.modes >> 4));
    return TE_OK;
}
