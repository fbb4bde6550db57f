/* SPDX-License-Identifier: Apache-2.0
 *
 * philox_reference.h - Philox4x32-10 once more, in full (128-bit counter, 64-bit key), and the
 * random decisions that the library makes with it.
 */
#ifndef TE_TESTS_PHILOX_REFERENCE_H
#define TE_TESTS_PHILOX_REFERENCE_H

#include <stdint.h>
#include <string.h>

/* Word 0 is the lowest of the counter and of the key. */
static inline void philox_reference(const uint32_t counter[4], const uint32_t key[2],
                                    uint32_t words[4])
{
    uint32_t k[2] = {key[0], key[1]};
    memcpy(words, counter, 4 * sizeof *words);
    for (int round = 0; round < 10; round++) {
        uint64_t even = (uint64_t)words[0] * 0xD2511F53U, odd = (uint64_t)words[2] * 0xCD9E8D57U;
        uint32_t next[4];
        next[0] = (uint32_t)(odd >> 32) ^ words[1] ^ k[0];
        next[1] = (uint32_t)(odd & 0xFFFFFFFFU);
        next[2] = (uint32_t)(even >> 32) ^ words[3] ^ k[1];
        next[3] = (uint32_t)(even & 0xFFFFFFFFU);
        memcpy(words, next, sizeof next);
        k[0] += 0x9E3779B9U; /* golden ratio */
        k[1] += 0xBB67AE85U; /* sqrt(3) - 1 */
    }
}

/* The number in [0, 1) that decides about an element; rng is {seed, offset}. */
static inline double philox_uniform(const int64_t rng[2], int64_t element)
{
    uint64_t seed = (uint64_t)rng[0], count = (uint64_t)rng[1] + (uint64_t)element / 4;
    const uint32_t counter[4] = {(uint32_t)(count & 0xFFFFFFFFU), (uint32_t)(count >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)(seed & 0xFFFFFFFFU), (uint32_t)(seed >> 32)};
    uint32_t words[4];
    philox_reference(counter, key, words);
    return (double)(words[element % 4] >> 8) / 16777216.0;
}

/* What an element is multiplied by. */
static inline double philox_factor(const int64_t rng[2], int64_t element, float probability)
{
    if (!(probability > 0.0F)) return 1.0;
    if (philox_uniform(rng, element) < (double)probability) return 0.0;
    return 1.0 / (1.0 - (double)probability);
}

#endif
