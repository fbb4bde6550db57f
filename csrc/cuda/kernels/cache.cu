/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.cu - keys and values of tokens, into the pages of a cache and out of them.
 *
 * A block copies all heads of a token, in vectors of 16 bytes. Where a token belongs is read on the
 * device, so one captured launch serves every step.
 */
#include "cache.h"
#include "vector.cuh"
#include "view4.cuh"

/* What comes to a token's place. */
enum cache_fill { COPY, ZERO, NOT_A_NUMBER };

/* All heads of a token: `to` and `from` are its lines of head 0. */
template <int BYTES>
static __device__ __forceinline__ void
copy_heads(const te_cache_params &p, const te_cache_heads &heads, unsigned char *to,
           te_index to_step, const unsigned char *from, te_index from_step, cache_fill what)
{
    typedef te_opaque<BYTES> T;
    constexpr int N = 16 / BYTES;
    const te_index per_head = (heads.channels + N - 1) / N;
    for (te_index i = threadIdx.x; i < per_head * p.heads; i += blockDim.x) {
        te_index place;
        const te_index head = te_divide(i, per_head, &place), channel = place * N;
        const te_index count = heads.channels - channel;
        te_vector<T, N> bits;
        if (what == COPY) {
            bits.load((const typename T::raw *)(from + head * from_step * BYTES) + channel,
                      heads.aligned != 0, count);
        } else {
#pragma unroll
            for (int k = 0; k < bits.words; k++) bits.word[k] = what == ZERO ? 0U : ~0U;
        }
        bits.store((typename T::raw *)(to + head * to_step * BYTES) + channel, heads.aligned != 0,
                   count);
    }
}

/* Token (batch, index) of a tensor to a place in the pages, or with `out` back. */
template <int BYTES>
static __device__ __forceinline__ void
move_heads(const te_cache_params &p, const te_cache_heads &heads, te_index batch, te_index index,
           te_index page, te_index place, bool out, cache_fill what)
{
    unsigned char *token = te_line(heads.tokens, BYTES, batch, index, 0);
    unsigned char *kept = te_line(heads.pages, BYTES, page, place, 0);
    const te_index of_token = heads.tokens.strides[2], of_kept = heads.pages.strides[2];
    if (out)
        copy_heads<BYTES>(p, heads, token, of_token, kept, of_kept, what);
    else
        copy_heads<BYTES>(p, heads, kept, of_kept, token, of_token, what);
}

/* The page of a sequence's token; -1 where there is none. */
static __device__ __forceinline__ te_index find_page(const te_cache_params &p, te_index sequence,
                                                     te_index position, te_index *place)
{
    const te_index entry = te_divide(position, p.page_size, place);
    te_index page = sequence;
    if (p.page_table != nullptr) page = p.page_table[sequence * p.table_stride + entry];
    return page >= 0 && page < p.pages ? page : -1;
}

/* The packed sequence of a token; -1 before the first. */
static __device__ __forceinline__ te_index sequence_at(const te_cache_params &p, te_index token)
{
    te_index low = -1, high = p.batch; /* sequence `low` begins at or before the token */
    while (high - low > 1) {
        const te_index middle = low + (high - low) / 2;
        if (p.cu_seqlens[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <int BYTES> static __device__ __forceinline__ void append(const te_cache_params &p)
{
    const te_index room = p.page_size * p.table_pages;
    for (te_index token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        te_index index, j, count = p.sequence, place;
        te_index sequence = te_divide(token, p.sequence, &index);
        const te_index batch = sequence;
        j = index;
        if (p.cu_seqlens != nullptr) {
            sequence = sequence_at(p, token);
            if (sequence < 0) continue;
            j = token - p.cu_seqlens[sequence];
            count = p.cu_seqlens[sequence + 1] - p.cu_seqlens[sequence];
        }
        if (p.counts != nullptr) count = p.counts[sequence];
        if (j >= count) continue;
        const te_index start = p.starts[sequence];
        te_index position = start + j;
        cache_fill what = COPY;
        /* Beyond the end: the one token that has, or is nearest to, the last place spoils it. */
        if (start + count > room) {
            if (position >= room && (j > 0 || room == 0)) continue;
            if (position >= room - 1) {
                what = NOT_A_NUMBER;
                position = room - 1;
            }
        }
        if (position < 0) continue;
        const te_index page = find_page(p, sequence, position, &place);
        if (page < 0) continue;
        move_heads<BYTES>(p, p.key, batch, index, page, place, false, what);
        move_heads<BYTES>(p, p.value, batch, index, page, place, false, what);
    }
}

template <int BYTES> static __device__ __forceinline__ void gather(const te_cache_params &p)
{
    for (te_index token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        te_index index, place = 0;
        const te_index batch = te_divide(token, p.sequence, &index);
        const te_index page = index < p.counts[batch] ? find_page(p, batch, index, &place) : -1;
        const cache_fill what = page >= 0 ? COPY : ZERO;
        move_heads<BYTES>(p, p.key, batch, index, page, place, true, what);
        move_heads<BYTES>(p, p.value, batch, index, page, place, true, what);
    }
}

#define X(BYTES)                                                                                   \
    TE_KERNEL(te_cache_append_##BYTES, te_cache_params, (TE_CACHE_THREADS), append<BYTES>(p))      \
    TE_KERNEL(te_cache_gather_##BYTES, te_cache_params, (TE_CACHE_THREADS), gather<BYTES>(p))
TE_CACHE_INSTANCES(X)
#undef X
