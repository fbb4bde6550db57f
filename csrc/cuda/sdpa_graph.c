/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/sdpa_graph.h"

#include "core/philox.h"
#include "cuda/sdpa_mask.h"

typedef te_cudnn_tensor tensor;

/* Offsets of sequences in packed tensors of one token stride. */
typedef struct offsets {
    int of_keys;
    int64_t stride;
    tensor *tensor;
} offsets;

/* A graph being written, and what both directions read. */
typedef struct writer {
    te_cudnn_graph *graph;
    const te_sdpa_key *key;
    cudnnDataType_t dtype;      /* of queries, keys and values */
    cudnnDataType_t grad_dtype; /* of the gradients of these */
    te_sdpa_lengths lengths;
    tensor *query, *key_turned; /* [.., tokens, d_k] and [.., d_k, tokens] */
    tensor *scale;
    tensor *tanh; /* of the scores, where they are capped */
    offsets offsets[TE_SDPA_OFFSETS];
    int offset_count;
    tensor *factors[TE_SDPA_OFFSETS]; /* of FP8, by place: a factor is one tensor wherever it is */
} writer;

static cudnnDataType_t type_of(uint8_t dtype)
{
    return dtype == TE_DTYPE_F16    ? CUDNN_DATA_HALF
           : dtype == TE_DTYPE_BF16 ? CUDNN_DATA_BFLOAT16
           : dtype == TE_DTYPE_E4M3 ? CUDNN_DATA_FP8_E4M3
           : dtype == TE_DTYPE_E5M2 ? CUDNN_DATA_FP8_E5M2
                                    : CUDNN_DATA_FLOAT;
}

int te_sdpa_is_fp8(const te_sdpa_key *key)
{
    return key->dtype == TE_DTYPE_E4M3;
}

/* ---- tensors of a problem ---- */

/* What a caller may have put wherever its dtype can lie: the second of a pair of numbers, a part of
 * a bias. */
static tensor *at(const writer *w, int32_t place, cudnnDataType_t dtype, const int64_t shape[4],
                  const int64_t strides[4])
{
    const int64_t alignment = dtype == CUDNN_DATA_INT64                                ? 8
                              : dtype == CUDNN_DATA_FLOAT || dtype == CUDNN_DATA_INT32 ? 4
                                                                                       : 2;
    return te_cudnn_at(w->graph, place, dtype, shape, strides, alignment, NULL);
}

int te_sdpa_is_of_keys(int32_t place)
{
    return place == TE_SDPA_KEY || place == TE_SDPA_VALUE || place == TE_SDPA_GRAD_KEY ||
           place == TE_SDPA_GRAD_VALUE;
}

/* A number or, with an extent, one number of each sequence. */
static tensor *numbers_at(const writer *w, int32_t place, cudnnDataType_t dtype, int64_t count)
{
    const int64_t shape[4] = {count, 1, 1, 1}, strides[4] = {1, 1, 1, 1};
    return at(w, place, dtype, shape, strides);
}

/* fp32 numbers of the heads. */
static tensor *of_heads_at(const writer *w, int32_t place)
{
    const int64_t shape[4] = {1, w->key->heads, 1, 1};
    const int64_t strides[4] = {w->key->heads, 1, 1, 1};
    return at(w, place, CUDNN_DATA_FLOAT, shape, strides);
}

/* Where sequences begin at a place of packed tokens, NULL for others; one tensor for all places of
 * one stride. */
static tensor *offsets_at(writer *w, int32_t place, int64_t stride)
{
    const int of_keys = te_sdpa_is_of_keys(place);
    offsets *of = w->offsets;
    if (!w->key->is_packed) return NULL;
    for (; of < w->offsets + w->offset_count; of++) {
        if (of->of_keys == of_keys && of->stride == stride) return of->tensor;
    }
    w->offset_count++;
    *of = (offsets){of_keys, stride,
                    numbers_at(w, TE_SDPA_OFFSETS + place, CUDNN_DATA_INT64, w->key->batch + 1)};
    return of->tensor;
}

/* Gradients, of the output too, have a dtype of their own. */
static cudnnDataType_t type_at(const writer *w, int32_t place)
{
    return place >= TE_SDPA_GRAD_OUTPUT && place <= TE_SDPA_GRAD_VALUE ? w->grad_dtype : w->dtype;
}

/* Heads at a place: [batch, heads, tokens, channels], or turned, with the last two exchanged. */
static tensor *heads_at(writer *w, int32_t place, const te_sdpa_strides *of, int64_t heads,
                        int64_t tokens, int64_t channels, int turned)
{
    const int64_t shape[4] = {w->key->batch, heads, turned ? channels : tokens,
                              turned ? tokens : channels};
    const int64_t strides[4] = {of->batch, of->head, turned ? 1 : of->token,
                                turned ? of->token : 1};
    const tensor *offsets = offsets_at(w, place, of->token);
    return te_cudnn_at(w->graph, place, type_at(w, place), shape, strides, 16, offsets);
}

static tensor *queries_at(writer *w, int32_t place, const te_sdpa_strides *of, int64_t d)
{
    return heads_at(w, place, of, w->key->heads, w->key->queries, d, 0);
}

static tensor *keys_at(writer *w, int32_t place, const te_sdpa_strides *of, int64_t d, int turned)
{
    return heads_at(w, place, of, w->key->kv_heads, w->key->keys, d, turned);
}

/* One fp32 number of each row of the scores; packed: [tokens, heads]. */
static tensor *rows_at(writer *w, int32_t place, int packed)
{
    const int64_t shape[4] = {w->key->batch, w->key->heads, w->key->queries, 1};
    const int64_t strides[4] = {shape[1] * shape[2], packed ? 1 : shape[2], packed ? shape[1] : 1,
                                1};
    const tensor *offsets = packed ? offsets_at(w, TE_SDPA_STATISTICS, shape[1]) : NULL;
    return te_cudnn_at(w->graph, place, CUDNN_DATA_FLOAT, shape, strides, 16, offsets);
}

static tensor *statistics_at(writer *w)
{
    return rows_at(w, TE_SDPA_STATISTICS, w->key->is_packed);
}

static tensor *virtual_rows(const writer *w)
{
    const int64_t shape[4] = {w->key->batch, w->key->heads, w->key->queries, 1};
    return te_cudnn_virtual(w->graph, CUDNN_DATA_FLOAT, shape, NULL);
}

static tensor *virtual_scores(const writer *w)
{
    const int64_t shape[4] = {w->key->batch, w->key->heads, w->key->queries, w->key->keys};
    return te_cudnn_virtual(w->graph, CUDNN_DATA_FLOAT, shape, NULL);
}

static tensor *floats(const writer *w, cudnnPointwiseMode_t mode, tensor *x, tensor *b)
{
    return te_cudnn_pointwise(w->graph, mode, x, b, CUDNN_DATA_FLOAT);
}

static tensor *multiplied(const writer *w, tensor *x, tensor *b)
{
    return floats(w, CUDNN_POINTWISE_MUL, x, b);
}

static tensor *subtracted(const writer *w, tensor *x, tensor *b)
{
    return floats(w, CUDNN_POINTWISE_SUB, x, b);
}

static tensor *exponential(const writer *w, tensor *x)
{
    return floats(w, CUDNN_POINTWISE_EXP, x, NULL);
}

/* x in the dtype of the operands, as the last step before a product. */
static tensor *narrowed(const writer *w, tensor *x, tensor *factor)
{
    return te_cudnn_pointwise(w->graph, CUDNN_POINTWISE_MUL, x, factor, w->dtype);
}

/* ---- FP8 ---- */

static tensor *factor_at(writer *w, int32_t place)
{
    if (w->factors[place] == NULL) {
        w->factors[place] = numbers_at(w, place, CUDNN_DATA_FLOAT, 1);
    }
    return w->factors[place];
}

/* x times the factors at two places. */
static tensor *scaled(writer *w, tensor *x, int32_t first, int32_t second)
{
    return multiplied(w, multiplied(w, x, factor_at(w, first)), factor_at(w, second));
}

/* The scores, or what is made of them, in FP8 for a product, and their amax (below 0: not wanted).
 */
static tensor *cast(writer *w, tensor *x, int32_t scale, int32_t amax, cudnnDataType_t dtype)
{
    if (amax >= 0) te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_AMAX, x, factor_at(w, amax));
    return te_cudnn_pointwise(w->graph, CUDNN_POINTWISE_MUL, x, factor_at(w, scale), dtype);
}

/* What an FP8 product is read by, cast with and measured in. */
typedef struct scaling {
    int32_t inverses[2], scale, amax;
} scaling;

/* y = a b in FP8, summed over the heads of a group where y has fewer. */
static void multiply_cast(writer *w, tensor *a, tensor *b, tensor *y, const scaling *of,
                          const tensor *m, const tensor *k)
{
    const int64_t shape[4] = {y->shape[0], w->key->heads, y->shape[2], y->shape[3]};
    const tensor *extents[3] = {m, NULL, k};
    tensor *x = te_cudnn_virtual(w->graph, CUDNN_DATA_FLOAT, shape, NULL);
    te_cudnn_multiply(w->graph, a, b, x, extents);
    if (y->shape[1] != shape[1]) {
        tensor *sum = te_cudnn_virtual(w->graph, CUDNN_DATA_FLOAT, y->shape, NULL);
        te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_ADD, x, sum);
        x = sum;
    }
    x = scaled(w, x, of->inverses[0], of->inverses[1]);
    te_cudnn_pointwise_to(w->graph, CUDNN_POINTWISE_MUL, x, factor_at(w, of->scale), y);
    te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_AMAX, x, factor_at(w, of->amax));
}

static void multiply(const writer *w, tensor *a, tensor *b, tensor *c, const tensor *m,
                     const tensor *n, const tensor *k)
{
    const tensor *extents[3] = {m, n, k};
    te_cudnn_multiply(w->graph, a, b, c, extents);
}

/* ---- scores ---- */

static tensor *within_window(const writer *w, tensor *scores)
{
    return te_sdpa_within_window(w->graph, w->key, &w->lengths, scores);
}

/* Scores less slope * |key - query|, with one slope of a head. The engines take slopes of each
 * sequence and other diagonals too, and compute something else. */
static tensor *sloped(const writer *w, tensor *scores)
{
    const te_sdpa_key *key = w->key;
    tensor *row, *column, *distance;
    if (!key->has_slopes) return scores;
    row = te_cudnn_index(w->graph, scores, 2);
    column = te_cudnn_index(w->graph, scores, 3);
    distance = floats(w, CUDNN_POINTWISE_ABS, subtracted(w, column, row), NULL);
    distance = multiplied(w, distance, of_heads_at(w, TE_SDPA_SLOPES));
    return subtracted(w, scores, distance);
}

/* ---- what both directions read ---- */

static void begin(writer *w)
{
    const te_sdpa_key *key = w->key;
    if (key->has_lengths) {
        w->lengths.queries = numbers_at(w, TE_SDPA_QUERY_LENGTHS, CUDNN_DATA_INT32, key->batch);
        w->lengths.keys = numbers_at(w, TE_SDPA_KEY_LENGTHS, CUDNN_DATA_INT32, key->batch);
    }
    w->query = queries_at(w, TE_SDPA_QUERY, &key->query, key->d_k);
    w->key_turned = keys_at(w, TE_SDPA_KEY, &key->key, key->d_k, 1);
    w->scale = te_cudnn_float(w->graph, key->scale);
}

/* cap tanh(scores / cap) */
static tensor *capped(writer *w, tensor *scores)
{
    tensor *cap;
    if (w->key->softcap == 0.0F) return scores;
    cap = te_cudnn_float(w->graph, w->key->softcap);
    w->tanh =
        floats(w, CUDNN_POINTWISE_TANH_FWD, floats(w, CUDNN_POINTWISE_DIV, scores, cap), NULL);
    return multiplied(w, w->tanh, cap);
}

/* The gradient of the scaled scores of that of the capped ones: 1 - tanh^2 of it. */
static tensor *uncapped(const writer *w, tensor *grads)
{
    if (w->key->softcap == 0.0F) return grads;
    return subtracted(w, grads, multiplied(w, multiplied(w, grads, w->tanh), w->tanh));
}

/* scale * query key^T, capped, + bias - slope * distance, without keys of no sequence. */
static tensor *scores_of(writer *w)
{
    const te_sdpa_key *key = w->key;
    tensor *scores = virtual_scores(w);
    multiply(w, w->query, w->key_turned, scores, w->lengths.queries, w->lengths.keys, NULL);
    scores = multiplied(w, scores, w->scale);
    if (te_sdpa_is_fp8(key)) {
        scores = scaled(w, scores, TE_SDPA_QUERY_INVERSE, TE_SDPA_KEY_INVERSE);
    }
    scores = capped(w, scores);
    if (key->has_bias) {
        tensor *bias =
            at(w, TE_SDPA_BIAS, type_of(key->bias_dtype), key->bias_shape, key->bias_strides);
        scores = floats(w, CUDNN_POINTWISE_ADD, scores, bias);
    }
    return te_sdpa_within_lengths(w->graph, &w->lengths, sloped(w, scores));
}

/* 1 for a weight that stays, 0 for one that is dropped. */
static tensor *decisions(const writer *w)
{
    tensor *made = virtual_scores(w);
    te_cudnn_bernoulli(w->graph, numbers_at(w, TE_SDPA_SEED, CUDNN_DATA_INT64, 1),
                       numbers_at(w, TE_SDPA_OFFSET, CUDNN_DATA_INT64, 1),
                       1.0 - (double)w->key->dropout, made);
    return made;
}

/* ---- forward ---- */

static void write_forward(writer *w)
{
    static const scaling of_output = {{TE_SDPA_WEIGHTS_INVERSE, TE_SDPA_VALUE_INVERSE},
                                      TE_SDPA_OUTPUT_SCALE,
                                      TE_SDPA_OUTPUT_AMAX};
    const te_sdpa_key *key = w->key;
    const int drops = key->dropout > 0.0F, fp8 = te_sdpa_is_fp8(key);
    tensor *scores, *top = virtual_rows(w), *sum = virtual_rows(w), *weights, *statistics;
    tensor *sink = NULL, *value, *output;
    begin(w);
    scores = within_window(w, scores_of(w));
    te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_MAX, scores, top);
    if (key->has_sink) {
        sink = of_heads_at(w, TE_SDPA_SINK);
        top = floats(w, CUDNN_POINTWISE_MAX, top, sink);
    }
    weights = exponential(w, subtracted(w, scores, top));
    te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_ADD, weights, sum);
    if (key->has_sink) {
        sum = floats(w, CUDNN_POINTWISE_ADD, sum, exponential(w, subtracted(w, sink, top)));
    }
    /* The pattern has the statistics even where nobody reads them. */
    statistics = key->keeps_statistics ? statistics_at(w) : virtual_rows(w);
    te_cudnn_pointwise_to(w->graph, CUDNN_POINTWISE_ADD, top,
                          floats(w, CUDNN_POINTWISE_LOG, sum, NULL), statistics);
    weights = te_cudnn_pointwise(w->graph, CUDNN_POINTWISE_DIV, weights, sum,
                                 drops || fp8 ? CUDNN_DATA_FLOAT : w->dtype);
    if (drops) {
        tensor *factor = te_cudnn_float(w->graph, te_keep_factor(key->dropout));
        weights = multiplied(w, weights, decisions(w));
        weights = fp8 ? multiplied(w, weights, factor) : narrowed(w, weights, factor);
    }
    value = keys_at(w, TE_SDPA_VALUE, &key->value, key->d_v, 0);
    output = queries_at(w, TE_SDPA_OUTPUT, &key->output, key->d_v);
    if (fp8) {
        weights = cast(w, weights, TE_SDPA_WEIGHTS_SCALE, TE_SDPA_WEIGHTS_AMAX, w->dtype);
        multiply_cast(w, weights, value, output, &of_output, w->lengths.queries, w->lengths.keys);
    } else {
        multiply(w, weights, value, output, w->lengths.queries, NULL, w->lengths.keys);
    }
}

/* ---- backward ---- */

/* The transpose of a matrix of scores, narrowed: the left operand of a product over queries. */
static tensor *turned(const writer *w, tensor *x, cudnnDataType_t dtype)
{
    const te_sdpa_key *key = w->key;
    const int64_t area = key->queries * key->keys;
    const int64_t shape[4] = {key->batch, key->heads, key->keys, key->queries};
    const int64_t strides[4] = {key->heads * area, area, 1, key->keys};
    tensor *y = te_cudnn_virtual(w->graph, dtype, shape, strides);
    te_cudnn_reshape(w->graph, x, y);
    return y;
}

/* What each head adds to a gradient that the heads of a group share. */
static tensor *by_heads(writer *w, int32_t place, const te_sdpa_strides *of, int64_t channels)
{
    const te_sdpa_key *key = w->key;
    const int64_t shape[4] = {key->batch, key->heads, key->keys, channels};
    const int64_t group = key->heads / key->kv_heads;
    const int64_t strides[4] = {of->batch * group, of->head, of->token * group, 1};
    const int full = place == TE_SDPA_GRAD_KEY ? TE_SDPA_FULL_KEY : TE_SDPA_FULL_VALUE;
    if (!te_sdpa_fills_heads(key)) return te_cudnn_virtual(w->graph, w->dtype, shape, NULL);
    /* The offsets are the gradient's: the engine scales them as it does the strides. */
    return te_cudnn_at(w->graph, full, w->dtype, shape, strides, 16,
                       offsets_at(w, place, of->token));
}

/* A gradient of keys or values, y = x^T b; of heads that share them: their sum. */
static void multiply_by_keys(writer *w, tensor *x, tensor *b, int32_t place,
                             const te_sdpa_strides *of, int64_t channels)
{
    const te_sdpa_key *key = w->key;
    tensor *y = keys_at(w, place, of, channels, 0), *all = y;
    if (key->heads != key->kv_heads) all = by_heads(w, place, of, channels);
    multiply(w, turned(w, x, w->dtype), b, all, w->lengths.keys, NULL, w->lengths.queries);
    if (all != y) te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_ADD, all, y);
}

static tensor *keys_again(writer *w)
{
    const te_sdpa_key *key = w->key;
    const int64_t shape[4] = {key->batch, key->kv_heads, key->keys, key->d_k};
    const int64_t strides[4] = {key->key.batch, key->key.head, key->key.token, 1};
    tensor *y = te_cudnn_virtual_from(w->graph, CUDNN_DATA_FLOAT, shape, strides,
                                      offsets_at(w, TE_SDPA_KEY, key->key.token));
    te_cudnn_reshape(w->graph, w->key_turned, y);
    return y;
}

/* Sums over channels of grad_output * output, times what dropout keeps. */
static tensor *row_sums(writer *w, tensor *grad_output)
{
    const te_sdpa_key *key = w->key;
    tensor *output = queries_at(w, TE_SDPA_OUTPUT, &key->output, key->d_v);
    tensor *sums = virtual_rows(w), *kept;
    te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_ADD, multiplied(w, grad_output, output), sums);
    if (te_sdpa_is_fp8(key)) {
        return scaled(w, sums, TE_SDPA_GRAD_OUTPUT_INVERSE, TE_SDPA_OUTPUT_INVERSE);
    }
    kept = rows_at(w, TE_SDPA_ROW_SUM, key->packs_scratch);
    /* Without this product, by 1 too, the engine keeps all scores in its workspace. */
    te_cudnn_pointwise_to(w->graph, CUDNN_POINTWISE_MUL, sums,
                          te_cudnn_float(w->graph, 1.0F - key->dropout), kept);
    return kept;
}

int te_sdpa_sums_queries(const te_sdpa_key *key)
{
    return key->backward && !key->deterministic && !key->wants_bias_grad && !te_sdpa_is_fp8(key);
}

int te_sdpa_fills_heads(const te_sdpa_key *key)
{
    return key->packs_scratch && key->heads != key->kv_heads;
}

/* fp32, dense or as the gradient lies. */
static tensor *query_sum(writer *w)
{
    const te_sdpa_key *key = w->key;
    const te_sdpa_strides *of = &key->grad_query;
    const int64_t shape[4] = {key->batch, key->heads, key->queries, key->d_k};
    const int64_t dense[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
    const int64_t packed[4] = {of->batch, of->head, of->token, 1};
    return te_cudnn_at(w->graph, TE_SDPA_QUERY_SUM, CUDNN_DATA_FLOAT, shape,
                       key->packs_scratch ? packed : dense, 16,
                       key->packs_scratch ? offsets_at(w, TE_SDPA_GRAD_QUERY, of->token) : NULL);
}

static void write_query_gradient(writer *w, tensor *grad_scores)
{
    const te_sdpa_key *key = w->key;
    tensor *result = queries_at(w, TE_SDPA_GRAD_QUERY, &key->grad_query, key->d_k), *sum = result;
    if (te_sdpa_sums_queries(key)) sum = query_sum(w);
    multiply(w, grad_scores, keys_again(w), sum, w->lengths.queries, NULL, w->lengths.keys);
    if (sum != result) {
        te_cudnn_pointwise_to(w->graph, CUDNN_POINTWISE_IDENTITY, sum, NULL, result);
    }
}

static tensor *bias_gradient(const writer *w)
{
    const te_sdpa_key *key = w->key;
    int64_t shape[4];
    for (int i = 0; i < 4; i++) shape[i] = key->bias_grad_sums >> i & 1 ? 1 : key->bias_shape[i];
    return at(w, TE_SDPA_GRAD_BIAS, type_of(key->bias_dtype), shape, NULL);
}

static void write_backward(writer *w)
{
    const te_sdpa_key *key = w->key;
    const int drops = key->dropout > 0.0F;
    tensor *grad_output, *sums, *scores, *weights, *dropped, *grads, *kept = NULL, *factor = NULL;
    begin(w);
    grad_output = queries_at(w, TE_SDPA_GRAD_OUTPUT, &key->grad_output, key->d_v);
    if (drops) {
        kept = decisions(w);
        factor = te_cudnn_float(w->graph, te_keep_factor(key->dropout));
    }
    sums = row_sums(w, grad_output);
    scores = subtracted(w, scores_of(w), statistics_at(w));
    weights = exponential(w, within_window(w, scores));
    dropped = drops ? multiplied(w, multiplied(w, weights, kept), factor) : weights;
    multiply_by_keys(w, dropped, grad_output, TE_SDPA_GRAD_VALUE, &key->grad_value, key->d_v);
    grads = virtual_scores(w);
    multiply(w, grad_output, keys_at(w, TE_SDPA_VALUE, &key->value, key->d_v, 1), grads,
             w->lengths.queries, w->lengths.keys, NULL);
    if (drops) grads = multiplied(w, grads, kept);
    grads = multiplied(w, subtracted(w, grads, sums), weights);
    if (drops) grads = multiplied(w, grads, factor);
    if (key->wants_bias_grad) {
        te_cudnn_reduce(w->graph, CUDNN_REDUCE_TENSOR_ADD, grads, bias_gradient(w));
    }
    grads = multiplied(w, uncapped(w, grads), w->scale);
    multiply_by_keys(w, grads, w->query, TE_SDPA_GRAD_KEY, &key->grad_key, key->d_k);
    write_query_gradient(w, grads);
}

/* In FP8: products of what was cast, the weights and the gradient of the scores too. */
static void write_fp8_backward(writer *w)
{
    static const scaling of_value = {{TE_SDPA_WEIGHTS_INVERSE, TE_SDPA_GRAD_OUTPUT_INVERSE},
                                     TE_SDPA_GRADS_SCALE,
                                     TE_SDPA_GRAD_VALUE_AMAX};
    static const scaling of_query = {{TE_SDPA_GRAD_SCORES_INVERSE, TE_SDPA_KEY_INVERSE},
                                     TE_SDPA_GRADS_SCALE,
                                     TE_SDPA_GRAD_QUERY_AMAX};
    static const scaling of_key = {{TE_SDPA_GRAD_SCORES_INVERSE, TE_SDPA_QUERY_INVERSE},
                                   TE_SDPA_GRADS_SCALE,
                                   TE_SDPA_GRAD_KEY_AMAX};
    const te_sdpa_key *key = w->key;
    tensor *grad_output, *sums, *scores, *weights, *narrow, *grads;
    begin(w);
    grad_output = queries_at(w, TE_SDPA_GRAD_OUTPUT, &key->grad_output, key->d_v);
    sums = row_sums(w, grad_output);
    scores = within_window(w, scores_of(w));
    weights = exponential(w, subtracted(w, scores, statistics_at(w)));
    narrow = cast(w, weights, TE_SDPA_WEIGHTS_SCALE, -1, w->dtype);
    multiply_cast(w, turned(w, narrow, w->dtype), grad_output,
                  keys_at(w, TE_SDPA_GRAD_VALUE, &key->grad_value, key->d_v, 0), &of_value,
                  w->lengths.keys, w->lengths.queries);
    grads = virtual_scores(w);
    multiply(w, grad_output, keys_at(w, TE_SDPA_VALUE, &key->value, key->d_v, 1), grads,
             w->lengths.queries, w->lengths.keys, NULL);
    grads = scaled(w, grads, TE_SDPA_GRAD_OUTPUT_INVERSE, TE_SDPA_VALUE_INVERSE);
    grads = multiplied(w, multiplied(w, subtracted(w, grads, sums), weights), w->scale);
    grads = cast(w, grads, TE_SDPA_GRAD_SCORES_SCALE, TE_SDPA_GRAD_SCORES_AMAX, w->grad_dtype);
    multiply_cast(w, grads, keys_again(w),
                  queries_at(w, TE_SDPA_GRAD_QUERY, &key->grad_query, key->d_k), &of_query,
                  w->lengths.queries, w->lengths.keys);
    multiply_cast(w, turned(w, grads, w->grad_dtype), w->query,
                  keys_at(w, TE_SDPA_GRAD_KEY, &key->grad_key, key->d_k, 0), &of_key,
                  w->lengths.keys, w->lengths.queries);
}

void te_sdpa_write(te_cudnn_graph *graph, const te_sdpa_key *key)
{
    writer w = {.graph = graph, .key = key, .dtype = type_of(key->dtype)};
    w.grad_dtype = te_sdpa_is_fp8(key) ? type_of(key->grad_dtype) : w.dtype;
    if (!key->backward) {
        write_forward(&w);
    } else if (te_sdpa_is_fp8(key)) {
        write_fp8_backward(&w);
    } else {
        write_backward(&w);
    }
}
