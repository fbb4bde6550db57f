/* SPDX-License-Identifier: Apache-2.0
 *
 * sdpa_graph.h - attention and its gradient as graphs of cuDNN operations.
 *
 * cuDNN knows these patterns and runs each as one fused kernel of its own; the operations must be
 * those of its patterns, in the same roles, or no engine takes the graph.
 */
#ifndef TE_CUDA_SDPA_GRAPH_H
#define TE_CUDA_SDPA_GRAPH_H

#include "cuda/cudnn_graph.h"

/* Strides of [batch, heads, tokens, channels]; channels are adjacent. */
typedef struct te_sdpa_strides {
    int64_t batch, head, token;
} te_sdpa_strides;

/* All that a plan depends on; bytes that are no field are 0, so that keys are compared by bytes. */
typedef struct te_sdpa_key {
    int64_t batch, heads, kv_heads, queries, keys, d_k, d_v;
    te_sdpa_strides query, key, value, output, grad_output, grad_query, grad_key, grad_value;
    int64_t bias_shape[4], bias_strides[4];
    int64_t window_left, window_right; /* -1: no limit */
    int64_t diagonal; /* the key on the diagonal of query 0; further right by (keys - queries) of
                         each sequence where bottom_right */
    float scale, dropout, softcap; /* softcap 0: the scaled scores are as they are */
    uint8_t dtype, bias_dtype;     /* FP8 operands have scales, and so has what is made of them */
    uint8_t backward;
    uint8_t has_bias, has_slopes, has_lengths, bottom_right;
    uint8_t has_sink, keeps_statistics; /* of a forward */
    uint8_t wants_bias_grad;            /* of a backward */
    uint8_t bias_grad_sums; /* 1 << dim: its gradient has one entry where the bias has several */
    uint8_t deterministic;  /* of a backward */
    uint8_t is_packed;      /* sequences begin at offsets, of tensors and statistics; lengths are
                               there; batch, queries and keys are bounds */
    uint8_t packs_scratch;  /* of a backward: what it sums lies as the gradients do */
    uint8_t grad_dtype;     /* of an FP8 backward: of grad_output and all gradients */
    uint8_t unused[5];
} te_sdpa_key;

/* Where a run finds its tensors. */
enum {
    TE_SDPA_QUERY,
    TE_SDPA_KEY,
    TE_SDPA_VALUE,
    TE_SDPA_OUTPUT,
    TE_SDPA_STATISTICS,
    TE_SDPA_BIAS,
    TE_SDPA_SLOPES,
    TE_SDPA_SINK,
    TE_SDPA_QUERY_LENGTHS,
    TE_SDPA_KEY_LENGTHS,
    TE_SDPA_SEED,
    TE_SDPA_OFFSET,
    TE_SDPA_GRAD_OUTPUT,
    TE_SDPA_GRAD_QUERY,
    TE_SDPA_GRAD_KEY,
    TE_SDPA_GRAD_VALUE,
    TE_SDPA_GRAD_BIAS,  /* dense, in the dtype of the bias; see bias_grad_sums */
    TE_SDPA_QUERY_SUM,  /* scratch: [batch, heads, queries, d_k] f32, where not deterministic */
    TE_SDPA_ROW_SUM,    /* scratch: [batch, heads, queries] f32 */
    TE_SDPA_FULL_KEY,   /* scratch, if packed, with groups: gradients of keys by each head, with */
    TE_SDPA_FULL_VALUE, /* token strides that are larger by the heads of a group; of values */
    /* Of FP8: what values are multiplied with before they are cast, by which they are read again,
     * and their largest magnitudes (written). Weights are the softmax, GRAD_SCORES is the gradient
     * of the scores; GRADS_SCALE serves the gradients of query, key and value, which have an amax
     * each. */
    TE_SDPA_QUERY_INVERSE,
    TE_SDPA_KEY_INVERSE,
    TE_SDPA_VALUE_INVERSE,
    TE_SDPA_WEIGHTS_SCALE,
    TE_SDPA_WEIGHTS_INVERSE,
    TE_SDPA_WEIGHTS_AMAX,
    TE_SDPA_OUTPUT_SCALE,
    TE_SDPA_OUTPUT_INVERSE,
    TE_SDPA_OUTPUT_AMAX,
    TE_SDPA_GRAD_OUTPUT_INVERSE,
    TE_SDPA_GRAD_SCORES_SCALE,
    TE_SDPA_GRAD_SCORES_INVERSE,
    TE_SDPA_GRAD_SCORES_AMAX,
    TE_SDPA_GRADS_SCALE,
    TE_SDPA_GRAD_QUERY_AMAX,
    TE_SDPA_GRAD_KEY_AMAX,
    TE_SDPA_GRAD_VALUE_AMAX,
    TE_SDPA_OFFSETS, /* + the place of a packed tensor: [batch + 1] i64, the element with which
                        each sequence begins there */
    TE_SDPA_PLACES = 2 * TE_SDPA_OFFSETS
};

/* Whether a backward sums the gradient of the query in TE_SDPA_QUERY_SUM. */
int te_sdpa_sums_queries(const te_sdpa_key *key);
/* Whether it has TE_SDPA_FULL_KEY and TE_SDPA_FULL_VALUE. */
int te_sdpa_fills_heads(const te_sdpa_key *key);
/* Whether tokens at a place are those of the keys. */
int te_sdpa_is_of_keys(int32_t place);
/* Whether queries, keys and values are FP8. */
int te_sdpa_is_fp8(const te_sdpa_key *key);
/* Writes the graph of a problem; the outcome is in its status. */
void te_sdpa_write(te_cudnn_graph *graph, const te_sdpa_key *key);

#endif
