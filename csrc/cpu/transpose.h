/* SPDX-License-Identifier: Apache-2.0
 *
 * transpose.h - transposition of a small block that is in the first-level cache.
 */
#ifndef TE_CPU_TRANSPOSE_H
#define TE_CPU_TRANSPOSE_H

#include <stdint.h>

enum { TE_CPU_BLOCK = 64 }; /* rows and columns of a block at most; a line of the cache of bytes */

/* output[c][r] = input[r][c] of bytes; strides in elements. Up to 64 x 64. */
void te_cpu_transpose_bytes(const uint8_t *input, int64_t input_stride, uint8_t *output,
                            int64_t output_stride, int64_t rows, int64_t columns);
/* The same of floats given by row: output[c * stride + r] = input[r][c]. */
void te_cpu_transpose_floats(const float *const *input, float *output, int64_t output_stride,
                             int64_t rows, int64_t columns);

#endif
