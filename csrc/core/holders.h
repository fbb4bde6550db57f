/* SPDX-License-Identifier: Apache-2.0
 *
 * holders.h - which object each thread is using, and what it ran, told by stores of the thread's
 * own: no atomic read-modify-write, and no memory that two threads write. Who replaces an object
 * asks, once the new one is in place, whether any thread still uses the old one.
 *
 * That needs each thread's stores to come before its next load. Where the kernel can order those of
 * all threads at once (membarrier), it does so for the rare writer, and readers pay nothing; else
 * every reader has a fence.
 */
#ifndef TE_CORE_HOLDERS_H
#define TE_CORE_HOLDERS_H

#include <stdatomic.h>
#include <stddef.h>

#include "transformer_engine.h"

typedef struct te_holder {
    _Alignas(64) _Atomic(const void *) held; /* NULL: nothing; written by its thread alone */
    _Atomic int64_t ran[TE_DEVICE_COUNT][TE_OP_COUNT]; /* operators, by it and those before it */
    _Atomic int taken;                                 /* a thread has it */
    struct te_holder *next;                            /* of all there are; none is ever freed */
} te_holder;

extern _Thread_local te_holder *te_holder_mine; /* NULL: it has none yet */
extern int te_holders_fence; /* readers need fences; constant from the load of the library on */

te_holder *te_holder_begin(void);

/* That of the calling thread, until the thread ends; NULL: no memory. */
static inline te_holder *te_holder_of_thread(void)
{
    te_holder *mine = te_holder_mine;
    return mine != NULL ? mine : te_holder_begin();
}

/* All there are, by `next`. */
const te_holder *te_holders_all(void);

/* One operator run by the thread. */
static inline void te_holder_count(te_holder *mine, te_device_type device, te_op op)
{
    _Atomic int64_t *ran = &mine->ran[device][op];
    const int64_t before = atomic_load_explicit(ran, memory_order_relaxed);
    atomic_store_explicit(ran, before + 1, memory_order_relaxed);
}

/* Between a store of `held` and a load of what writers change. */
static inline void te_holder_order(void)
{
    if (te_holders_fence) {
        atomic_thread_fence(memory_order_seq_cst);
    } else {
        atomic_signal_fence(memory_order_seq_cst); /* the compiler keeps the order, too */
    }
}

/* Of a writer, after its change: each thread that has not seen the change has its `held` seen from
 * here on. 0, or -1 where the kernel no longer does it: then nothing may be freed. */
int te_holders_settle(void);
/* Whether a thread has it as its `held`; after te_holders_settle. */
int te_holders_have(const void *object);

#endif
