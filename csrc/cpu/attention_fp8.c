/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fp8.c - what attention does besides where its operands are FP8: scales, and values that
 * are cast between two products.
 *
 * The bytes of an operand are packed as they are, and what they are to be multiplied with becomes
 * part of the scale of the scores or of a factor of the result.
 */
#include "core/attention.h"
#include "cpu/attention.h"

enum { PIECE = 256 };

static float inverse_of(const te_tensor *scales)
{
    return te_tensor_present(scales) ? ((const float *)scales->data)[TE_SCALES_INVERSE] : 1.0F;
}

void te_cpu_fp8_begin(const te_attention_problem *problem, te_cpu_attention_job *attention)
{
    te_cpu_attention_scales *s = &attention->scales;
    s->fp8 = te_attention_is_fp8(problem);
    s->query = inverse_of(&problem->query_scales);
    s->key = inverse_of(&problem->key_scales);
    s->value = inverse_of(&problem->value_scales);
    s->weights = te_attention_weights_scale(problem->dropout);
    attention->scores.scale *= s->query * s->key;
}

void te_cpu_fp8_measure(const float *values, int64_t n, float *amax)
{
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = values[i] < 0.0F ? -values[i] : values[i];
        if (magnitude > *amax) *amax = magnitude;
    }
}

void te_cpu_fp8_round(const te_cpu_kernels *kernels, te_dtype dtype, float scale, float *values,
                      int64_t n, float *amax)
{
    unsigned char bytes[PIECE];
    te_cpu_fp8_measure(values, n, amax);
    for (int64_t i = 0; i < n; i += PIECE) {
        const int64_t count = te_cpu_min(PIECE, n - i);
        kernels->multiply(values + i, scale, count);
        kernels->from_f32[dtype](values + i, bytes, count);
        kernels->to_f32[dtype](bytes, values + i, count);
    }
}
