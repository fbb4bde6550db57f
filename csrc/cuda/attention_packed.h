/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_packed.h - packed sequences: bounds of few values in place of sizes, where cuDNN finds
 * each sequence, and what it leaves unwritten.
 */
#ifndef TE_CUDA_ATTENTION_PACKED_H
#define TE_CUDA_ATTENTION_PACKED_H

#include "cuda/driver.h"
#include "cuda/kernels/attention.h"
#include "cuda/launch.h"
#include "cuda/sdpa_graph.h"

/* Elements of 16 bytes: what heads are multiples of and begin at. */
#define TE_CUDA_ATTENTION_VECTOR 8

static inline te_attention_heads te_cuda_attention_heads(const te_tensor *heads)
{
    const int64_t *n = heads->shape, pair = te_dtype_is_fp8(heads->dtype) ? 2 : 1;
    te_attention_heads made = {te_cuda_view4(heads), n[1], n[2],
                               n[3] / (pair * TE_CUDA_ATTENTION_VECTOR)};
    for (int i = 0; i < 4; i++) made.view.strides[i] /= pair;
    return made;
}

/* Batch, queries and keys of a problem's key, and what `begin` has of the problem. What goes beyond
 * a sequence costs blocks that end at once, but memory where a backward has a matrix of scores:
 * is_exact keeps it small. */
void te_cuda_attention_bound(const te_attention_problem *problem, int is_exact, te_sdpa_key *key,
                             te_attention_begin_params *begin);
/* Writes lengths, and starts of packed sequences, as cuDNN reads them. */
te_status te_cuda_attention_begin(te_cuda_state *cuda, const te_attention_begin_params *begin,
                                  void *stream);
/* Writes what cuDNN does not: of heads of queries, or of queries, keys and values, and of
 * statistics (NULL: none); absent ones are passed over. */
te_status te_cuda_attention_gaps(te_cuda_state *cuda, const te_attention_begin_params *begin,
                                 const te_tensor *const heads[3], const te_tensor *statistics,
                                 void *stream);

#endif
