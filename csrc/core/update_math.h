/* SPDX-License-Identifier: Apache-2.0
 *
 * update_math.h - what an update makes of one element, once for both backends. Read by gcc, nvcc
 * and NVRTC.
 *
 * IEEE fp32, no two operations contracted to one: every backend makes the same bits.
 */
#ifndef TE_CORE_UPDATE_MATH_H
#define TE_CORE_UPDATE_MATH_H

#include "core/scaling_math.h"

#if defined(__CUDA_ARCH__)
#define TE_TIMES(a, b) __fmul_rn(a, b)
#define TE_PLUS(a, b) __fadd_rn(a, b)
#define TE_OVER(a, b) __fdiv_rn(a, b)
#define TE_ROOT(a) __fsqrt_rn(a)
#define TE_TIMES_64(a, b) __dmul_rn(a, b)
#else
#if !defined(__CUDACC__)
#include <math.h>
#endif
#define TE_TIMES(a, b) ((a) * (b))
#define TE_PLUS(a, b) ((a) + (b))
#define TE_OVER(a, b) ((a) / (b))
#define TE_ROOT(a) sqrtf(a)
#define TE_TIMES_64(a, b) ((a) * (b))
#endif

/* Bits of te_update_numbers.flags: those of the public header, which NVRTC can not read. */
enum {
    TE_STEP_DECOUPLED = 1,
    TE_STEP_CORRECTED = 2,
    TE_STEP_NESTEROV = 4,
    TE_STEP_FIRST = 8,
    TE_STEP_DECAY_LAST = 16,
    TE_STEP_WRITE_GRAD = 32,
    TE_STEP_POWER_2 = 64
};

typedef struct te_update_numbers {
    float lr, beta1, rest1, beta2, rest2; /* rest: 1 - beta */
    float eps, decay, grad_scale;
    float correction1, correction2;
    float momentum, taken; /* taken: 1 - dampening */
    float top;
    int flags;
} te_update_numbers;

/* A gradient times 1 is there already. */
TE_SHARED int te_update_writes_grad(const te_update_numbers *n)
{
    return (n->flags & TE_STEP_WRITE_GRAD) != 0 && n->grad_scale != 1.0F;
}

/* 1 - beta^step by squaring, so that no two libraries' pow() differ. */
TE_SHARED float te_update_correction(double beta, long long step)
{
    double power = 1.0, square = beta;
    for (; step > 0; step >>= 1) {
        if ((step & 1) != 0) power = TE_TIMES_64(power, square);
        square = TE_TIMES_64(square, square);
    }
    return (float)(1.0 - power);
}

/* The new value; the gradient has its factor already. */
TE_SHARED float te_update_adam(const te_update_numbers *n, float grad, float value, float *mean,
                               float *square)
{
    const int decoupled = (n->flags & TE_STEP_DECOUPLED) != 0;
    float update;
    if (!decoupled) grad = TE_PLUS(grad, TE_TIMES(n->decay, value));
    *mean = TE_PLUS(TE_TIMES(n->beta1, *mean), TE_TIMES(n->rest1, grad));
    *square = TE_PLUS(TE_TIMES(n->beta2, *square), TE_TIMES(TE_TIMES(n->rest2, grad), grad));
    update = TE_PLUS(TE_ROOT(TE_OVER(*square, n->correction2)), n->eps);
    update = TE_OVER(TE_OVER(*mean, n->correction1), update);
    if (decoupled) update = TE_PLUS(update, TE_TIMES(n->decay, value));
    return TE_PLUS(value, -TE_TIMES(n->lr, update));
}

/* The same of gradient descent; `mean` is not read or written where there is no momentum. */
TE_SHARED float te_update_sgd(const te_update_numbers *n, float grad, float value, float *mean)
{
    const int last = (n->flags & TE_STEP_DECAY_LAST) != 0;
    const int decays = n->decay != 0.0F;
    if (decays && !last) grad = TE_PLUS(grad, TE_TIMES(n->decay, value));
    if (n->momentum != 0.0F) {
        *mean = (n->flags & TE_STEP_FIRST) != 0
                    ? grad
                    : TE_PLUS(TE_TIMES(n->momentum, *mean), TE_TIMES(n->taken, grad));
        grad = (n->flags & TE_STEP_NESTEROV) != 0 ? TE_PLUS(grad, TE_TIMES(n->momentum, *mean))
                                                  : *mean;
    }
    if (decays && last) grad = TE_PLUS(grad, TE_TIMES(n->decay, value));
    return TE_PLUS(value, -TE_TIMES(n->lr, grad));
}

/* The scale of an amax, and its inverse. */
TE_SHARED float te_update_rescale(const te_update_numbers *n, float amax, float *inverse)
{
    const int power_2 = (n->flags & TE_STEP_POWER_2) != 0;
    const float scale = te_current_scale(amax, n->top, n->eps, power_2);
    *inverse = TE_OVER(1.0F, scale);
    return scale;
}

/* An fp32 number of its two halves, and back: see te_update_list. */
TE_SHARED float te_update_join(unsigned high, unsigned low)
{
    if ((low & 0x8000U) != 0U) high -= 1U;
    return te_bits_float(high << 16 | (low & 0xffffU));
}

TE_SHARED unsigned te_update_high(float value)
{
    const unsigned bits = te_float_bits(value);
    return ((bits >> 16) + ((bits & 0x8000U) != 0U ? 1U : 0U)) & 0xffffU;
}

#endif
