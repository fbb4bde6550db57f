/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt_problem.h - one GEMM put to cuBLASLt: the two libraries opened by name, memory on the
 * device, and try_problem, which says whether the library takes it and how long it needs. A failure
 * of anything else ends the program.
 */
#ifndef TE_BENCHMARKS_CUBLASLT_PROBLEM_H
#define TE_BENCHMARKS_CUBLASLT_PROBLEM_H

#include <cublasLt.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the two libraries -------------------------------------------------------------------- */

#define DRIVER(X)                                                                                  \
    X(cuInit)                                                                                      \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuCtxSetCurrent)                                                                             \
    X(cuCtxSynchronize)                                                                            \
    X(cuMemAlloc_v2)                                                                               \
    X(cuMemcpyHtoD_v2)                                                                             \
    X(cuMemcpyDtoH_v2)                                                                             \
    X(cuEventCreate)                                                                               \
    X(cuEventRecord)                                                                               \
    X(cuEventElapsedTime_v2)
#define CUBLASLT(X)                                                                                \
    X(cublasLtCreate)                                                                              \
    X(cublasLtGetVersion)                                                                          \
    X(cublasLtGetStatusName)                                                                       \
    X(cublasLtMatmul)                                                                              \
    X(cublasLtMatmulAlgoGetHeuristic)                                                              \
    X(cublasLtMatmulDescCreate)                                                                    \
    X(cublasLtMatmulDescDestroy)                                                                   \
    X(cublasLtMatmulDescSetAttribute)                                                              \
    X(cublasLtMatrixLayoutCreate)                                                                  \
    X(cublasLtMatrixLayoutDestroy)                                                                 \
    X(cublasLtMatmulPreferenceCreate)                                                              \
    X(cublasLtMatmulPreferenceDestroy)                                                             \
    X(cublasLtMatmulPreferenceSetAttribute)

#define X(name) __typeof__(&name) p_##name;
static struct {
    DRIVER(X)
    CUBLASLT(X)
} api;
#undef X

static void check(int status, const char *what)
{
    if (status == 0) return;
    printf("%s failed: %d\n", what, status);
    exit(1);
}

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    check(found == NULL, name);
    return found;
}

/* ---- one problem -------------------------------------------------------------------------- */

enum { NO_TYPE = -1, F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };

typedef struct problem {
    int64_t m, n, k;
    int a, b, d; /* cudaDataType */
    int a_transposed, b_transposed;
    int bias, aux;       /* cudaDataType or NO_TYPE */
    int gelu, bias_grad; /* bias_grad: sums of a over k, in the dtype `bias` */
    int fast, tf32, accumulate, amax;
    int64_t d_stride; /* elements; 0: n */
    int64_t aux_stride;
    int64_t k_stride; /* row stride of FP8 operands; 0: k */
    int a_offset, b_offset, d_offset, bias_offset, aux_offset; /* bytes */
    int scale_offset; /* bytes; of the scale of a and b (1), of d (2), of the amax (4): which */
    int scale_which;
    uint32_t min_alignment; /* what the heuristic may assume of a, b, d; 0: the library's default */
    int repeats;            /* timed runs; 0: one run, no time */
} problem;

typedef struct outcome {
    cublasStatus_t status;
    int candidates;
    size_t workspace;
    float milliseconds; /* of the first candidate */
    float best;         /* of all candidates */
    double host_us;     /* per call with the queue filling */
} outcome;

static struct {
    cublasLtHandle_t handle;
    CUdeviceptr a, b, c, d, bias, aux, workspace, scale, amax;
} gpu;

#define WORKSPACE ((size_t)32 << 20)
#define BUFFER ((size_t)272 << 20)

static void set_descriptor(cublasLtMatmulDesc_t desc, const problem *p)
{
    cublasLtMatmulDescAttributes_t name;
#define SET(NAME, value)                                                                           \
    (name = CUBLASLT_MATMUL_DESC_##NAME,                                                           \
     api.p_cublasLtMatmulDescSetAttribute(desc, name, &(value), sizeof(value)))
    int32_t op_a = p->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t op_b = p->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int8_t fast = (int8_t)p->fast;
    CUdeviceptr bias = gpu.bias + (CUdeviceptr)p->bias_offset;
    CUdeviceptr aux = gpu.aux + (CUdeviceptr)p->aux_offset;
    int64_t aux_ld = p->aux_stride != 0 ? p->aux_stride : p->n;
    int fp8 = p->a == E4M3 || p->a == E5M2;
    SET(TRANSA, op_a);
    SET(TRANSB, op_b);
    CUdeviceptr scale_ab = gpu.scale + (CUdeviceptr)(p->scale_which & 1 ? p->scale_offset : 0);
    CUdeviceptr scale_d = gpu.scale + (CUdeviceptr)(p->scale_which & 2 ? p->scale_offset : 0);
    CUdeviceptr amax = gpu.amax + (CUdeviceptr)(p->scale_which & 4 ? p->scale_offset : 0);
    if (fp8) {
        SET(FAST_ACCUM, fast);
        SET(A_SCALE_POINTER, scale_ab);
        SET(B_SCALE_POINTER, scale_ab);
    }
    if (p->d == E4M3 || p->d == E5M2) SET(D_SCALE_POINTER, scale_d);
    if (p->amax) SET(AMAX_D_POINTER, amax);
    if (p->bias_grad) {
        epilogue = CUBLASLT_EPILOGUE_BGRADB;
    } else if (p->gelu && p->aux != NO_TYPE) {
        epilogue =
            p->bias != NO_TYPE ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    } else if (p->gelu) {
        epilogue = p->bias != NO_TYPE ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    } else if (p->bias != NO_TYPE) {
        epilogue = CUBLASLT_EPILOGUE_BIAS;
    }
    SET(EPILOGUE, epilogue);
    if (p->bias != NO_TYPE) {
        SET(BIAS_POINTER, bias);
        SET(BIAS_DATA_TYPE, p->bias);
    }
    if (p->aux != NO_TYPE) {
        SET(EPILOGUE_AUX_POINTER, aux);
        SET(EPILOGUE_AUX_LD, aux_ld);
        SET(EPILOGUE_AUX_DATA_TYPE, p->aux);
    }
#undef SET
}

/* The cuBLASLt objects of one problem: column-major, so its A is our b and its B is our a. */
typedef struct objects {
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulPreference_t preference;
} objects;

static cublasLtMatrixLayout_t make_layout(int type, int64_t rows, int64_t columns, int64_t ld)
{
    cublasLtMatrixLayout_t layout;
    check((int)api.p_cublasLtMatrixLayoutCreate(&layout, (cudaDataType)type, (uint64_t)rows,
                                                (uint64_t)columns, ld),
          "layout");
    return layout;
}

static objects make_objects(const problem *p)
{
    objects o;
    size_t limit = WORKSPACE;
    int64_t k_stride = p->k_stride != 0 ? p->k_stride : p->k;
    int64_t d_stride = p->d_stride != 0 ? p->d_stride : p->n;
    int fp8_output = p->d == E4M3 || p->d == E5M2;
    int c = !fp8_output ? p->d : p->bias == F16 ? F16 : BF16;
    cublasComputeType_t compute = p->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    check((int)api.p_cublasLtMatmulDescCreate(&o.desc, compute, CUDA_R_32F), "descriptor");
    set_descriptor(o.desc, p);
    o.a = p->b_transposed ? make_layout(p->b, p->k, p->n, k_stride)
                          : make_layout(p->b, p->n, p->k, p->n);
    o.b = p->a_transposed ? make_layout(p->a, p->m, p->k, p->m)
                          : make_layout(p->a, p->k, p->m, k_stride);
    o.c = make_layout(c, p->n, p->m, d_stride);
    o.d = make_layout(p->d, p->n, p->m, d_stride);
    check((int)api.p_cublasLtMatmulPreferenceCreate(&o.preference), "preference");
    api.p_cublasLtMatmulPreferenceSetAttribute(
        o.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof limit);
    for (int which = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
         p->min_alignment != 0 && which <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; ++which)
        api.p_cublasLtMatmulPreferenceSetAttribute(o.preference,
                                                   (cublasLtMatmulPreferenceAttributes_t)which,
                                                   &p->min_alignment, sizeof p->min_alignment);
    return o;
}

static void destroy_objects(objects *o)
{
    api.p_cublasLtMatmulPreferenceDestroy(o->preference);
    api.p_cublasLtMatrixLayoutDestroy(o->d);
    api.p_cublasLtMatrixLayoutDestroy(o->c);
    api.p_cublasLtMatrixLayoutDestroy(o->b);
    api.p_cublasLtMatrixLayoutDestroy(o->a);
    api.p_cublasLtMatmulDescDestroy(o->desc);
}

static void *pointer(CUdeviceptr base, int offset)
{
    return (void *)(uintptr_t)(base + (CUdeviceptr)offset);
}

static cublasStatus_t matmul(const objects *o, const problem *p, const cublasLtMatmulAlgo_t *algo)
{
    float one = 1.0F, beta = p->accumulate ? 1.0F : 0.0F;
    void *d = pointer(gpu.d, p->d_offset);
    void *c = p->d == E4M3 || p->d == E5M2 ? pointer(gpu.c, 0) : d;
    return api.p_cublasLtMatmul(gpu.handle, o->desc, &one, pointer(gpu.b, p->b_offset), o->a,
                                pointer(gpu.a, p->a_offset), o->b, &beta, c, o->c, d, o->d, algo,
                                pointer(gpu.workspace, 0), WORKSPACE, NULL);
}

static double now_us(void)
{
    struct timespec now;
    (void)timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

/* Milliseconds of one run, the best of three batches. */
static float time_algorithm(const objects *o, const problem *p, const cublasLtMatmulAlgo_t *algo,
                            double *host_us)
{
    static CUevent start, stop;
    float ms = 0.0F, best = 1e30F;
    if (start == NULL) {
        check((int)api.p_cuEventCreate(&start, 0), "event");
        check((int)api.p_cuEventCreate(&stop, 0), "event");
    }
    for (int round = 0; round < 3; ++round) {
        (void)matmul(o, p, algo);
        check((int)api.p_cuEventRecord(start, NULL), "record");
        double began = now_us();
        for (int i = 0; i < p->repeats; ++i) (void)matmul(o, p, algo);
        *host_us = (now_us() - began) / p->repeats;
        check((int)api.p_cuEventRecord(stop, NULL), "record");
        check((int)api.p_cuCtxSynchronize(), "synchronize");
        check((int)api.p_cuEventElapsedTime_v2(&ms, start, stop), "elapsed");
        if (ms < best) best = ms;
    }
    return best / (float)p->repeats;
}

static outcome try_problem(const problem *p)
{
    outcome out = {.status = CUBLAS_STATUS_SUCCESS};
    cublasLtMatmulHeuristicResult_t found[8];
    objects o = make_objects(p);
    out.status = api.p_cublasLtMatmulAlgoGetHeuristic(gpu.handle, o.desc, o.a, o.b, o.c, o.d,
                                                      o.preference, 8, found, &out.candidates);
    if (out.status == CUBLAS_STATUS_SUCCESS && out.candidates == 0)
        out.status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (out.status == CUBLAS_STATUS_SUCCESS) {
        out.workspace = found[0].workspaceSize;
        out.status = matmul(&o, p, &found[0].algo);
        check((int)api.p_cuCtxSynchronize(), "synchronize");
    }
    for (int i = 0; out.status == CUBLAS_STATUS_SUCCESS && p->repeats > 0 && i < out.candidates;
         ++i) {
        double host_us;
        float ms = time_algorithm(&o, p, &found[i].algo, &host_us);
        if (i == 0) out.milliseconds = out.best = ms;
        if (i == 0) out.host_us = host_us;
        if (ms < out.best) out.best = ms;
    }
    destroy_objects(&o);
    return out;
}

/* ---- the device --------------------------------------------------------------------------- */

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr memory = 0;
    check((int)api.p_cuMemAlloc_v2(&memory, bytes), "cuMemAlloc");
    return memory;
}

/* Random bytes with the second-highest bit clear: of magnitude below 2 in every dtype, never NaN.
 */
static void fill_random(CUdeviceptr to, size_t bytes)
{
    enum { PIECE = 1 << 20 };
    static uint8_t host[PIECE];
    uint64_t state = 88172645463325252ULL + to;
    for (int i = 0; i < PIECE; ++i) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        host[i] = (uint8_t)((state >> 32) & 0xbf);
    }
    for (size_t at = 0; at < bytes; at += PIECE)
        check((int)api.p_cuMemcpyHtoD_v2(to + at, host, bytes - at < PIECE ? bytes - at : PIECE),
              "fill");
}

static void open_libraries(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *lt = dlopen("libcublasLt.so.13", RTLD_NOW);
    if (lt == NULL) lt = dlopen("libcublasLt.so.12", RTLD_NOW);
    if (library == NULL || lt == NULL) {
        printf("%s not found\n", library == NULL ? "libcuda.so.1" : "libcublasLt.so");
        exit(77);
    }
#define X(name) *(void **)&api.p_##name = symbol(library, #name);
    DRIVER(X)
#undef X
#define X(name) *(void **)&api.p_##name = symbol(lt, #name);
    CUBLASLT(X)
#undef X
}

/* Makes the device current, and everything that a problem needs on it. */
static void open_gpu(void)
{
    CUcontext context;
    float one = 1.0F;
    open_libraries();
    check((int)api.p_cuInit(0), "cuInit");
    check((int)api.p_cuDevicePrimaryCtxRetain(&context, 0), "context");
    check((int)api.p_cuCtxSetCurrent(context), "context");
    check((int)api.p_cublasLtCreate(&gpu.handle), "cublasLtCreate");
    CUdeviceptr *buffers[] = {&gpu.a, &gpu.b, &gpu.c, &gpu.d, &gpu.bias, &gpu.aux};
    for (int i = 0; i < 6; ++i) {
        *buffers[i] = allocate(BUFFER);
        fill_random(*buffers[i], BUFFER);
    }
    gpu.workspace = allocate(WORKSPACE);
    gpu.scale = allocate(256);
    gpu.amax = allocate(256);
    for (CUdeviceptr i = 0; i < 64; ++i)
        check((int)api.p_cuMemcpyHtoD_v2(gpu.scale + i * sizeof one, &one, sizeof one), "copy");
}

#endif
