/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_variants.h - the same work with every instruction set and with every number of threads: it
 * must give the same bits.
 */
#ifndef TE_TESTS_CPU_VARIANTS_H
#define TE_TESTS_CPU_VARIANTS_H

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "cpu_device.h"

/* An internal hook (csrc/cpu/isa.h), reachable through the static library only. */
te_status te_cpu_force_isa(int isa);

enum { PORTABLE, AVX2, AVX512, BEST = -1, MOST_THREADS = 5 };

/* What is run over the data of a case; returns a digest of all that it made. */
typedef uint64_t (*test_work)(test_device *t, const void *data);

static const uint64_t empty_digest = 14695981039346656037U;

/* FNV-1a over the memory of a matrix; what is not written keeps the guard byte. */
static inline uint64_t test_digest(uint64_t digest, const test_buffer *made)
{
    for (size_t i = 0; i < made->bytes; i++) digest = (digest ^ made->device[i]) * 1099511628211U;
    return digest;
}

/* The digest; what the work allocated is free again. */
static inline uint64_t run_work(test_device *t, test_work work, const void *data)
{
    int inputs = t->buffer_count;
    uint64_t digest = work(t, data);
    while (t->buffer_count > inputs) {
        test_buffer *last = &t->buffers[--t->buffer_count];
        free(last->host);
        t->release(last->device);
    }
    return digest;
}

/* Compares the digests of the instruction sets from `first` on, those that this machine has, and of
 * all numbers of threads. `what` names the case. */
static inline void compare_variants(test_device *t, const char *what, int first, test_work work,
                                    const void *data)
{
    (void)te_cpu_force_isa(BEST);
    uint64_t expected = run_work(t, work, data);
    for (int isa = first; isa <= AVX512; isa++) {
        if (te_cpu_force_isa(isa) != TE_OK) continue;
        TEST_CHECK(t, run_work(t, work, data) == expected,
                   "%s: instruction set %d gives other bits", what, isa);
    }
    (void)te_cpu_force_isa(BEST);
#if defined(_OPENMP)
    int threads = omp_get_max_threads();
    for (int count = 1; count <= MOST_THREADS; count++) {
        omp_set_num_threads(count);
        TEST_CHECK(t, run_work(t, work, data) == expected, "%s: %d threads give other bits", what,
                   count);
    }
    omp_set_num_threads(threads);
#endif
}

#endif
