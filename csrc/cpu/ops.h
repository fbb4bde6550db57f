/* SPDX-License-Identifier: Apache-2.0
 *
 * ops.h - the operators of the CPU backend, which has no state and no streams; backend.c puts them
 * in the table.
 */
#ifndef TE_CPU_OPS_H
#define TE_CPU_OPS_H

#include "transformer_engine.h"

#define X(NAME, name) te_status te_cpu_##name(const te_##name##_args *args);
TE_OPS(X)
#undef X

/* te_update and te_l2norm of a CPU context. */
te_status te_cpu_update(te_context *context, const te_update_args *args, void *stream);
te_status te_cpu_l2norm(te_context *context, const te_l2norm_args *args, void *stream);

/* The operators that need a workspace, and its bytes. */
#define TE_CPU_WORKSPACES(X)                                                                       \
    X(QUANTIZE, quantize)                                                                          \
    X(GEMM, gemm)                                                                                  \
    X(NORM_BACKWARD, norm_backward)                                                                \
    X(ACTIVATION_BACKWARD, activation_backward)                                                    \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(DROPOUT_BACKWARD, dropout_backward)

#define X(NAME, name) size_t te_cpu_##name##_workspace(const te_##name##_args *args);
TE_CPU_WORKSPACES(X)
#undef X

#endif
