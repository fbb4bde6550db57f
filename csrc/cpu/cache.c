/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c - keys and values of tokens, into the pages of a cache and out of them.
 *
 * What only the CPU can see is checked before anything is written: positions within a sequence's
 * pages, and pages that there are.
 */
#include <string.h>

#include "core/status.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"

#define LL(value) ((long long)(value))

typedef struct cache_job {
    const char *op;
    const te_cache *cache;
    const te_tensor *key, *value; /* of tokens: [batch, tokens, heads, channels]; packed: without
                                     the first */
    const int32_t *starts, *counts, *cu_seqlens; /* NULL: 0; all tokens; not packed */
    int64_t batch, tokens;
    int64_t page_size, capacity; /* of a page; of a sequence */
} cache_job;

/* Keys or values of all heads of a token; 0 without `from`. */
static void copy_heads(const te_tensor *to, const int64_t to_at[2], const te_tensor *from,
                       const int64_t from_at[2])
{
    const size_t bytes = (size_t)to->shape[to->ndim - 1] * te_dtype_bytes(to->dtype);
    const te_cpu_tensor4 target = te_cpu_tensor4_of(to);
    const te_cpu_tensor4 source = te_cpu_tensor4_of(from == NULL ? to : from);
    for (int64_t h = 0; h < to->shape[to->ndim - 2] && bytes > 0; h++) {
        unsigned char *head = te_cpu_at4(&target, to_at[0], to_at[1], h);
        if (from == NULL) {
            memset(head, 0, bytes);
        } else {
            memcpy(head, te_cpu_at4(&source, from_at[0], from_at[1], h), bytes);
        }
    }
}

static cache_job describe(const char *op, const te_cache *cache, const te_tensor *key,
                          const te_tensor *value, int64_t batch)
{
    const int paged = te_tensor_requested(&cache->page_table);
    cache_job job = {.op = op,
                     .cache = cache,
                     .key = key,
                     .value = value,
                     .batch = batch,
                     .tokens = key->shape[key->ndim - 3],
                     .page_size = cache->key.shape[1]};
    job.capacity = job.page_size * (paged ? cache->page_table.shape[1] : 1);
    return job;
}

/* Tokens of sequence i: [*first, *first + count) of those given. */
static int64_t tokens_of(const cache_job *job, int64_t i, int64_t *first)
{
    int64_t end = job->tokens;
    *first = 0;
    if (job->cu_seqlens != NULL) {
        *first = job->cu_seqlens[i];
        end = job->cu_seqlens[i + 1];
    }
    return job->counts == NULL ? end - *first : job->counts[i];
}

static int64_t page_of(const cache_job *job, int64_t i, int64_t position)
{
    const te_tensor *table = &job->cache->page_table;
    if (!te_tensor_requested(table)) return i;
    return ((const int32_t *)table->data)[i * table->strides[0] + position / job->page_size];
}

static te_status check_pages(const cache_job *job, int64_t i, int64_t start, int64_t end)
{
    for (int64_t p = start; p < end; p += job->page_size - p % job->page_size) {
        const int64_t page = page_of(job, i, p);
        if (page >= 0 && page < job->cache->key.shape[0]) continue;
        return TE_FAIL(TE_ERROR_INVALID,
                       "%s: page_table: page %lld of token %lld of sequence %lld: "
                       "there are %lld",
                       job->op, LL(page), LL(p), LL(i), LL(job->cache->key.shape[0]));
    }
    return TE_OK;
}

static te_status check_job(const cache_job *job)
{
    for (int64_t i = 0; i < job->batch; i++) {
        int64_t first, count = tokens_of(job, i, &first);
        int64_t start = job->starts == NULL ? 0 : job->starts[i];
        TE_FAIL_IF(count < 0 || first < 0 || first + count > job->tokens, TE_ERROR_INVALID,
                   "%s: sequence %lld has the tokens [%lld, %lld) of %lld", job->op, LL(i),
                   LL(first), LL(first + count), LL(job->tokens));
        if (count == 0) continue;
        TE_FAIL_IF(start < 0 || start + count > job->capacity, TE_ERROR_INVALID,
                   "%s: starts: sequence %lld gets the tokens %lld to %lld, and has room "
                   "for %lld",
                   job->op, LL(i), LL(start), LL(start + count - 1), LL(job->capacity));
        TE_TRY(check_pages(job, i, start, start + count));
    }
    return TE_OK;
}

/* What is done with token j of sequence i. */
typedef void (*each_token)(const cache_job *job, int64_t i, int64_t j);

static te_status run_tokens(const cache_job *job, each_token run)
{
    int threads = te_cpu_threads(job->batch * job->tokens,
                                 job->cache->key.shape[2] * job->cache->key.shape[3]);
    (void)threads;
    TE_TRY(check_job(job));
#pragma omp parallel for num_threads(threads)
    for (int64_t token = 0; token < job->batch * job->tokens; token++) {
        run(job, token / job->tokens, token % job->tokens);
    }
    return TE_OK;
}

static void append_token(const cache_job *job, int64_t i, int64_t j)
{
    int64_t first, position = job->starts[i] + j;
    if (j >= tokens_of(job, i, &first)) return;
    const int64_t from[] = {job->cu_seqlens == NULL ? i : 0, first + j};
    const int64_t to[] = {page_of(job, i, position), position % job->page_size};
    copy_heads(&job->cache->key, to, job->key, from);
    copy_heads(&job->cache->value, to, job->value, from);
}

te_status te_cpu_cache_append(const te_cache_append_args *args)
{
    cache_job job =
        describe("cache_append", &args->cache, &args->key, &args->value, args->starts.shape[0]);
    job.starts = args->starts.data;
    job.counts = args->counts.data;
    job.cu_seqlens = args->cu_seqlens.data;
    return run_tokens(&job, append_token);
}

static void gather_token(const cache_job *job, int64_t i, int64_t j)
{
    const int64_t to[] = {i, j};
    const int inside = j < job->counts[i];
    const int64_t from[] = {inside ? page_of(job, i, j) : 0, j % job->page_size};
    copy_heads(job->key, to, inside ? &job->cache->key : NULL, from);
    copy_heads(job->value, to, inside ? &job->cache->value : NULL, from);
}

te_status te_cpu_cache_gather(const te_cache_gather_args *args)
{
    cache_job job =
        describe("cache_gather", &args->cache, &args->key, &args->value, args->key.shape[0]);
    job.counts = args->lengths.data;
    return run_tokens(&job, gather_token);
}
