/* SPDX-License-Identifier: Apache-2.0
 *
 * random.h - the decisions of a dropout for a run of elements (core/philox.h).
 */
#ifndef TE_CPU_RANDOM_H
#define TE_CPU_RANDOM_H

#include "core/philox.h"
#include "cpu/isa.h"

/* One dropout of one call. */
typedef struct te_cpu_dropout {
    uint64_t seed, offset;
    float probability, factor; /* factor: of what is kept */
    int active;                /* 0: nothing is dropped, nothing else here is set */
} te_cpu_dropout;

/* Elements that te_cpu_decide_run writes for a run of n. */
#define TE_CPU_DECISIONS(n) (((n) + 6) / 4 * 4)

static inline te_cpu_dropout te_cpu_dropout_of(const int64_t *rng, float probability)
{
    te_cpu_dropout dropout = {.active = probability > 0.0F};
    if (dropout.active) {
        dropout.seed = (uint64_t)rng[0];
        dropout.offset = (uint64_t)rng[1];
        dropout.probability = probability;
        dropout.factor = te_keep_factor(probability);
    }
    return dropout;
}

/* Decides elements first .. first + n - 1: returns where in `buffer` the n of them lie. */
static inline const int32_t *te_cpu_decide_run(const te_cpu_kernels *kernels,
                                               const te_cpu_dropout *dropout, int64_t first,
                                               int64_t n, int32_t *buffer)
{
    int64_t skipped = first % 4;
    kernels->decide(dropout->seed, dropout->offset + (uint64_t)(first / 4), (skipped + n + 3) / 4,
                    dropout->probability, buffer);
    return buffer + skipped;
}

/* x = x * factor where kept, else 0, for the elements from `first` on. */
static inline void te_cpu_drop(const te_cpu_kernels *kernels, const te_cpu_dropout *dropout,
                               int64_t first, float *x, int64_t n, int32_t *buffer)
{
    kernels->keep(x, te_cpu_decide_run(kernels, dropout, first, n, buffer), dropout->factor, n);
}

#endif
