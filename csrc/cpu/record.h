/* SPDX-License-Identifier: Apache-2.0
 *
 * record.h - the amax of a slot of delayed scaling. Threads that share a model record into one slot
 * while another one may be updating the scales: what is recorded is taken by exactly one update.
 */
#ifndef TE_CPU_RECORD_H
#define TE_CPU_RECORD_H

/* Raises the slot to the amax, which is no NaN; a NaN in the slot is replaced. */
static inline void te_cpu_record_amax(float *slot, float amax)
{
    float recorded;
    __atomic_load(slot, &recorded, __ATOMIC_RELAXED);
    while (!(amax <= recorded) && !__atomic_compare_exchange(slot, &recorded, &amax, 1,
                                                             __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* What was recorded since the last call; the slot starts again at 0. */
static inline float te_cpu_take_amax(float *slot)
{
    float recorded, none = 0.0F;
    __atomic_exchange(slot, &none, &recorded, __ATOMIC_RELAXED);
    return recorded;
}

#endif
