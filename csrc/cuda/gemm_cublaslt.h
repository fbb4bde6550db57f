/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_cublaslt.h - cuBLASLt behind the GEMM operator: what one matmul is (key), the algorithm
 * chosen for it (cached per device), and its launch. gemm_cublaslt.c makes keys from te_gemm_args;
 * gemm_algorithm.c owns the cache; gemm_tuner.c times candidates where that is switched on;
 * gemm_matmul.c describes one matmul to the library and launches it.
 *
 * Row-major d[m, n] = a[m, k] b[k, n] is what cuBLASLt calls D = A B with D [n, m] column-major,
 * its A being our b and its B our a. The names here are ours.
 */
#ifndef TE_CUDA_GEMM_CUBLASLT_H
#define TE_CUDA_GEMM_CUBLASLT_H

#include <pthread.h>
#include <stdatomic.h>

#include "core/operand.h"
#include "cuda/cublaslt_library.h"
#include "cuda/driver.h"

/* Largest workspace a matmul may ask for. */
#define TE_GEMM_WORKSPACE_LOG2 25
/* Assumed alignment of everything that is not named by a pointer yet: the packed buffers' and
 * torch's. */
#define TE_GEMM_ALIGNMENT_LOG2 8

enum { /* te_gemm_key.features */
       TE_GEMM_FEATURE_GELU = 1,
       TE_GEMM_FEATURE_BIAS_GRAD = 2, /* the bias pointer receives the sums of a over k */
       TE_GEMM_FEATURE_ACCUMULATE = 4,
       TE_GEMM_FEATURE_FAST = 8, /* fast FP8 accumulation */
       TE_GEMM_FEATURE_TF32 = 16,
       TE_GEMM_FEATURE_AMAX = 32,
       TE_GEMM_FEATURE_ALPHA = 64 /* alpha and beta are on the device */
};

#define TE_GEMM_NO_DTYPE 0xff

/* Everything the choice of an algorithm depends on. Zero-filled first: compared and hashed as
 * words. */
typedef struct te_gemm_key {
    int64_t m, n, k;
    int64_t a_stride, b_stride, d_stride, aux_stride; /* elements from row to row */
    uint8_t a_dtype, b_dtype, c_dtype, d_dtype; /* te_dtype; c differs from d for FP8 output */
    uint8_t bias_dtype, aux_dtype;              /* or TE_GEMM_NO_DTYPE */
    uint8_t a_transposed, b_transposed;
    uint8_t features;
    uint8_t a_align, b_align, d_align, bias_align, aux_align; /* log2 of bytes */
    uint8_t workspace_log2;                                   /* limit; 0: none at all */
    uint8_t modes; /* te_scaling_mode of a, and 16 times that of b */
} te_gemm_key;

_Static_assert(TE_SCALING_COUNT <= 16, "two scaling modes in a byte");

#define TE_GEMM_KEY_WORDS (sizeof(te_gemm_key) / sizeof(uint64_t))

/* What changes from call to call. */
typedef struct te_gemm_pointers {
    const void *a, *b;
    void *d, *bias, *aux;
    const float *a_scale, *b_scale, *d_scale;
    float *amax;        /* overwritten with max|d|, before its scale */
    const float *alpha; /* {alpha, beta} on the device; NULL: 1, and 0 or 1 */
    void *workspace;
    size_t workspace_size;
} te_gemm_pointers;

/* Immutable once published, but for `warm`. */
typedef struct te_gemm_entry {
    te_gemm_key key;
    cublasLtMatrixLayoutOpaque_t a, b, c, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;           /* bytes that algo needs, in multiples of 256 */
    atomic_int warm;            /* launched before: its kernel is loaded */
    struct te_gemm_entry *next; /* in its bucket */
} te_gemm_entry;

/* The algorithm of an entry from now on. */
static inline void te_gemm_adopt(te_gemm_entry *entry, const cublasLtMatmulAlgo_t *algo,
                                 size_t workspace)
{
    entry->algo = *algo;
    entry->workspace = (workspace + 255) / 256 * 256;
}

#define TE_GEMM_BUCKETS 4096
/* Past this many problems the heuristic is asked on every call rather than memory taken without
 * end. */
#define TE_GEMM_MAX_ENTRIES 65536

/* State of one device. */
typedef struct te_cublaslt {
    cublasLtHandle_t handle;
    te_cuda_state *cuda;
    pthread_mutex_t lock; /* guards insertion; readers take none */
    int entry_count;
    struct te_gemm_tuner *tuner; /* NULL: off */
    _Atomic(te_gemm_entry *) buckets[TE_GEMM_BUCKETS];
} te_cublaslt;

/* The device's state, made at first use. Between te_cuda_enter and te_cuda_leave. */
te_status te_cublaslt_open(te_cuda_state *cuda, te_cublaslt **out);
/* NULL is legal; no call may be in flight. */
void te_cublaslt_destroy(te_cublaslt *lt);

/* A descriptor of the key's matmul with this call's pointers (for the heuristic only their
 * alignment counts). Space for later versions of the library. */
typedef struct te_gemm_descriptor {
    uint64_t data[64];
} te_gemm_descriptor;
te_status te_gemm_describe(const te_gemm_key *key, const te_gemm_pointers *at,
                           te_gemm_descriptor *out);
/* Fills the layouts of an entry. */
te_status te_gemm_describe_matrices(const te_gemm_key *key, te_gemm_entry *out);

/* Whether the library makes d of what it multiplies for such operands: f32 of fp32 for mixed ones,
 * f32 or bf16 of bf16 for groups, f32 or their own dtype of others in high precision. */
static inline int te_gemm_makes_d(const te_gemm_args *args, te_gemm_way way, te_dtype a)
{
    const te_dtype d = args->d.dtype;
    if (d == TE_DTYPE_F32) return 1;
    if (way != TE_GEMM_AS_IT_IS) return way == TE_GEMM_MICRO && d == TE_DTYPE_BF16;
    return te_dtype_is_fp8(a) || d == a;
}

/* The GEMM of operands in high precision, its product times an alpha on the device ({alpha, beta};
 * NULL: 1). */
te_status te_cuda_wide_gemm(void *self, te_context *context, const te_gemm_args *args,
                            const float *alpha, void *stream);
te_status te_cuda_wide_gemm_workspace(void *self, te_context *context, const te_gemm_args *args,
                                      const float *alpha, size_t *bytes);

/* The entry of a key: from the cache, else made by the heuristic (and the tuner). `spare` is what
 * *out points to when the cache is full. UNSUPPORTED with the whole problem in the text where the
 * library has no algorithm. `at` NULL: only sizes are asked. */
te_status te_gemm_find(te_cublaslt *lt, const te_gemm_key *key, const te_gemm_pointers *at,
                       void *stream, te_gemm_entry *spare, te_gemm_entry **out);

/* Hands one matmul to the library and counts it. */
te_status te_gemm_launch(const te_cublaslt *lt, te_gemm_entry *entry, const te_gemm_pointers *at,
                         void *stream);
/* The bare call, with an algorithm of the caller's choice. */
cublasStatus_t te_gemm_matmul(const te_cublaslt *lt, const te_gemm_entry *entry,
                              const cublasLtMatmulAlgo_t *algo, const te_gemm_pointers *at,
                              te_gemm_descriptor *desc, void *stream);

#endif
