/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.h - host side of the casts to MXFP8 and NVFP4, and of what no GEMM of the device
 * reads: operands that are multiplied out first.
 */
#ifndef TE_CUDA_MICROSCALE_H
#define TE_CUDA_MICROSCALE_H

#include "core/operand.h"
#include "cuda/driver.h"
#include "cuda/kernels/microscale.h"

/* What a kernel of micro_cast.cuh is told, with `across` tiles beside each other. */
te_micro_params te_cuda_micro_params(const te_cast_request *cast, int across);
/* The launch that writes the amax of each row (row_scaled), of at least one. */
te_cuda_call te_cuda_micro_rows_call(const te_quantize_args *args, te_nvfp4_rows_params *params);
/* Partial maxima of the transformed columns. */
te_status te_cuda_hadamard_amax(te_cuda_state *cuda, const te_amax_args *args, void *stream);
/* `raw`: without the factor of an NVFP4 tensor. */
te_status te_cuda_micro_dequantize(te_cuda_state *cuda, const te_operand *input, int by_rows,
                                   int raw, const te_tensor *output, void *stream);
/* out = {factor of a and b, beta}. */
te_status te_cuda_nvfp4_alpha(te_cuda_state *cuda, const te_gemm_operand *a,
                              const te_gemm_operand *b, float beta, float *out, void *stream);

#endif
