/* SPDX-License-Identifier: Apache-2.0
 *
 * rope.cu - rotary position embedding and its transpose.
 *
 * A block has a token: cosines and sines of its position are made once, in shared memory, and serve
 * all heads of all parts that turn by them. A thread stays with its channels and goes through
 * heads, two at a time. All that it reads first is under way at once: its angle, its channels of
 * two heads, and vectors that are copied. Each pair of channels is rotated by one thread, which has
 * read both before it writes either, so that the output may be the input.
 */
#include "rope.h"
#include "vector.cuh"
#include "view4.cuh"

#define WHOLE_WARP 0xffffffffU

/* Where a token stands. */
struct rope_token {
    te_index batch, index; /* of the tensors */
    te_index position;     /* of freqs; not checked */
    bool rotates;          /* it belongs to a sequence */
};

/* First token of a packed sequence on this rank. */
static __device__ __forceinline__ te_index limit_of(const te_rope_params &p, te_index sequence)
{
    const int limit = p.cu_seqlens[sequence];
    return p.ranks > 1 ? limit / p.ranks : limit;
}

/* How many of the packed sequences have ended at a token; for whole warps. */
static __device__ __forceinline__ te_index ended_at(const te_rope_params &p, te_index token)
{
    te_index ended = 0;
    for (te_index first = 0; first < p.sequences; first += 32) {
        const te_index i = first + (threadIdx.x & 31U);
        const bool has = i < p.sequences && limit_of(p, i + 1) <= token;
        ended += __popc(__ballot_sync(WHOLE_WARP, has));
    }
    return ended;
}

static __device__ __forceinline__ rope_token find_token(const te_rope_params &p, te_index token)
{
    rope_token at;
    te_index entry, length = p.sequence;
    at.rotates = true;
    at.batch = te_divide(token, p.sequence, &at.index);
    at.position = at.index;
    entry = at.batch;
    if (p.cu_seqlens != nullptr) {
        entry = ended_at(p, token);
        const te_index begin = entry < p.sequences ? limit_of(p, entry) : token + 1;
        at.rotates = begin <= token;
        if (!at.rotates) return at;
        at.position = token - begin;
        if (p.ranks > 1) length = limit_of(p, entry + 1) - begin;
    }
    if (p.ranks > 1) { /* chunk `rank`, then its counterpart */
        const te_index chunk = length / 2;
        at.position += (at.position < chunk ? p.rank : 2 * (p.ranks - 1) - p.rank) * chunk;
    }
    if (p.starts != nullptr) at.position += p.starts[entry];
    return at;
}

/* Of pair k of a unit, what multiplies {channel a, its partner b} to a and {b, a} to b. */
template <int N> struct rope_table {
    float4 of[N][TE_ROPE_UNITS + 1]; /* one more: columns begin in other banks */
};

/* The two angles of a pair, and its place in the table. */
struct rope_angles {
    int unit, k;
    float a, b;
};

/* Entry i of the units [first, first + units). A position that freqs lack has NaN. */
template <int N>
static __device__ __forceinline__ rope_angles load_angles(const te_rope_params &p,
                                                          const te_rope_round &r, te_index position,
                                                          int first, int i)
{
    rope_angles at = {i / N, i % N, __uint_as_float(0x7fc00000U), __uint_as_float(0x7fc00000U)};
    const float *freqs = r.freqs + position * r.rotary;
    int a = (first + at.unit) * N, b, end = r.split;
    if (p.interleaved == 0) {
        a += at.k;
        b = a + r.split;
    } else {
        a += at.k < N / 2 ? 2 * at.k : r.split + 2 * at.k - N;
        b = a + 1;
        end = at.k < N / 2 ? min(r.split, r.rotary) : r.rotary;
    }
    if (a < end && position >= 0 && position < r.positions) at.a = freqs[a], at.b = freqs[b];
    return at;
}

template <int N>
static __device__ __forceinline__ void enter(const te_rope_params &p, const rope_angles &at,
                                             rope_table<N> &table)
{
    float cos_a, sin_a, cos_b, sin_b;
    sincosf(at.a, &sin_a, &cos_a);
    sin_b = sin_a, cos_b = cos_a;
    if (at.b != at.a) sincosf(at.b, &sin_b, &cos_b);
    table.of[at.k][at.unit] = p.backward != 0 ? make_float4(cos_a, sin_b, cos_b, -sin_a)
                                              : make_float4(cos_a, -sin_a, cos_b, sin_b);
}

/* Both vectors of a unit of a head. ALIGNED: whole ones. */
template <typename T, int N, bool ALIGNED> struct rope_unit {
    static constexpr int words = te_vector<T, N>::words, each = N / words; /* elements of a word */
    te_vector<T, N> low, high;

    static __device__ __forceinline__ unsigned encode_word(const float *values)
    {
        if constexpr (each == 1)
            return __float_as_uint(values[0]);
        else
            return te_encode_pair<T>(values[0], values[1]);
    }

    __device__ __forceinline__ void load(const te_rope_round &r, const unsigned char *head,
                                         int channel)
    {
        const typename T::raw *from = (const typename T::raw *)head + channel;
        if constexpr (ALIGNED) {
            low.load_aligned(from);
            high.load_aligned(from + r.split);
        } else {
            low.load(from, false, min(r.split, r.rotary) - channel);
            high.load(from + r.split, false, r.rotary - r.split - channel);
        }
    }

    __device__ __forceinline__ void store(const te_rope_round &r, unsigned char *head,
                                          int channel) const
    {
        typename T::raw *to = (typename T::raw *)head + channel;
        if constexpr (ALIGNED) {
            low.store_aligned(to);
            high.store_aligned(to + r.split);
        } else {
            low.store(to, false, min(r.split, r.rotary) - channel);
            high.store(to + r.split, false, r.rotary - r.split - channel);
        }
    }

    /* Pairs are (low, high). */
    __device__ __forceinline__ void rotate_halves(const rope_table<N> &table, int unit)
    {
#pragma unroll
        for (int w = 0; w < words; w++) {
            float x[each], y[each];
#pragma unroll
            for (int j = 0; j < each; j++) {
                const float4 by = table.of[w * each + j][unit];
                const float a = low.value(w * each + j), b = high.value(w * each + j);
                x[j] = a * by.x + b * by.y;
                y[j] = b * by.z + a * by.w;
            }
            low.word[w] = encode_word(x);
            high.word[w] = encode_word(y);
        }
    }

    /* Pairs are neighbours in one of both. */
    static __device__ __forceinline__ void rotate_pairs(const rope_table<N> &table, int unit,
                                                        int first, te_vector<T, N> &vector)
    {
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            const float4 by = table.of[first + k][unit];
            const float a = vector.value(2 * k), b = vector.value(2 * k + 1);
            const float x[2] = {a * by.x + b * by.y, b * by.z + a * by.w};
#pragma unroll
            for (int w = 0; w < 2 / each; w++)
                vector.word[2 / each * k + w] = encode_word(x + w * each);
        }
    }

    __device__ __forceinline__ void rotate(const rope_table<N> &table, int unit, bool interleaved)
    {
        if (!interleaved) {
            rotate_halves(table, unit);
        } else {
            rotate_pairs(table, unit, 0, low);
            rotate_pairs(table, unit, N / 2, high);
        }
    }
};

/* A head of a token. */
template <typename T>
static __device__ __forceinline__ unsigned char *head_at(const te_rope_heads &heads,
                                                         const rope_token &at, int head, int dim)
{
    int line = head, within = 0;
    if (heads.per_line > 1) {
        line = (int)((unsigned)head / (unsigned)heads.per_line);
        within = (head - line * heads.per_line) * dim;
    }
    return te_line(heads.view, T::bytes, at.batch, at.index, line) + (te_index)within * T::bytes;
}

/* Vectors on their way from the input of a part to its output. */
template <typename T, bool ALIGNED> struct rope_vectors {
    static constexpr int N = 16 / T::bytes;
    te_vector<T, N> bits[TE_ROPE_COPIES];
    int head[TE_ROPE_COPIES], channel[TE_ROPE_COPIES];

    static __device__ __forceinline__ unsigned per_head(const te_rope_part_params &part, int first)
    {
        return (unsigned)(part.dim - first + N - 1) / N;
    }

    /* Of the vectors of all heads from channel `first` on, every blockDim.x-th from i on. */
    __device__ __forceinline__ void load(const te_rope_part_params &part, const rope_token &at,
                                         int first, unsigned i)
    {
        const unsigned each = per_head(part, first);
#pragma unroll
        for (int j = 0; j < TE_ROPE_COPIES; j++, i += blockDim.x) {
            head[j] = (int)(i / each);
            channel[j] = first + (int)(i - head[j] * each) * N;
            if (head[j] >= part.heads) continue;
            const unsigned char *from = head_at<T>(part.input, at, head[j], part.dim);
            bits[j].load((const typename T::raw *)from + channel[j], ALIGNED,
                         part.dim - channel[j]);
        }
    }

    __device__ __forceinline__ void store(const te_rope_part_params &part, const rope_token &at)
    {
#pragma unroll
        for (int j = 0; j < TE_ROPE_COPIES; j++) {
            if (head[j] >= part.heads) continue;
            unsigned char *to = head_at<T>(part.output, at, head[j], part.dim);
            bits[j].store((typename T::raw *)to + channel[j], ALIGNED, part.dim - channel[j]);
        }
    }
};

/* Copies the channels from `first` on in all heads of a part, from vector `begin` on. */
template <typename T, bool ALIGNED>
static __device__ __forceinline__ void
copy_channels(const te_rope_part_params &part, const rope_token &at, int first, unsigned begin)
{
    rope_vectors<T, ALIGNED> copy;
    const unsigned count = copy.per_head(part, first) * (unsigned)part.heads;
#pragma unroll 1
    for (unsigned i = begin + threadIdx.x; i < count; i += TE_ROPE_COPIES * blockDim.x) {
        copy.load(part, at, first, i);
        copy.store(part, at);
    }
}

/* Copies all of a token that does not rotate. */
template <typename T, bool ALIGNED>
static __device__ __forceinline__ void copy_token(const te_rope_params &p, const rope_token &at)
{
#pragma unroll 1
    for (int i = 0; i < p.count; i++)
        if (p.parts[i].in_place == 0) copy_channels<T, ALIGNED>(p.parts[i], at, 0, 0);
}

/* The part of a head of a round; the head becomes one of that part. */
static __device__ __forceinline__ int part_of(const te_rope_params &p, const te_rope_round &r,
                                              int *head)
{
    int part = r.first;
    for (; part + 1 < r.last && *head >= p.parts[part].heads; part++) *head -= p.parts[part].heads;
    return part;
}

/* The units [first, first + units) of all heads of a round of a token; `rests`: and all of the
 * token that is copied. */
template <typename T, int N, bool ALIGNED>
static __device__ __forceinline__ void rotate_units(const te_rope_params &p, const te_rope_round &r,
                                                    const rope_token &at, int first, int units,
                                                    bool rests, rope_table<N> &table)
{
    const int slot = (int)threadIdx.x / units, unit = (int)threadIdx.x - slot * units;
    const int slots = (int)blockDim.x / units; /* threads left over have nothing to do */
    const int channel = (first + unit) * N, heads = slot < slots ? r.heads : 0;
    const int copies = rests ? p.copy_count : 0, entries = units * N;
    rope_unit<T, N, ALIGNED> x[TE_ROPE_HEADS];
    rope_vectors<T, ALIGNED> copy;
    const auto load = [&](int i, int head) {
        const int part = part_of(p, r, &head);
        x[i].load(r, head_at<T>(p.parts[part].input, at, head, p.parts[part].dim), channel);
    };
    rope_angles angles =
        load_angles<N>(p, r, at.position, first, min((int)threadIdx.x, entries - 1));
#pragma unroll
    for (int i = 0; i < TE_ROPE_HEADS; i++)
        if (slot + i * slots < heads) load(i, slot + i * slots);
    if (copies > 0) copy.load(p.parts[p.copies[0].part], at, p.copies[0].first, threadIdx.x);
    __syncthreads(); /* all threads have read the table of the units before */
    for (int i = (int)threadIdx.x; i < entries; i += (int)blockDim.x) {
        if (i != (int)threadIdx.x) angles = load_angles<N>(p, r, at.position, first, i);
        enter<N>(p, angles, table);
    }
    __syncthreads();
#pragma unroll 1
    for (int begin = slot; begin < heads; begin += TE_ROPE_HEADS * slots) {
#pragma unroll
        for (int i = 0; i < TE_ROPE_HEADS; i++)
            if (begin != slot && begin + i * slots < heads) load(i, begin + i * slots);
#pragma unroll
        for (int i = 0; i < TE_ROPE_HEADS; i++) {
            int head = begin + i * slots;
            if (head >= heads) break;
            const int part = part_of(p, r, &head);
            x[i].rotate(table, unit, p.interleaved != 0);
            x[i].store(r, head_at<T>(p.parts[part].output, at, head, p.parts[part].dim), channel);
        }
    }
    if (copies > 0) copy.store(p.parts[p.copies[0].part], at);
#pragma unroll 1
    for (int i = 0; i < copies; i++)
        copy_channels<T, ALIGNED>(p.parts[p.copies[i].part], at, p.copies[i].first,
                                  i == 0 ? TE_ROPE_COPIES * blockDim.x : 0);
}

template <typename T, bool ALIGNED>
static __device__ __forceinline__ void rope(const te_rope_params &p)
{
    constexpr int N = 16 / T::bytes;
    __shared__ rope_table<N> table;
    for (te_index token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        const rope_token at = find_token(p, token);
        if (!at.rotates || p.round_count == 0) {
            copy_token<T, ALIGNED>(p, at);
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < p.round_count; i++) {
            const te_rope_round &r = p.rounds[i];
#pragma unroll 1
            for (int first = 0; first < r.units; first += TE_ROPE_UNITS)
                rotate_units<T, N, ALIGNED>(p, r, at, first,
                                            min(r.units - first, (int)TE_ROPE_UNITS),
                                            i == 0 && first == 0, table);
        }
    }
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_rope_##i, te_rope_params, (TE_ROPE_THREADS, TE_ROPE_BLOCKS),                      \
              rope<te_##i, true>(p))                                                               \
    TE_KERNEL(te_rope_any_##i, te_rope_params, (TE_ROPE_THREADS, 4), rope<te_##i, false>(p))
TE_NUMBERS(X, )
#undef X
