/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/attention_packed.h"

#include "core/attention.h"
#include "core/status.h"

enum {
    GAP_BLOCKS = 8,     /* of what is between two sequences */
    LEAST_TOKENS = 128, /* bounds are at least that */
    MAX_BLOCKS = 65536
};

static te_attention_side side_of(const te_tensor *heads, const te_tensor *lengths,
                                 const te_tensor *offsets, int64_t longest)
{
    return (te_attention_side){offsets->data, lengths->data, heads->shape[1], longest};
}

/* A power of two or half as much again, at least n: one plan serves many bounds. */
static int64_t rounded(int64_t n, int64_t least)
{
    while (least < n && least + least / 2 < n) least *= 2;
    return least < n ? least + least / 2 : least;
}

static int64_t bound_of(int64_t longest, int is_exact)
{
    if (longest == 0) return LEAST_TOKENS;
    return is_exact ? te_round_up(longest, LEAST_TOKENS) : rounded(longest, LEAST_TOKENS);
}

void te_cuda_attention_bound(const te_attention_problem *problem, int is_exact, te_sdpa_key *key,
                             te_attention_begin_params *begin)
{
    const te_attention_problem *p = problem;
    begin->sides[0] = side_of(&p->query, &p->query_lengths, &p->query_offsets, p->max_queries);
    begin->sides[1] = side_of(&p->key, &p->key_lengths, &p->key_offsets, p->max_keys);
    begin->batch = te_attention_batch(p);
    key->is_packed = 1;
    key->batch = is_exact ? begin->batch : rounded(begin->batch, 1);
    key->queries = bound_of(p->max_queries, is_exact);
    key->keys = bound_of(p->max_keys, is_exact);
    begin->entries = key->batch;
}

te_status te_cuda_attention_begin(te_cuda_state *cuda, const te_attention_begin_params *begin,
                                  void *stream)
{
    const int64_t blocks = te_ceil_div(begin->entries + 1, TE_ATTENTION_THREADS);
    const te_cuda_call launch = {"attention",
                                 "te_attention_begin",
                                 {(uint32_t)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS), 1, 1,
                                  TE_ATTENTION_THREADS, 1, 1, 0},
                                 begin,
                                 sizeof *begin};
    return te_cuda_run(cuda, &launch, 1, stream);
}

te_status te_cuda_attention_gaps(te_cuda_state *cuda, const te_attention_begin_params *begin,
                                 const te_tensor *const heads[3], const te_tensor *statistics,
                                 void *stream)
{
    te_attention_gaps_params params = {.sides = {begin->sides[0], begin->sides[1]},
                                       .batch = begin->batch};
    const int64_t ranges = begin->batch + 1;
    const te_cuda_call launch = {
        "attention",
        "te_attention_gaps",
        {GAP_BLOCKS, (uint32_t)(ranges < TE_CUDA_MAX_GRID_Y ? ranges : TE_CUDA_MAX_GRID_Y), 4,
         TE_ATTENTION_THREADS, 1, 1, 0},
        &params,
        sizeof params};
    for (int i = 0; i < 3; i++) {
        if (heads[i] == NULL || !te_tensor_present(heads[i])) continue;
        params.heads[i] = te_cuda_attention_heads(heads[i]);
        params.side_of[i] = i > 0;
    }
    if (statistics != NULL && te_tensor_present(statistics)) {
        params.statistics = statistics->data;
        params.rows = statistics->shape[2];
    }
    return te_cuda_run(cuda, &launch, 1, stream);
}
