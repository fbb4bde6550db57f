/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/attention_rows.h"

#include "core/philox.h"
#include "cuda/kernels/attention.h"
#include "cuda/launch.h"

#define VECTOR 8 /* elements of 16 bytes */
#define MAX_BLOCKS 65536

/* Numbers at a place; packed: [tokens, heads], else [batch, heads, queries]. */
static te_attention_rows rows_at(const te_sdpa_key *key, void *const *places, int32_t place,
                                 int packed)
{
    te_attention_rows rows = {places[place], key->heads * key->queries, key->queries, 1, NULL};
    if (!packed) return rows;
    rows.head = 1;
    rows.query = key->heads;
    rows.starts = places[TE_SDPA_OFFSETS + TE_SDPA_STATISTICS];
    return rows;
}

te_status te_cuda_attention_join_sink(te_cuda_state *cuda, const te_sdpa_key *key,
                                      void *const *places, const te_tensor *output,
                                      float *statistics, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT] = {
        [TE_DTYPE_F16] = "te_attention_sink_f16", [TE_DTYPE_BF16] = "te_attention_sink_bf16"};
    const int64_t *n = output->shape, vectors = n[3] / VECTOR;
    const int64_t blocks = te_ceil_div(te_tensor_numel(output) / VECTOR, TE_ATTENTION_THREADS);
    te_attention_sink_params params = {.output = {te_cuda_view4(output), n[1], n[2], vectors},
                                       .statistics =
                                           rows_at(key, places, TE_SDPA_STATISTICS, key->is_packed),
                                       .joined = statistics,
                                       .sink = places[TE_SDPA_SINK],
                                       .batch = n[0]};
    const te_cuda_call call = {"attention",
                               kernels[output->dtype],
                               {(uint32_t)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS), 1, 1,
                                TE_ATTENTION_THREADS, 1, 1, 0},
                               &params,
                               sizeof params};
    params.statistics.starts = NULL; /* all tokens, of the one batch entry */
    return te_cuda_run(cuda, &call, 1, stream);
}

te_status te_cuda_attention_sink_grad(te_cuda_state *cuda, const te_sdpa_key *key,
                                      void *const *places, float *grad, void *stream)
{
    te_attention_sink_grad_params params = {
        .rows = rows_at(key, places, TE_SDPA_ROW_SUM, key->packs_scratch),
        .statistics = rows_at(key, places, TE_SDPA_STATISTICS, key->is_packed),
        .sink = places[TE_SDPA_SINK],
        .output = grad,
        .query_lengths = places[TE_SDPA_QUERY_LENGTHS],
        .key_lengths = places[TE_SDPA_KEY_LENGTHS],
        .batch = key->batch,
        .queries = key->queries,
        .factor = te_keep_factor(key->dropout)}; /* the sums are times what dropout keeps */
    const te_cuda_call call = {"attention",
                               "te_attention_sink_grad",
                               {(uint32_t)key->heads, 1, 1, TE_ATTENTION_HEAD_THREADS, 1, 1, 0},
                               &params,
                               sizeof params};
    return te_cuda_run(cuda, &call, 1, stream);
}

te_status te_cuda_attention_raise(te_cuda_state *cuda, const float *statistics, float *output,
                                  int64_t rows, void *stream)
{
    te_attention_raise_params params = {statistics, output, rows};
    const int64_t blocks = te_ceil_div(rows, TE_ATTENTION_THREADS);
    const te_cuda_call call = {"attention",
                               "te_attention_raise",
                               {(uint32_t)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS), 1, 1,
                                TE_ATTENTION_THREADS, 1, 1, 0},
                               &params,
                               sizeof params};
    return te_cuda_run(cuda, &call, 1, stream);
}
