/* SPDX-License-Identifier: Apache-2.0
 *
 * rope.cu - rotary position embedding and its transpose.
 *
 * A block has a token: cosines and sines of its position are made once, in shared memory, and serve
 * all heads. A thread stays with its channels and goes through heads, two at a time; the first two
 * are loaded while the angles are computed. Each pair of channels is rotated by
 * one thread, which has read both before it writes either, so that the output may be the input.
 */
#include "rope.h"
#include "vector.cuh"
#include "view4.cuh"

#define WHOLE_WARP 0xffffffffU

enum { HEADS = 2 }; /* in flight per thread */

/* Where a token stands. */
struct rope_token {
    te_index batch, index; /* of the tensor */
    te_index position;     /* of freqs; checked */
    bool rotates;          /* it belongs to a sequence */
};

/* How many of the packed sequences have ended at a token; for whole warps. */
static __device__ __forceinline__ te_index ended_at(const te_rope_params &p, te_index token)
{
    te_index ended = 0;
    for (te_index first = 0; first < p.sequences; first += 32) {
        const te_index i = first + (threadIdx.x & 31U);
        const bool has = i < p.sequences && p.cu_seqlens[i + 1] <= token;
        ended += __popc(__ballot_sync(WHOLE_WARP, has));
    }
    return ended;
}

static __device__ __forceinline__ rope_token find_token(const te_rope_params &p, te_index token)
{
    rope_token at;
    te_index entry;
    at.rotates = true;
    at.batch = te_divide(token, p.sequence, &at.index);
    at.position = at.index;
    entry = at.batch;
    if (p.cu_seqlens != nullptr) {
        entry = ended_at(p, token);
        at.rotates = entry < p.sequences && p.cu_seqlens[entry] <= token;
        at.position = at.rotates ? token - p.cu_seqlens[entry] : 0;
    }
    if (p.starts != nullptr && at.rotates) at.position += p.starts[entry];
    return at;
}

/* Fills the table for units [first, first + units): of pair k of a unit, what multiplies
 * {channel a, its partner b} to a and {b, a} to b. A position that freqs lack gives NaN. */
template <int N>
static __device__ __forceinline__ void fill_table(const te_rope_params &p, te_index position,
                                                  te_index first, int units,
                                                  float4 table[N][TE_ROPE_UNITS + 1])
{
    const bool known = position >= 0 && position < p.positions;
    const float *freqs = p.freqs + position * p.rotary;
    for (int i = (int)threadIdx.x; i < units * N; i += (int)blockDim.x) {
        const int unit = i / N, k = i % N;
        te_index a = (first + unit) * N, b, end = p.split;
        if (p.interleaved == 0) {
            a += k;
            b = a + p.split;
        } else {
            a += k < N / 2 ? 2 * k : p.split + 2 * k - N;
            b = a + 1;
            end = k < N / 2 ? min(p.split, p.rotary) : p.rotary;
        }
        if (a >= end) continue;
        float cos_a = __uint_as_float(0x7fc00000U), sin_a = cos_a, cos_b = cos_a, sin_b = cos_a;
        if (known) {
            const float angle_a = freqs[a], angle_b = freqs[b];
            sincosf(angle_a, &sin_a, &cos_a);
            sin_b = sin_a, cos_b = cos_a;
            if (angle_b != angle_a) sincosf(angle_b, &sin_b, &cos_b);
        }
        table[k][unit] = p.backward != 0 ? make_float4(cos_a, sin_b, cos_b, -sin_a)
                                         : make_float4(cos_a, -sin_a, cos_b, sin_b);
    }
}

/* Both vectors of a unit of a head. ALIGNED: whole ones. */
template <typename T, int N, bool ALIGNED> struct rope_unit {
    te_vector<T, N> low, high;

    __device__ __forceinline__ void load(const te_rope_params &p, const unsigned char *head,
                                         te_index channel)
    {
        const typename T::raw *from = (const typename T::raw *)head + channel;
        if constexpr (ALIGNED) {
            low.load_aligned(from);
            high.load_aligned(from + p.split);
        } else {
            low.load(from, false, min(p.split, p.rotary) - channel);
            high.load(from + p.split, false, p.rotary - p.split - channel);
        }
    }

    __device__ __forceinline__ void store(const te_rope_params &p, unsigned char *head,
                                          te_index channel) const
    {
        typename T::raw *to = (typename T::raw *)head + channel;
        if constexpr (ALIGNED) {
            low.store_aligned(to);
            high.store_aligned(to + p.split);
        } else {
            low.store(to, false, min(p.split, p.rotary) - channel);
            high.store(to + p.split, false, p.rotary - p.split - channel);
        }
    }

    /* Pairs are (low, high). */
    __device__ __forceinline__ void rotate_halves(const float4 by[N])
    {
        float x[N], y[N];
#pragma unroll
        for (int k = 0; k < N; k++) {
            const float a = low.value(k), b = high.value(k);
            x[k] = a * by[k].x + b * by[k].y;
            y[k] = b * by[k].z + a * by[k].w;
        }
        low.encode(x);
        high.encode(y);
    }

    /* Pairs are neighbours in one of both. */
    static __device__ __forceinline__ void rotate_pairs(const float4 by[N / 2],
                                                        te_vector<T, N> &vector)
    {
        float x[N];
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            const float a = vector.value(2 * k), b = vector.value(2 * k + 1);
            x[2 * k] = a * by[k].x + b * by[k].y;
            x[2 * k + 1] = b * by[k].z + a * by[k].w;
        }
        vector.encode(x);
    }

    __device__ __forceinline__ void rotate(const te_rope_params &p, const float4 by[N])
    {
        if (p.interleaved == 0) {
            rotate_halves(by);
        } else {
            rotate_pairs(by, low);
            rotate_pairs(by + N / 2, high);
        }
    }
};

/* Copies the channels from `first` on in all heads. */
template <typename T>
static __device__ __forceinline__ void copy_channels(const te_rope_params &p, const rope_token &at,
                                                     te_index first, bool aligned)
{
    constexpr int N = 16 / T::bytes;
    const te_index per_head = (p.dim - first + N - 1) / N;
    if (p.in_place != 0) return;
    for (te_index i = threadIdx.x; i < per_head * p.heads; i += blockDim.x) {
        te_index place;
        const te_index head = te_divide(i, per_head, &place), channel = first + place * N;
        te_vector<T, N> bits;
        bits.load((typename T::raw *)te_line(p.input, T::bytes, at.batch, at.index, head) + channel,
                  aligned, p.dim - channel);
        bits.store((typename T::raw *)te_line(p.output, T::bytes, at.batch, at.index, head) +
                       channel,
                   aligned, p.dim - channel);
    }
}

/* The units [first, first + units) of all heads of a token. */
template <typename T, int N, bool ALIGNED>
static __device__ __forceinline__ void rotate_units(const te_rope_params &p, const rope_token &at,
                                                    te_index first, int units,
                                                    float4 table[N][TE_ROPE_UNITS + 1])
{
    const int slot = (int)threadIdx.x / units, unit = (int)threadIdx.x - slot * units;
    const int slots = (int)blockDim.x / units; /* threads left over have nothing to do */
    const te_index channel = (first + unit) * N, heads = slot < slots ? p.heads : 0;
    const te_index from_step = slots * p.input.strides[2] * T::bytes;
    const te_index to_step = slots * p.output.strides[2] * T::bytes;
    const unsigned char *from = te_line(p.input, T::bytes, at.batch, at.index, slot);
    unsigned char *to = te_line(p.output, T::bytes, at.batch, at.index, slot);
    rope_unit<T, N, ALIGNED> x[HEADS];
    float4 by[N];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        if (slot + i * slots < heads) x[i].load(p, from + i * from_step, channel);
    __syncthreads(); /* all threads have read the table of the units before */
    fill_table<N>(p, at.position, first, units, table);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; k++) by[k] = table[k][unit];
#pragma unroll 1
    for (te_index head = slot; head < heads; head += HEADS * slots) {
#pragma unroll
        for (int i = 0; i < HEADS; i++)
            if (head != slot && head + i * slots < heads)
                x[i].load(p, from + i * from_step, channel);
#pragma unroll
        for (int i = 0; i < HEADS; i++) {
            if (head + i * slots >= heads) break;
            x[i].rotate(p, by);
            x[i].store(p, to + i * to_step, channel);
        }
        from += HEADS * from_step;
        to += HEADS * to_step;
    }
}

template <typename T, bool ALIGNED>
static __device__ __forceinline__ void rope(const te_rope_params &p)
{
    constexpr int N = 16 / T::bytes;
    __shared__ float4 table[N][TE_ROPE_UNITS + 1]; /* one more: columns begin in other banks */
    for (te_index token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        const rope_token at = find_token(p, token);
        if (!at.rotates) {
            copy_channels<T>(p, at, 0, ALIGNED);
            continue;
        }
        for (te_index first = 0; first < p.units; first += TE_ROPE_UNITS)
            rotate_units<T, N, ALIGNED>(p, at, first,
                                        (int)min(p.units - first, (te_index)TE_ROPE_UNITS), table);
        if (p.rotary < p.dim) copy_channels<T>(p, at, p.rotary, ALIGNED);
    }
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_rope_##i, te_rope_params, (TE_ROPE_THREADS), rope<te_##i, true>(p))               \
    TE_KERNEL(te_rope_any_##i, te_rope_params, (TE_ROPE_THREADS), rope<te_##i, false>(p))
TE_NUMBERS(X, )
#undef X
