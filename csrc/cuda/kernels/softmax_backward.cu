/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax_backward.cu - the gradient of softmax, through its dropout.
 *
 * As forward: a row lives in the registers of a team of threads, as it was read; a row that is too
 * long for that is gone over twice, in tiles.
 */
#include "softmax.cuh"

/* Both operands of the thread's keys. What dropout has dropped of the gradient, and what lies
 * outside of the row, is 0. */
template <typename T, int N, int VECTORS> struct softmax_keys {
    te_vector<T, N> grad[VECTORS], probability[VECTORS];

    template <bool ALIGNED, int STEP>
    __device__ __forceinline__ void load(const te_softmax_backward_params &p,
                                         const te_softmax_place &place, te_index start,
                                         const te_part<N, STEP> &part, unsigned live)
    {
        te_operand<T, N, STEP, VECTORS, ALIGNED> grads, probabilities;
        grads.fetch(part, place.at(p.grad_output, T::bytes, start), p.grad_output.data,
                    p.grad_output_end);
        probabilities.fetch(part, place.at(p.probabilities, T::bytes, start), p.probabilities.data,
                            p.probabilities_end);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            grad[i].clear();
            probability[i].clear();
            if ((live >> i & 1U) == 0U) continue;
            grad[i] = grads.take(part, i);
            probability[i] = probabilities.take(part, i);
            if (!ALIGNED && !part.needs_all(i)) {
                grad[i].keep(part.needed(i));
                probability[i].keep(part.needed(i));
            }
        }
    }

    template <bool ALIGNED, int STEP>
    __device__ __forceinline__ void drop(const te_softmax_backward_params &p,
                                         const te_random &random, te_index index, unsigned live)
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if ((live >> i & 1U) == 0U) continue;
            grad[i].keep(ALIGNED ? random.keep_aligned<N>(index, i * STEP, p.drop_limit)
                                 : random.keep<N>(index + i * STEP, p.drop_limit));
        }
    }

    __device__ __forceinline__ float dot(unsigned live, float sum) const
    {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if ((live >> i & 1U) == 0U) continue;
#pragma unroll
            for (int j = 0; j < N; j++) sum += grad[i].value(j) * probability[i].value(j);
        }
        return sum;
    }

    /* factor * probability * (gradient - mean) */
    template <bool ALIGNED, int STEP>
    __device__ __forceinline__ void write(const te_part<N, STEP> &part, unsigned live, float factor,
                                          float mean, unsigned char *line) const
    {
        const float less = mean * factor;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float x[N];
            te_vector<T, N> out;
            if ((live >> i & 1U) == 0U) continue;
#pragma unroll
            for (int j = 0; j < N; j++)
                x[j] = probability[i].value(j) * __fmaf_rn(grad[i].value(j), factor, -less);
            out.encode(x);
            te_write_keys<ALIGNED>(part, line, i, out);
        }
    }
};

/* What the row adds to the gradient of its sink; `mean` is the row's sum without the factor of what
 * dropout has kept. */
static __device__ __forceinline__ void write_sink(const te_softmax_backward_params &p,
                                                  const te_softmax_place &place, float mean)
{
    if (p.grad_sinks == nullptr || !place.exists || threadIdx.x != 0U) return;
    const te_index row = place.along(p.walk.row_strides);
    const float own = expf(p.sink[place.along(p.walk.head_strides)] - p.log_sum[row]);
    p.grad_sinks[row] = -own * (mean * p.keep_factor);
}

template <typename T, int LANES, int KEYS, bool ALIGNED>
static __device__ __forceinline__ void backward(const te_softmax_backward_params &p)
{
    constexpr int N = 16 / T::bytes, VECTORS = KEYS / N, STEP = LANES * N;
    __shared__ te_softmax_board sums;
    const te_random random(p.rng);
    const te_softmax_place place(p.walk);
    const int start =
        te_softmax_start<T, LANES, KEYS, ALIGNED>(place.at(p.grad_input, T::bytes, 0));
    const te_part<N, STEP> part(-start, place.exists ? (int)p.keys - start : -start);
    const unsigned live = part.template live<VECTORS>();
    softmax_keys<T, N, VECTORS> keys;
    keys.template load<ALIGNED>(p, place, start, part, live);
    if (p.rng != nullptr)
        keys.template drop<ALIGNED, STEP>(p, random,
                                          place.along(p.walk.row_strides) * p.keys + start, live);
    const float mean = te_softmax_sum<LANES>(sums, keys.dot(live, 0.0F));
    write_sink(p, place, mean);
    keys.template write<ALIGNED>(part, live, p.scale * p.keep_factor, mean,
                                 place.at(p.grad_input, T::bytes, start));
}

/* Two operands stay in registers, as they were read. */
#define KERNEL(name, T, LANES, KEYS, ALIGNED, BLOCKS)                                              \
    TE_KERNEL(name, te_softmax_backward_params, (TE_SOFTMAX_THREADS, BLOCKS),                      \
              backward<T, LANES, KEYS, ALIGNED>(p))
#define ALIGNED_KERNEL(I, i, LANES, KEYS)                                                          \
    KERNEL(te_softmax_backward_##i##_##LANES##_##KEYS, te_##i, LANES, KEYS, true,                  \
           te_##i::bytes == 2 ? 4 : 3)
#define ANY_KERNEL(I, i, LANES, KEYS)                                                              \
    KERNEL(te_softmax_backward_any_##i##_##LANES##_##KEYS, te_##i, LANES, KEYS, false,             \
           te_##i::bytes == 2 ? 5 : 4)
TE_SOFTMAX_TEAMS(TE_NUMBERS, ALIGNED_KERNEL)
TE_SOFTMAX_ANY_TEAMS(TE_NUMBERS, ANY_KERNEL)
#undef ALIGNED_KERNEL
#undef ANY_KERNEL
#undef KERNEL

template <typename T>
static __device__ __forceinline__ void backward_long(const te_softmax_backward_params &p)
{
    constexpr int N = 16 / T::bytes, KEYS = 64 / T::bytes, VECTORS = KEYS / N, STEP = 32 * N;
    __shared__ te_softmax_board sums;
    const te_random random(p.rng);
    const te_softmax_place place(p.walk);
    const te_index row = place.along(p.walk.row_strides) * p.keys;
    const int start = te_softmax_start<T, 32, KEYS, false>(place.at(p.grad_input, T::bytes, 0));
    const int step = (int)blockDim.x * KEYS;
    softmax_keys<T, N, VECTORS> keys;
    float mean = 0.0F;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
        for (te_index tile = start; tile < start + p.keys + N; tile += step) {
            const te_part<N, STEP> part(te_near(-tile), te_near(p.keys - tile));
            const unsigned live = part.template live<VECTORS>();
            keys.template load<false>(p, place, tile, part, live);
            if (p.rng != nullptr) keys.template drop<false, STEP>(p, random, row + tile, live);
            if (pass == 0)
                mean = keys.dot(live, mean);
            else
                keys.template write<false>(part, live, p.scale * p.keep_factor, mean,
                                           place.at(p.grad_input, T::bytes, tile));
        }
        if (pass == 0) {
            mean = te_softmax_sum<32>(sums, mean);
            write_sink(p, place, mean);
        }
    }
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_softmax_backward_long_##i, te_softmax_backward_params,                            \
              (TE_SOFTMAX_LONG_THREADS, 2), backward_long<te_##i>(p))
TE_NUMBERS(X, )
#undef X
