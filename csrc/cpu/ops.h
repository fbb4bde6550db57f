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

te_status te_cpu_quantize_workspace(void *self, te_context *context, const void *args,
                                    size_t *bytes);
te_status te_cpu_gemm_workspace(void *self, te_context *context, const void *args, size_t *bytes);
te_status te_cpu_norm_backward_workspace(void *self, te_context *context, const void *args,
                                         size_t *bytes);
te_status te_cpu_activation_backward_workspace(void *self, te_context *context, const void *args,
                                               size_t *bytes);
te_status te_cpu_attention_workspace(void *self, te_context *context, const void *args,
                                     size_t *bytes);
te_status te_cpu_attention_backward_workspace(void *self, te_context *context, const void *args,
                                              size_t *bytes);
te_status te_cpu_dropout_backward_workspace(void *self, te_context *context, const void *args,
                                            size_t *bytes);

#endif
