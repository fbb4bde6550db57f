/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax.cu - softmax over the keys with scale, bias, mask, window and dropout.
 *
 * An aligned row of up to 2048 keys lives in the registers of one warp: it is read once, and
 * nothing but shuffles joins the lanes. Random decisions are made while the row is on its way from
 * memory. Any other row has a block, which goes over it twice: once for the largest score and the
 * sum together, once for the output; the second read comes from the cache. Keys outside of the
 * window are not read.
 */
#include "softmax.h"
#include "random.cuh"
#include "reduce.cuh"
#include "vector.cuh"
#include "view4.cuh"

#define INFINITE __uint_as_float(0x7f800000U)
#define NOT_A_NUMBER __uint_as_float(0x7fc00000U)
#define WHOLE_WARP 0xffffffffU

enum { ANY_WARPS = TE_SOFTMAX_ANY_THREADS / 32 };

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

static __device__ __forceinline__ float warp_largest(float value)
{
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        value = larger(value, __shfl_xor_sync(WHOLE_WARP, value, step));
    return value;
}

/* What scores are taken relative to: their maximum, but a number in a row without any. */
static __device__ __forceinline__ float base_of(float largest)
{
    return largest == -INFINITE ? 0.0F : largest;
}

/* The row has no distribution: NaN in every key whose score is not -Inf. */
static __device__ __forceinline__ bool undefined(float largest)
{
    return !(largest < INFINITE);
}

static __device__ __forceinline__ float undefined_at(float score)
{
    return score == -INFINITE ? 0.0F : NOT_A_NUMBER;
}

/* 1 / sum; 0 for a row without keys. */
static __device__ __forceinline__ float inverse_of(float sum)
{
    return sum > 0.0F ? __fdividef(1.0F, sum) : 0.0F;
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

/* ---- rows ---- */

/* The lines of one row, and the keys [first, end) of its window. */
struct softmax_row {
    unsigned char *input, *output, *probabilities, *mask, *bias;
    te_index index, first, end;
};

template <typename T>
static __device__ __forceinline__ softmax_row place_row(const te_softmax_params &p, te_index index)
{
    te_index head, query;
    const te_index matrix = te_divide(index, p.queries, &query);
    const te_index batch = te_divide(matrix, p.heads, &head);
    const int bias_bytes = p.bias_dtype == TE_STORE_F32 ? 4 : 2;
    softmax_row row;
    row.input = te_line(p.input, T::bytes, batch, head, query);
    row.output = te_line(p.output, T::bytes, batch, head, query);
    row.probabilities = te_line(p.probabilities, T::bytes, batch, head, query);
    row.mask = te_line(p.mask, 1, batch, head, query);
    row.bias = te_line(p.bias, bias_bytes, batch, head, query);
    row.index = index;
    row.first = max(query + p.first_key, (te_index)0);
    row.end = min(query + p.end_key, p.keys);
    return row;
}

/* One of the N keys from `key` on lies in the window. */
template <int N> static __device__ __forceinline__ bool inside(const softmax_row &row, te_index key)
{
    return key < row.end && key + N > row.first;
}

/* Bits 0 .. N - 1: key + i lies in the window; one of them does. */
template <int N>
static __device__ __forceinline__ unsigned window_bits(const softmax_row &row, te_index key)
{
    const te_index low = row.first - key, high = row.end - key;
    unsigned bits = (1U << N) - 1U;
    if (high < N) bits >>= N - (int)high;
    if (low > 0) bits &= ~0U << (int)low;
    return bits;
}

/* x = -Inf where the key is not allowed; returns the larger of `largest` and all of them. */
template <int N>
static __device__ __forceinline__ float forbid(unsigned allowed, float largest, float *x)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = (allowed >> i & 1U) != 0U ? x[i] : -INFINITE;
        largest = larger(largest, x[i]);
    }
    return largest;
}

/* x = 0 where dropout drops, else x * factor. */
template <int N> static __device__ __forceinline__ void drop(unsigned kept, float factor, float *x)
{
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = (kept >> i & 1U) != 0U ? x[i] * factor : 0.0F;
}

/* ---- a warp per row ---- */

/* Scores of N aligned keys, of which at least one lies in the window. */
template <typename T, int N>
static __device__ __forceinline__ float
make_aligned_scores(const te_softmax_params &p, const softmax_row &row, te_index key,
                    const te_vector<T, N> &in, float largest, float *x)
{
    unsigned allowed = window_bits<N>(row, key);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = in.value(i) * p.scale;
    if (row.bias != nullptr) {
        te_vector<T, N> bias;
        bias.load_aligned(row.bias + key * T::bytes);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += bias.value(i);
    }
    if (row.mask != nullptr) {
        te_vector<te_opaque<1>, N> bytes;
        bytes.load_aligned(row.mask + key);
        allowed &= ~nonzero<N>(bytes);
    }
    return forbid<N>(allowed, largest, x);
}

/* Scores of the row become probabilities. */
template <int KEYS> static __device__ __forceinline__ void normalize(float largest, float *x)
{
    float sum = 0.0F;
    if (undefined(largest)) {
#pragma unroll
        for (int i = 0; i < KEYS; i++) x[i] = undefined_at(x[i]);
        return;
    }
    const float base = base_of(largest);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        x[i] = exponential(x[i] - base);
        sum += x[i];
    }
    const float factor = inverse_of(te_warp_sum(sum));
#pragma unroll
    for (int i = 0; i < KEYS; i++) x[i] *= factor;
}

template <typename T, int KEYS>
static __device__ __forceinline__ void
softmax_row_of_warp(const te_softmax_params &p, const softmax_row &row, const te_random &random)
{
    constexpr int N = 16 / T::bytes, vectors = KEYS / N;
    const te_index lane_key = (te_index)(threadIdx.x & 31U) * N;
    unsigned long long kept = 0ULL;
    float x[KEYS], largest = -INFINITE;
    te_vector<T, N> in[vectors];
#pragma unroll
    for (int i = 0; i < vectors; i++) {
        const te_index key = lane_key + i * 32 * N;
        in[i].clear();
        if (inside<N>(row, key)) in[i].load_aligned(row.input + key * T::bytes);
    }
    if (p.rng != nullptr)
        kept = random.keep_lane<N, vectors>(row.index * p.keys, p.drop_limit, row.first, row.end);
#pragma unroll
    for (int i = 0; i < vectors; i++) {
        const te_index key = lane_key + i * 32 * N;
        if (inside<N>(row, key))
            largest = make_aligned_scores<T, N>(p, row, key, in[i], largest, x + i * N);
        else
            (void)forbid<N>(0U, largest, x + i * N);
    }
    normalize<KEYS>(warp_largest(largest), x);
#pragma unroll
    for (int i = 0; i < vectors; i++) {
        const te_index key = lane_key + i * 32 * N;
        te_vector<T, N> out;
        if (key >= p.keys) break;
        if (row.probabilities != nullptr) {
            out.encode(x + i * N);
            out.store_aligned(row.probabilities + key * T::bytes);
        }
        if (p.rng != nullptr) drop<N>((unsigned)(kept >> (i * N)), p.keep_factor, x + i * N);
        out.encode(x + i * N);
        out.store_aligned(row.output + key * T::bytes);
    }
}

template <typename T, int KEYS>
static __device__ __forceinline__ void softmax(const te_softmax_params &p)
{
    const te_random random(p.rng);
    const te_index step = (te_index)gridDim.x * TE_SOFTMAX_WARPS;
    for (te_index index = (te_index)blockIdx.x * TE_SOFTMAX_WARPS + (threadIdx.x >> 5);
         index < p.rows; index += step)
        softmax_row_of_warp<T, KEYS>(p, place_row<T>(p, index), random);
}

/* Blocks per multiprocessor: as many as leave a lane the registers for its keys. */
#define X(I, i, KEYS)                                                                              \
    extern "C" __global__ void __launch_bounds__(TE_SOFTMAX_WARPS * 32, 256 / (KEYS + 16))         \
        te_softmax_##i##_##KEYS(const __grid_constant__ te_softmax_params p)                       \
    {                                                                                              \
        softmax<te_##i, KEYS>(p);                                                                  \
    }
TE_SOFTMAX_INSTANCES(X)
#undef X

/* ---- a block per row ---- */

template <typename B, int N>
static __device__ __forceinline__ void add_bias_of(const te_softmax_params &p,
                                                   const softmax_row &row, te_index key, float *x)
{
    te_vector<B, N> bias;
    bias.load(row.bias + key * B::bytes, p.bias_aligned != 0, p.keys - key);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] += bias.value(i);
}

template <int N>
static __device__ __forceinline__ void add_bias(const te_softmax_params &p, const softmax_row &row,
                                                te_index key, float *x)
{
    if (p.bias.strides[3] == 0) {
        const float bias = te_load_as(p.bias_dtype, row.bias, 0);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] += bias;
    } else if (p.bias_dtype == TE_STORE_F32) {
        add_bias_of<te_f32, N>(p, row, key, x);
    } else if (p.bias_dtype == TE_STORE_F16) {
        add_bias_of<te_f16, N>(p, row, key, x);
    } else {
        add_bias_of<te_bf16, N>(p, row, key, x);
    }
}

/* Bits 0 .. N - 1: the mask forbids key + i. */
template <int N>
static __device__ __forceinline__ unsigned mask_bits(const te_softmax_params &p,
                                                     const softmax_row &row, te_index key)
{
    te_vector<te_opaque<1>, N> bytes;
    if (p.mask.strides[3] == 0) return *row.mask != 0 ? (1U << N) - 1U : 0U;
    bytes.load(row.mask + key, p.mask_aligned != 0, p.keys - key);
    return nonzero<N>(bytes);
}

/* Scores of the N keys from `key` on, of which at least one lies in the window. */
template <typename T, int N>
static __device__ __forceinline__ float make_scores(const te_softmax_params &p,
                                                    const softmax_row &row, te_index key,
                                                    float largest, float *x)
{
    unsigned allowed = window_bits<N>(row, key);
    te_vector<T, N> in;
    in.load(row.input + key * T::bytes, p.input_aligned != 0, p.keys - key);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = in.value(i) * p.scale;
    if (row.bias != nullptr) add_bias<N>(p, row, key, x);
    if (row.mask != nullptr) allowed &= ~mask_bits<N>(p, row, key);
    return forbid<N>(allowed, largest, x);
}

/* The largest score of the block and the sum of e^(score - base of it), from those of the threads;
 * `scratch` may be reused after the next barrier. */
static __device__ __forceinline__ void join_threads(float scratch[2][ANY_WARPS], float *largest,
                                                    float *sum)
{
    const int warps = (int)blockDim.x >> 5;
    const float own = *largest;
    float all = warp_largest(own);
    if ((threadIdx.x & 31U) == 0U) scratch[0][threadIdx.x >> 5] = all;
    __syncthreads();
    for (int i = 0; i < warps; i++) all = larger(all, scratch[0][i]);
    float total = te_warp_sum(*sum * exponential(own - base_of(all)));
    if ((threadIdx.x & 31U) == 0U) scratch[1][threadIdx.x >> 5] = total;
    __syncthreads();
    total = 0.0F;
    for (int i = 0; i < warps; i++) total += scratch[1][i];
    *largest = all;
    *sum = total;
}

template <typename T>
static __device__ __forceinline__ void write_keys(const te_softmax_params &p,
                                                  const softmax_row &row, const te_random &random,
                                                  te_index key, float *x)
{
    constexpr int N = 16 / T::bytes;
    const te_index left = p.keys - key;
    te_vector<T, N> out;
    if (row.probabilities != nullptr) {
        out.encode(x);
        out.store(row.probabilities + key * T::bytes, p.probabilities_aligned != 0, left);
    }
    if (p.rng != nullptr && inside<N>(row, key))
        drop<N>(random.keep<N>(row.index * p.keys + key, p.drop_limit), p.keep_factor, x);
    out.encode(x);
    out.store(row.output + key * T::bytes, p.output_aligned != 0, left);
}

template <typename T>
static __device__ __forceinline__ void
softmax_row_of_block(const te_softmax_params &p, const softmax_row &row, const te_random &random,
                     float scratch[2][ANY_WARPS])
{
    constexpr int N = 16 / T::bytes;
    const te_index start = (te_index)threadIdx.x * N, step = (te_index)blockDim.x * N;
    float largest = -INFINITE, sum = 0.0F, x[N];
#pragma unroll 1
    for (te_index key = start; key < row.end; key += step) {
        if (!inside<N>(row, key)) continue;
        const float before = largest;
        largest = make_scores<T, N>(p, row, key, largest, x);
        const float base = base_of(largest);
        if (largest != before) sum *= exponential(before - base);
#pragma unroll
        for (int i = 0; i < N; i++) sum += exponential(x[i] - base);
    }
    join_threads(scratch, &largest, &sum);
    const float base = base_of(largest), factor = inverse_of(sum);
#pragma unroll 1
    for (te_index key = start; key < p.keys; key += step) {
        (void)forbid<N>(0U, 0.0F, x);
        if (inside<N>(row, key)) (void)make_scores<T, N>(p, row, key, 0.0F, x);
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = undefined(largest) ? undefined_at(x[i]) : exponential(x[i] - base) * factor;
        write_keys<T>(p, row, random, key, x);
    }
}

template <typename T> static __device__ __forceinline__ void softmax_any(const te_softmax_params &p)
{
    __shared__ float scratch[2][ANY_WARPS];
    const te_random random(p.rng);
    for (te_index index = blockIdx.x; index < p.rows; index += gridDim.x) {
        softmax_row_of_block<T>(p, place_row<T>(p, index), random, scratch);
        __syncthreads();
    }
}

#define X(I, i)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TE_SOFTMAX_ANY_THREADS)                           \
        te_softmax_any_##i(const __grid_constant__ te_softmax_params p)                            \
    {                                                                                              \
        softmax_any<te_##i>(p);                                                                    \
    }
TE_SOFTMAX_ANY_INSTANCES(X)
#undef X
