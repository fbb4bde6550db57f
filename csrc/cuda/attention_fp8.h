/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fp8.h - attention in FP8: the numbers that cuDNN's kernels read and write on the
 * device.
 *
 * They take inverse scales beside the scales, and write the largest magnitude of this call, while
 * an operator is given scales and raises what was recorded before.
 */
#ifndef TE_CUDA_ATTENTION_FP8_H
#define TE_CUDA_ATTENTION_FP8_H

#include "cuda/driver.h"
#include "cuda/kernels/attention.h"
#include "cuda/sdpa_graph.h"

enum { TE_ATTENTION_FP8_FLOATS = 16 }; /* of the workspace */

typedef struct te_attention_fp8 {
    te_attention_fp8_begin_params begin;
    te_attention_fp8_end_params end;
} te_attention_fp8;

/* Fills the places of a graph; `floats` are of the workspace. */
void te_cuda_attention_fp8_forward(const te_attention_args *args, float *floats, void **places,
                                   te_attention_fp8 *fp8);
void te_cuda_attention_fp8_backward(const te_attention_backward_args *args, float *floats,
                                    void **places, te_attention_fp8 *fp8);
/* Before cuDNN's kernels: scales and their inverses. Without a workspace those alone that are
 * results. */
te_status te_cuda_attention_fp8_begin(te_cuda_state *cuda, const te_attention_fp8 *fp8,
                                      void *stream);
/* Behind them: amaxes, where they are recorded. */
te_status te_cuda_attention_fp8_end(te_cuda_state *cuda, const te_attention_fp8 *fp8, void *stream);

#endif
