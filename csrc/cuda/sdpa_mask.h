/* SPDX-License-Identifier: Apache-2.0
 *
 * sdpa_mask.h - which query attends which key, as operations of a graph of attention: scores that
 * it forbids become -Inf, in the forms that the engines know.
 */
#ifndef TE_CUDA_SDPA_MASK_H
#define TE_CUDA_SDPA_MASK_H

#include "cuda/sdpa_graph.h"

/* int32 [batch, 1, 1, 1]; NULL where all sequences are as long as the tensors. */
typedef struct te_sdpa_lengths {
    te_cudnn_tensor *queries, *keys;
} te_sdpa_lengths;

/* The scores without tokens behind the ends of the sequences. */
te_cudnn_tensor *te_sdpa_within_lengths(te_cudnn_graph *graph, const te_sdpa_lengths *lengths,
                                        te_cudnn_tensor *scores);
/* The scores without keys outside of the window. */
te_cudnn_tensor *te_sdpa_within_window(te_cudnn_graph *graph, const te_sdpa_key *key,
                                       const te_sdpa_lengths *lengths, te_cudnn_tensor *scores);

#endif
