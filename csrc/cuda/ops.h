/* SPDX-License-Identifier: Apache-2.0
 *
 * ops.h - the operators of the CUDA backend, one function per slot; backend.c puts them in the
 * table.
 */
#ifndef TE_CUDA_OPS_H
#define TE_CUDA_OPS_H

#include "transformer_engine.h"

#define X(NAME, name)                                                                              \
    te_status te_cuda_##name(void *self, te_context *context, const void *args, void *stream);
TE_OPS(X)
#undef X

/* The operators that need a workspace. */
#define TE_CUDA_WORKSPACES(X)                                                                      \
    X(QUANTIZE, quantize)                                                                          \
    X(GEMM, gemm)                                                                                  \
    X(NORM, norm)                                                                                  \
    X(NORM_BACKWARD, norm_backward)                                                                \
    X(ACTIVATION_BACKWARD, activation_backward)                                                    \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(DROPOUT_BACKWARD, dropout_backward)

#define X(NAME, name)                                                                              \
    te_status te_cuda_##name##_workspace(void *self, te_context *context, const void *args,        \
                                         size_t *bytes);
TE_CUDA_WORKSPACES(X)
#undef X

/* The operators that a library or the kernels limit. */
#define TE_CUDA_SUPPORTS(X)                                                                        \
    X(GEMM, gemm)                                                                                  \
    X(NORM, norm)                                                                                  \
    X(NORM_BACKWARD, norm_backward)                                                                \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)

#define X(NAME, name)                                                                              \
    te_status te_cuda_##name##_supports(void *self, te_context *context, const void *args);
TE_CUDA_SUPPORTS(X)
#undef X

/* te_update and te_l2norm of a CUDA context. */
te_status te_cuda_update(te_context *context, const te_update_args *args, void *stream);
te_status te_cuda_l2norm(te_context *context, const te_l2norm_args *args, void *stream);
/* te_context_tune_gemm of a CUDA context, on its device state. */
te_status te_cuda_tune_gemm(void *state, int32_t enabled, const char *cache_file);

#endif
