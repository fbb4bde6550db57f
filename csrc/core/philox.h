/* SPDX-License-Identifier: Apache-2.0
 *
 * philox.h - the random decisions of the library's dropouts, once for both backends. Read by gcc,
 * nvcc and NVRTC.
 *
 * Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds of
 * two 32 x 32 -> 64 bit products over a 128-bit counter and a 64-bit key. The key is the seed, the
 * lower 64 bits of the counter are offset + index / 4, the upper ones are 0; element `index` has
 * word index % 4 of the result.
 */
#ifndef TE_CORE_PHILOX_H
#define TE_CORE_PHILOX_H

#include "core/scaling_math.h"

typedef struct te_philox_words {
    unsigned word[4];
} te_philox_words;

/* In PTX, for nvcc makes two more additions of a 64-bit product in C. */
TE_SHARED unsigned long long te_multiply_wide(unsigned a, unsigned b)
{
#if defined(__CUDA_ARCH__)
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
#else
    return (unsigned long long)a * b;
#endif
}

/* What each of the ten rounds mixes in. */
typedef struct te_philox_keys {
    unsigned low[10], high[10];
} te_philox_keys;

TE_SHARED te_philox_keys te_philox_schedule(unsigned long long seed)
{
    te_philox_keys keys;
    for (unsigned round = 0; round < 10; round++) {
        keys.low[round] = (unsigned)seed + round * 0x9E3779B9U;
        keys.high[round] = (unsigned)(seed >> 32) + round * 0xBB67AE85U;
    }
    return keys;
}

TE_SHARED te_philox_words te_philox_rounds(te_philox_keys keys, unsigned long long counter)
{
    te_philox_words c = {{(unsigned)counter, (unsigned)(counter >> 32), 0U, 0U}};
    for (int round = 0; round < 10; round++) {
        unsigned long long p0 = te_multiply_wide(0xD2511F53U, c.word[0]);
        unsigned long long p1 = te_multiply_wide(0xCD9E8D57U, c.word[2]);
        te_philox_words next = {{(unsigned)(p1 >> 32) ^ c.word[1] ^ keys.low[round], (unsigned)p1,
                                 (unsigned)(p0 >> 32) ^ c.word[3] ^ keys.high[round],
                                 (unsigned)p0}};
        c = next;
    }
    return c;
}

TE_SHARED te_philox_words te_philox(unsigned long long seed, unsigned long long counter)
{
    return te_philox_rounds(te_philox_schedule(seed), counter);
}

/* A word as a number in [0, 1), exact in fp32. */
TE_SHARED float te_philox_uniform(unsigned word)
{
    return (float)(word >> 8) * 5.9604644775390625e-8F;
}

/* What a kept element is multiplied by; 0 where everything is dropped. */
TE_SHARED float te_keep_factor(float probability)
{
    return probability < 1.0F ? 1.0F / (1.0F - probability) : 0.0F;
}

#endif
