/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_activation.h - the inner loops of the activations, as a template like rows.h and included
 * after it.
 *
 * Values and slopes go through exponential() of rows.h: within a few units in the last place of the
 * number or, where a slope passes through 0, of its terms; where x s(z) is small because z is far
 * below 0, |z| times the rounding of z comes on top (100 units for GELU at -10). x s(x) has the
 * limits 0 at -Inf and Inf at Inf, and is 0 once e^-x overflows (x below -88.4, results below
 * 4e-37); slopes have the limits 0 and 1. NaN stays NaN, but for the slope of relu, which is 0
 * there.
 */
#ifndef TE_CPU_ROWS_ACTIVATION_H
#define TE_CPU_ROWS_ACTIVATION_H

#include "cpu/rows.h"

/* x between -limit and limit; NaN stays. */
TE_INLINE float limited(float x, float limit)
{
    float below = choose(x > limit, limit, x);
    return choose(below < -limit, -limit, below);
}

TE_INLINE float logistic(float z)
{
    return 1.0F / (1.0F + exponential(-z));
}

/* Slope of the logistic function, and its value. Both from e^-|z|: 1 - s would lose its digits. */
TE_INLINE float logistic_slope(float z, float *value)
{
    float small = exponential(te_float_of(te_bits_of(z) | INT32_MIN));
    float inverse = 1.0F / (1.0F + small);
    *value = choose(z < 0.0F, small, 1.0F) * inverse;
    return small * inverse * inverse;
}

/* x s(alpha x) */
TE_INLINE float swish_value(float x, float alpha)
{
    float finite = above_minus_infinity(x);
    return finite / (1.0F + exponential(-alpha * finite));
}

TE_INLINE float swish_slope(float x, float alpha)
{
    float value, z = limited(alpha * x, TE_CPU_LARGE);
    float slope = logistic_slope(z, &value);
    return value + z * slope;
}

/* The slope is 0 or 1 in fp32 long before 16. */
TE_INLINE float gelu_slope(float x)
{
    float value, near = limited(x, 16.0F), square = near * near;
    float slope = logistic_slope(1.5957691216F * near * (1.0F + 0.044715F * square), &value);
    return value + slope * 1.5957691216F * near * (1.0F + 0.134145F * square);
}

TE_INLINE float relu_value(float x)
{
    return choose(x <= 0.0F, 0.0F, x); /* no -0 */
}

TE_INLINE float relu_slope(float x)
{
    return choose(x > 0.0F, 1.0F, 0.0F);
}

TE_INLINE float srelu_value(float x)
{
    return relu_value(x) * relu_value(x);
}

TE_INLINE float srelu_slope(float x)
{
    return 2.0F * relu_value(x);
}

#define TE_CPU_SWISH(name, alpha)                                                                  \
    TE_INLINE float name##_value(float x)                                                          \
    {                                                                                              \
        return swish_value(x, alpha);                                                              \
    }                                                                                              \
    TE_INLINE float name##_slope(float x)                                                          \
    {                                                                                              \
        return swish_slope(x, alpha);                                                              \
    }
TE_CPU_SWISH(silu, 1.0F)
TE_CPU_SWISH(qgelu, 1.702F)

TE_INLINE float glu_value(float x)
{
    return logistic(x);
}

TE_INLINE float glu_slope(float x)
{
    float value;
    return logistic_slope(x, &value);
}

TE_INLINE float clamped_value(float x, const te_activation_params *p)
{
    return swish_value(choose(x > p->limit, p->limit, x), p->alpha);
}

TE_INLINE float clamped_slope(float x, const te_activation_params *p)
{
    float slope = swish_slope(choose(x > p->limit, p->limit, x), p->alpha);
    return choose(x > p->limit, 0.0F, slope);
}

TE_INLINE float clamped_gate(float x, const te_activation_params *p)
{
    return limited(x, p->limit) + p->linear_offset;
}

/* 1 within the limit, 0 outside; NaN stays. */
TE_INLINE float clamped_gate_slope(float x, const te_activation_params *p)
{
    return choose(limited(x, p->limit) == x, 1.0F, choose(x == x, 0.0F, x));
}

/* One loop; `result` is made of a, b, grad and p. */
#define TE_CPU_ACTIVATION_LOOP(function, result)                                                   \
    static void function(const te_cpu_activation_row *row, float *restrict y, int64_t n)           \
    {                                                                                              \
        const float *restrict first = row->a, *restrict second = row->b;                           \
        const float *restrict grads = row->grad;                                                   \
        const te_activation_params p = row->params;                                                \
        for (int64_t i = 0; i < n; i++) y[i] = (result);                                           \
        (void)second, (void)grads, (void)p;                                                        \
    }

/* X(ENUM, name): activations of one number, and those whose result a second one multiplies. */
#define TE_CPU_PLAIN_ACTIVATIONS(X)                                                                \
    X(GELU, gelu) X(QGELU, qgelu) X(RELU, relu) X(SRELU, srelu) X(SILU, silu)
#define TE_CPU_GATED_ACTIVATIONS(X)                                                                \
    X(GEGLU, gelu) X(QGEGLU, qgelu) X(REGLU, relu) X(SREGLU, srelu) X(SWIGLU, silu) X(GLU, glu)

#define X(NAME, name)                                                                              \
    TE_CPU_ACTIVATION_LOOP(plain_##name, name##_value(first[i]))                                   \
    TE_CPU_ACTIVATION_LOOP(plain_##name##_gradient, grads[i] * name##_slope(first[i]))
TE_CPU_PLAIN_ACTIVATIONS(X)
#undef X
#define X(NAME, name)                                                                              \
    TE_CPU_ACTIVATION_LOOP(gated_##name, name##_value(first[i]) * second[i])                       \
    TE_CPU_ACTIVATION_LOOP(gated_##name##_gradient, grads[i] * second[i] * name##_slope(first[i])) \
    TE_CPU_ACTIVATION_LOOP(gated_##name##_gate, grads[i] * name##_value(first[i]))
TE_CPU_GATED_ACTIVATIONS(X)
#undef X
TE_CPU_ACTIVATION_LOOP(clamped, clamped_value(first[i], &p) * clamped_gate(second[i], &p))
TE_CPU_ACTIVATION_LOOP(clamped_gradient,
                       grads[i] * clamped_gate(second[i], &p) * clamped_slope(first[i], &p))
TE_CPU_ACTIVATION_LOOP(clamped_gate_gradient,
                       grads[i] * clamped_value(first[i], &p) * clamped_gate_slope(second[i], &p))

#endif
