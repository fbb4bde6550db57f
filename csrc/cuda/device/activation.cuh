/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.cuh - activations of one number, and their slopes.
 *
 * All but the two relus are a s(z) with the logistic function s, tanh GELU too: 0.5 (1 + tanh(u)) =
 * s(2 u). s(z) = 1 / (1 + 2^(-z log2 e)) takes two instructions of the special function unit and
 * errs by a few 1e-7 of its value; it is right at both infinities. NaN stays NaN.
 */
#ifndef TE_DEVICE_ACTIVATION_CUH
#define TE_DEVICE_ACTIVATION_CUH

/* -log2 e, and with it tanh GELU's 2 sqrt(2 / pi) and its cubic term. */
#define TE_MINUS_LOG2_E (-1.44269504F)
#define TE_GELU_1 (-2.30220820F)
#define TE_GELU_3 (-0.10294324F)
/* 2 sqrt(2 / pi), and three times its cubic term. */
#define TE_GELU_SLOPE_1 1.59576912F
#define TE_GELU_SLOPE_3 0.21406445F
/* Beyond, in fp32, the logistic function is 0 or 1 even where squares are not Inf. */
#define TE_FAR 1e18F

/* The smaller, the larger; NaN stays. */
__device__ __forceinline__ float te_min_nan(float a, float b)
{
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float te_max_nan(float a, float b)
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

/* 1 / (1 + 2^exponent) */
__device__ __forceinline__ float te_logistic_2(float exponent)
{
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0F + power));
    return result;
}

/* f(a), and where requested f'(a). The derivative of a s(z) is s + s (1 - s) a z'. */
template <int SHAPE, typename P> struct te_activation;

template <typename P> struct te_activation<TE_SHAPE_GELU, P> {
    static __device__ __forceinline__ float value(float a, const P &)
    {
        a = te_max_nan(a, -TE_FAR); /* -Inf * 0 */
        return a * te_logistic_2(a * __fmaf_rn(TE_GELU_3, a * a, TE_GELU_1));
    }
    static __device__ __forceinline__ float slope(float a, const P &, float *value)
    {
        const float near = te_min_nan(te_max_nan(a, -TE_FAR), TE_FAR), square = near * near;
        const float s = te_logistic_2(near * __fmaf_rn(TE_GELU_3, square, TE_GELU_1));
        *value = te_max_nan(a, -TE_FAR) * s;
        return __fmaf_rn((s - s * s) * near, __fmaf_rn(TE_GELU_SLOPE_3, square, TE_GELU_SLOPE_1),
                         s);
    }
};

template <typename P> struct te_activation<TE_SHAPE_SWISH, P> {
    static __device__ __forceinline__ float value(float a, const P &p)
    {
        a = te_max_nan(a, -TE_FAR);
        return a * te_logistic_2(a * (p.alpha * TE_MINUS_LOG2_E));
    }
    static __device__ __forceinline__ float slope(float a, const P &p, float *value)
    {
        const float near = te_min_nan(te_max_nan(a, -TE_FAR), TE_FAR);
        const float s = te_logistic_2(near * (p.alpha * TE_MINUS_LOG2_E));
        *value = te_max_nan(a, -TE_FAR) * s;
        return __fmaf_rn(s - s * s, p.alpha * near, s);
    }
};

template <typename P> struct te_activation<TE_SHAPE_RELU, P> {
    static __device__ __forceinline__ float value(float a, const P &)
    {
        return te_max_nan(a, 0.0F);
    }
    static __device__ __forceinline__ float slope(float a, const P &, float *value)
    {
        *value = te_max_nan(a, 0.0F);
        return a > 0.0F ? 1.0F : 0.0F;
    }
};

template <typename P> struct te_activation<TE_SHAPE_SRELU, P> {
    static __device__ __forceinline__ float value(float a, const P &)
    {
        a = te_max_nan(a, 0.0F);
        return a * a;
    }
    static __device__ __forceinline__ float slope(float a, const P &, float *value)
    {
        a = te_max_nan(a, 0.0F);
        *value = a * a;
        return 2.0F * a;
    }
};

template <typename P> struct te_activation<TE_SHAPE_GLU, P> {
    static __device__ __forceinline__ float value(float a, const P &)
    {
        return te_logistic_2(a * TE_MINUS_LOG2_E);
    }
    static __device__ __forceinline__ float slope(float a, const P &, float *value)
    {
        const float s = te_logistic_2(a * TE_MINUS_LOG2_E);
        *value = s;
        return s * te_logistic_2(a * -TE_MINUS_LOG2_E); /* s - s * s has few digits near 1 */
    }
};

template <typename P> struct te_activation<TE_SHAPE_CLAMPED, P> {
    typedef te_activation<TE_SHAPE_SWISH, P> swish;
    static __device__ __forceinline__ float value(float a, const P &p)
    {
        return swish::value(te_min_nan(a, p.limit), p);
    }
    static __device__ __forceinline__ float slope(float a, const P &p, float *value)
    {
        const float inside = swish::slope(te_min_nan(a, p.limit), p, value);
        return a > p.limit ? 0.0F : inside;
    }
};

/* What multiplies f(a), and its slope. */
template <int SHAPE, typename P> __device__ __forceinline__ float te_gate_value(float b, const P &p)
{
    if (SHAPE != TE_SHAPE_CLAMPED) return b;
    return te_max_nan(te_min_nan(b, p.limit), -p.limit) + p.offset;
}
template <int SHAPE, typename P> __device__ __forceinline__ float te_gate_slope(float b, const P &p)
{
    if (SHAPE != TE_SHAPE_CLAMPED) return 1.0F;
    return b != b ? b : fabsf(b) <= p.limit ? 1.0F : 0.0F;
}

#endif
