/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax_backward.cu - the gradient of softmax, through its dropout.
 *
 * As forward: an aligned row of up to 2048 keys lives in the registers of one warp, as it was read;
 * any other row has a block, which goes over it twice.
 */
#include "softmax.h"
#include "random.cuh"
#include "reduce.cuh"
#include "vector.cuh"
#include "view4.cuh"

enum { ANY_WARPS = TE_SOFTMAX_ANY_THREADS / 32 };

struct backward_row {
    unsigned char *grad_output, *probabilities, *grad_input;
    te_index index;
};

template <typename T>
static __device__ __forceinline__ backward_row place_row(const te_softmax_backward_params &p,
                                                         te_index index)
{
    te_index head, query;
    const te_index matrix = te_divide(index, p.queries, &query);
    const te_index batch = te_divide(matrix, p.heads, &head);
    return {te_line(p.grad_output, T::bytes, batch, head, query),
            te_line(p.probabilities, T::bytes, batch, head, query),
            te_line(p.grad_input, T::bytes, batch, head, query), index};
}

/* N gradients and probabilities. */
template <typename T, int N> struct backward_keys {
    te_vector<T, N> grad, probability;

    /* The gradient of probability i, which dropout has kept or not. */
    __device__ __forceinline__ float through(unsigned kept, float factor, int i) const
    {
        return (kept >> i & 1U) != 0U ? grad.value(i) * factor : 0.0F;
    }

    __device__ __forceinline__ float dot(unsigned kept, float factor, float sum) const
    {
#pragma unroll
        for (int i = 0; i < N; i++) sum += through(kept, factor, i) * probability.value(i);
        return sum;
    }

    __device__ __forceinline__ te_vector<T, N> result(const te_softmax_backward_params &p,
                                                      unsigned kept, float mean) const
    {
        float x[N];
        te_vector<T, N> out;
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = p.scale * (probability.value(i) * (through(kept, p.keep_factor, i) - mean));
        out.encode(x);
        return out;
    }
};

template <typename T, int KEYS>
static __device__ __forceinline__ void backward_row_of_warp(const te_softmax_backward_params &p,
                                                            const backward_row &row,
                                                            const te_random &random)
{
    constexpr int N = 16 / T::bytes, vectors = KEYS / N;
    const te_index lane_key = (te_index)(threadIdx.x & 31U) * N;
    unsigned long long kept = ~0ULL;
    backward_keys<T, N> keys[vectors];
    float mean = 0.0F;
#pragma unroll
    for (int i = 0; i < vectors; i++) {
        const te_index key = lane_key + i * 32 * N;
        keys[i].grad.clear();
        keys[i].probability.clear();
        if (key >= p.keys) continue;
        keys[i].grad.load_aligned(row.grad_output + key * T::bytes);
        keys[i].probability.load_aligned(row.probabilities + key * T::bytes);
    }
    if (p.rng != nullptr)
        kept = random.keep_lane<N, vectors>(row.index * p.keys, p.drop_limit, 0, p.keys);
#pragma unroll
    for (int i = 0; i < vectors; i++)
        mean = keys[i].dot((unsigned)(kept >> (i * N)), p.keep_factor, mean);
    mean = te_warp_sum(mean);
#pragma unroll
    for (int i = 0; i < vectors; i++) {
        const te_index key = lane_key + i * 32 * N;
        if (key >= p.keys) break;
        keys[i]
            .result(p, (unsigned)(kept >> (i * N)), mean)
            .store_aligned(row.grad_input + key * T::bytes);
    }
}

template <typename T, int KEYS>
static __device__ __forceinline__ void backward(const te_softmax_backward_params &p)
{
    const te_random random(p.rng);
    const te_index step = (te_index)gridDim.x * TE_SOFTMAX_WARPS;
    for (te_index index = (te_index)blockIdx.x * TE_SOFTMAX_WARPS + (threadIdx.x >> 5);
         index < p.rows; index += step)
        backward_row_of_warp<T, KEYS>(p, place_row<T>(p, index), random);
}

/* Two operands of KEYS elements of the dtype stay in registers. */
#define X(I, i, KEYS)                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_SOFTMAX_WARPS * 32,                            \
                                                 512 / (KEYS * te_##i::bytes + 32))                \
        te_softmax_backward_##i##_##KEYS(const __grid_constant__ te_softmax_backward_params p)     \
    {                                                                                              \
        backward<te_##i, KEYS>(p);                                                                 \
    }
TE_SOFTMAX_INSTANCES(X)
#undef X

/* One thread's keys from `key` on: which dropout keeps, and both operands. */
template <typename T, int N>
static __device__ __forceinline__ unsigned
load_keys(const te_softmax_backward_params &p, const backward_row &row, const te_random &random,
          te_index key, backward_keys<T, N> &keys)
{
    const te_index left = p.keys - key;
    keys.grad.load(row.grad_output + key * T::bytes, p.grad_output_aligned != 0, left);
    keys.probability.load(row.probabilities + key * T::bytes, p.probabilities_aligned != 0, left);
    return p.rng != nullptr ? random.keep<N>(row.index * p.keys + key, p.drop_limit) : ~0U;
}

template <typename T>
static __device__ __forceinline__ void backward_any(const te_softmax_backward_params &p)
{
    constexpr int N = 16 / T::bytes;
    const te_index start = (te_index)threadIdx.x * N, step = (te_index)blockDim.x * N;
    const te_random random(p.rng);
    __shared__ float scratch[ANY_WARPS];
    for (te_index index = blockIdx.x; index < p.rows; index += gridDim.x) {
        const backward_row row = place_row<T>(p, index);
        backward_keys<T, N> keys;
        float mean = 0.0F;
#pragma unroll 1
        for (te_index key = start; key < p.keys; key += step) {
            const unsigned kept = load_keys<T, N>(p, row, random, key, keys);
            mean = keys.dot(kept, p.keep_factor, mean);
        }
        mean = te_warp_sum(mean);
        if ((threadIdx.x & 31U) == 0U) scratch[threadIdx.x >> 5] = mean;
        __syncthreads();
        mean = 0.0F;
        for (int i = 0; i < (int)blockDim.x >> 5; i++) mean += scratch[i];
#pragma unroll 1
        for (te_index key = start; key < p.keys; key += step) {
            const unsigned kept = load_keys<T, N>(p, row, random, key, keys);
            keys.result(p, kept, mean)
                .store(row.grad_input + key * T::bytes, p.grad_input_aligned != 0, p.keys - key);
        }
        __syncthreads();
    }
}

#define X(I, i)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TE_SOFTMAX_ANY_THREADS)                           \
        te_softmax_backward_any_##i(const __grid_constant__ te_softmax_backward_params p)          \
    {                                                                                              \
        backward_any<te_##i>(p);                                                                   \
    }
TE_SOFTMAX_ANY_INSTANCES(X)
#undef X
