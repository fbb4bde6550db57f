/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_algorithm.c - per device: the algorithm of each problem seen.
 *
 * A bucket is a list that only grows at its head, so a lookup takes no lock; entries live as long
 * as the device's state.
 */
#include "cuda/gemm_cublaslt.h"

#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "cuda/api.h"
#include "cuda/gemm_tuner.h"
#include "cuda/ops.h"

/* ---- the device's state ------------------------------------------------------------------- */

static te_status make_state(te_cuda_state *cuda, te_cublaslt **out)
{
    te_status st = TE_OK;
    te_cublaslt *lt = calloc(1, sizeof *lt);
    *out = NULL;
    TE_FAIL_IF(lt == NULL, TE_ERROR_MEMORY, "no memory for the cuBLASLt state");
    lt->cuda = cuda;
    TE_TRY_DONE(te_cublaslt_handle(cuda->context, &lt->handle));
    if (pthread_mutex_init(&lt->lock, NULL) != 0) {
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for a lock");
        goto done;
    }
    *out = lt;
    lt = NULL;
done:
    free(lt);
    return st;
}

te_status te_cublaslt_open(te_cuda_state *cuda, te_cublaslt **out)
{
    struct te_cublaslt **slot = &cuda->cublaslt;
    te_cublaslt *made = NULL, *there = NULL;
    te_cuda_relaxed relaxed;
    te_status st;
    *out = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
    if (*out != NULL) return TE_OK;
    TE_TRY(te_cuda_relax_capture(&relaxed)); /* the library allocates and loads code */
    st = make_state(cuda, &made);
    te_cuda_restore_capture(&relaxed);
    if (st != TE_OK) return st;
    if (__atomic_compare_exchange_n(slot, &there, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        *out = made;
    } else { /* another thread was first */
        te_cublaslt_destroy(made);
        *out = there;
    }
    return TE_OK;
}

void te_cublaslt_destroy(te_cublaslt *lt)
{
    if (lt == NULL) return;
    for (int i = 0; i < TE_GEMM_BUCKETS; ++i) {
        te_gemm_entry *entry = atomic_load_explicit(&lt->buckets[i], memory_order_relaxed);
        while (entry != NULL) {
            te_gemm_entry *next = entry->next;
            free(entry);
            entry = next;
        }
    }
    te_gemm_tuner_destroy(lt->tuner);
    (void)pthread_mutex_destroy(&lt->lock);
    free(lt);
}

/* An address of exactly this alignment. */
static void *aligned_address(uint8_t align_log2)
{
    uintptr_t base = (uintptr_t)1 << 20;
    return (void *)(align_log2 >= TE_GEMM_ALIGNMENT_LOG2 ? base
                                                         : base + ((uintptr_t)1 << align_log2));
}

/* Stand-ins for the pointers, so that the choice depends on the key alone. */
static te_gemm_pointers any_pointers(const te_gemm_key *key)
{
    te_gemm_pointers at = {.a = aligned_address(key->a_align), .b = aligned_address(key->b_align)};
    at.d = aligned_address(key->d_align);
    at.bias = aligned_address(key->bias_align);
    at.aux = aligned_address(key->aux_align);
    at.a_scale = at.b_scale = at.d_scale = aligned_address(TE_GEMM_ALIGNMENT_LOG2);
    at.amax = aligned_address(TE_GEMM_ALIGNMENT_LOG2);
    return at;
}

/* ---- choosing an algorithm ---------------------------------------------------------------- */

static size_t workspace_of(const te_gemm_key *key)
{
    return key->workspace_log2 == 0 ? 0 : (size_t)1 << key->workspace_log2;
}

static te_status describe_preference(const te_gemm_key *key, cublasLtMatmulPreferenceOpaque_t *out)
{
    size_t workspace = workspace_of(key);
    uint32_t a = 1U << key->b_align, b = 1U << key->a_align, d = 1U << key->d_align;
    cublasStatus_t status;
    memset(out, 0, sizeof *out);
    status = te_cublaslt_functions.cublasLtMatmulPreferenceInit_internal(out, sizeof *out);
#define SET(NAME, value)                                                                           \
    if (status == CUBLAS_STATUS_SUCCESS)                                                           \
    status = te_cublaslt_functions.cublasLtMatmulPreferenceSetAttribute(                           \
        out, CUBLASLT_MATMUL_PREF_##NAME, &(value), sizeof(value))
    SET(MAX_WORKSPACE_BYTES, workspace);
    SET(MIN_ALIGNMENT_A_BYTES, a);
    SET(MIN_ALIGNMENT_B_BYTES, b);
    SET(MIN_ALIGNMENT_C_BYTES, d);
    SET(MIN_ALIGNMENT_D_BYTES, d);
#undef SET
    return te_cublaslt_check(status, "cublasLtMatmulPreferenceSetAttribute", __FILE__, __LINE__);
}

static te_status no_algorithm(const te_gemm_key *key, cublasStatus_t status)
{
    int bias = key->bias_dtype != TE_GEMM_NO_DTYPE;
    int aux = key->aux_dtype != TE_GEMM_NO_DTYPE;
    return TE_FAIL(TE_ERROR_UNSUPPORTED,
                   "gemm: cuBLASLt %zu has no algorithm (%s) for m = %lld, n = %lld, k = %lld, "
                   "%s%s x %s%s -> %s, "
                   "row strides %lld, %lld, %lld, %s %s, aux %s, features 0x%x, workspace 2^%d",
                   te_cublaslt_functions.cublasLtGetVersion(),
                   te_cublaslt_functions.cublasLtGetStatusName(status), (long long)key->m,
                   (long long)key->n, (long long)key->k, te_dtype_name((te_dtype)key->a_dtype),
                   key->a_transposed ? " transposed" : "", te_dtype_name((te_dtype)key->b_dtype),
                   key->b_transposed ? " transposed" : "", te_dtype_name((te_dtype)key->d_dtype),
                   (long long)key->a_stride, (long long)key->b_stride, (long long)key->d_stride,
                   (key->features & TE_GEMM_FEATURE_BIAS_GRAD) ? "bias gradient" : "bias",
                   bias ? te_dtype_name((te_dtype)key->bias_dtype) : "none",
                   aux ? te_dtype_name((te_dtype)key->aux_dtype) : "none", (unsigned)key->features,
                   (int)key->workspace_log2);
}

/* What the library's heuristic answers, the best first. */
typedef struct answers {
    cublasLtMatmulHeuristicResult_t found[TE_GEMM_CANDIDATES];
    int count;
    cublasStatus_t status;
} answers;

static te_status ask(const te_cublaslt *lt, te_gemm_descriptor *desc, te_gemm_entry *entry,
                     answers *out)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    const int requested = lt->tuner != NULL ? TE_GEMM_CANDIDATES : 1;
    out->count = 0;
    TE_TRY(te_gemm_describe_matrices(&entry->key, entry));
    TE_TRY(describe_preference(&entry->key, &preference));
    out->status = te_cublaslt_functions.cublasLtMatmulAlgoGetHeuristic(
        lt->handle, (cublasLtMatmulDesc_t)(void *)desc, &entry->a, &entry->b, &entry->c, &entry->d,
        &preference, requested, out->found, &out->count);
    if (out->status == CUBLAS_STATUS_SUCCESS)
        out->status = out->count > 0 ? out->found[0].state : CUBLAS_STATUS_NOT_SUPPORTED;
    if (out->status != CUBLAS_STATUS_SUCCESS) out->count = 0;
    return TE_OK;
}

/* Where the library would split a long k (few tiles, from k = 8192 on), cuBLASLt 13.1 offers no
 * algorithm at all for scales of rows with a bias, though those of shorter sums run there. So it
 * is asked for the same problem with fewer terms, and whether the best answer runs this one. */
static te_status ask_for_shorter_sums(const te_cublaslt *lt, te_gemm_descriptor *desc,
                                      te_gemm_entry *entry, answers *out)
{
    enum { FEWEST = 1024, MULTIPLE = 16 };
    cublasLtMatmulHeuristicResult_t *best = &out->found[0];
    for (int64_t k = entry->key.k / 2; k >= FEWEST; k /= 2) {
        te_gemm_entry shorter = {.key = entry->key};
        shorter.key.k = k / MULTIPLE * MULTIPLE;
        TE_TRY(ask(lt, desc, &shorter, out));
        if (out->count == 0) continue;
        out->status = te_cublaslt_functions.cublasLtMatmulAlgoCheck(
            lt->handle, (cublasLtMatmulDesc_t)(void *)desc, &entry->a, &entry->b, &entry->c,
            &entry->d, &best->algo, best);
        out->count = out->status == CUBLAS_STATUS_SUCCESS &&
                     best->workspaceSize <= workspace_of(&entry->key);
        if (out->count == 1) break;
    }
    return TE_OK;
}

/* Fills an entry. May allocate and load code inside the library. */
static te_status choose(te_cublaslt *lt, const te_gemm_key *key, const te_gemm_pointers *at,
                        void *stream, te_gemm_entry *out)
{
    answers answered;
    te_gemm_descriptor desc;
    te_gemm_pointers any = any_pointers(key);
    cublasStatus_t refusal;
    memset(out, 0, sizeof *out);
    out->key = *key;
    TE_TRY(te_gemm_describe(key, &any, &desc));
    TE_TRY(ask(lt, &desc, out, &answered));
    refusal = answered.status;
    if (answered.count == 0) TE_TRY(ask_for_shorter_sums(lt, &desc, out, &answered));
    if (answered.count == 0) return no_algorithm(key, refusal);
    te_gemm_adopt(out, &answered.found[0].algo, answered.found[0].workspaceSize);
    if (lt->tuner != NULL) te_gemm_tune_entry(lt, out, answered.found, answered.count, at, stream);
    return TE_OK;
}

/* ---- the cache ---------------------------------------------------------------------------- */

static _Atomic(te_gemm_entry *) *bucket_of(te_cublaslt *lt, const te_gemm_key *key)
{
    uint64_t words[TE_GEMM_KEY_WORDS], hash = 0x9e3779b97f4a7c15ULL;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < TE_GEMM_KEY_WORDS; ++i) {
        hash = (hash ^ words[i]) * 0xff51afd7ed558ccdULL;
        hash ^= hash >> 32;
    }
    return &lt->buckets[hash % TE_GEMM_BUCKETS];
}

static te_gemm_entry *look_up(_Atomic(te_gemm_entry *) *bucket, const te_gemm_key *key)
{
    te_gemm_entry *entry = atomic_load_explicit(bucket, memory_order_acquire);
    while (entry != NULL && memcmp(&entry->key, key, sizeof *key) != 0) entry = entry->next;
    return entry;
}

/* With the lock held: chooses, and publishes the entry where it may be kept. */
static te_status insert(te_cublaslt *lt, _Atomic(te_gemm_entry *) *bucket, te_gemm_entry *chosen,
                        te_gemm_entry **out)
{
    te_gemm_entry *entry;
    *out = chosen;
    if (lt->entry_count >= TE_GEMM_MAX_ENTRIES) return TE_OK;
    entry = malloc(sizeof *entry);
    TE_FAIL_IF(entry == NULL, TE_ERROR_MEMORY, "no memory for a GEMM cache entry");
    memcpy(entry, chosen, sizeof *entry);
    entry->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, entry, memory_order_release);
    ++lt->entry_count;
    *out = entry;
    return TE_OK;
}

te_status te_gemm_find(te_cublaslt *lt, const te_gemm_key *key, const te_gemm_pointers *at,
                       void *stream, te_gemm_entry *spare, te_gemm_entry **out)
{
    _Atomic(te_gemm_entry *) *bucket = bucket_of(lt, key);
    te_cuda_relaxed relaxed;
    te_status st;
    *out = look_up(bucket, key);
    if (*out != NULL) return TE_OK;
    TE_TRY(te_cuda_relax_capture(&relaxed));
    (void)pthread_mutex_lock(&lt->lock);
    *out = look_up(bucket, key);
    st = TE_OK;
    if (*out == NULL) {
        st = choose(lt, key, at, stream, spare);
        *out = spare;
        /* A size query under the tuner must not fix the choice that the first run is to time. */
        if (st == TE_OK && (at != NULL || lt->tuner == NULL)) st = insert(lt, bucket, spare, out);
    }
    (void)pthread_mutex_unlock(&lt->lock);
    te_cuda_restore_capture(&relaxed);
    return st;
}

/* ---- tuning ------------------------------------------------------------------------------- */

te_status te_cuda_tune_gemm(void *state, int32_t enabled, const char *cache_file)
{
    te_cuda_state *cuda = state;
    te_cuda_scope scope;
    te_cublaslt *lt = NULL;
    te_gemm_tuner *made = NULL, *old;
    te_status st;
    TE_TRY(te_cuda_enter(cuda, &scope));
    TE_TRY_DONE(te_cublaslt_open(cuda, &lt));
    if (enabled) TE_TRY_DONE(te_gemm_tuner_create(lt, cache_file, &made));
    (void)pthread_mutex_lock(&lt->lock);
    old = lt->tuner;
    lt->tuner = made;
    (void)pthread_mutex_unlock(&lt->lock);
    te_gemm_tuner_destroy(old);
done:
    te_cuda_leave(cuda, &scope);
    return st;
}
