/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.cu - activations and their gradients as sources of a kernel on tiles, which casts,
 * transposes, measures and sums them in the same pass.
 *
 * Which activation it is, is known at run time: every thread takes the same branch, once per 8
 * numbers. Both halves of the gradient of a gated activation are made by one thread, which reads
 * its inputs once and works the logistic function out once.
 */
#include "activation.h"
#include "activation.cuh"
#include "micro_cast.cuh"
#include "scaled_cast.cuh"

typedef te_activation_kernel_params te_p;

/* Row i of a source, by the function of this call. Gated ones alone have the last two. */
template <bool GATED, typename S>
static __device__ __forceinline__ void apply_shape(const S &source, const te_p &p, int i,
                                                   float v[S::outputs][8])
{
    if (p.shape == TE_SHAPE_GELU)
        source.template apply<TE_SHAPE_GELU>(p, i, v);
    else if (p.shape == TE_SHAPE_SWISH)
        source.template apply<TE_SHAPE_SWISH>(p, i, v);
    else if (p.shape == TE_SHAPE_RELU)
        source.template apply<TE_SHAPE_RELU>(p, i, v);
    else if (!GATED || p.shape == TE_SHAPE_SRELU)
        source.template apply<TE_SHAPE_SRELU>(p, i, v);
    else if (p.shape == TE_SHAPE_GLU)
        source.template apply<TE_SHAPE_GLU>(p, i, v);
    else
        source.template apply<TE_SHAPE_CLAMPED>(p, i, v);
}

/* f(a), times the gate. */
template <typename T, bool GATED> struct te_value_source {
    typedef te_p params;
    static constexpr int outputs = 1;
    static constexpr bool pads = false, writes = true, adds = false;
    te_index column;
    te_vector<T, 8> a[4], b[GATED ? 4 : 1];

    __device__ __forceinline__ te_value_source(const te_p &, te_index at) : column(at)
    {
    }

    __device__ __forceinline__ void fetch(const te_p &p, te_index row)
    {
        te_fetch_rows<T>(p.input, p.aligned != 0, row, column, a);
        if constexpr (GATED) te_fetch_rows<T>(p.gate, p.aligned != 0, row, column, b);
    }

    template <int SHAPE>
    __device__ __forceinline__ void apply(const te_p &p, int i, float v[1][8]) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[0][j] = te_activation<SHAPE, te_p>::value(a[i].value(j), p);
            if constexpr (GATED) v[0][j] *= te_gate_value<SHAPE>(b[i].value(j), p);
        }
    }

    __device__ __forceinline__ void values(const te_p &p, int i, float v[1][8]) const
    {
        apply_shape<GATED>(*this, p, i, v);
    }
};

/* grad f'(a); gated: grad gate(b) f'(a) and grad f(a) gate'(b). */
template <typename T, bool GATED> struct te_gradient_source {
    typedef te_p params;
    static constexpr int outputs = GATED ? 2 : 1;
    static constexpr bool pads = false, writes = true, adds = true;
    te_index column;
    te_vector<T, 8> g[4], a[4], b[GATED ? 4 : 1];

    __device__ __forceinline__ te_gradient_source(const te_p &, te_index at) : column(at)
    {
    }

    __device__ __forceinline__ void fetch(const te_p &p, te_index row)
    {
        te_fetch_rows<T>(p.grad, p.aligned != 0, row, column, g);
        te_fetch_rows<T>(p.input, p.aligned != 0, row, column, a);
        if constexpr (GATED) te_fetch_rows<T>(p.gate, p.aligned != 0, row, column, b);
    }

    template <int SHAPE>
    __device__ __forceinline__ void apply(const te_p &p, int i, float v[outputs][8]) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float grad = g[i].value(j);
            float value;
            const float slope = te_activation<SHAPE, te_p>::slope(a[i].value(j), p, &value);
            if constexpr (GATED) {
                const float gate = b[i].value(j);
                v[0][j] = grad * te_gate_value<SHAPE>(gate, p) * slope;
                v[1][j] = grad * value * te_gate_slope<SHAPE>(gate, p);
            } else {
                v[0][j] = grad * slope;
            }
        }
    }

    __device__ __forceinline__ void values(const te_p &p, int i, float v[outputs][8]) const
    {
        apply_shape<GATED>(*this, p, i, v);
    }
};

/* cap tanh(x / cap), or its gradient. 1 - tanh^2 has few digits where tanh is close to 1. */
template <typename T> struct te_softcap_source {
    typedef te_p params;
    static constexpr int outputs = 1;
    static constexpr bool pads = false, writes = true, adds = false;
    te_index column;
    te_vector<T, 8> x[4], g[4];

    __device__ __forceinline__ te_softcap_source(const te_p &, te_index at) : column(at)
    {
    }

    __device__ __forceinline__ void fetch(const te_p &p, te_index row)
    {
        te_fetch_rows<T>(p.input, p.aligned != 0, row, column, x);
        if (p.grad.data != nullptr) te_fetch_rows<T>(p.grad, p.aligned != 0, row, column, g);
    }

    __device__ __forceinline__ void values(const te_p &p, int i, float v[1][8]) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float u = x[i].value(j) / p.limit, small = expf(-2.0F * fabsf(u));
            v[0][j] = p.grad.data == nullptr
                          ? p.limit * tanhf(u)
                          : g[i].value(j) * (4.0F * small / ((1.0F + small) * (1.0F + small)));
        }
    }
};

/* As many blocks per multiprocessor as need no spills. */
#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_activation_##i, te_p, (TE_TILE_THREADS, 6),                                       \
              te_tile_cast<te_value_source<te_##i, false>, te_any_fp8>(p))                         \
    TE_KERNEL(te_activation_gated_##i, te_p, (TE_TILE_THREADS, te_##i::bytes == 4 ? 4 : 5),        \
              te_tile_cast<te_value_source<te_##i, true>, te_any_fp8>(p))                          \
    TE_KERNEL(te_activation_backward_##i, te_p, (TE_TILE_THREADS, te_##i::bytes == 4 ? 4 : 5),     \
              te_tile_cast<te_gradient_source<te_##i, false>, te_any_fp8>(p))                      \
    TE_KERNEL(te_activation_backward_gated_##i, te_p,                                              \
              (TE_TILE_THREADS, te_##i::bytes == 4 ? 2 : 4),                                       \
              te_tile_cast<te_gradient_source<te_##i, true>, te_any_fp8>(p))                       \
    TE_KERNEL(te_softcap_##i, te_p, (TE_TILE_THREADS, 4),                                          \
              te_tile_cast<te_softcap_source<te_##i>, te_any_fp8>(p))                              \
    TE_KERNEL(te_activation_scaled_##i, te_p, (TE_SCALED_THREADS, 2),                              \
              te_scaled_cast<te_value_source<te_##i, false>, te_any_fp8>(p))                       \
    TE_KERNEL(te_activation_gated_scaled_##i, te_p, (TE_SCALED_THREADS, 2),                        \
              te_scaled_cast<te_value_source<te_##i, true>, te_any_fp8>(p))                        \
    TE_KERNEL(te_activation_backward_scaled_##i, te_p, (TE_SCALED_THREADS, 2),                     \
              te_scaled_cast<te_gradient_source<te_##i, false>, te_any_fp8>(p))                    \
    TE_KERNEL(te_activation_backward_gated_scaled_##i, te_p, (TE_SCALED_THREADS, 1),               \
              te_scaled_cast<te_gradient_source<te_##i, true>, te_any_fp8>(p))                     \
    TE_KERNEL(te_softcap_scaled_##i, te_p, (TE_SCALED_THREADS, 2),                                 \
              te_scaled_cast<te_softcap_source<te_##i>, te_any_fp8>(p))
TE_NUMBERS(X, )
#undef X

/* The same to small groups. */
#define MICRO(name, i, ...)                                                                        \
    TE_KERNEL(name##_mxfp8_##i, te_p, (TE_TILE_THREADS),                                           \
              te_micro_cast<__VA_ARGS__, te_mxfp8<te_any_fp8>>(p))                                 \
    TE_KERNEL(name##_nvfp4_##i, te_p, (TE_TILE_THREADS), te_micro_cast<__VA_ARGS__, te_nvfp4>(p))
#define X(I, i, ...)                                                                               \
    MICRO(te_activation, i, te_value_source<te_##i, false>)                                        \
    MICRO(te_activation_gated, i, te_value_source<te_##i, true>)                                   \
    MICRO(te_activation_backward, i, te_gradient_source<te_##i, false>)                            \
    MICRO(te_activation_backward_gated, i, te_gradient_source<te_##i, true>)                       \
    MICRO(te_softcap, i, te_softcap_source<te_##i>)
TE_NUMBERS(X, )
#undef X
