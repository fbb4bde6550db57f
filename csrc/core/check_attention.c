/* SPDX-License-Identifier: Apache-2.0
 *
 * check_attention.c - checks of attention, rotary embeddings and caches that no rule says.
 */
#include "core/attention.h"
#include "core/check.h"
#include "core/status.h"

/* Packed sequences: one batch entry, offsets for both sides, bounds, and what goes with them. */
static te_status check_packed(const te_check_site *site, const te_attention_problem *p,
                              int64_t batch)
{
    const te_tensor *const absent[] = {&p->mask, &p->bias};
    static const char *const names[] = {"mask", "bias"};
    INVALID_IF(!te_tensor_requested(&p->query_offsets), "query_offsets",
               "None beside key_offsets: give both");
    INVALID_IF(batch < 0, "query_offsets", "length 0, expected a vector of batch + 1");
    INVALID_IF(!te_tensor_requested(&p->key_offsets), "key_offsets",
               "None beside query_offsets: give both");
    TE_TRY(te_check_length(site, "key_offsets", &p->key_offsets, batch + 1));
    INVALID_IF(p->query.shape[0] != 1, "query", "dim 0: size %lld, expected 1 of packed sequences",
               LL(p->query.shape[0]));
    for (int i = 0; i < 2; i++) {
        INVALID_IF(te_tensor_requested(absent[i]), names[i],
                   "it does not go with packed sequences (query_offsets)");
    }
    INVALID_IF(p->max_queries < 0 || p->max_queries > INT32_MAX, "max_queries",
               "%lld, expected 0 to 2^31 - 1", LL(p->max_queries));
    INVALID_IF(p->max_keys < 0 || p->max_keys > INT32_MAX, "max_keys",
               "%lld, expected 0 to 2^31 - 1", LL(p->max_keys));
    return TE_OK;
}

te_status te_check_softmax(const te_check_site *site, const te_softmax_args *args)
{
    return te_check_length(site, "sink", &args->sink, args->input.shape[1]);
}

te_status te_check_softmax_backward(const te_check_site *site, const te_softmax_backward_args *args)
{
    const te_tensor *const three[] = {&args->sink, &args->log_sum, &args->grad_sinks};
    static const char *const names[] = {"sink", "log_sum", "grad_sinks"};
    const int wanted = te_tensor_requested(&args->grad_sinks);
    for (int i = 0; i < 3; i++) {
        if (te_tensor_requested(three[i]) == wanted) continue;
        return INVALID(names[i], wanted ? "None beside grad_sinks: give sink and log_sum"
                                        : "grad_sinks, which it is for, is None");
    }
    return te_check_length(site, "sink", &args->sink, args->grad_output.shape[1]);
}

/* [heads], or [1 or batch, heads]. */
static te_status check_slopes(const te_check_site *site, const te_tensor *slopes, int64_t batch,
                              int64_t heads)
{
    if (!te_tensor_requested(slopes)) return TE_OK;
    if (slopes->ndim <= 2 && slopes->shape[slopes->ndim - 1] == heads &&
        (slopes->ndim == 1 || slopes->shape[0] == 1 || slopes->shape[0] == batch)) {
        return TE_OK;
    }
    return INVALID("slopes", "ndim %d, first size %lld, expected [%lld] or [%lld or 1, %lld]",
                   (int)slopes->ndim, LL(slopes->shape[0]), LL(heads), LL(batch), LL(heads));
}

/* What is computed of the queries included; `statistics` dense, where they are requested. */
static te_status check_problem(const te_check_site *site, const te_attention_problem *p,
                               const te_tensor *output, const te_tensor *statistics)
{
    const int packed = te_attention_is_packed(p) || te_tensor_requested(&p->key_offsets);
    const int64_t batch = te_attention_batch(p);
    const int64_t *q = p->query.shape, *k = p->key.shape, d_v = p->value.shape[3];
    const te_tensor keys = {.ndim = 4, .shape = {q[0], k[1], k[2], q[3]}};
    const te_tensor values = {.ndim = 4, .shape = {q[0], k[1], k[2], d_v}};
    const te_tensor attended = {.ndim = 4, .shape = {q[0], q[1], q[2], d_v}};
    const te_tensor scores = {.ndim = 4, .shape = {q[0], q[2], q[1], k[1]}};
    const te_tensor sums = {.ndim = 3, .shape = {q[0], packed ? q[1] : q[2], packed ? q[2] : q[1]}};
    int64_t dense = 1;
    if (packed) TE_TRY(check_packed(site, p, batch));
    TE_TRY(te_check_length(site, "query_lengths", &p->query_lengths, batch));
    TE_TRY(te_check_length(site, "key_lengths", &p->key_lengths, batch));
    INVALID_IF(k[2] == 0 ? q[2] != 0 : q[2] % k[2] != 0, "key",
               "%lld heads, expected a number that divides the %lld of query", LL(k[2]), LL(q[2]));
    TE_TRY(te_check_sizes(site, "key", &p->key, &keys, 0));
    TE_TRY(te_check_sizes(site, "value", &p->value, &values, 0));
    TE_TRY(te_check_sizes(site, "output", output, &attended, 0));
    if (te_tensor_requested(&p->mask)) TE_TRY(te_check_sizes(site, "mask", &p->mask, &scores, 1));
    if (te_tensor_requested(&p->bias)) TE_TRY(te_check_sizes(site, "bias", &p->bias, &scores, 1));
    TE_TRY(te_check_length(site, "sink", &p->sink, q[2]));
    TE_TRY(check_slopes(site, &p->slopes, batch, q[2]));
    if (!te_tensor_requested(statistics)) return TE_OK;
    TE_TRY(te_check_sizes(site, "statistics", statistics, &sums, 0));
    for (int i = 2; i >= 0; i--) {
        INVALID_IF(dense > 0 && sums.shape[i] > 1 && statistics->strides[i] != dense, "statistics",
                   "dim %d: stride %lld, expected %lld: make it contiguous", i,
                   LL(statistics->strides[i]), LL(dense));
        dense *= sums.shape[i];
    }
    return TE_OK;
}

/* Scales that have to be there with FP8, and not without. */
static te_status check_pair(const te_check_site *site, const char *name, const te_tensor *scales,
                            int fp8)
{
    INVALID_IF(te_tensor_requested(scales) != fp8, name,
               fp8 ? "is missing: FP8 has scales" : "there is no FP8 to scale");
    return te_check_length(site, name, scales, TE_TENSOR_SCALES);
}

/* What goes with FP8, and what does not; the floats of `names` are part of it. */
static te_status check_fp8(const te_check_site *site, const te_attention_problem *p,
                           const float *const *floats, const char *const *names, int count)
{
    const te_tensor *const scales[] = {&p->query_scales, &p->key_scales, &p->value_scales};
    static const char *const named[] = {"query_scales", "key_scales", "value_scales"};
    const te_tensor *const absent[] = {&p->mask, &p->bias, &p->sink, &p->slopes};
    static const char *const others[] = {"mask", "bias", "sink", "slopes"};
    const int fp8 = te_attention_is_fp8(p);
    WRONG_TYPE_IF(p->query.dtype == TE_DTYPE_E5M2, "query",
                  "dtype e5m2, expected f32, f16, bf16 or e4m3");
    for (int i = 0; i < 3; i++) TE_TRY(check_pair(site, named[i], scales[i], fp8));
    for (int i = 0; i < 4; i++) {
        INVALID_IF(fp8 && te_tensor_requested(absent[i]), others[i],
                   "it does not go with FP8 (query)");
    }
    for (int i = 0; i < count; i++) {
        if (fp8 || floats[i] == NULL) continue;
        return INVALID(names[i], "there is no FP8 to scale");
    }
    return TE_OK;
}

te_status te_check_attention(const te_check_site *site, const te_attention_args *args)
{
    const float *const floats[] = {args->output_scale, args->output_amax, args->weights_amax};
    static const char *const names[] = {"output_scale", "output_amax", "weights_amax"};
    const int fp8 = te_attention_is_fp8(&args->problem);
    TE_TRY(check_problem(site, &args->problem, &args->output, &args->statistics));
    TE_TRY(check_fp8(site, &args->problem, floats, names, 3));
    TE_TRY(check_pair(site, "output_scales", &args->output_scales, fp8));
    INVALID_IF(fp8 && te_tensor_requested(&args->top), "top", "it does not go with FP8 (query)");
    return te_check_length(site, "top", &args->top, args->problem.query.shape[2]);
}

te_status te_check_attention_merge(const te_check_site *site, const te_attention_merge_args *args)
{
    const te_tensor *const three[] = {&args->total_statistics, &args->step_statistics,
                                      &args->statistics};
    static const char *const names[] = {"total_statistics", "step_statistics", "statistics"};
    const int wanted = te_tensor_requested(&args->statistics);
    te_tensor like = args->total;
    like.shape[3] = 1;
    for (int i = 0; i < 3; i++) {
        INVALID_IF(te_tensor_requested(three[i]) != wanted, names[i],
                   wanted ? "None beside statistics: give both parts'"
                          : "statistics, which it is for, is None");
        if (wanted) TE_TRY(te_check_sizes(site, names[i], three[i], &like, 0));
    }
    return TE_OK;
}

static te_status check_fp8_backward(const te_check_site *site,
                                    const te_attention_backward_args *args)
{
    const float *const floats[] = {args->grad_scores_scale, args->grads_scale,
                                   args->grad_scores_amax, args->grads_amax};
    static const char *const names[] = {"grad_scores_scale", "grads_scale", "grad_scores_amax",
                                        "grads_amax"};
    const te_attention_problem *p = &args->problem;
    const te_dtype grad = args->grad_output.dtype;
    const int fp8 = te_attention_is_fp8(p);
    TE_TRY(check_fp8(site, p, floats, names, 4));
    TE_TRY(check_pair(site, "output_scales", &args->output_scales, fp8));
    TE_TRY(check_pair(site, "grad_output_scales", &args->grad_output_scales, fp8));
    TE_TRY(check_pair(site, "grads_scales", &args->grads_scales, fp8));
    if (!fp8) return te_check_dtype(site, "grad_output", grad, args->output.dtype);
    WRONG_TYPE_IF(!te_dtype_is_fp8(grad), "grad_output",
                  "dtype %s, expected e4m3 or e5m2 as query is FP8", te_dtype_name(grad));
    for (int i = 0; i < 2; i++) {
        INVALID_IF(floats[i] == NULL, names[i], "is missing: FP8 has scales");
    }
    if (p->dropout == 0.0F) return TE_OK;
    return INVALID("dropout", "%g, expected 0: a gradient in FP8 has none", (double)p->dropout);
}

te_status te_check_attention_backward(const te_check_site *site,
                                      const te_attention_backward_args *args)
{
    const te_tensor *bias = &args->problem.bias, *grad_bias = &args->grad_bias;
    TE_TRY(check_problem(site, &args->problem, &args->output, &args->statistics));
    TE_TRY(check_fp8_backward(site, args));
    TE_TRY(te_check_length(site, "grad_sink", &args->grad_sink, args->problem.query.shape[2]));
    INVALID_IF(te_tensor_requested(&args->grad_sink) && !te_tensor_requested(&args->problem.sink),
               "grad_sink", "there is no sink");
    if (!te_tensor_requested(grad_bias)) return TE_OK;
    INVALID_IF(!te_tensor_requested(bias), "grad_bias", "there is no bias");
    return te_check_sizes(site, "grad_bias", grad_bias, bias, 0);
}

/* A part of a call against the first one, which has the tokens. */
static te_status check_rope_part(const te_check_site *site, const te_rope_args *args, int number)
{
    static const char *const names[TE_ROPE_PARTS][3] = {{"input", "output", "freqs"},
                                                        {"key", "key_output", "key_freqs"},
                                                        {"value", "value_output", "value_freqs"}};
    const te_rope_part *part = &args->parts[number], *first = &args->parts[0];
    const char *const *name = names[number];
    const te_tensor *input = &part->input, *freqs = &part->freqs;
    const int last = first->input.ndim - 1;
    te_tensor like = *input;
    int64_t width = input->shape[last];
    if (!te_tensor_requested(input)) {
        if (!te_tensor_requested(&part->output) && !te_tensor_requested(freqs)) return TE_OK;
        return INVALID(name[0], "is missing, and %s is given", name[1]);
    }
    for (int i = 0; i < last - 1; i++) like.shape[i] = first->input.shape[i];
    like.ndim = first->input.ndim;
    TE_TRY(te_check_sizes(site, name[0], input, &like, 0));
    TE_TRY(te_check_dtype(site, name[0], input->dtype, first->input.dtype));
    TE_TRY(te_check_sizes(site, name[1], &part->output, input, 0));
    TE_TRY(te_check_dtype(site, name[1], part->output.dtype, input->dtype));
    if (te_tensor_present(input) && te_tensor_numel(input) > 0) {
        TE_TRY(te_check_missing(site, name[1], &part->output, "there is nowhere to write to"));
    }
    if (!te_tensor_requested(freqs)) return TE_OK;
    if (args->channels > 0) {
        INVALID_IF(width % args->channels != 0, "channels",
                   "%lld, which does not divide the last dim of %s, %lld", LL(args->channels),
                   name[0], LL(width));
        width = args->channels;
    }
    INVALID_IF(freqs->shape[1] % 2 != 0 || freqs->shape[1] > width, name[2],
               "%lld rotary channels, expected an even number of at most %lld", LL(freqs->shape[1]),
               LL(width));
    INVALID_IF(freqs->shape[0] > 1 && freqs->strides[0] != freqs->shape[1], name[2],
               "row stride %lld, expected %lld: make it contiguous", LL(freqs->strides[0]),
               LL(freqs->shape[1]));
    /* Lengths and starts on the device are known to the kernel alone. */
    width = input->shape[1] * (args->cp_size > 1 ? args->cp_size : 1);
    if (last < 3 || freqs->shape[0] >= width) return TE_OK;
    return INVALID(name[2], "%lld positions, expected at least the %lld of the sequence",
                   LL(freqs->shape[0]), LL(width));
}

te_status te_check_rope(const te_check_site *site, const te_rope_args *args)
{
    const te_tensor *input = &args->parts[0].input, *limits = &args->cu_seqlens;
    const int packed = te_tensor_present(limits);
    INVALID_IF(input->ndim != (packed ? 3 : 4), "input", "ndim = %d, expected %d", (int)input->ndim,
               packed ? 3 : 4);
    INVALID_IF(packed && (limits->shape[0] < 1 || (limits->shape[0] < 2 && input->shape[0] > 0)),
               "cu_seqlens", "length %lld, expected a vector of batch + 1 for %lld tokens",
               LL(limits->shape[0]), LL(input->shape[0]));
    TE_TRY(te_check_length(site, "start_positions", &args->start_positions,
                           packed ? limits->shape[0] - 1 : input->shape[0]));
    INVALID_IF(args->cp_rank > 0 && args->cp_rank >= args->cp_size, "cp_rank",
               "%d, expected one of cp_size = %d ranks", args->cp_rank, args->cp_size);
    INVALID_IF(args->cp_size > 1 && !packed && input->shape[1] % 2 != 0, "input",
               "a sequence of %lld tokens, expected two chunks of one length", LL(input->shape[1]));
    for (int i = 0; i < TE_ROPE_PARTS; i++) TE_TRY(check_rope_part(site, args, i));
    return TE_OK;
}

/* Tokens [.., heads, channels] for a cache. */
static te_status check_tokens(const te_check_site *site, const char *name, const te_tensor *tokens,
                              const te_tensor *like, const te_tensor *cache)
{
    const int64_t *last = tokens->shape + tokens->ndim - 2, *kept = cache->shape + 2;
    int same = tokens->ndim == like->ndim;
    for (int32_t i = 0; same && i < like->ndim - 2; i++) same = tokens->shape[i] == like->shape[i];
    INVALID_IF(!same, name, "shape, expected the leading dims of key");
    if (last[0] == kept[0] && last[1] == kept[1]) return TE_OK;
    return INVALID(name, "%lld heads of %lld channels, the cache has %lld of %lld", LL(last[0]),
                   LL(last[1]), LL(kept[0]), LL(kept[1]));
}

/* A cache, and tokens of `batch` sequences that come from there or go there. */
static te_status check_cache(const te_check_site *site, const te_cache *cache, const te_tensor *key,
                             const te_tensor *value, int64_t batch)
{
    const te_tensor *table = &cache->page_table;
    for (int32_t i = 0; i < 3; i++) {
        if (cache->value.shape[i] == cache->key.shape[i]) continue;
        return INVALID("value_cache", "dim %d: size %lld, expected %lld", (int)i,
                       LL(cache->value.shape[i]), LL(cache->key.shape[i]));
    }
    TE_TRY(check_tokens(site, "key", key, key, &cache->key));
    TE_TRY(check_tokens(site, "value", value, key, &cache->value));
    INVALID_IF(te_tensor_requested(table) && table->shape[0] != batch, "page_table",
               "%lld rows, expected one for each of %lld sequences", LL(table->shape[0]),
               LL(batch));
    if (te_tensor_requested(table) || cache->key.shape[0] >= batch) return TE_OK;
    return INVALID("key_cache", "%lld pages for %lld sequences without a page_table",
                   LL(cache->key.shape[0]), LL(batch));
}

te_status te_check_cache_append(const te_check_site *site, const te_cache_append_args *args)
{
    const te_tensor *key = &args->key, *limits = &args->cu_seqlens;
    const int packed = te_tensor_present(limits);
    const int64_t batch = args->starts.shape[0];
    INVALID_IF(key->ndim != (packed ? 3 : 4), "key", "ndim = %d, expected %d", (int)key->ndim,
               packed ? 3 : 4);
    INVALID_IF(!packed && key->shape[0] != batch, "starts",
               "length %lld, expected a vector of %lld", LL(batch), LL(key->shape[0]));
    TE_TRY(te_check_length(site, "cu_seqlens", limits, batch + 1));
    return check_cache(site, &args->cache, key, &args->value, batch);
}

te_status te_check_cache_gather(const te_check_site *site, const te_cache_gather_args *args)
{
    const te_tensor *pages = &args->cache.key, *table = &args->cache.page_table;
    const int64_t each = te_tensor_requested(table) ? table->shape[1] : 1;
    TE_TRY(check_cache(site, &args->cache, &args->key, &args->value, args->key.shape[0]));
    if (args->key.shape[1] <= each * pages->shape[1]) return TE_OK;
    return INVALID("key", "%lld tokens of each sequence, the cache has room for %lld",
                   LL(args->key.shape[1]), LL(each * pages->shape[1]));
}
