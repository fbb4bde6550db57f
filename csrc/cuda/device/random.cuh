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
    te_philox_keys keys; /* of the seed */
    unsigned long long offset;

    /* rng: {seed, offset}, or NULL where nothing will be asked. The keys are made here, once: left
     * to itself, the compiler makes them again for every few numbers. */
    __device__ __forceinline__ explicit te_random(const te_index *rng)
        : keys(te_philox_schedule(rng != nullptr ? (unsigned long long)rng[0] : 0ULL)),
          offset(rng != nullptr ? (unsigned long long)rng[1] : 0ULL)
    {
#pragma unroll
        for (int i = 0; i < 10; i++) asm volatile("" : "+r"(keys.low[i]), "+r"(keys.high[i]));
    }

    /* Bit i: element 4 * group + i is kept, its word being more than `limit`. */
    __device__ __forceinline__ unsigned keep_four(unsigned long long group, unsigned limit) const
    {
        const te_philox_words words = te_philox_rounds(keys, offset + group);
        unsigned bits = 0U;
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= words.word[i] > limit ? 1U << i : 0U;
        return bits;
    }

    /* Bits 0 .. N - 1: element first + more + i is kept; both are multiples of 4. */
    template <int N>
    __device__ __forceinline__ unsigned keep_aligned(te_index first, int more, unsigned limit) const
    {
        const unsigned long long group = (unsigned long long)(first >> 2) + more / 4;
        unsigned bits = 0U;
#pragma unroll
        for (int i = 0; i < N / 4; i++) bits |= keep_four(group + i, limit) << (4 * i);
        return bits;
    }

    /* The same for any `first`, which may touch one more group; bits from N on mean nothing, nor do
     * those of elements before 0. */
    template <int N> __device__ __forceinline__ unsigned keep(te_index first, unsigned limit) const
    {
        const unsigned shift = (unsigned)first & 3U;
        unsigned bits = keep_aligned<N>(first, 0, limit);
        if (shift != 0U) bits |= keep_four((unsigned long long)(first >> 2) + N / 4, limit) << N;
        return bits >> shift;
    }

    /* Whether one element is kept. */
    __device__ __forceinline__ bool keep_one(unsigned long long index, unsigned limit) const
    {
        return (keep_four(index >> 2, limit) >> (index & 3U) & 1U) != 0U;
    }
};

#endif
