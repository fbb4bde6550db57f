/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c - host side of a cache of keys and values: a block per token.
 */
#include "cuda/kernels/cache.h"

#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

#define MAX_BLOCKS INT32_MAX

static te_cache_heads heads_of(const te_tensor *tokens, const te_tensor *pages)
{
    const size_t bytes = te_dtype_bytes(pages->dtype);
    te_cache_heads heads = {.tokens = te_cuda_view4(tokens),
                            .pages = te_cuda_view4(pages),
                            .channels = pages->shape[3]};
    heads.aligned =
        te_cuda_aligned4(&heads.tokens, bytes, 16) && te_cuda_aligned4(&heads.pages, bytes, 16);
    return heads;
}

/* What both directions have; packed tokens have no dim of batches. */
static te_cache_params describe(const te_cache *cache, const te_tensor *key, const te_tensor *value)
{
    const te_tensor *table = &cache->page_table;
    const int64_t sequence = key->shape[key->ndim - 3];
    te_cache_params params = {.key = heads_of(key, &cache->key),
                              .value = heads_of(value, &cache->value),
                              .tokens = (key->ndim > 3 ? key->shape[0] : 1) * sequence,
                              .sequence = sequence,
                              .heads = cache->key.shape[2],
                              .pages = cache->key.shape[0],
                              .page_size = cache->key.shape[1],
                              .table_pages = 1};
    if (te_tensor_requested(table)) {
        params.page_table = table->data;
        params.table_pages = table->shape[1];
        params.table_stride = table->strides[0];
    }
    return params;
}

static te_status launch(te_context *context, const char *name, te_cache_params *params,
                        void *stream)
{
    const uint32_t blocks = (uint32_t)(params->tokens < MAX_BLOCKS ? params->tokens : MAX_BLOCKS);
    const te_cuda_call call = {
        "cache", name, {blocks, 1, 1, TE_CACHE_THREADS, 1, 1, 0}, params, sizeof *params};
    if (params->tokens == 0 || params->heads == 0) return TE_OK;
    return te_cuda_run(te_context_state(context), &call, 1, stream);
}

#define X(BYTES) [BYTES] = "te_cache_append_" #BYTES,
static const char *const appends[] = {TE_CACHE_INSTANCES(X)};
#undef X
#define X(BYTES) [BYTES] = "te_cache_gather_" #BYTES,
static const char *const gathers[] = {TE_CACHE_INSTANCES(X)};
#undef X

te_status te_cuda_cache_append(void *self, te_context *context, const void *args_, void *stream)
{
    const te_cache_append_args *args = args_;
    te_cache_params params = describe(&args->cache, &args->key, &args->value);
    (void)self;
    params.batch = args->starts.shape[0];
    params.starts = args->starts.data;
    params.counts = args->counts.data;
    params.cu_seqlens = args->cu_seqlens.data;
    return launch(context, appends[te_dtype_bytes(args->key.dtype)], &params, stream);
}

te_status te_cuda_cache_gather(void *self, te_context *context, const void *args_, void *stream)
{
    const te_cache_gather_args *args = args_;
    te_cache_params params = describe(&args->cache, &args->key, &args->value);
    (void)self;
    params.batch = args->lengths.shape[0];
    params.counts = args->lengths.data;
    return launch(context, gathers[te_dtype_bytes(args->key.dtype)], &params, stream);
}
