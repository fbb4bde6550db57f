/* SPDX-License-Identifier: Apache-2.0
 *
 * counters.h - what really ran, counted where it is launched. Lock-free; read through
 * te_counters_read.
 */
#ifndef TE_CORE_COUNTERS_H
#define TE_CORE_COUNTERS_H

#include "transformer_engine.h"

/* Why a call took more than its one fast path. X(ENUM, name) */
#define TE_FALLBACKS(X)                                                                            \
    X(GEMM_OUTPUT_PADDED,                                                                          \
      gemm_output_padded) /* rows of d are no 16-byte multiples: scratch + copy */                 \
    X(GEMM_OPERAND_COPIED,                                                                         \
      gemm_operand_copied) /* an operand the library refuses was copied first */                   \
    X(GEMM_BIAS_SEPARATE,                                                                          \
      gemm_bias_separate) /* bias, bias gradient or activation in a kernel of its own */           \
    X(GEMM_CAST_SEPARATE,                                                                          \
      gemm_cast_separate) /* FP8 output cast, with its amax, by the quantize operator */           \
    X(KERNEL_FROM_SOURCE, kernel_from_source) /* device code compiled by NVRTC at run time */

typedef enum te_fallback {
#define X(NAME, name) TE_FALLBACK_##NAME,
    TE_FALLBACKS(X)
#undef X
        TE_FALLBACK_COUNT
} te_fallback;

/* How the operands of a GEMM are scaled, where by rows or tiles; beside te_count_gemm. */
void te_count_scaling(te_device_type device, te_scaling_mode a, te_scaling_mode b);
/* One operator run. */
void te_count_op(te_device_type device, te_op op);
void te_count_fallback(te_fallback reason);

#endif
