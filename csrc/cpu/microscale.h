/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.h - casts to MXFP8 and NVFP4 (core/microscale.h) of tiles of fp32 numbers, and their
 * inverse.
 */
#ifndef TE_CPU_MICROSCALE_H
#define TE_CPU_MICROSCALE_H

#include "core/scales.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"

/* Casts a matrix. */
void te_cpu_micro_quantize(const te_cast_request *cast, const te_cpu_matrix *input);

/* The largest magnitude of the transposed and transformed matrix, NaN ignored. */
float te_cpu_hadamard_amax(const te_cpu_kernels *kernels, const te_cpu_matrix *input);

/* Data to numbers; a GEMM's operand is `raw`, without the factor of an NVFP4 tensor. From the
 * row-wise data, or from the column-wise data. */
void te_cpu_micro_dequantize(const te_operand *input, int by_rows, int raw,
                             const te_tensor *output);

#endif
