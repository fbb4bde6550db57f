/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_rows.h - what is made of cuDNN's numbers of each query, or for it: sinks and
 * their gradients, statistics.
 */
#ifndef TE_CUDA_ATTENTION_ROWS_H
#define TE_CUDA_ATTENTION_ROWS_H

#include "cuda/driver.h"
#include "cuda/sdpa_graph.h"

/* The sink at its place joins a forward without one: scales the output down, and writes statistics
 * (NULL: none) from those at their place. */
te_status te_cuda_attention_join_sink(te_cuda_state *cuda, const te_sdpa_key *key,
                                      void *const *places, const te_tensor *output,
                                      float *statistics, void *stream);
/* [heads]: the gradient of the sink at its place, once a backward has run. */
te_status te_cuda_attention_sink_grad(te_cuda_state *cuda, const te_sdpa_key *key,
                                      void *const *places, float *grad, void *stream);
/* Statistics [rows], with a large number in place of -Inf. */
te_status te_cuda_attention_raise(te_cuda_state *cuda, const float *statistics, float *output,
                                  int64_t rows, void *stream);

#endif
