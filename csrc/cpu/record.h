/* SPDX-License-Identifier: Apache-2.0
 *
 * record.h - what casts record: scales, and the amax of a slot of delayed scaling. Threads that
 * share a model record into one slot while another one may be updating the scales: what is recorded
 * is taken by exactly one update.
 */
#ifndef TE_CPU_RECORD_H
#define TE_CPU_RECORD_H

#include "core/scaling_math.h"
#include "transformer_engine.h"

/* {1 / scale, scale}, where they are wanted. */
static inline void te_cpu_write_scales(const te_tensor *scales, float scale)
{
    float *pair = scales->data;
    if (pair == NULL) return;
    pair[TE_SCALES_INVERSE] = 1.0F / scale;
    pair[TE_SCALES_SCALE] = scale;
}

/* The largest of the maxima that an amax pass has left. */
static inline float te_cpu_largest_partial(const float *partials)
{
    float amax = 0.0F;
    for (int i = 0; i < TE_AMAX_PARTIALS; i++) amax = te_max_ignoring_nan(amax, partials[i]);
    return amax;
}

/* Raises the slot to the amax, which is no NaN; a NaN in the slot is replaced. NULL: nobody wants
 * it. */
static inline void te_cpu_record_amax(float *slot, float amax)
{
    float recorded;
    if (slot == NULL) return;
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
