/* SPDX-License-Identifier: Apache-2.0
 *
 * random.cuh - random decisions for neighbouring elements: one Philox call serves four.
 */
#ifndef TE_DEVICE_RANDOM_CUH
#define TE_DEVICE_RANDOM_CUH

#include "cuda/device/types.h"
#include "core/philox.h"

/* The generator's state as a kernel carries it. */
struct te_random {
    unsigned long long seed, offset;

    /* rng: {seed, offset}, or NULL where nothing will be asked. */
    __device__ __forceinline__ explicit te_random(const te_index *rng)
        : seed(rng != nullptr ? (unsigned long long)rng[0] : 0ULL),
          offset(rng != nullptr ? (unsigned long long)rng[1] : 0ULL)
    {
    }

    /* Bit i: element 4 * group + i is kept, its word being more than `limit`. */
    __device__ __forceinline__ unsigned keep_four(unsigned long long group, unsigned limit) const
    {
        const te_philox_words words = te_philox(seed, offset + group);
        unsigned bits = 0U;
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= words.word[i] > limit ? 1U << i : 0U;
        return bits;
    }

    /* Bits 0 .. N - 1: element first + i is kept; first is a multiple of 4. */
    template <int N>
    __device__ __forceinline__ unsigned keep_aligned(te_index first, unsigned limit) const
    {
        unsigned bits = 0U;
#pragma unroll
        for (int i = 0; i < N / 4; i++)
            bits |= keep_four(((unsigned long long)first >> 2) + i, limit) << (4 * i);
        return bits;
    }

    /* The same for any `first`, which may touch one more group; bits from N on mean nothing. */
    template <int N> __device__ __forceinline__ unsigned keep(te_index first, unsigned limit) const
    {
        const unsigned shift = (unsigned)first & 3U;
        unsigned bits = keep_aligned<N>(first, limit);
        if (shift != 0U) bits |= keep_four(((unsigned long long)first >> 2) + N / 4, limit) << N;
        return bits >> shift;
    }

    /* Decisions of a lane about its part of a row whose elements from `first` on, a multiple of 4,
     * are dealt to the lanes of a warp in vectors of N, VECTORS to each: bits i * N .. are those of
     * its vector i. Vectors outside of [begin, end) get no bits. A loop: the warps of a
     * multiprocessor together have enough of these chains of products in flight. */
    template <int N, int VECTORS>
    __device__ __forceinline__ unsigned long long keep_lane(te_index first, unsigned limit,
                                                            te_index begin, te_index end) const
    {
        unsigned long long bits = 0ULL;
#pragma unroll 2
        for (int i = 0; i < VECTORS; i++) {
            const te_index at = ((te_index)(threadIdx.x & 31U) + i * 32) * N;
            if (at < end && at + N > begin)
                bits |= (unsigned long long)keep_aligned<N>(first + at, limit) << (i * N);
        }
        return bits;
    }

    /* Whether one element is kept. */
    __device__ __forceinline__ bool keep_one(unsigned long long index, unsigned limit) const
    {
        return (keep_four(index >> 2, limit) >> (index & 3U) & 1U) != 0U;
    }
};

#endif
