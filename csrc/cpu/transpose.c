/* SPDX-License-Identifier: Apache-2.0
 *
 * transpose.c - blocks of 16 x 16 bytes and 4 x 4 floats in registers (SSE2, which every x86-64
 * has), plain loops for the edges and elsewhere.
 */

#include "cpu/isa.h"
#include "cpu/transpose.h"
#if defined(TE_CPU_X86)
#include <emmintrin.h>
#include <xmmintrin.h>
#endif

static void bytes_plain(const uint8_t *input, int64_t input_stride, uint8_t *output,
                        int64_t output_stride, int64_t rows, int64_t columns)
{
    for (int64_t c = 0; c < columns; c++) {
        for (int64_t r = 0; r < rows; r++) {
            output[c * output_stride + r] = input[r * input_stride + c];
        }
    }
}

#if defined(TE_CPU_X86)
/* Four rounds of interleaving row i with row i + 8: each rotates the 8 bits of (row, column). */
static void bytes_16x16(const uint8_t *input, int64_t input_stride, uint8_t *output,
                        int64_t output_stride)
{
    __m128i x[16], y[16];
    for (int i = 0; i < 16; i++) {
        x[i] = _mm_loadu_si128((const __m128i *)(const void *)(input + i * input_stride));
    }
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 8; i++) {
            y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
            y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
        }
        for (int i = 0; i < 8; i++) {
            x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 8]);
            x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 8]);
        }
    }
    for (int i = 0; i < 16; i++) {
        _mm_storeu_si128((__m128i *)(void *)(output + i * output_stride), x[i]);
    }
}

#define WHOLE(n, side) ((n) / (side) * (side))
#else
#define WHOLE(n, side) 0 /* all are edges */
#endif

void te_cpu_transpose_bytes(const uint8_t *input, int64_t input_stride, uint8_t *output,
                            int64_t output_stride, int64_t rows, int64_t columns)
{
    int64_t whole_rows = WHOLE(rows, 16), whole_columns = WHOLE(columns, 16);
#if defined(TE_CPU_X86)
    for (int64_t r = 0; r < whole_rows; r += 16) {
        for (int64_t c = 0; c < whole_columns; c += 16) {
            bytes_16x16(input + r * input_stride + c, input_stride, output + c * output_stride + r,
                        output_stride);
        }
    }
#endif
    bytes_plain(input + whole_columns, input_stride, output + whole_columns * output_stride,
                output_stride, whole_rows, columns - whole_columns);
    bytes_plain(input + whole_rows * input_stride, input_stride, output + whole_rows, output_stride,
                rows - whole_rows, columns);
}

void te_cpu_transpose_floats(const float *const *input, float *output, int64_t output_stride,
                             int64_t rows, int64_t columns)
{
    int64_t whole_rows = WHOLE(rows, 4), whole_columns = WHOLE(columns, 4);
#if defined(TE_CPU_X86)
    for (int64_t c = 0; c < whole_columns; c += 4) {
        for (int64_t r = 0; r < whole_rows; r += 4) {
            float *block = output + c * output_stride + r;
            __m128 r0 = _mm_loadu_ps(input[r] + c), r1 = _mm_loadu_ps(input[r + 1] + c);
            __m128 r2 = _mm_loadu_ps(input[r + 2] + c), r3 = _mm_loadu_ps(input[r + 3] + c);
            __m128 low01 = _mm_unpacklo_ps(r0, r1), high01 = _mm_unpackhi_ps(r0, r1);
            __m128 low23 = _mm_unpacklo_ps(r2, r3), high23 = _mm_unpackhi_ps(r2, r3);
            _mm_storeu_ps(block, _mm_movelh_ps(low01, low23));
            _mm_storeu_ps(block + output_stride, _mm_movehl_ps(low23, low01));
            _mm_storeu_ps(block + 2 * output_stride, _mm_movelh_ps(high01, high23));
            _mm_storeu_ps(block + 3 * output_stride, _mm_movehl_ps(high23, high01));
        }
    }
#endif
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = r < whole_rows ? whole_columns : 0;
        for (int64_t c = first; c < columns; c++) output[c * output_stride + r] = input[r][c];
    }
}
