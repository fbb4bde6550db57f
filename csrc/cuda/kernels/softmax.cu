/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.cu - softmax over the keys with scale, bias, mask, window and dropout.
 *
 * A row lives in the registers of a team of threads: half a warp, a warp or a few. It is read once,
 * and all that a thread needs of it is on its way before any of it is used. A row that is too long
 * is gone over twice, in tiles: once for the largest score and the sum together, once for the
 * output. Vectors of which no lane of a warp needs anything, as most of a causal row, cost next to
 * nothing.
 */
#include "softmax.h"
#include "softmax.cuh"

#define INFINITE __uint_as_float(0x7f800000U)
#define NOT_A_NUMBER __uint_as_float(0x7fc00000U)
#define WHOLE_WARP 0xffffffffU

/* ---- numbers ---- */

/* e^x; results below the normal numbers become 0. */
static __device__ __forceinline__ float exponential(float x)
{
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634F));
    return result;
}

/* The larger one, or NaN if either is. */
static __device__ __forceinline__ float larger(float a, float b)
{
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

template <int LANES> static __device__ __forceinline__ float lanes_largest(float value)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1)
        value = larger(value, __shfl_xor_sync(WHOLE_WARP, value, step));
    return value;
}

/* The largest of all threads of a team, or NaN. */
template <int LANES>
static __device__ __forceinline__ float team_largest(te_softmax_board &board, float value)
{
    value = lanes_largest<LANES>(value);
    if (LANES == 32 && blockDim.x > 32U)
        value = lanes_largest<TE_SOFTMAX_WARPS>(te_softmax_show(board, value, -INFINITE));
    return value;
}

/* The row has no distribution: NaN in every key whose score is not -Inf. */
static __device__ __forceinline__ bool undefined(float largest)
{
    return !(largest < INFINITE);
}

/* What scores are taken relative to: their maximum, but a number in a row without any. */
static __device__ __forceinline__ float base_of(float largest)
{
    return undefined(largest) || largest == -INFINITE ? 0.0F : largest;
}

/* The score of the row that belongs to no key. */
static __device__ __forceinline__ float sink_of(const te_softmax_params &p,
                                                const te_softmax_place &place)
{
    return p.sink == nullptr ? -INFINITE : p.sink[place.along(p.walk.head_strides)];
}

/* 1 / sum; 0 for a row without keys. */
static __device__ __forceinline__ float inverse_of(float sum)
{
    return sum > 0.0F ? __fdividef(1.0F, sum) : 0.0F;
}

/* Writes the logarithm of the sum of a row's exponentials e^(score - base): +Inf where it has no
 * term, NaN where it has no distribution. */
static __device__ __forceinline__ void
write_log_sum(const te_softmax_params &p, const te_softmax_place &place, float largest, float sum)
{
    if (p.log_sum == nullptr || !place.exists || threadIdx.x != 0U) return;
    p.log_sum[place.along(p.walk.row_strides)] =
        undefined(largest) ? NOT_A_NUMBER : (sum > 0.0F ? base_of(largest) + logf(sum) : INFINITE);
}

/* Bits 0 .. 3: byte i of the word is not 0. */
static __device__ __forceinline__ unsigned nonzero_bytes(unsigned word)
{
    const unsigned high = (((word & 0x7f7f7f7fU) + 0x7f7f7f7fU) | word) >> 7 & 0x01010101U;
    return high * 0x01020408U >> 24; /* no two products of bits meet */
}

template <int N>
static __device__ __forceinline__ unsigned nonzero(const te_vector<te_opaque<1>, N> &v)
{
    unsigned bits = 0U;
#pragma unroll
    for (int i = 0; i < N / 4; i++) bits |= nonzero_bytes(v.word[i]) << (4 * i);
    return bits;
}

/* ---- scores ---- */

template <typename T, int N>
static __device__ __forceinline__ void add(const te_vector<T, N> &terms, float *x)
{
#pragma unroll
    for (int i = 0; i < N; i++) x[i] += terms.value(i);
}

/* Adds the bias of the thread's keys, once their scores are there. */
template <typename B, int VECTORS, int N, int STEP>
static __device__ __forceinline__ void add_bias_of(const te_softmax_params &p,
                                                   const te_part<N, STEP> &part,
                                                   const unsigned char *line, float *x)
{
    te_operand<B, N, STEP, VECTORS, false> bias;
    bias.fetch(part, line, p.bias.data, p.bias_end);
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (part.needs(i)) add(bias.take(part, i), x + i * N);
}

/* The same with a dtype that is known at run time, or with one number for all keys. */
template <int VECTORS, int N, int STEP>
static __device__ __forceinline__ void add_bias(const te_softmax_params &p,
                                                const te_softmax_place &place, te_index start,
                                                const te_part<N, STEP> &part, float *x)
{
    const int bytes = p.bias_dtype == TE_STORE_F32 ? 4 : 2;
    const unsigned char *line = place.at(p.bias, bytes, p.bias.strides[3] != 0 ? start : 0);
    if (p.bias.strides[3] == 0) {
        const float bias = te_load_as(p.bias_dtype, line, 0);
#pragma unroll
        for (int i = 0; i < VECTORS * N; i++) x[i] += bias;
    } else if (p.bias_dtype == TE_STORE_F32) {
        add_bias_of<te_f32, VECTORS>(p, part, line, x);
    } else if (p.bias_dtype == TE_STORE_F16) {
        add_bias_of<te_f16, VECTORS>(p, part, line, x);
    } else {
        add_bias_of<te_bf16, VECTORS>(p, part, line, x);
    }
}

/* Scores of the thread's keys from `start` of the row on, -Inf where a key is not allowed; the
 * largest one comes back. */
template <typename T, int KEYS, bool ALIGNED, int N, int STEP>
static __device__ __forceinline__ float
make_scores(const te_softmax_params &p, const te_softmax_place &place, te_index start,
            const te_part<N, STEP> &part, unsigned live, float *x)
{
    constexpr int VECTORS = KEYS / N;
    const bool biased = p.bias.data != nullptr;
    const bool masked = p.mask.data != nullptr && (ALIGNED || p.mask.strides[3] != 0);
    te_operand<T, N, STEP, VECTORS, ALIGNED> input, bias;
    te_operand<te_opaque<1>, N, STEP, VECTORS, ALIGNED> mask;
    float largest = -INFINITE;
    input.fetch(part, place.at(p.input, T::bytes, start), p.input.data, p.input_end);
    if (ALIGNED && biased)
        bias.fetch(part, place.at(p.bias, T::bytes, start), p.bias.data, p.bias_end);
    if (masked) mask.fetch(part, place.at(p.mask, 1, start), p.mask.data, p.mask_end);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if ((live >> i & 1U) == 0U) {
#pragma unroll
            for (int j = 0; j < N; j++) x[i * N + j] = -INFINITE;
            continue;
        }
        const te_vector<T, N> in = input.take(part, i);
#pragma unroll
        for (int j = 0; j < N; j++) x[i * N + j] = in.value(j) * p.scale;
        if (ALIGNED && biased) add(bias.take(part, i), x + i * N);
    }
    if (!ALIGNED && biased) add_bias<VECTORS>(p, place, start, part, x);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float *at = x + i * N;
        if ((live >> i & 1U) == 0U) continue;
        if (masked || !part.needs_all(i)) {
            unsigned allowed = part.needed(i);
            if (masked) allowed &= ~nonzero<N>(mask.take(part, i));
#pragma unroll
            for (int j = 0; j < N; j++) at[j] = (allowed >> j & 1U) != 0U ? at[j] : -INFINITE;
        }
#pragma unroll
        for (int j = 0; j < N; j++) largest = larger(largest, at[j]);
    }
    return largest;
}

/* Scores become e^(score - base), whose sum over the thread's keys comes back. */
template <int N, int VECTORS>
static __device__ __forceinline__ float exponentials(unsigned live, float base, float *x)
{
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if ((live >> i & 1U) == 0U) continue;
#pragma unroll
        for (int j = i * N; j < (i + 1) * N; j++) {
            x[j] = exponential(x[j] - base);
            sum += x[j];
        }
    }
    return sum;
}

/* In a row without a distribution, e^score is to be NaN for all keys whose score is not -Inf. */
template <int KEYS> static __device__ __forceinline__ void spoil(float *x)
{
#pragma unroll
    for (int i = 0; i < KEYS; i++) x[i] = x[i] == -INFINITE ? -INFINITE : NOT_A_NUMBER;
}

/* Writes the thread's keys: x times `factor`, which goes through dropout. */
template <typename T, int KEYS, bool ALIGNED, int N, int STEP>
static __device__ __forceinline__ void
write_part(const te_softmax_params &p, const te_softmax_place &place, te_index start,
           const te_part<N, STEP> &part, unsigned live, const te_random &random, float factor,
           const float *x)
{
    const float kept_factor = p.rng != nullptr ? factor * p.keep_factor : factor;
    const te_index index = place.along(p.walk.row_strides) * p.keys + start;
    unsigned char *output = place.at(p.output, T::bytes, start);
    unsigned char *probabilities = place.at(p.probabilities, T::bytes, start);
#pragma unroll
    for (int i = 0; i < KEYS / N; i++) {
        const int key = i * STEP;
        const bool needed = (live >> i & 1U) != 0U;
        float y[N];
        te_vector<T, N> out;
        if (p.probabilities.data != nullptr) {
            out.clear();
            if (needed) {
#pragma unroll
                for (int j = 0; j < N; j++) y[j] = x[i * N + j] * factor;
                out.encode(y);
            }
            if (ALIGNED || p.probabilities_alike != 0)
                te_write_keys<ALIGNED>(part, probabilities, i, out);
            else
                out.store_part(probabilities + (te_index)key * T::bytes, part.begin - key,
                               part.count - key);
        }
        out.clear();
        if (needed) {
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = x[i * N + j] * kept_factor;
            if (p.rng != nullptr) {
                const unsigned kept = ALIGNED ? random.keep_aligned<N>(index, key, p.drop_limit)
                                              : random.keep<N>(index + key, p.drop_limit);
#pragma unroll
                for (int j = 0; j < N; j++) y[j] = (kept >> j & 1U) != 0U ? y[j] : 0.0F;
            }
            out.encode(y);
        }
        te_write_keys<ALIGNED>(part, output, i, out);
    }
}

/* ---- a row in registers ---- */

/* Leaves in the part, whose first key is `start` of the row, what lies in the window, or nothing
 * where a mask with one byte for all keys forbids them. */
template <bool ALIGNED, int N, int STEP>
static __device__ __forceinline__ void apply_window(const te_softmax_params &p,
                                                    const te_softmax_place &place, te_index start,
                                                    te_part<N, STEP> &part)
{
    if (p.windowed != 0) {
        const te_index query = place.along(p.walk.query_strides);
        part.narrow(query + p.first_key - start, query + p.end_key - start);
    }
    if (!ALIGNED && p.mask.data != nullptr && p.mask.strides[3] == 0 &&
        *place.at(p.mask, 1, 0) != 0)
        part.end = part.begin - 1;
}

template <typename T, int LANES, int KEYS, bool ALIGNED>
static __device__ __forceinline__ void softmax(const te_softmax_params &p)
{
    constexpr int N = 16 / T::bytes, VECTORS = KEYS / N;
    __shared__ te_softmax_board scores, sums;
    const te_random random(p.rng);
    const te_softmax_place place(p.walk);
    const int start = te_softmax_start<T, LANES, KEYS, ALIGNED>(place.at(p.output, T::bytes, 0));
    te_part<N, LANES * N> part(-start, place.exists ? (int)p.keys - start : -start);
    apply_window<ALIGNED>(p, place, start, part);
    const unsigned live = part.template live<VECTORS>();
    float x[KEYS];
    const float sink = sink_of(p, place);
    const float own = make_scores<T, KEYS, ALIGNED>(p, place, start, part, live, x);
    const float largest = larger(team_largest<LANES>(scores, own), sink), base = base_of(largest);
    if (undefined(largest)) spoil<KEYS>(x);
    const float sum = te_softmax_sum<LANES>(sums, exponentials<N, VECTORS>(live, base, x)) +
                      exponential(sink - base);
    write_log_sum(p, place, largest, sum);
    write_part<T, KEYS, ALIGNED>(p, place, start, part, live, random, inverse_of(sum), x);
}

/* Blocks per multiprocessor: as many as leave a thread the registers for its keys, and of 16-bit
 * elements one more: that spills a few bytes and takes up to two fifths less time. */
#define KERNEL(name, T, LANES, KEYS, ALIGNED, BLOCKS)                                              \
    TE_KERNEL(name, te_softmax_params, (TE_SOFTMAX_THREADS, BLOCKS),                               \
              softmax<T, LANES, KEYS, ALIGNED>(p))
#define ALIGNED_KERNEL(I, i, LANES, KEYS)                                                          \
    KERNEL(te_softmax_##i##_##LANES##_##KEYS, te_##i, LANES, KEYS, true,                           \
           te_##i::bytes == 2 ? (KEYS == 32 ? 8 : 5) : 7 - KEYS / 16)
#define ANY_KERNEL(I, i, LANES, KEYS)                                                              \
    KERNEL(te_softmax_any_##i##_##LANES##_##KEYS, te_##i, LANES, KEYS, false, 5)
TE_SOFTMAX_TEAMS(TE_NUMBERS, ALIGNED_KERNEL)
TE_SOFTMAX_ANY_TEAMS(TE_NUMBERS, ANY_KERNEL)
#undef ALIGNED_KERNEL
#undef ANY_KERNEL
#undef KERNEL

/* ---- a row that is longer ---- */

template <typename T>
static __device__ __forceinline__ void softmax_long(const te_softmax_params &p)
{
    constexpr int N = 16 / T::bytes, KEYS = 64 / T::bytes, VECTORS = KEYS / N;
    __shared__ te_softmax_board scores, sums;
    const te_random random(p.rng);
    const te_softmax_place place(p.walk);
    const int start = te_softmax_start<T, 32, KEYS, false>(place.at(p.output, T::bytes, 0));
    const te_index end = start + p.keys + N;
    const int step = (int)blockDim.x * KEYS;
    float largest = -INFINITE, sum = 0.0F, x[KEYS];
#pragma unroll 1
    for (te_index tile = start; tile < end; tile += step) {
        te_part<N, 32 * N> part(te_near(-tile), te_near(p.keys - tile));
        apply_window<false>(p, place, tile, part);
        const unsigned live = part.template live<VECTORS>();
        const float before = largest;
        largest = larger(largest, make_scores<T, KEYS, false>(p, place, tile, part, live, x));
        if (largest != before) sum *= exponential(before - base_of(largest));
        sum += exponentials<N, VECTORS>(live, base_of(largest), x);
    }
    const float own = largest, sink = sink_of(p, place);
    largest = larger(team_largest<32>(scores, own), sink);
    sum = te_softmax_sum<32>(sums, sum * exponential(own - base_of(largest)));
    sum += exponential(sink - base_of(largest));
    write_log_sum(p, place, largest, sum);
    const float factor = undefined(largest) ? 0.0F : inverse_of(sum); /* NaN stays, 0 too */
#pragma unroll 1
    for (te_index tile = start; tile < end; tile += step) {
        te_part<N, 32 * N> part(te_near(-tile), te_near(p.keys - tile));
        apply_window<false>(p, place, tile, part);
        const unsigned live = part.template live<VECTORS>();
        (void)make_scores<T, KEYS, false>(p, place, tile, part, live, x);
        if (undefined(largest)) spoil<KEYS>(x);
        (void)exponentials<N, VECTORS>(live, base_of(largest), x);
        write_part<T, KEYS, false>(p, place, tile, part, live, random, factor, x);
    }
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_softmax_long_##i, te_softmax_params, (TE_SOFTMAX_LONG_THREADS, 2),                \
              softmax_long<te_##i>(p))
TE_NUMBERS(X, )
#undef X
