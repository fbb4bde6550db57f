/* SPDX-License-Identifier: Apache-2.0
 *
 * ops.h - the operators of the CPU backend, one function per slot; backend.c puts them in the
 * table.
 */
#ifndef TE_CPU_OPS_H
#define TE_CPU_OPS_H

#include "transformer_engine.h"

#define X(NAME, name)                                                                              \
    te_status te_cpu_##name(void *self, te_context *context, const void *args, void *stream);
TE_OPS(X)
#undef X

/* The operators that need a workspace. */
#define TE_CPU_WORKSPACES(X)                                                                       \
    X(QUANTIZE, quantize)                                                                          \
    X(GEMM, gemm)                                                                                  \
    X(NORM_BACKWARD, norm_backward)                                                                \
    X(ACTIVATION_BACKWARD, activation_backward)                                                    \
    X(ATTENTION, attention)                                                                        \
    X(ATTENTION_BACKWARD, attention_backward)                                                      \
    X(DROPOUT_BACKWARD, dropout_backward)

#define X(NAME, name)                                                                              \
    te_status te_cpu_##name##_workspace(void *self, te_context *context, const void *args,         \
                                        size_t *bytes);
TE_CPU_WORKSPACES(X)
#undef X

#endif
